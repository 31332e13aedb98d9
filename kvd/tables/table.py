"""The rows of one table on one node, or of one part of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvd.compute.halves import in_halves
from kvd.errors import NotAllowed
from kvd.optimizer import Optimizer
from kvd.protocol.specs import Keeping
from kvd.tables.description import RowSparse
from kvd.tables.duplicates import added_up
from kvd.tables.initial_rows import InitialRows
from kvd.tables.keeper import Keeper, may_evict
from kvd.tables.lazy import LazyRule
from kvd.tables.merged_rows import MergedRows
from kvd.tables.row_arena import RowArena
from kvd.tables.row_index import Ids, Places, RowIndex
from kvd.tables.row_values import Rows

Array = np.ndarray[Any, Any]


class Table:
    """Rows by id. A row takes memory from its first update on; before, it is what the initializer says.

    Row ids and rows that come in were checked: `kvd.tables.row_values`. Not safe to use from several threads.

    Args:
        key: the name of the table, on which the initial rows depend.
        parts: of the table, of which this is one. They share its limits.

    Attributes:
        description: what the program said of it.
        step: the updates that an optimizer made.
    """

    def __init__(self, description: RowSparse, key: str, parts: int = 1) -> None:
        self.description = description
        self.step = 0
        self._key = key
        self._dtype = description.numpy_dtype
        self._initial = InitialRows(description.initializer, key, description.width, self._dtype)
        keeping = description.keeping
        self._index = RowIndex(removable=may_evict(keeping))
        self._keeper = None if keeping == Keeping() else Keeper(keeping, parts, self._index)
        self._weights = RowArena(description.width, self._dtype)
        self._slots: dict[str, RowArena] = {}

    def __len__(self) -> int:
        """How many rows take memory: those that were updated, and are kept."""
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """The memory that it takes."""
        arenas = (self._weights, *self._slots.values())
        kept = 0 if self._keeper is None else self._keeper.nbytes
        return self._index.nbytes + sum(arena.nbytes for arena in arenas) + kept

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

    def update_merged(self, optimizer: Optimizer, merged: MergedRows, before: Array | None = None) -> Ids:
        """The same with rows that are merged already.

        Args:
            before: begins afterwards with the rows as they were, in the order of the ids; is as it was if an error is
                raised.

        Returns:
            The rows that were changed: those that the table admits, ascending.
        """
        rule = LazyRule(optimizer, self._key, self.description.width, self._dtype)
        merged = self._admitted(merged)
        count, kept = len(self), list(self._slots)
        places = self._places(merged.ids, rule)
        slots = [self._slots[name] for name in rule.slot_widths]
        try:
            rule.apply(self.step + 1, places, merged, self._weights, slots, _first(before, merged))
        except BaseException:
            self._index.take_back(merged.ids[places >= count])  # a copy of the table has not made them either
            self._slots = {name: self._slots[name] for name in kept}
            raise
        self.step += 1
        self._note(places)
        return merged.ids

    def assign(self, ids: Ids, rows: Array) -> None:
        """Replace the rows of these ids by these; of the same id, by their sum. The others stay.

        Raises:
            NotAllowed: there would be too many rows.
            MemoryError: there is no memory for new rows.
        """
        self.assign_merged(added_up(ids, rows))

    def assign_merged(self, merged: MergedRows, before: Array | None = None) -> Ids:
        """The same with rows that are merged already; `before`, and what is returned, as above."""
        merged = self._admitted(merged)
        rows = merged.rows()  # memory first: a row that is there and was not noted would never be evicted
        places = self._places(merged.ids)
        if merged.num_rows:
            if before is not None:
                self._weights.take(places, before[: merged.num_rows])
            self._weights.put(places, rows)
        self._note(places)
        return merged.ids

    def evict(self) -> Rows:
        """Remove the rows that the table does not keep after the last update, which is asked after each one. They begin
        again as the initializer says, and with new state.

        Returns:
            What they were, with their ids ascending.
        """
        ids = np.zeros(0, np.int64) if self._keeper is None else self._keeper.to_evict(self._row_nbytes)
        rows = np.empty((len(ids), self.description.width), self._dtype)
        if self._keeper is not None and len(ids):
            places = self._index.find(ids)
            self._weights.take(places, rows)
            self._remove(places)
            self._keeper.evicted(ids)
        return Rows(ids, rows)

    def forget_optimizer(self) -> None:
        """The next optimizer begins with new state."""
        self._slots.clear()
        self.step = 0

    def ids(self) -> Ids:
        """The rows that take memory, ascending."""
        return np.sort(self._index.ids())

    def slot(self, name: str, ids: Ids) -> Array:
        """What the optimizer keeps under this name of rows that were updated, shape (ids, numbers of a row)."""
        arena = self._slots[name]
        return arena.take(self._index.find(ids), np.empty((len(ids), arena.width), self._dtype))

    # ── what has changed, and copies ──

    @property
    def tracked(self) -> int | None:
        """The number of the last update, if the table tracks updates."""
        return self._keeper.number if self._keeper is not None and self.description.keeping.track_updates else None

    def updated_since(self, number: int) -> Ids:
        """The rows that were changed after this update and are there, ascending.

        Raises:
            NotAllowed: the table does not track updates, or has not had so many.
        """
        return self._tracked_by(number).updated_since(number)

    def evicted_since(self, number: int) -> Ids:
        """The rows that were evicted after this update and are not there, ascending.

        Raises:
            NotAllowed: the same, or there were too many evictions since.
        """
        return self._tracked_by(number).evicted_since(number)

    def _tracked_by(self, number: int) -> Keeper:
        if self._keeper is None or not self.description.keeping.track_updates:
            text = f"table {self._key!r} does not track updates: make it with track_updates=True, or export all of it"
            raise NotAllowed(text, key=self._key)
        if number > self._keeper.number:
            text = f"table {self._key!r} is at version {self._keeper.number}, before since={number}: export all of it"
            raise NotAllowed(text, key=self._key)
        return self._keeper

    def keeping_state(self) -> dict[str, Ids]:
        """All that says which rows are kept, for a table with the same rows."""
        return {} if self._keeper is None else self._keeper.state()

    def restore_keeping(self, state: Mapping[str, Ids]) -> bool:
        """Go on to keep rows as the table does whose `keeping_state` this is. The rows are there already.

        Returns:
            False, and nothing was changed, if it is none of a table like this with these rows.
        """
        return not state if self._keeper is None else self._keeper.restore(state)

    def keeping_marks(self, ids: Ids) -> list[Array]:
        """What is the same in tables that keep the same rows: some numbers of all, and of these rows."""
        return [] if self._keeper is None else self._keeper.marks(ids)

    # ── as they lie ──

    @property
    def slot_widths(self) -> dict[str, int]:
        """What the optimizer keeps of each row: names, and numbers per row."""
        return {name: arena.width for name, arena in self._slots.items()}

    def ids_by_place(self) -> Ids:
        """The rows that were updated, in the order in which they lie in memory."""
        return self._index.ids()

    def rows_at(self, places: Places | slice) -> list[Array]:
        """Copies of the rows at these places, and of what the optimizer keeps of them, in the order of
        `slot_widths`."""
        if isinstance(places, slice):
            places = np.arange(len(self))[places]
        arenas = (self._weights, *self._slots.values())
        return [arena.take(places, np.empty((len(places), arena.width), self._dtype)) for arena in arenas]

    def load(self, ids: Ids, rows: Array, slots: Mapping[str, Array]) -> bool:
        """Adds rows behind the others, with what the optimizer keeps of them. False, and nothing was changed, if one of
        them is there.

        Args:
            ids: each once.
            slots: the same names and widths in each call.

        Raises:
            NotAllowed: there would be too many rows.
            MemoryError: there is no memory for new rows.
        """
        if bool((self._index.find(ids) >= 0).any()):
            return False
        for name, array in slots.items():
            if name not in self._slots:
                self._slots[name] = RowArena(array.shape[1], self._dtype)
        self._require(len(self) + len(ids), None)
        places = self._index.insert(ids)
        self._weights.put(places, rows)
        for name, array in slots.items():
            self._slots[name].put(places, array)
        return True

    def store(self, ids: Ids, rows: Array, slots: Mapping[str, Array]) -> None:
        """Puts rows in place of those of these ids, with what the optimizer keeps of them: it is no update. The table
        admits them all, as rows of the newest update.

        Args:
            ids: each once.
            slots: shape (ids, numbers of a row) each.

        Raises:
            NotAllowed: there would be too many rows.
            MemoryError: there is no memory for them.
        """
        for name, array in slots.items():
            if name not in self._slots or self._slots[name].width != array.shape[1]:
                self._slots[name] = RowArena(array.shape[1], self._dtype)
        num_before = len(self)
        places = self._places(ids)
        self._weights.put(places, rows)
        for name, array in slots.items():
            self._slots[name].put(places, array)
        if self._keeper is not None:
            self._keeper.stored(places, num_before)

    def store_state(self, ids: Ids, slots: Mapping[str, Array]) -> None:
        """The same with what the optimizer keeps alone: rows that are there stay as they are, and new ones begin as the
        initializer says."""
        for name, array in slots.items():
            if name not in self._slots or self._slots[name].width != array.shape[1]:
                self._slots[name] = RowArena(array.shape[1], self._dtype)
        num_before = len(self)
        places = self._places(ids)
        for name, array in slots.items():
            self._slots[name].put(places, array)
        if self._keeper is not None:
            self._keeper.stored(places[places >= num_before], num_before)

    def _places(self, ids: Ids, rule: LazyRule | None = None) -> Places:
        """The places of these ids, each of which is there once; new ones get theirs, and their initial rows."""
        places = self._index.find(ids)
        absent = np.flatnonzero(places < 0)
        self._require(len(self) + absent.size, rule)  # memory first: an error leaves all as it was
        if self._keeper is not None:
            self._keeper.reserve(len(self) + absent.size, len(ids))
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
            if name not in self._slots or self._slots[name].width != width:  # of a file, for another optimizer
                self._slots[name] = RowArena(width, self._dtype)
        for arena in self._slots.values():
            arena.require(count)

    @property
    def _row_nbytes(self) -> int:
        """Of a row with the optimizer's state."""
        return sum(arena.width for arena in (self._weights, *self._slots.values())) * self._dtype.itemsize

    def _admitted(self, merged: MergedRows) -> MergedRows:
        """Those that an update may change."""
        mask = None if self._keeper is None else self._keeper.admitted(merged.ids)
        return merged if mask is None else merged.only(mask)

    def _note(self, places: Places) -> None:
        if self._keeper is not None:
            self._keeper.note(places)

    def _remove(self, places: Places) -> None:
        moves = self._index.remove(places)
        for arena in (self._weights, *self._slots.values()):
            arena.close_up(moves)
        if self._keeper is not None:
            self._keeper.moved(moves)


def _first(before: Array | None, merged: MergedRows) -> Array | None:
    return None if before is None else before[: merged.num_rows]
