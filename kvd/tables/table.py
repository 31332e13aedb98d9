"""The rows of one table on one node, or of one part of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from kvd.compute.halves import WORTH_A_THREAD, in_halves
from kvd.errors import NotAllowed
from kvd.optimizer import Optimizer
from kvd.protocol.specs import Keeping
from kvd.tables.columns import Columns
from kvd.tables.description import RowSparse
from kvd.tables.duplicates import added_up
from kvd.tables.initial_rows import InitialRows
from kvd.tables.keeper import Keeper, may_evict
from kvd.tables.lazy import LazyRule
from kvd.tables.merged_rows import MergedRows
from kvd.tables.row_index import Found, Ids, Places, RowIndex
from kvd.tables.row_values import Rows
from kvd.tables.turnover import Turnover

Array = np.ndarray[Any, Any]


class Updated(NamedTuple):
    """Effect of an update.

    Attributes:
        ids: the rows that it has changed: those that the table admits and keeps, ascending.
        evicted: rows that were there before it and have gone, as they were, ids ascending.
    """

    ids: Ids
    evicted: Rows


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
        self._columns = Columns(description.width, self._dtype)
        self._turnover = Turnover(self._index, self._columns, self._initial, self._keeper)
        self._rule: tuple[Optimizer, LazyRule] | None = None  # of the last update

    def __len__(self) -> int:
        """Number of rows in memory: those that were updated and are kept."""
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """The memory that it takes."""
        kept = 0 if self._keeper is None else self._keeper.nbytes
        return self._index.nbytes + self._columns.nbytes + kept

    def read(self, ids: Ids, out: Array) -> None:
        """Write the rows of these ids, in this order, into ``out``, of shape (ids, width)."""
        if out.size < WORTH_A_THREAD:
            self._read(ids, out)
        else:
            in_halves(lambda part: self._read(ids[part], out[part]), len(ids), out.size)

    def _read(self, ids: Ids, out: Array) -> None:
        places, absent = self._index.found(ids)
        if not len(self):
            self._initial.fill(ids, out)
            return
        if not absent.size:
            self._columns.weights.take(places, out)
            return
        self._columns.weights.take(np.maximum(places, 0), out)
        rows = np.empty((absent.size, self.description.width), self._dtype)
        self._initial.fill(ids[absent], rows)
        out[absent] = rows

    def check(self, optimizer: Optimizer) -> None:
        """Raise NotAllowed if the optimizer cannot update single rows."""
        LazyRule(optimizer, self._key, self.description.width, self._dtype)

    def update(self, optimizer: Optimizer, ids: Ids, rows: Array) -> Updated:
        """Make one update with these gradients; those of the same id are added up in their order.

        No row but these changes or decays, and a NaN gets no further than its own row. No ids are an update, too: it
        counts. If an error is raised, no row was changed.

        Raises:
            NotAllowed: the optimizer cannot update single rows; or there would be too many rows.
            MemoryError: there is no memory for new rows.
        """
        return self.update_merged(optimizer, added_up(ids, rows))

    def update_merged(self, optimizer: Optimizer, merged: MergedRows, before: Array | None = None) -> Updated:
        """Make one update with merged rows.

        Args:
            before: begins afterwards with the rows that were changed, as they were, in the order of the ids; is as it
                was if an error is raised.
        """
        rule = self._rule_of(optimizer)

        def update(places: Places, given: MergedRows) -> None:
            slots = [self._columns.slots[name] for name in rule.slot_widths]
            rule.apply(self.step + 1, places, given, self._columns.weights, slots, _first(before, given))

        updated = self._made(merged, rule.slot_widths, update)
        self.step += 1
        return updated

    def _rule_of(self, optimizer: Optimizer) -> LazyRule:
        if self._rule is not None and self._rule[0] is optimizer:
            return self._rule[1]
        rule = LazyRule(optimizer, self._key, self.description.width, self._dtype)
        if rule.is_ours:  # it cannot change
            self._rule = (optimizer, rule)
        return rule

    def assign(self, ids: Ids, rows: Array) -> Updated:
        """Replace the rows of these ids by these; of the same id, by their sum. The others stay.

        Raises:
            NotAllowed: there would be too many rows.
            MemoryError: there is no memory for new rows.
        """
        return self.assign_merged(added_up(ids, rows))

    def assign_merged(self, merged: MergedRows, before: Array | None = None) -> Updated:
        """Replace rows by merged rows; `before` as in `update_merged`."""

        def update(places: Places, given: MergedRows) -> None:
            rows, weights = given.rows(), self._columns.weights
            if given.num_rows:
                if before is not None:
                    weights.take(places, before[: given.num_rows])
                weights.put(places, rows)

        return self._made(merged, {}, update)

    def _made(
        self, merged: MergedRows, slot_widths: Mapping[str, int], update: Callable[[Places, MergedRows], None]
    ) -> Updated:
        """Make one update, or none if it fails.

        Args:
            update: of the rows at these places by these; if it raises, the rows that were there are as they were.
        """
        if self._keeper is not None and (mask := self._keeper.admitted(merged.ids)) is not None:
            merged = merged.only(mask)
        # The slots of a file may be another optimizer's. If the update fails there are no others: a copy of the table
        # has not made any either.
        if self._columns.has_slots(slot_widths):
            return self._changed(merged, update)
        with self._columns.having_slots(slot_widths):
            return self._changed(merged, update)

    def _changed(self, merged: MergedRows, update: Callable[[Places, MergedRows], None]) -> Updated:
        seats = self._turnover.begin(merged.ids)
        try:
            update(seats.places, seats.of(merged))
        except BaseException:
            self._turnover.take_back(seats)
            raise
        return Updated(seats.ids, self._turnover.settle(seats))

    def forget_optimizer(self) -> None:
        """Drop the optimizer's state: the next optimizer begins with new state."""
        self._columns.forget_slots()
        self.step = 0

    def ids(self) -> Ids:
        """Return the rows that take memory, ascending."""
        return np.sort(self._index.ids())

    def slot(self, name: str, ids: Ids) -> Array:
        """Return a slot of the optimizer for updated rows, shape (ids, numbers of a row)."""
        arena = self._columns.slots[name]
        return arena.take(self._index.find(ids), np.empty((len(ids), arena.width), self._dtype))

    # ── what has changed, and copies ──

    @property
    def tracked(self) -> int | None:
        """The number of the last update, if the table tracks updates."""
        return self._keeper.number if self._keeper is not None and self.description.keeping.track_updates else None

    def updated_since(self, number: int) -> Ids:
        """Return the rows that were changed after this update and are there, ascending.

        Raises:
            NotAllowed: the table does not track updates, or has not had so many.
        """
        return self._tracked_by(number).updated_since(number)

    def evicted_since(self, number: int) -> Ids:
        """Return the rows that were evicted after this update and are not there, ascending.

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
        """Return the keeper's state, for a table with the same rows."""
        return {} if self._keeper is None else self._keeper.state()

    def restore_keeping(self, state: Mapping[str, Ids]) -> bool:
        """Restore a `keeping_state`. The rows must exist already.

        Returns:
            False, and nothing was changed, if it is none of a table like this with these rows.
        """
        return not state if self._keeper is None else self._keeper.restore(state)

    def keeping_marks(self, ids: Ids) -> list[Array]:
        """Return arrays that are equal in tables that keep the same rows: some numbers of all, and of these rows."""
        return [] if self._keeper is None else self._keeper.marks(ids)

    # ── as they lie ──

    @property
    def slot_widths(self) -> dict[str, int]:
        """Slots of the optimizer: names, and numbers per row."""
        return self._columns.slot_widths

    def ids_by_place(self) -> Ids:
        """Return the rows that were updated, in the order in which they lie in memory."""
        return self._index.ids()

    def rows_at(self, places: Places | slice) -> list[Array]:
        """Return copies of the rows at these places and of their optimizer state, in the order of `slot_widths`."""
        if isinstance(places, slice):
            places = np.arange(len(self))[places]
        return self._columns.rows_at(places)

    def load(self, ids: Ids, rows: Array, slots: Mapping[str, Array]) -> bool:
        """Append rows with their optimizer state. False, and nothing was changed, if one of
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
        with self._columns.having_slots(_widths(slots)):
            self._columns.require(len(self) + len(ids))
            places = self._index.insert(ids)
        self._put(places, rows, slots)
        return True

    def store(self, ids: Ids, rows: Array, slots: Mapping[str, Array]) -> None:
        """Replace the rows of these ids and their optimizer state, which is no update. The table
        admits them all, as rows of the newest update.

        Args:
            ids: each once.
            slots: shape (ids, numbers of a row) each.

        Raises:
            NotAllowed: there would be too many rows.
            MemoryError: there is no memory for them.
        """
        num_before = len(self)
        with self._columns.having_slots(_widths(slots)):
            places, _ = self._seated(ids)
        self._put(places, rows, slots)
        if self._keeper is not None:
            self._keeper.stored(ids, places, num_before)

    def store_state(self, ids: Ids, slots: Mapping[str, Array], *, is_first: bool) -> None:
        """Store the optimizer's state alone: existing rows stay, and new ones begin as the initializer says.

        Args:
            is_first: what it has kept of all rows is forgotten.
        """
        num_before = len(self)
        with self._columns.having_slots(_widths(slots), alone=is_first):
            places, fresh = self._seated(ids, are_given=False)
        self._put_slots(places, slots)
        if self._keeper is not None:
            self._keeper.stored(ids[fresh], places[fresh], num_before)

    def _seated(self, ids: Ids, *, are_given: bool = True) -> Found:
        """Return places for all of these ids, and which of them are new. An error leaves everything unchanged.

        Args:
            are_given: False: new rows begin as the initializer says.
        """
        places, fresh = self._index.found(ids)
        rows = None if are_given else self._initial.rows(ids[fresh])
        count = len(self) + fresh.size
        self._columns.require(count)
        if self._keeper is not None:
            self._keeper.require(count)
            self._keeper.reserve(count, len(ids))
        places[fresh] = self._index.insert(ids[fresh])
        if rows is not None:
            self._columns.weights.put(places[fresh], rows)
        return Found(places, fresh)

    def _put(self, places: Places, rows: Array, slots: Mapping[str, Array]) -> None:
        self._columns.weights.put(places, rows)
        self._put_slots(places, slots)

    def _put_slots(self, places: Places, slots: Mapping[str, Array]) -> None:
        for name, array in slots.items():
            self._columns.slots[name].put(places, array)


def _widths(slots: Mapping[str, Array]) -> dict[str, int]:
    """Return the numbers per row by slot."""
    return {name: array.shape[1] for name, array in slots.items()}


def _first(before: Array | None, merged: MergedRows) -> Array | None:
    return None if before is None else before[: merged.num_rows]
