"""Retention of a table's rows: admission and eviction.

All of it follows from the pushes that the table got, in their order, and from nothing else: no clock and no read has a
part in it. So servers that get the same pushes keep the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from kvd.errors import NotAllowed
from kvd.protocol.specs import Keeping
from kvd.tables.candidates import LEAST_REMEMBERED, Candidates
from kvd.tables.numbered_ids import NumberedIds
from kvd.tables.recency import Recency
from kvd.tables.row_arena import Moves
from kvd.tables.row_index import Ids, Places, RowIndex

Array = np.ndarray[Any, Any]

ROW_OVERHEAD_NBYTES = 96  # of a row, besides the row and the optimizer's state, as `max_bytes` counts it
_BEFORE_ALL = -1  # of a row that no update has named, but that was there, the last update is 0
LEAST_EVICTIONS = 1 << 20  # of those that were evicted last; as many as there are rows, if that is more


_NO_IDS = np.zeros(0, np.int64)


class _Naming(NamedTuple):
    """Effect of an update on the candidates: ids ascending."""

    waiting: Ids
    counts: Ids
    admitted: Ids


class Keeper:
    """Keeper of one table, or of one part of it. Not thread-safe.

    Args:
        keeping: what the program wants.
        parts: those that share the limits of the table.
        index: where the rows are. It must be removable if rows are evicted.
        remembered: how many candidates are, see `Candidates`.
        evictions: how many of the last evictions are known to `evicted_since`.

    Attributes:
        number: how many updates were noted.
    """

    def __init__(
        self,
        keeping: Keeping,
        parts: int,
        index: RowIndex,
        *,
        remembered: int = LEAST_REMEMBERED,
        evictions: int = LEAST_EVICTIONS,
    ) -> None:
        self.number = 0
        self._keeping = keeping
        self._parts = parts
        self._index = index
        self._candidates = Candidates(remembered) if keeping.admit_after > 1 else None
        self._naming: _Naming | None = None  # of the update that is being made
        evicts = may_evict(keeping)
        self._recency = Recency(index, in_order=evicts) if evicts or keeping.track_updates else None
        self._evicted = NumberedIds() if evicts and keeping.track_updates else None
        self._evictions = evictions
        self._forgotten = 0  # the last update whose evictions are not all known
        self._going = _NO_IDS  # the rows that go with the update that is being made

    @property
    def nbytes(self) -> int:
        """The memory that it takes."""
        return sum(part.nbytes for part in (self._candidates, self._recency, self._evicted) if part is not None)

    # ── an update ──

    def admitted(self, ids: Ids) -> Array | None:
        """Return a mask of the named rows that an update may change; None stands for all. Nothing is recorded yet.

        Args:
            ids: ascending, each once.
        """
        self._naming = None
        if self._candidates is None:
            return None
        absent = np.flatnonzero(self._index.find(ids) < 0)
        if not absent.size:
            return None
        named = ids[absent]
        counts = self._candidates.counts(named) + 1
        enough = counts >= self._keeping.admit_after
        self._naming = _Naming(named[~enough], counts[~enough], named[enough])
        self._candidates.reserve(len(self._naming.waiting), len(self._index) + len(self._naming.admitted))
        mask = np.ones(len(ids), bool)
        mask[absent] = enough
        return mask

    def begin(self, ids: Ids, places: Places, row_nbytes: int) -> Ids:
        """Return the rows to evict after an update, among existing and named ones. Call `note` or `take_back` next.

        Args:
            ids: that it names, ascending, each once: the admitted ones.
            places: theirs; -1: it is new.
            row_nbytes: of a row with the optimizer's state.

        Returns:
            Them, ascending.

        Raises:
            MemoryError: there is no memory for the update. Nothing was changed.
        """
        there = places[places >= 0]
        count = len(self._index) + len(ids) - len(there)
        most = self._most(count, row_nbytes)
        self.reserve(count, min(len(ids), most))
        if self._recency is None or not may_evict(self._keeping):
            return self._going
        number = self.number + 1
        self._recency.name(there, number)
        try:
            until = number - self._keeping.ttl_updates if self._keeping.ttl_updates else _BEFORE_ALL
            oldest = self._recency.oldest(until, count - most)
            named = ids[: max(0, count - most - len(oldest))]  # of the newest rows the smallest ids go first
            self._going = np.sort(np.concatenate([oldest, named]))
            if self._evicted is not None:
                self._evicted.reserve(len(self._going))
        except BaseException:
            self.take_back()
            raise
        return self._going

    def take_back(self) -> None:
        """Undo a begun update that has failed."""
        self._naming = None
        self._going = _NO_IDS
        if self._recency is not None:
            self._recency.take_back()

    def require(self, count: int) -> None:
        """Have room for so many rows. Raises MemoryError, and is as it was then."""
        if self._recency is not None:
            self._recency.require(count)

    def reserve(self, count: int, touched: int) -> None:
        """Have room for an update that names so many rows, when there are so many. Raises MemoryError, and is as it was
        then."""
        if self._recency is not None:
            self._recency.reserve(count, touched)

    def note(self, ids: Ids, places: Places, num_named: int) -> None:
        """Record an update that was made. It can no longer fail, so this uses reserved memory only.

        Args:
            ids, places: of the rows that it has changed, ids ascending, each once.
            num_named: how many rows there would be if none went.
        """
        self.number += 1
        if self._recency is not None:
            self._recency.note(ids, places, self.number)
        if self._candidates is not None and self._naming is not None:
            self._candidates.forget(self._naming.admitted)
            self._candidates.set(self._naming.waiting, self._naming.counts, num_named)
        self._naming = None

    def stored(self, ids: Ids, places: Places, num_before: int) -> None:
        """Record stored rows, in any order: they are as old as the newest update. Room was reserved.

        Args:
            num_before: how many rows there were: places from there on are new.
        """
        if self._recency is not None:
            self._recency.stored(ids, places, self.number, num_before)

    # ── evictions ──

    def evicted(self) -> None:
        """Record the eviction of the rows that `begin` returned."""
        ids, self._going = self._going, _NO_IDS
        if self._evicted is None or not len(ids):
            return
        self._evicted.append(ids, self.number)
        excess = len(self._evicted) - max(self._evictions, len(self._index))
        if excess > 0:
            self._forgotten = int(self._evicted.numbers[excess - 1])
            self._evicted.drop(excess)

    def moved(self, moves: Moves) -> None:
        """Record moves of rows to the places of removed ones."""
        if self._recency is not None:
            self._recency.moved(moves)

    def _most(self, count: int, row_nbytes: int) -> int:
        """Return the most of `count` rows that this part keeps."""
        most = count
        if self._keeping.max_rows:
            most = min(most, -(-self._keeping.max_rows // self._parts))
        if self._keeping.max_bytes:
            nbytes = -(-self._keeping.max_bytes // self._parts)
            most = min(most, max(1, nbytes // (row_nbytes + ROW_OVERHEAD_NBYTES)))
        return most

    # ── what has changed ──

    def updated_since(self, number: int) -> Ids:
        """Return the rows that were changed after this update and are there, ascending. Updates are tracked."""
        assert self._recency is not None
        return self._recency.since(number)

    def evicted_since(self, number: int) -> Ids:
        """Return the rows that were evicted after this update and are not there, ascending.

        Raises:
            NotAllowed: there were too many evictions since.
        """
        if self._evicted is None:
            return np.zeros(0, np.int64)
        if number < self._forgotten:
            text = f"which rows were evicted after update {number} is not known any more, only after {self._forgotten}"
            raise NotAllowed(f"{text}: export the whole table, without since")
        ids = np.unique(self._evicted.ids[self._evicted.end_of(number) :])
        return ids[self._index.find(ids) < 0]

    # ── copies ──

    def state(self) -> dict[str, Ids]:
        """Return the whole state as arrays of int64, for a keeper of a table with the same rows."""
        state: dict[str, Ids] = {"number": np.array([self.number, self._forgotten])}
        if self._recency is not None:
            ids = np.sort(self._index.ids())
            state |= {"ids": ids, "last": self._recency.last(ids)}
        if self._candidates is not None:
            state |= self._candidates.state()
        if self._evicted is not None:
            state |= {"evicted_ids": self._evicted.ids.copy(), "evicted_at": self._evicted.numbers.copy()}
        return state

    def restore(self, state: Mapping[str, Ids]) -> bool:
        """Restore a `state`. The rows of the table must exist already.

        Returns:
            False, and nothing was changed, if it is no state of a keeper like this with these rows.
        """
        if not self._fits(state):
            return False
        self.number, self._forgotten = state["number"].tolist()
        self._naming = None
        if self._recency is not None:
            self._recency.restore(state["ids"], state["last"])
        if self._candidates is not None:
            self._candidates.restore(state)
        if self._evicted is not None:
            self._evicted.replace(state["evicted_ids"], state["evicted_at"])
        return True

    def marks(self, ids: Ids) -> list[Ids]:
        """Return arrays that are equal in keepers of the same rows: numbers, and the last updates of these rows."""
        candidates = 0 if self._candidates is None else len(self._candidates)
        evicted = 0 if self._evicted is None else len(self._evicted)
        found = np.array([self.number, self._forgotten, candidates, evicted])
        return [found] if self._recency is None else [found, self._recency.last(ids)]

    def _fits(self, state: Mapping[str, Ids]) -> bool:
        owners = (("ids", self._recency), ("young_ids", self._candidates), ("old_ids", self._candidates))
        has = {ids for ids, owner in (*owners, ("evicted_ids", self._evicted)) if owner is not None}
        names = {name for pair in _PAIRS if pair[0] in has for name in pair}
        if state.keys() != {"number", *names} or len(state["number"]) != 2:
            return False
        for ids, numbers in _PAIRS:
            if ids in state and (len(state[ids]) != len(state[numbers]) or not _is_ordered(state, ids, numbers)):
                return False
        return "ids" not in state or np.array_equal(state["ids"], np.sort(self._index.ids()))


_PAIRS = (("ids", "last"), ("young_ids", "young_counts"), ("old_ids", "old_counts"), ("evicted_ids", "evicted_at"))


def _is_ordered(state: Mapping[str, Ids], ids: str, numbers: str) -> bool:
    """Return whether evictions are in the order of their updates, and all other lists in that of their distinct ids."""
    if ids == "evicted_ids":
        return bool((state[numbers][1:] >= state[numbers][:-1]).all())
    return bool((state[ids][1:] > state[ids][:-1]).all() and (state[ids][:1] >= 0).all())


def may_evict(keeping: Keeping) -> bool:
    """Return whether rows may be evicted."""
    return bool(keeping.ttl_updates or keeping.max_rows or keeping.max_bytes)
