"""A queue of row ids, each with a number that is not smaller than that of the one before it."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvd.tables.row_index import Ids

Mask = np.ndarray[Any, np.dtype[np.bool_]]

_SPARE = 4  # memory for one part in so many more than is needed
_SPARE_IDS = 512


class NumberedIds:
    """Ids come at the end, and go from the beginning."""

    def __init__(self) -> None:
        self._entries = np.empty((2, 0), np.int64)  # the ids, and their numbers
        self._head = self._tail = 0

    def __len__(self) -> int:
        return self._tail - self._head

    @property
    def ids(self) -> Ids:
        """Not a copy."""
        return self._entries[0, self._head : self._tail]

    @property
    def numbers(self) -> Ids:
        """Numbers of the ids, never decreasing. Not a copy."""
        return self._entries[1, self._head : self._tail]

    @property
    def nbytes(self) -> int:
        """The memory that it takes."""
        return self._entries.nbytes

    def reserve(self, more: int) -> None:
        """Have room for so many more ids. Raises MemoryError, and is as it was then."""
        if self._tail + more > self._entries.shape[1]:
            needed = len(self) + more
            entries = np.empty((2, needed + needed // _SPARE + _SPARE_IDS), np.int64)
            entries[:, : len(self)] = self._entries[:, self._head : self._tail]
            self._entries, self._head, self._tail = entries, 0, len(self)

    def append(self, ids: Ids, number: int) -> None:
        """Append these ids with this number, in their order."""
        self.reserve(len(ids))
        new = slice(self._tail, self._tail + len(ids))
        self._entries[0, new] = ids
        self._entries[1, new] = number
        self._tail = new.stop

    def drop(self, count: int) -> None:
        """Remove the first ids."""
        self._head += count

    def keep(self, which: Mask) -> None:
        """Remove all other ids. The order stays."""
        kept = self._entries[:, self._head : self._tail][:, which]
        self._head, self._tail = 0, kept.shape[1]
        self._entries[:, : self._tail] = kept

    def end_of(self, number: int) -> int:
        """Return the number of ids with at most this number: they are the first ones."""
        return int(np.searchsorted(self.numbers, number, "right"))

    def replace(self, ids: Ids, numbers: Ids) -> None:
        """Replace all ids and numbers. The numbers must not decrease."""
        self._head = self._tail = 0
        self.append(ids, 0)
        self.numbers[:] = numbers
