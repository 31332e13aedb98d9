"""Recency of rows: the last update of each row, and the rows that were updated longest ago.

The last update of a row is a number at its place. Which rows are the oldest says a queue of all updates of rows: an
entry counts if it is still the last update of its row. The others are thrown out when there are too many of them, so
each update costs as much as the rows that it names and those that go, on average.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvd.tables.numbered_ids import Mask, NumberedIds
from kvd.tables.row_arena import Moves, RowArena
from kvd.tables.row_index import Ids, Places, RowIndex

_NUMBERS: np.dtype[Any] = np.dtype(np.int64)
_LEAST_LOOKED_AT = 1024
_SPARE_ENTRIES = 4096
_NONE: tuple[Places, Ids] = (np.zeros(0, np.intp), np.zeros(0, np.int64))


class Recency:
    """Not safe to use from several threads.

    Args:
        index: where the rows are. It must be removable if their order is wanted.
        in_order: whether it is asked which are the oldest.
    """

    def __init__(self, index: RowIndex, *, in_order: bool) -> None:
        self._index = index
        self._last = RowArena(1, _NUMBERS)
        self._queue = NumberedIds() if in_order else None
        self._oldest_end = 0  # of the queue: there are all that `oldest` said last
        self._named = _NONE  # places, and what was there

    @property
    def nbytes(self) -> int:
        """The memory that it takes."""
        return self._last.nbytes + (0 if self._queue is None else self._queue.nbytes)

    def require(self, count: int) -> None:
        """Have room for so many rows. Raises MemoryError, and is as it was then."""
        self._last.require(count)

    def reserve(self, count: int, touched: int) -> None:
        """Have room for an update that names so many rows, when there are so many. Raises MemoryError, and is as it was
        then."""
        if self._queue is not None:
            if len(self._queue) + touched > count + count // 2 + _SPARE_ENTRIES:
                self._queue.keep(self._counting(slice(None)))
            self._queue.reserve(touched)

    def name(self, places: Places, number: int) -> None:
        """Name the rows of an update with this number, which may still fail."""
        last = self._last.where_they_lie()
        self._named = places, last[places, 0]
        last[places, 0] = number

    def take_back(self) -> None:
        """Undo a failed update: the rows keep their age."""
        places, last = self._named
        self._last.where_they_lie()[places, 0] = last
        self._named = _NONE
        self._oldest_end = 0

    def note(self, ids: Ids, places: Places, number: int) -> None:
        """Record an update of these rows, ids ascending. Room was reserved."""
        self._last.where_they_lie()[places, 0] = number
        self._named = _NONE
        if self._queue is not None:
            self._queue.drop(self._oldest_end)
            self._oldest_end = 0
            self._queue.append(ids, number)

    def stored(self, ids: Ids, places: Places, number: int, num_before: int) -> None:
        """Record stored rows, which is no update: rows may be stored again, and keep one entry with this number.

        Args:
            ids: in any order.
            num_before: how many rows there were: places from there on are new.
        """
        again = (places < num_before) & (self._last.where_they_lie()[places, 0] == number)
        order = np.argsort(ids[~again])
        self.note(ids[~again][order], places[~again][order], number)
        if self._queue is not None:
            stored = self._queue.ids[self._queue.end_of(number - 1) :]
            if bool((stored[1:] < stored[:-1]).any()):
                stored.sort()  # in the order that a copy of the table makes of them: `restore`

    def moved(self, moves: Moves) -> None:
        """Record moves of rows to the places of removed ones."""
        self._last.close_up(moves)

    def oldest(self, until: int, excess: int) -> Ids:
        """Return the rows with a last update up to number `until`, then the oldest others, up to `excess` in all.

        Among equals the smaller ids are older. The result is in this order.

        The next `note` takes them out of the order, since they will have gone.
        """
        assert self._queue is not None
        end = self._queue.end_of(until)
        found = [self._queue.ids[:end][self._counting(slice(0, end))]]
        missing = excess - len(found[0])
        while missing > 0 and end < len(self._queue):
            part = slice(end, min(len(self._queue), end + max(_LEAST_LOOKED_AT, missing)))
            which = np.flatnonzero(self._counting(part))[:missing]
            found.append(self._queue.ids[part][which])
            missing -= len(which)
            end = part.stop if missing else end + int(which[-1]) + 1
        self._oldest_end = end
        return np.concatenate(found)

    def since(self, number: int) -> Ids:
        """Return the rows that were updated after this update, ascending."""
        places = np.flatnonzero(self._last.where_they_lie()[: len(self._index), 0] > number)
        return np.sort(self._index.ids()[places])

    def last(self, ids: Ids) -> Ids:
        """Return the last update of each of these rows."""
        found: Ids = self._last.where_they_lie()[self._index.find(ids), 0]
        return found

    def restore(self, ids: Ids, last: Ids) -> None:
        """Restore the last updates of all rows of the index."""
        self._last.require(len(self._index))
        self._last.where_they_lie()[self._index.find(ids), 0] = last
        if self._queue is not None:
            order = np.lexsort((ids, last))
            self._queue.replace(ids[order], last[order])

    def _counting(self, part: slice) -> Mask:
        """Return a mask of the valid entries of the queue."""
        assert self._queue is not None
        ids, numbers = self._queue.ids[part], self._queue.numbers[part]
        places = self._index.find(ids)
        there = np.flatnonzero(places >= 0)
        counts = np.zeros(len(ids), np.bool_)
        counts[there] = self._last.where_they_lie()[places[there], 0] == numbers[there]
        return counts
