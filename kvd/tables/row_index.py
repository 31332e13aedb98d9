"""Which row id is at which place: a hash table of arrays, whose look-ups go over many ids at once.

Open addressing with linear probing. A look-up goes in rounds: in each round every id that is still open looks at one
more slot. At most half of the slots are taken, so most ids end in the first round, and the last few rounds are short.
Compiled loops (`kvd.compute.jit_ids`) look ids up one by one, in the same slots.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvd.compute.compiled import id_loop
from kvd.errors import NotAllowed
from kvd.tables.counted_bits import mix

Ids = np.ndarray[Any, np.dtype[np.int64]]
Places = np.ndarray[Any, np.dtype[np.intp]]

MOST_ROWS = (1 << 31) - 1  # places take 32 bits here
_LEAST_SLOTS = 1024
_FREE = -1  # row ids are ≥ 0


class RowIndex:
    """Places are given in the order 0, 1, 2 …; none is ever taken back."""

    def __init__(self) -> None:
        self._count = 0
        self._make_slots(_LEAST_SLOTS)

    def __len__(self) -> int:
        """How many ids have a place."""
        return self._count

    @property
    def nbytes(self) -> int:
        """The memory of the slots: 12 bytes each, two to four slots per id."""
        return self._ids.nbytes + self._places.nbytes

    def find(self, ids: Ids) -> Places:
        """The place of each id; -1 for those that have none."""
        loop = id_loop("find_ids", len(ids))
        if loop is None:
            return self._find(ids)
        found: Places = np.empty(len(ids), np.intp)
        loop(ids, self._ids, self._places, found)
        return found

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

    def insert(self, ids: Ids) -> Places:
        """Give places to ids that have none, each of which is there once.

        Raises:
            NotAllowed: the table would have too many rows. Nothing was changed.
            MemoryError: there is no memory for more slots. Nothing was changed.
        """
        count = self._count + len(ids)
        if count > MOST_ROWS:
            raise NotAllowed(f"a table has at most {MOST_ROWS} rows that were updated, on each server")
        slots = len(self._ids)
        while slots < 2 * count:
            slots *= 2
        if slots > len(self._ids):
            self._grow(slots)
        places = np.arange(self._count, count)
        self._put(ids, places)
        self._count = count
        return places

    def ids(self) -> Ids:
        """The ids in the order of their places."""
        taken = np.flatnonzero(self._ids != _FREE)
        ids = np.empty(self._count, np.int64)
        ids[self._places[taken]] = self._ids[taken]
        return ids

    def _make_slots(self, slots: int) -> None:
        ids, places = np.full(slots, _FREE, np.int64), np.zeros(slots, np.int32)  # memory first
        self._mask = slots - 1
        self._ids: Ids = ids
        self._places = places

    def _grow(self, slots: int) -> None:
        ids = self.ids()
        self._make_slots(slots)
        self._put(ids, np.arange(len(ids)))

    def _home(self, ids: Ids) -> Places:
        return (mix(ids.view(np.uint64)) & np.uint64(self._mask)).astype(np.intp)

    def _put(self, ids: Ids, places: Places) -> None:
        loop = id_loop("put_ids", len(ids))
        if loop is None:
            self._put_in_rounds(ids, places)
        else:
            loop(ids, places, self._ids, self._places)

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
