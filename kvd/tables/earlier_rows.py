"""Rows as they were before the last updates, for those who still ask for an earlier version."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np

from kvd.tables.row_values import Ids, Rows

Array = np.ndarray[Any, Any]

_TOO_LARGE = 2  # times the memory that is needed: it is not kept for the next update


class _Aside(NamedTuple):
    """Attributes:
    ids: ascending.
    memory: begins with their rows; shape (at least ids, width).
    """

    ids: Ids
    memory: Array


class EarlierRows:
    """Rows as they were before each of the last updates.

    Memory of forgotten updates is reused: new memory costs more time than writing the rows.

    Args:
        width, dtype: of a row.
        updates: how many are kept.
    """

    def __init__(self, width: int, dtype: np.dtype[Any], updates: int) -> None:
        self._width = width
        self._dtype = dtype
        self._updates = updates
        self._kept: deque[_Aside] = deque()

    def __len__(self) -> int:
        """Return the number of updates with earlier rows."""
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """The memory of all."""
        return sum([each.ids.nbytes + each.memory.nbytes for each in self._kept])

    def room(self, count: int) -> Array:
        """Return memory for at least so many rows of the next update.

        It may be that of the oldest rows, so write to it only once the update cannot fail any more.
        """
        if len(self._kept) == self._updates:
            oldest = self._kept[0].memory
            if count <= len(oldest) <= _TOO_LARGE * count:
                return oldest
        return np.empty((count, self._width), self._dtype)

    def put_aside(self, ids: Ids, memory: Array, evicted: Rows) -> None:
        """Record an update of these ascending ids; the memory begins with their earlier rows.

        Args:
            evicted: rows that have gone after the update, and what they were by then.
        """
        aside = _Aside(ids, memory)
        self._append(_with(aside, evicted) if len(evicted.ids) else aside)

    def forget(self) -> None:
        """Drop all earlier rows: no version before the newest can be read."""
        self._kept.clear()

    def kept(self) -> list[Rows]:
        """Return the earlier rows, the oldest update first."""
        return [Rows(each.ids, each.memory[: len(each.ids)]) for each in self._kept]

    def add(self, rows: Rows) -> None:
        """Append earlier rows from another node, ids ascending. They are copied."""
        self._append(_Aside(rows.ids.copy(), rows.rows.copy()))

    def _append(self, aside: _Aside) -> None:
        if len(self._kept) == self._updates:
            self._kept.popleft()
        self._kept.append(aside)

    def lay_over(self, out: Array, ids: Ids, updates: int) -> None:
        """Make of the newest rows of some ids those before the last updates, the newest of which is undone first."""
        for number in range(updates):
            before = self._kept[-1 - number]
            if len(before.ids):
                at = np.minimum(np.searchsorted(before.ids, ids), len(before.ids) - 1)
                hit = np.flatnonzero(before.ids[at] == ids)
                out[hit] = before.memory[at[hit]]


def _with(aside: _Aside, rows: Rows) -> _Aside:
    """Return earlier rows with others merged in, without duplicates."""
    is_new = ~np.isin(rows.ids, aside.ids, assume_unique=True)
    ids = rows.ids[is_new]
    at = np.searchsorted(aside.ids, ids)
    before = aside.memory[: len(aside.ids)]
    return _Aside(np.insert(aside.ids, at, ids), np.insert(before, at, rows.rows[is_new], axis=0))
