"""Memory for rows that grows in small steps, so that little of it is unused."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
Places = np.ndarray[Any, np.dtype[np.intp]]

_GROWTH = 16  # by one part in so many
_BLOCK_NBYTES = 64 << 10


class Moves(NamedTuple):
    """What becomes of places when some are taken back, so that none is free among them.

    Attributes:
        sources, holes: what is at the first ones moves to the others, each of which is there once.
        left, was: how many places there are now, and how many there were.
    """

    sources: Places
    holes: Places
    left: int
    was: int


class RowArena:
    """Rows by place. New ones are zeros.

    It is enlarged by `realloc`, which for large memory moves pages and copies nothing (Linux).

    Args:
        width: the elements of a row.
    """

    def __init__(self, width: int, dtype: np.dtype[Any]) -> None:
        self._rows: Array = np.empty((0, width), dtype)
        self._block = max(1, _BLOCK_NBYTES // max(1, width * dtype.itemsize))

    @property
    def width(self) -> int:
        """The elements of a row."""
        return int(self._rows.shape[1])

    @property
    def nbytes(self) -> int:
        """The memory, of used and of unused rows."""
        return self._rows.nbytes

    def require(self, count: int) -> None:
        """Have room for so many rows. Raises MemoryError, and is as it was then."""
        room, width = self._rows.shape
        if count > room:
            # Nobody keeps a view of the rows, so nobody can see the memory move.
            self._rows.resize((max(count, room + room // _GROWTH + self._block), width), refcheck=False)

    def where_they_lie(self) -> Array:
        """The rows themselves, for one calculation: they move when the next ones come."""
        return self._rows

    def take(self, places: Places, out: Array) -> Array:
        """Copy the rows at these places, which are there, into ``out``, and return it."""
        # Any other mode makes NumPy write into memory of its own first.
        return np.take(self._rows, places, axis=0, out=out, mode="clip")

    def put(self, places: Places, rows: Array) -> None:
        """Write the rows at these places, each of which is named once."""
        self._rows[places] = rows

    def close_up(self, moves: Moves) -> None:
        """Move rows to the places that were taken back; those behind the last row are zeros again.

        Memory is given back when more than a half of it is unused.
        """
        self._rows[moves.holes] = self._rows[moves.sources]
        room, width = self._rows.shape
        if room > 2 * (moves.left + self._block):
            self._rows.resize((moves.left + moves.left // _GROWTH + self._block, width), refcheck=False)
        self._rows[moves.left : moves.was] = 0
