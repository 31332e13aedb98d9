"""How a key that is made is to be merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from kvd.client.calls.keys import KeyList
from kvd.client.calls.values import Source, paired
from kvd.errors import NotAllowed
from kvd.optimizer.fields import shown
from kvd.protocol.specs import MERGES, merge_error

#: Of one key or all keys of a list: "sum", "mean" or "weighted"; None: that of the cluster. Or a list, one per key.
MergeChoice: TypeAlias = str | Sequence[str | None] | None


def with_merge(keys: KeyList, sources: list[Source], merge: MergeChoice) -> list[Source]:
    """The values of an init with the merge that their keys are to have.

    Raises:
        NotAllowed: there is no such merge, or the key cannot have it.
    """
    if merge is None:
        return sources
    given = paired(keys, merge, "merges") if keys.many and not isinstance(merge, str) else [merge] * keys.size
    made = []
    for name, source, own in zip(keys.names, sources, given, strict=True):
        if own is None:
            made.append(source)
            continue
        if not isinstance(own, str) or own not in MERGES:
            raise NotAllowed(f"merge is one of {', '.join(map(repr, MERGES))}, or None, not {shown(own)}", key=name)
        written = keys.written.get(name, name)
        text = merge_error(written, source.spec.dtype, own)
        if text is not None:
            raise NotAllowed(text, key=written)
        made.append(source._replace(spec=replace(source.spec, merge=own)))
    return made
