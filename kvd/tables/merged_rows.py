"""Rows to update, one for each row id. Pending additions and divisions are made when the rows are read."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvd.compute.compiled import loop_for
from kvd.compute.quiet import quietly

Array = np.ndarray[Any, Any]
Ids = np.ndarray[Any, np.dtype[np.int64]]
Places = np.ndarray[Any, np.dtype[np.intp]]

TILE = 1 << 15  # elements that are calculated at a time, so that they stay in the cache


class MergedRows(NamedTuple):
    """Each row is one of ``first``, one of ``second``, or the sum of both: ``(f₁·first + f₂·second) / divisor``.

    Nothing is multiplied by 1, nor divided by it, so the bits of a row that nothing is done with stay as they are.

    Attributes:
        ids: ascending, each one once.
        left, right: the number of each row in `first` and in `second`; -1: it has none there.
        first, second: shape (any number, width).
        factors: f₁ and f₂.
    """

    ids: Ids
    left: Places
    right: Places
    first: Array
    second: Array
    factors: tuple[int, int] = (1, 1)
    divisor: int = 1

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.ids)

    @property
    def are_contiguous(self) -> bool:
        """True if compiled loops accept the rows."""
        return bool(self.first.flags.c_contiguous and self.second.flags.c_contiguous)

    def only(self, mask: np.ndarray[Any, np.dtype[np.bool_]]) -> MergedRows:
        """Return the rows that a mask selects."""
        return self._replace(ids=self.ids[mask], left=self.left[mask], right=self.right[mask])

    def rows(self, out: Array | None = None) -> Array:
        """Return all rows, merged, in new memory or in ``out``; shape (ids, width)."""
        if out is None:
            out = np.empty((self.num_rows, self.first.shape[1]), self.first.dtype)
        step = max(1, TILE // max(1, out.shape[1]))
        for begin in range(0, self.num_rows, step):
            part = slice(begin, min(begin + step, self.num_rows))
            self.take(part, out[part])
        return out

    def take(self, which: slice | Places, out: Array) -> Array:
        """Write some of the rows, by their numbers, into ``out``, and return it."""
        left, right = self.left[which], self.right[which]
        if left.size:
            quietly(self._take, left, right, out)
        return out

    def _take(self, left: Places, right: Places, out: Array) -> None:
        if self.are_contiguous and out.flags.c_contiguous:
            loop = loop_for("take_rows", out.dtype, out.dtype).ready(out.size)
            if loop is not None:
                numbers = np.array((*self.factors, self.divisor), out.dtype)
                loop(left, right, self.first, self.second, out, numbers, self.divisor != 1)
                return
        self._take_in_passes(left, right, out)

    def _take_in_passes(self, left: Places, right: Places, out: Array) -> None:
        if len(self.first):
            np.take(self.first, left, axis=0, out=out, mode="clip")
            _multiply(out, self.factors[0])
        if len(self.second):
            second = np.flatnonzero(right >= 0)
            rows = self.second[right[second]]
            _multiply(rows, self.factors[1])
            is_sum = left[second] >= 0
            out[second[~is_sum]] = rows[~is_sum]
            out[second[is_sum]] += rows[is_sum]
        if self.divisor != 1:
            np.divide(out, np.asarray(self.divisor, out.dtype), out=out)


def plain(ids: Ids, rows: Array) -> MergedRows:
    """Return rows that need no merging."""
    return MergedRows(ids, np.arange(len(ids)), np.full(len(ids), -1), rows, rows[:0])


def _multiply(rows: Array, factor: int) -> None:
    if factor != 1:
        np.multiply(rows, np.asarray(factor, rows.dtype), out=rows)
