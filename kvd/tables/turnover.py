"""Rows that go make room for those that come: before an update, so that a table is never larger than it may be.

Which rows go follows from which ones the update names, not from what it makes of them. So those that go are put aside
first, and the new rows take their places. What an update would make of rows that it names, and that go right after it,
nobody could ever read: they are not updated.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvd.tables.columns import Columns
from kvd.tables.initial_rows import InitialRows
from kvd.tables.keeper import Keeper
from kvd.tables.merged_rows import MergedRows
from kvd.tables.row_index import Ids, Places, RowIndex
from kvd.tables.row_values import Rows

Array = np.ndarray[Any, Any]
Mask = np.ndarray[Any, np.dtype[np.bool_]]

_NO_IDS = np.zeros(0, np.int64)
_NO_PLACES = np.zeros(0, np.intp)


class Seats(NamedTuple):
    """The places of the rows that an update changes, and those that it takes from others.

    Attributes:
        ids, places: of the rows that it changes, ids ascending.
        stays: which of the rows that it names these are; None: all.
        evicted: rows that were there and go, as they are before the update, ids ascending.
        taken: the places of the first of these, which new rows have got.
        kept: what the optimizer kept of those.
        left: the places of the other ones, which are still there.
        made: new rows behind all others.
        num_named: how many rows there would be if none went.
    """

    ids: Ids
    places: Places
    stays: Mask | None
    evicted: Rows
    taken: Places
    kept: list[Array]
    left: Places
    made: Ids
    num_named: int

    def of(self, merged: MergedRows) -> MergedRows:
        """Return the rows to update that stay."""
        return merged if self.stays is None else merged.only(self.stays)


class Turnover:
    """Eviction during an update of one table: begin, then settle or take back. Not thread-safe.

    Args:
        keeper: says which rows go; None: none ever do.
    """

    def __init__(self, index: RowIndex, columns: Columns, initial: InitialRows, keeper: Keeper | None) -> None:
        self._index = index
        self._columns = columns
        self._initial = initial
        self._keeper = keeper
        self._none = Rows(_NO_IDS, np.zeros((0, columns.weights.width), columns.weights.dtype))

    def begin(self, ids: Ids) -> Seats:
        """Give places to the rows that an update names; new ones are initial rows, and zeros in the slots.

        Args:
            ids: ascending, each once: those that the table admits.

        Raises:
            NotAllowed: there would be too many rows. Nothing was changed.
            MemoryError: there is no memory for them. Nothing was changed.
        """
        places, absent = self._index.found(ids)
        if self._keeper is None:
            if not absent.size:
                self._columns.require(len(self._index))  # a new optimizer has slots without rows
                return Seats(ids, places, None, self._none, _NO_PLACES, [], _NO_PLACES, _NO_IDS, len(self._index))
            return self._seated(ids, places, _NO_IDS)
        going = self._keeper.begin(ids, places, self._columns.row_nbytes)
        try:
            return self._seated(ids, places, going)
        except BaseException:
            self._keeper.take_back()
            raise

    def settle(self, seats: Seats) -> Rows:
        """Finish an update. Return the evicted rows as they were before it."""
        if self._keeper is not None:
            self._keeper.note(seats.ids, seats.places, seats.num_named)
            if len(seats.left):
                moves = self._index.remove(seats.left)
                self._columns.close_up(moves)
                self._keeper.moved(moves)
            self._keeper.evicted()
        return seats.evicted

    def take_back(self, seats: Seats) -> None:
        """Undo a failed update completely."""
        self._index.take_back(seats.made)
        self._columns.clear(slice(len(self._index), len(self._index) + len(seats.made)))
        if len(seats.taken):
            self._index.replace(seats.taken, seats.evicted.ids[: len(seats.taken)])
            self._columns.put(seats.taken, [seats.evicted.rows[: len(seats.taken)], *seats.kept])
        if self._keeper is not None:
            self._keeper.take_back()

    def _seated(self, ids: Ids, places: Places, going: Ids) -> Seats:
        num_named = len(self._index) + int(np.count_nonzero(places < 0))
        stays = _without(ids, going)
        if stays is not None:
            ids, places = ids[stays], places[stays]
        absent = np.flatnonzero(places < 0)
        evicted, free = self._leaving(going)
        taken, left, made = free[: len(absent)], free[len(absent) :], ids[absent[len(free) :]]
        self._require(len(made))
        kept = self._columns.slots_at(taken)
        rows = self._initial.rows(ids[absent])
        if absent.size:
            self._index.replace(taken, ids[absent[: len(taken)]], len(made))
            self._columns.clear(taken)
            places[absent[: len(taken)]] = taken
            places[absent[len(taken) :]] = self._index.insert(made)
            if rows is not None:
                self._columns.weights.put(places[absent], rows)
        return Seats(ids, places, stays, evicted, taken, kept, left, made, num_named)

    def _leaving(self, going: Ids) -> tuple[Rows, Places]:
        """Return the existing rows of these ids, and their places."""
        weights = self._columns.weights
        if len(going):
            places = self._index.find(going)
            going, places = going[places >= 0], places[places >= 0]
        else:
            places = np.zeros(0, np.intp)
        return Rows(going, weights.take(places, np.empty((len(places), weights.width), weights.dtype))), places

    def _require(self, more: int) -> None:
        """Reserve memory first: if there is none, nothing has changed."""
        self._columns.require(len(self._index) + more)
        if self._keeper is not None:
            self._keeper.require(len(self._index) + more)
        self._index.reserve(more)


def _without(ids: Ids, going: Ids) -> Mask | None:
    """Return a mask of the ids that stay; None stands for all. Both lists are ascending."""
    if not len(going) or not len(ids):
        return None
    at = np.minimum(np.searchsorted(going, ids), len(going) - 1)
    stays: Mask = going[at] != ids
    return None if bool(stays.all()) else stays
