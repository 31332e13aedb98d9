"""How a key that is made is to be merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from kvd.client.calls.keys import KeyList
from kvd.client.calls.values import Source, paired
from kvd.errors import NotAllowed
from kvd.optimizer.fields import shown
from kvd.protocol.specs import MERGES, merge_error

#: Of one key or all keys of a list: "sum", "mean" or "weighted"; None: that of the cluster. Or a list, one per key.
MergeChoice: TypeAlias = str | Sequence[str | None] | None


def own_merges(keys: KeyList, merge: MergeChoice) -> dict[str, str]:
    """The merges that an init chooses, of the keys that have one of their own. Raises NotAllowed: there is no such."""
    if merge is None:
        return {}
    given = paired(keys, merge, "merges") if keys.many and not isinstance(merge, str) else [merge] * keys.size
    chosen = {}
    for name, own in zip(keys.names, given, strict=True):
        if own is None:
            continue
        if not isinstance(own, str) or own not in MERGES:
            written = keys.written.get(name, name)
            known = ", ".join(map(repr, MERGES))
            text = f"key {written!r}: merge is one of {known}, or None, not {shown(own)}"
            raise NotAllowed(text, key=written)
        chosen[name] = own
    return chosen


def with_merge(
    keys: KeyList, names: Sequence[str], sources: list[Source], chosen: Mapping[str, str], *, gradients: bool
) -> list[Source]:
    """The values of an init, of the keys with these names, with the merge that they are to have.

    Args:
        gradients: see `kvd.protocol.specs.KeySpec`.

    Raises:
        NotAllowed: a key cannot have its merge.
    """
    if not chosen and not gradients:
        return sources
    made = []
    for name, source in zip(names, sources, strict=True):
        own = chosen.get(name)
        if own is not None:
            written = keys.written.get(name, name)
            text = merge_error(written, source.spec.dtype, own)
            if text is not None:
                raise NotAllowed(text, key=written)
        made.append(source._replace(spec=replace(source.spec, merge=own or "", gradients=gradients)))
    return made
