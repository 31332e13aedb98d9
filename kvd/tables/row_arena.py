"""Memory for rows that grows in small steps, so that little of it is unused."""

from __future__ import annotations

import mmap
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
Places = np.ndarray[Any, np.dtype[np.intp]]

_GROWTH = 16  # by one part in so many
_BLOCK_NBYTES = 64 << 10
_LARGE_PAGE_NBYTES = 2 << 20
_LARGE_FROM_NBYTES = 16 * _LARGE_PAGE_NBYTES  # less of it is unused than the arena grows by


class Moves(NamedTuple):
    """Moves that close the gaps after places were freed.

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

    It is enlarged by `realloc`, which for large memory moves pages and copies nothing (Linux). Of random rows nearly
    every one lies in another page, so a large arena asks for large pages: the processor finds more of them, and the
    system gives them in fewer pieces.

    Args:
        width: the elements of a row.
    """

    def __init__(self, width: int, dtype: np.dtype[Any]) -> None:
        self._rows: Array = np.empty((0, width), dtype)
        self._row_nbytes = max(1, width * dtype.itemsize)
        self._block = max(1, _BLOCK_NBYTES // self._row_nbytes)
        self._pages: mmap.mmap | None = None  # in which large arenas lie

    @property
    def width(self) -> int:
        """The elements of a row."""
        return int(self._rows.shape[1])

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the elements."""
        dtype: np.dtype[Any] = self._rows.dtype
        return dtype

    @property
    def nbytes(self) -> int:
        """The memory, of used and of unused rows."""
        return self._rows.nbytes

    def require(self, count: int) -> None:
        """Reserve room for so many rows. Raises MemoryError, and changes nothing then."""
        room = len(self._rows)
        if count > room:
            self._resize(max(count, room + room // _GROWTH + self._block))

    def _resize(self, room: int) -> None:
        """Have room for so many rows; the first ones stay."""
        is_large = room * self._row_nbytes >= _LARGE_FROM_NBYTES and hasattr(mmap, "MADV_HUGEPAGE")
        if self._pages is not None or is_large:
            self._resize_pages(room)
        else:
            # Nobody keeps a view of the rows, so nobody can see the memory move.
            self._rows.resize((room, self.width), refcheck=False)

    def _resize_pages(self, room: int) -> None:
        """Resize in large pages."""
        nbytes = -(-room * self._row_nbytes // _LARGE_PAGE_NBYTES) * _LARGE_PAGE_NBYTES
        rows = self._rows
        width, dtype = rows.shape[1], rows.dtype
        try:
            if self._pages is None:
                pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                pages.madvise(mmap.MADV_HUGEPAGE)
                _rows_of(pages, width, dtype)[: len(rows)] = rows
                self._pages = pages
            else:
                del rows
                self._rows = np.empty((0, width), dtype)  # pages that are in use do not move
                self._pages.resize(nbytes)
        except OSError as error:
            raise MemoryError(f"there is no memory for {room} rows of {self._row_nbytes} bytes") from error
        finally:
            if self._pages is not None:
                self._rows = _rows_of(self._pages, width, dtype)

    def where_they_lie(self) -> Array:
        """Return the rows themselves, for one calculation: they move when the next ones come."""
        return self._rows

    def take(self, places: Places, out: Array) -> Array:
        """Copy the rows at these places, which are there, into ``out``, and return it."""
        # Any other mode makes NumPy write into memory of its own first.
        return self._rows.take(places, 0, out, "clip")

    def put(self, places: Places, rows: Array) -> None:
        """Write the rows at these places, each of which is named once."""
        self._rows[places] = rows

    def close_up(self, moves: Moves) -> None:
        """Move rows to the places that were taken back; those behind the last row are zeros again.

        Memory is given back when more than a half of it is unused.
        """
        for first in range(0, len(moves.holes), self._block):  # some at a time: NumPy copies them on the way
            part = slice(first, first + self._block)
            self._rows[moves.holes[part]] = self._rows[moves.sources[part]]
        if len(self._rows) > 2 * (moves.left + self._block):
            self._resize(moves.left + moves.left // _GROWTH + self._block)
        self._rows[moves.left : moves.was] = 0


def _rows_of(pages: mmap.mmap, width: int, dtype: np.dtype[Any]) -> Array:
    count = len(pages) // (width * dtype.itemsize)
    rows: Array = np.frombuffer(pages, dtype, count * width).reshape(count, width)
    return rows
