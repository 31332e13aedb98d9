"""The weights of the rows of a table and what the optimizer keeps of them, by place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvd.tables.row_arena import Moves, Places, RowArena

Array = np.ndarray[Any, Any]


class Columns:
    """One arena for the weights, and one for each slot of the optimizer. A place is the same row in all of them.

    Args:
        width: the elements of a row.

    Attributes:
        weights: as given.
        slots: by name.
    """

    def __init__(self, width: int, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self.weights = RowArena(width, dtype)
        self.slots: dict[str, RowArena] = {}

    @property
    def nbytes(self) -> int:
        """The memory that they take."""
        return sum([arena.nbytes for arena in self._all()])

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row with the optimizer's state."""
        return sum([arena.width for arena in self._all()]) * self._dtype.itemsize

    @property
    def slot_widths(self) -> dict[str, int]:
        """Slots of the optimizer: names, and numbers per row."""
        return {name: arena.width for name, arena in self.slots.items()}

    def has_slots(self, widths: Mapping[str, int]) -> bool:
        """Return whether these slots exist with these widths."""
        slots = self.slots
        return all(name in slots and slots[name].width == width for name, width in widths.items())

    @contextmanager
    def having_slots(self, widths: Mapping[str, int], *, alone: bool = False) -> Iterator[None]:
        """Have these slots, new ones without rows, and one of another width is made again. If what is done with them
        raises, the slots are what they were.

        Args:
            alone: forget all that is there.
        """
        before = self.slots
        self.slots = {} if alone else before.copy()
        for name, width in widths.items():
            if name not in self.slots or self.slots[name].width != width:
                self.slots[name] = RowArena(width, self._dtype)
        try:
            yield
        except BaseException:
            self.slots = before
            raise

    def forget_slots(self) -> None:
        """Remove all slots."""
        self.slots = {}

    def require(self, count: int) -> None:
        """Have room for so many rows. Raises MemoryError, and what is there stays."""
        for arena in self._all():
            arena.require(count)

    def rows_at(self, places: Places) -> list[Array]:
        """Return copies of the rows at these places: the weights, then the slots."""
        return [arena.take(places, np.empty((len(places), arena.width), self._dtype)) for arena in self._all()]

    def slots_at(self, places: Places) -> list[Array]:
        """Return copies of the slots alone."""
        slots = self.slots.values()
        return [arena.take(places, np.empty((len(places), arena.width), self._dtype)) for arena in slots]

    def put(self, places: Places, arrays: Sequence[Array]) -> None:
        """Write what `rows_at` has returned to these places, each of which is named once."""
        for arena, rows in zip(self._all(), arrays, strict=True):
            arena.put(places, rows)

    def clear(self, places: Places | slice) -> None:
        """Set these places to zeros."""
        for arena in self._all():
            arena.where_they_lie()[places] = 0

    def close_up(self, moves: Moves) -> None:
        """Move rows to the places of removed ones."""
        for arena in self._all():
            arena.close_up(moves)

    def _all(self) -> tuple[RowArena, ...]:
        return (self.weights, *self.slots.values())
