"""Layout of a snapshot: keys that rarely change share parts, so that unchanged parts are reused.

A group is some keys that are written one after the other, in parts of their own. The first snapshot has groups of about
one part, in the order of the names. In a later one, groups stay as they are if none of their keys has changed. The keys
of the others are grouped again, those that have changed apart from those that have not: so keys that rest come
to lie among themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

Group: TypeAlias = tuple[str, ...]

MOST_EXTRA = 16  # groups beyond twice as many as there must be: then all are made again


class KeyMark(NamedTuple):
    """Fingerprint that shows whether a key has changed. A wrong guess costs only one part that is written again.

    Attributes:
        nbytes: of its value.
        clock: as in `StoredKey`.
    """

    nbytes: int
    clock: int


class Layout:
    """The groups of the latest snapshot.

    Args:
        group_bytes: how large a group may be, unless it is one larger key.
    """

    def __init__(self, group_bytes: int) -> None:
        self._group_bytes = group_bytes
        self._groups: Sequence[Group] = ()
        self._marks: Mapping[str, KeyMark] = {}

    def resting(self, keys: Mapping[str, KeyMark]) -> Sequence[Group]:
        """Return the groups without a changed key."""
        return [group for group in self._groups if all(self._rests(name, keys) for name in group)]

    def next(self, keys: Mapping[str, KeyMark]) -> Sequence[Group]:
        """Return the groups of the next snapshot: each key is in one of them."""
        kept = self.resting(keys)
        settled = {name for group in kept for name in group}
        others = sorted(keys.keys() - settled)
        resting = [name for name in others if self._rests(name, keys)]
        changed = [name for name in others if not self._rests(name, keys)]
        groups = [*kept, *self._cut(resting, keys), *self._cut(changed, keys)]
        fewest = list(self._cut(sorted(keys), keys))
        return fewest if len(groups) > 2 * len(fewest) + MOST_EXTRA else groups

    def taken(self, groups: Sequence[Group], keys: Mapping[str, KeyMark]) -> None:
        """Record the written groups."""
        self._groups, self._marks = groups, dict(keys)

    def _rests(self, name: str, keys: Mapping[str, KeyMark]) -> bool:
        return name in keys and self._marks.get(name) == keys[name]

    def _cut(self, names: Iterable[str], keys: Mapping[str, KeyMark]) -> Iterator[Group]:
        group: list[str] = []
        nbytes = 0
        for name in names:
            if group and nbytes + keys[name].nbytes > self._group_bytes:
                yield tuple(group)
                group, nbytes = [], 0
            group.append(name)
            nbytes += keys[name].nbytes
        if group:
            yield tuple(group)
