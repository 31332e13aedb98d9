"""Rows that were pushed, one for each row id: those of the same id are added up, in the order in which they came."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvd.compute.quiet import quietly

Array = np.ndarray[Any, Any]
Places = np.ndarray[Any, np.dtype[np.intp]]

_ROUNDS = 8  # of additions of whole arrays; what comes up more often is added one by one


class MergedRows:
    """Rows in the order of their places, which is that of memory.

    Args:
        places: of each row, < 2³¹; any number of times.
        rows: shape (places, width).

    Attributes:
        places: each one once, ascending.
    """

    def __init__(self, places: Places, rows: Array) -> None:
        # One sort of numbers that hold the place and the order takes a tenth of the time of a stable argsort.
        sorted_ = (places.astype(np.int64) << 32) | np.arange(len(places))
        sorted_.sort()
        every, order = sorted_ >> 32, sorted_ & 0xFFFFFFFF
        is_first = np.ones(len(places), bool)
        np.not_equal(every[1:], every[:-1], out=is_first[1:])
        starts = np.flatnonzero(is_first)
        self._rows = rows
        self._first = order[starts]
        self.places: Places = every[starts]
        self._summed: Places = np.zeros(0, np.intp)  # which of them are sums
        self._sums: Array = rows[:0]
        if len(starts) < len(places):
            self._add_up(order, is_first, starts)

    def __len__(self) -> int:
        return len(self.places)

    @property
    def is_contiguous(self) -> bool:
        """Whether compiled loops take the rows as they are."""
        return bool(self._rows.flags.c_contiguous)

    def sources(self) -> tuple[Places, Array, Array]:
        """Where each of the rows is: its number among those that were pushed, or ``~number`` among the sums; these, and
        the sums."""
        order = self._first.copy()
        order[self._summed] = ~np.arange(len(self._summed))
        return order, self._rows, self._sums

    def take(self, part: slice, out: Array) -> Array:
        """Copy the rows at these of the places into ``out``, and return it."""
        np.take(self._rows, self._first[part], axis=0, out=out, mode="clip")
        low, high = np.searchsorted(self._summed, (part.start, part.stop))
        out[self._summed[low:high] - part.start] = self._sums[low:high]
        return out

    def take_at(self, which: Places, out: Array) -> Array:
        """The same for any of the places, ascending: `which` are their numbers."""
        np.take(self._rows, self._first[which], axis=0, out=out, mode="clip")
        if len(self._summed):
            number = np.minimum(np.searchsorted(self._summed, which), len(self._summed) - 1)
            hit = np.flatnonzero(self._summed[number] == which)
            out[hit] = self._sums[number[hit]]
        return out

    def _add_up(self, order: Places, is_first: Array, starts: Places) -> None:
        group = np.cumsum(is_first) - 1
        rest = np.flatnonzero(~is_first)
        self._summed = np.unique(group[rest])
        number = np.searchsorted(self._summed, group[rest])  # of the sum that a row goes into
        turn = rest - starts[group[rest]]  # 1 for the second of its id
        self._sums = self._rows[self._first[self._summed]]
        quietly(self._add_in_turn, order[rest], number, turn)

    def _add_in_turn(self, order: Places, number: Places, turn: Places) -> None:
        for current in range(1, min(_ROUNDS, int(turn.max())) + 1):
            now = np.flatnonzero(turn == current)
            self._sums[number[now]] += self._rows[order[now]]
        later = np.flatnonzero(turn > _ROUNDS)
        if later.size:  # ascending, so each sum gets its rows in order
            np.add.at(self._sums, number[later], self._rows[order[later]])
