"""Admission of new rows: counts of how often each was named before it is made.

Two generations bound the memory: counts go into the young one; when that is full, it becomes the old one, and the one
that was old is forgotten. A candidate that is named again moves to the young one with its count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvd.tables.row_arena import RowArena
from kvd.tables.row_index import Ids, RowIndex

Counts = np.ndarray[Any, np.dtype[np.int64]]

LEAST_REMEMBERED = 1 << 18  # of the candidates that were named last; at most four times as many


class Candidates:
    """Not safe to use from several threads. Ids that come in are ascending, and each is there once.

    Args:
        remembered: how many of the candidates that were named last are surely remembered.
    """

    def __init__(self, remembered: int = LEAST_REMEMBERED) -> None:
        self._remembered = remembered
        self._young, self._old = _Generation(), _Generation()
        self._following: list[_Generation] = []  # those that will be the young ones: of what is to come

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    @property
    def nbytes(self) -> int:
        """The memory that they take."""
        return self._young.nbytes + self._old.nbytes

    def counts(self, ids: Ids) -> Counts:
        """Return the count of each id; 0 for ids that are no candidates."""
        counts = self._young.counts(ids)
        rest = np.flatnonzero(counts < 0)
        counts[rest] = np.maximum(self._old.counts(ids[rest]), 0)
        return counts

    def reserve(self, more: int, rows: int) -> None:
        """Have room for so many to come. Raises MemoryError, and is as it was then.

        Args:
            rows: see `set`.
        """
        full = self._full(rows)
        self._young.reserve(min(more, full))
        self._following = []
        if len(self._young) + more >= full:  # it may become the old one
            for first in range(full, more + full, full):
                self._following.append(_Generation())
                self._following[-1].reserve(max(0, min(more - first, full)))

    def set(self, ids: Ids, counts: Counts, rows: int) -> None:
        """Set the counts of these ids.

        Args:
            rows: of the table: a fourth of as many candidates are remembered, if that is more.
        """
        full = self._full(rows)
        for first in range(0, len(ids), full):
            part = slice(first, first + full)
            self._young.set(ids[part], counts[part])
            if len(self._young) >= full:
                following = self._following.pop(0) if self._following else _Generation()
                self._young, self._old = following, self._young
        self._following = []

    def forget(self, ids: Ids) -> None:
        """Reset the counts of these ids to 0."""
        self._young.set_to_zero(ids)
        self._old.set_to_zero(ids)

    def _full(self, rows: int) -> int:
        """Return the number of candidates in a generation."""
        return max(self._remembered, rows // 4)

    def state(self) -> dict[str, Ids]:
        """Return the whole state: for each generation, ids ascending, and their counts."""
        young, old = self._young.items(), self._old.items()
        return {"young_ids": young[0], "young_counts": young[1], "old_ids": old[0], "old_counts": old[1]}

    def restore(self, state: Mapping[str, Ids]) -> None:
        """Restore this state."""
        self._young, self._old = _Generation(), _Generation()
        self._young.set(state["young_ids"], state["young_counts"])
        self._old.set(state["old_ids"], state["old_counts"])


class _Generation:
    def __init__(self) -> None:
        self._index = RowIndex()
        self._counts = RowArena(1, np.dtype(np.int32))

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        return self._index.nbytes + self._counts.nbytes

    def counts(self, ids: Ids) -> Counts:
        """Return the count of each id; -1 for absent ones."""
        places = self._index.find(ids)
        counts = np.full(len(ids), -1, np.int64)
        there = np.flatnonzero(places >= 0)
        counts[there] = self._counts.where_they_lie()[places[there], 0]
        return counts

    def reserve(self, more: int) -> None:
        self._index.reserve(more)
        self._counts.require(len(self) + more)

    def set(self, ids: Ids, counts: Counts) -> None:
        places = self._index.find(ids)
        absent = np.flatnonzero(places < 0)
        self.reserve(len(absent))
        places[absent] = self._index.insert(ids[absent])
        self._counts.where_they_lie()[places, 0] = counts

    def set_to_zero(self, ids: Ids) -> None:
        places = self._index.find(ids)
        self._counts.where_they_lie()[places[places >= 0], 0] = 0

    def items(self) -> tuple[Ids, Ids]:
        ids = np.sort(self._index.ids())
        return ids, self.counts(ids)
