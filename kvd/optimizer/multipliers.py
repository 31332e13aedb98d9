"""Factors per key, on the learning rate or the weight decay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

MAX_MULTIPLIERS = 64
"""Entries of one mapping."""

MAX_NAMES_BYTES = 2 << 10
"""Bytes of all names of one mapping, in UTF-8: an optimizer travels in the header of messages."""


class Multipliers(Mapping[str, float]):
    """An immutable, hashable mapping of names, or patterns of names, to factors; in the order in which it was written.

    Made by :func:`kvd.optimizer.fields.multipliers`, which checks what a person or a peer wrote.
    """

    __slots__ = ("_entries", "_patterns")

    def __init__(self, entries: Mapping[str, float] | None = None) -> None:
        self._entries = dict(entries or {})
        self._patterns = [name for name in self._entries if "*" in name]

    def of(self, key: str) -> float:
        """Return the factor of a key: that of its name, else of the first pattern that fits, else 1."""
        factor = self._entries.get(key)
        if factor is not None:
            return factor
        for pattern in self._patterns:
            if _fits(pattern, key):
                return self._entries[pattern]
        return 1.0

    @property
    def names_nbytes(self) -> int:
        """Bytes of all names in UTF-8."""
        return sum([len(name.encode(errors="replace")) for name in self._entries])

    def __getitem__(self, name: str) -> float:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __eq__(self, other: object) -> bool:
        # The order counts: the first pattern that fits is taken.
        return isinstance(other, Multipliers) and list(self._entries.items()) == list(other._entries.items())

    def __hash__(self) -> int:
        return hash(tuple(self._entries.items()))

    def __repr__(self) -> str:
        return repr(self._entries)


NO_MULTIPLIERS = Multipliers()
"""Every key has the factor 1."""


def _fits(pattern: str, key: str) -> bool:
    """Return whether the key matches the pattern, in which ``*`` stands for any text.

    The time is linear in both lengths.
    """
    first, *middle, last = pattern.split("*")
    at, end = len(first), len(key) - len(last)
    if at > end or not key.startswith(first) or not key.endswith(last):
        return False
    for part in middle:
        at = key.find(part, at, end)
        if at < 0:
            return False
        at += len(part)
    return True
