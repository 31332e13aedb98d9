"""The rows of one table on one node, or of one part of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvd.compute.halves import in_halves
from kvd.optimizer import Optimizer
from kvd.tables.description import RowSparse
from kvd.tables.duplicates import added_up
from kvd.tables.initial_rows import InitialRows
from kvd.tables.lazy import LazyRule
from kvd.tables.merged_rows import MergedRows
from kvd.tables.row_arena import RowArena
from kvd.tables.row_index import Ids, Places, RowIndex

Array = np.ndarray[Any, Any]


class Table:
    """Rows by id. A row takes memory from its first update on; before, it is what the initializer says.

    Row ids and rows that come in were checked: `kvd.tables.row_values`. Not safe to use from several threads.

    Args:
        key: the name of the table, on which the initial rows depend.

    Attributes:
        description: what the program said of it.
        step: the updates that an optimizer made.
    """

    def __init__(self, description: RowSparse, key: str) -> None:
        self.description = description
        self.step = 0
        self._key = key
        self._dtype = description.numpy_dtype
        self._initial = InitialRows(description.initializer, key, description.width, self._dtype)
        self._index = RowIndex()
        self._weights = RowArena(description.width, self._dtype)
        self._slots: dict[str, RowArena] = {}

    def __len__(self) -> int:
        """How many rows were updated."""
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """The memory that it takes."""
        arenas = (self._weights, *self._slots.values())
        return self._index.nbytes + sum(arena.nbytes for arena in arenas)

    def read(self, ids: Ids, out: Array) -> None:
        """Write the rows of these ids, in this order, into ``out``, of shape (ids, width)."""
        in_halves(lambda part: self._read(ids[part], out[part]), len(ids), out.size)

    def _read(self, ids: Ids, out: Array) -> None:
        places = self._index.find(ids)
        absent = np.flatnonzero(places < 0)
        if not len(self):
            self._initial.fill(ids, out)
            return
        if not absent.size:
            self._weights.take(places, out)
            return
        self._weights.take(np.maximum(places, 0), out)
        rows = np.empty((absent.size, self.description.width), self._dtype)
        self._initial.fill(ids[absent], rows)
        out[absent] = rows

    def check(self, optimizer: Optimizer) -> None:
        """Raise NotAllowed if the optimizer cannot update single rows."""
        LazyRule(optimizer, self._key, self.description.width, self._dtype)

    def update(self, optimizer: Optimizer, ids: Ids, rows: Array) -> None:
        """Make one update with these gradients; those of the same id are added up in their order.

        No row but these changes or decays, and a NaN gets no further than its own row. No ids are an update, too: it
        counts. If an error is raised, no row was changed.

        Raises:
            NotAllowed: the optimizer cannot update single rows; or there would be too many rows.
            MemoryError: there is no memory for new rows.
        """
        self.update_merged(optimizer, added_up(ids, rows))

    def update_merged(self, optimizer: Optimizer, merged: MergedRows, before: Array | None = None) -> None:
        """The same with rows that are merged already.

        Args:
            before: receives the rows as they were, in the order of the ids; nothing if an error is raised.
        """
        rule = LazyRule(optimizer, self._key, self.description.width, self._dtype)
        places = self._places(merged.ids, rule)
        slots = [self._slots[name] for name in rule.slot_widths]
        rule.apply(self.step + 1, places, merged, self._weights, slots, before)
        self.step += 1

    def assign(self, ids: Ids, rows: Array) -> None:
        """Replace the rows of these ids by these; of the same id, by their sum. The others stay.

        Raises:
            NotAllowed: there would be too many rows.
            MemoryError: there is no memory for new rows.
        """
        self.assign_merged(added_up(ids, rows))

    def assign_merged(self, merged: MergedRows, before: Array | None = None) -> None:
        """The same with rows that are merged already; `before` as above."""
        places = self._places(merged.ids)
        if merged.num_rows:
            rows = merged.rows()
            if before is not None:
                self._weights.take(places, before)
            self._weights.put(places, rows)

    def forget_optimizer(self) -> None:
        """The next optimizer begins with new state."""
        self._slots.clear()
        self.step = 0

    def ids(self) -> Ids:
        """The rows that were updated, ascending."""
        return np.sort(self._index.ids())

    def slot(self, name: str, ids: Ids) -> Array:
        """What the optimizer keeps under this name of rows that were updated, shape (ids, numbers of a row)."""
        arena = self._slots[name]
        return arena.take(self._index.find(ids), np.empty((len(ids), arena.width), self._dtype))

    def _places(self, ids: Ids, rule: LazyRule | None = None) -> Places:
        """The places of these ids, each of which is there once; new ones get theirs, and their initial rows."""
        places = self._index.find(ids)
        absent = np.flatnonzero(places < 0)
        self._require(len(self) + absent.size, rule)  # memory first: an error leaves all as it was
        if absent.size:
            fresh = ids[absent]
            rows = np.zeros((0, 0), self._dtype)
            if not self._initial.are_zeros:  # which they are already
                rows = np.empty((len(fresh), self.description.width), self._dtype)
                self._initial.fill(fresh, rows)
            places[absent] = new = self._index.insert(fresh)
            if rows.size:
                self._weights.put(new, rows)
        return places

    def _require(self, count: int, rule: LazyRule | None) -> None:
        self._weights.require(count)
        for name, width in ({} if rule is None else rule.slot_widths).items():
            if name not in self._slots:
                self._slots[name] = RowArena(width, self._dtype)
        for arena in self._slots.values():
            arena.require(count)
