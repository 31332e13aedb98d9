"""Index of row ids: a hash table of arrays that looks up many ids at once.

Open addressing with linear probing. A look-up goes in rounds: in each round every id that is still open looks at one
more slot. At most half of the slots are taken, so most ids end in the first round, and the last few rounds are short.
Compiled loops (`kvd.compute.jit_ids`) look ids up one by one, in the same slots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvd.compute.compiled import id_loop
from kvd.compute.halves import WORTH_A_THREAD, in_halves
from kvd.errors import NotAllowed
from kvd.tables.counted_bits import mix
from kvd.tables.row_arena import Moves, RowArena

Ids = np.ndarray[Any, np.dtype[np.int64]]
Places = np.ndarray[Any, np.dtype[np.intp]]

MOST_ROWS = (1 << 31) - 1  # places take 32 bits here
_LEAST_SLOTS = 1024
_ID_ELEMENTS = 16  # to find an id takes as long as so many elements of a row
_FREE = -1  # row ids are ≥ 0
_GONE = -2  # of an id that was removed: look-ups go on to the next slot
_NONE: Places = np.zeros(0, np.intp)


class Found(NamedTuple):
    """Result of a look-up of ids.

    Attributes:
        places: of each id; -1: it has none.
        absent: the numbers of the ids that have none.
    """

    places: Places
    absent: Places


class RowIndex:
    """Index of row ids. Places are 0, 1, 2 … without gaps: the last ids move to the places of removed ones.

    Args:
        removable: whether ids can be removed, which takes 8 bytes more for each.
    """

    def __init__(self, *, removable: bool = False) -> None:
        self._count = 0
        self._gone = 0  # slots of ids that were removed
        self._by_place = RowArena(1, np.dtype(np.int64)) if removable else None
        self._make_slots(_LEAST_SLOTS)

    def __len__(self) -> int:
        """Number of ids with a place."""
        return self._count

    @property
    def nbytes(self) -> int:
        """The memory of the slots: 12 bytes each, two to four slots per id."""
        return self._ids.nbytes + self._places.nbytes + (0 if self._by_place is None else self._by_place.nbytes)

    def find(self, ids: Ids) -> Places:
        """Return the place of each id; -1 for those that have none."""
        return self.found(ids).places

    def found(self, ids: Ids) -> Found:
        """Return the place of each id, and which ids have none."""
        loop = id_loop("find_ids", len(ids))
        if loop is None:
            places = self._find(ids)
            return Found(places, np.flatnonzero(places < 0))
        places, contiguous = np.empty(len(ids), np.intp), np.ascontiguousarray(ids)
        if len(ids) * _ID_ELEMENTS < WORTH_A_THREAD:
            num_absent = loop(contiguous, self._ids, self._places, places)
            return Found(places, np.flatnonzero(places < 0) if num_absent else _NONE)

        def find(part: slice) -> None:
            loop(contiguous[part], self._ids, self._places, places[part])

        in_halves(find, len(ids), len(ids) * _ID_ELEMENTS)
        return Found(places, np.flatnonzero(places < 0) if int(places.min()) < 0 else _NONE)

    def _find(self, ids: Ids) -> Places:
        at = self._home(ids)
        there = self._ids.take(at)
        found: Places = np.where(there == ids, self._places.take(at), -1).astype(np.intp)
        rest = np.flatnonzero((there != ids) & (there != _FREE))
        at = at[rest]
        while rest.size:
            at = (at + 1) & self._mask
            there = self._ids[at]
            hit = there == ids[rest]
            found[rest[hit]] = self._places[at[hit]]
            still = ~hit & (there != _FREE)
            rest, at = rest[still], at[still]
        return found

    def reserve(self, more: int) -> None:
        """Have slots for so many more ids.

        Raises:
            NotAllowed: the table would have too many rows. Nothing was changed.
            MemoryError: there is no memory for more slots. Nothing was changed.
        """
        count = self._count + more
        if count > MOST_ROWS:
            raise NotAllowed(f"a table has at most {MOST_ROWS} rows that were updated, on each server")
        if self._by_place is not None:
            self._by_place.require(count)
        if 2 * count > len(self._ids) or self._is_full(count):
            slots = _LEAST_SLOTS
            while slots < 2 * count:
                slots *= 2
            self._make_again(slots)

    def insert(self, ids: Ids) -> Places:
        """Give places to ids that have none, each of which is there once. Raises what `reserve` does."""
        self.reserve(len(ids))
        places = np.arange(self._count, self._count + len(ids))
        self._put(ids, places)
        if self._by_place is not None:
            self._by_place.put(places, ids[:, None])
        self._count += len(ids)
        return places

    def remove(self, places: Places) -> Moves:
        """Take these places, each of which is there once, from their ids; the last ids get them."""
        assert self._by_place is not None
        ids, count = self._by_place.where_they_lie()[:, 0], self._count - len(places)
        stays = np.ones(len(places), bool)
        stays[places[places >= count] - count] = False
        moves = Moves(np.flatnonzero(stays) + count, np.sort(places[places < count]), count, self._count)
        self._ids[self._slots_of(ids[places])] = _GONE
        self._places[self._slots_of(ids[moves.sources])] = moves.holes
        self._gone += len(places)
        del ids  # the memory may move
        self._by_place.close_up(moves)
        self._count = count
        return moves

    def replace(self, places: Places, ids: Ids, more: int = 0) -> None:
        """Give these places, each of which is there once, to ids that have none. It needs no memory that stays; if
        there is none at all, it raises MemoryError, and nothing was changed.

        Args:
            more: so many ids will be inserted, for which slots were reserved: they will need no others.
        """
        if not len(places):
            return
        assert self._by_place is not None
        slots = self._slots_of(self.ids_at(places))
        is_full = self._is_full(self._count + more, len(places))
        every = np.arange(self._count) if is_full else _NONE
        self._by_place.put(places, ids[:, None])
        if is_full:
            self._ids.fill(_FREE)
            self._put(self._by_place.where_they_lie()[: self._count, 0], every)
            self._gone = 0
        else:
            self._ids[slots] = _GONE
            self._gone += len(places)
            self._put(ids, places)

    def take_back(self, ids: Ids) -> None:
        """Remove the ids that were added last, in any order."""
        self._ids[self._slots_of(ids)] = _GONE
        self._gone += len(ids)
        self._count -= len(ids)

    def ids(self) -> Ids:
        """Return the ids in the order of their places."""
        if self._by_place is not None:
            return self._by_place.where_they_lie()[: self._count, 0].copy()
        taken = np.flatnonzero(self._ids >= 0)
        ids = np.empty(self._count, np.int64)
        ids[self._places[taken]] = self._ids[taken]
        return ids

    def ids_at(self, places: Places) -> Ids:
        """Return the ids at these places, of an index from which ids can be removed."""
        assert self._by_place is not None
        ids: Ids = self._by_place.where_they_lie()[places, 0]
        return ids

    def _is_full(self, count: int, more_gone: int = 0) -> bool:
        """Return whether look-ups are slow with so many ids and removed ids."""
        return 8 * (count + self._gone + more_gone) > 5 * len(self._ids)

    def _make_slots(self, slots: int) -> None:
        ids, places = np.full(slots, _FREE, np.int64), np.zeros(slots, np.int32)  # memory first
        self._mask = slots - 1
        self._ids: Ids = ids
        self._places = places

    def _make_again(self, slots: int) -> None:
        ids = self.ids()
        self._make_slots(slots)
        self._put(ids, np.arange(len(ids)))
        self._gone = 0

    def _home(self, ids: Ids) -> Places:
        return (mix(ids.view(np.uint64)) & np.uint64(self._mask)).astype(np.intp)

    def _slots_of(self, ids: Ids) -> Places:
        """Return the places of these ids, which all have one."""
        at = self._home(ids)
        rest = np.flatnonzero(self._ids[at] != ids)
        while rest.size:
            at[rest] = (at[rest] + 1) & self._mask
            rest = rest[self._ids[at[rest]] != ids[rest]]
        return at

    def _put(self, ids: Ids, places: Places) -> None:
        loop = id_loop("put_ids", len(ids))
        if loop is None:
            self._put_in_rounds(ids, places)
        else:
            loop(np.ascontiguousarray(ids), places, self._ids, self._places)

    def _put_in_rounds(self, ids: Ids, places: Places) -> None:
        """In each round every open id writes itself into its slot if that is free; the one that can be read there
        afterwards has got it, and the others go on to the next slot."""
        at = self._home(ids)
        rest: Places = np.arange(len(ids))
        while rest.size:
            mine = ids[rest]
            free = self._ids[at] == _FREE
            self._ids[at[free]] = mine[free]
            won = self._ids[at] == mine
            self._places[at[won]] = places[rest[won]]
            rest, at = rest[~won], (at[~won] + 1) & self._mask
