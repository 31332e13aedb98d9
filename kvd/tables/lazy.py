"""Updates of a few rows of a table: only these are read and written, and only they decay.

A compiled loop updates them where they lie. Without one the rows are gathered tile by tile, with what the optimizer
keeps of them, updated by the kernels that update other keys, and scattered. Either way the formulas and the bits are
those of a key that has just these rows. What an optimizer
computes of the number of an update (the bias correction of Adam, schedules) goes by the updates of the table, not of
the row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kvd.compute.catalogue import kernel_of
from kvd.compute.compiled import loop_for
from kvd.compute.halves import in_halves
from kvd.compute.kernels import ROW_LOOPS, ROWS, Shared, loop_name, prepare_gradient, shared_scalars
from kvd.compute.merge import TILE
from kvd.compute.quiet import quietly
from kvd.compute.scratch import Scratch
from kvd.errors import NotAllowed
from kvd.optimizer import Optimizer, RowWiseAdagrad
from kvd.optimizer.registry import row_error
from kvd.tables.merged_rows import MergedRows
from kvd.tables.row_arena import Places, RowArena

Array = np.ndarray[Any, Any]
_MOVES = 4  # NumPy gathers and scatters the rows as well, which takes several times as long as the rule itself
TileUpdate = Callable[[Array, Array, list[Array]], Array]  # of weights, gradients and slots: the weights afterwards


class LazyRule:
    """An optimizer as it updates the rows of one table.

    Args:
        key: the name of the table, for the text of an error.
        width: the elements of a row.

    Raises:
        NotAllowed: the optimizer cannot update single rows.

    Attributes:
        is_ours: the arithmetic is that of a built-in optimizer, none of the program's.
        slot_widths: how many numbers it keeps of a row, by the name of the slot.
    """

    def __init__(self, optimizer: Optimizer, key: str, width: int, dtype: np.dtype[Any]) -> None:
        self._optimizer = optimizer
        self._width = width
        self._dtype = dtype
        self._kernel: Any = kernel_of(optimizer)  # of those that are refused below, one of whole slices
        self.is_ours = getattr(optimizer, "kernel", None) is None
        if text := row_error(optimizer, key):
            raise NotAllowed(text, key=key)
        self._goes_by_row = type(optimizer) is RowWiseAdagrad
        self.slot_widths: Mapping[str, int] = dict.fromkeys(self._kernel.slot_names, 1 if self._goes_by_row else width)

    def apply(
        self,
        step: int,
        places: Places,
        merged: MergedRows,
        weights: RowArena,
        slots: list[RowArena],
        before: Array | None = None,
    ) -> None:
        """Make update ``step``, counted from 1. If a custom kernel raises, nothing was changed.

        Args:
            places: of each of the rows in the arenas; each is named once.
            before: receives the weights of the rows as they were, shape (rows, width); is as it was if a kernel raises.
        """
        if not merged.num_rows or self._made_in_place(step, places, merged, weights, slots, before):
            return
        rows = min(max(1, TILE // self._width), merged.num_rows) if self.is_ours else merged.num_rows
        update = self._tile_update(step)
        buffers = [np.empty((rows, self._width), self._dtype) for _ in range(2)]
        kept = [np.empty((rows, width), self._dtype) for width in self.slot_widths.values()]
        for first in range(0, merged.num_rows, rows):
            part = slice(first, min(first + rows, merged.num_rows))
            at, count = places[part], part.stop - part.start
            weight = weights.take(at, buffers[0][:count])
            gradient = merged.take(part, buffers[1][:count])
            taken = [slot.take(at, buffer[:count]) for slot, buffer in zip(slots, kept, strict=True)]
            after = self._after(update, weight, gradient, taken)
            if before is not None:
                weights.take(at, before[part])
            weights.put(at, after)
            for slot, buffer in zip(slots, taken, strict=True):
                slot.put(at, buffer)

    def _made_in_place(
        self,
        step: int,
        places: Places,
        merged: MergedRows,
        weights: RowArena,
        slots: list[RowArena],
        before: Array | None,
    ) -> bool:
        """Update the rows in place with an equal compiled loop. Return False if none is ready."""
        name = loop_name(self._kernel)
        if name not in ROW_LOOPS or self._goes_by_row or not merged.are_contiguous:
            return False
        function = loop_for(name + ROWS, self._dtype, self._dtype).ready(_MOVES * merged.num_rows * self._width)
        if function is None:
            return False
        numbers, decay = self._numbers(step)
        numbers[:2], numbers[2] = merged.factors, merged.divisor
        kept = np.empty((0, self._width), self._dtype) if before is None else before
        arenas = [arena.where_they_lie() for arena in (weights, *slots)]

        def update(part: slice) -> None:
            given = [places[part], merged.left[part], merged.right[part], merged.first, merged.second]
            arguments: list[Any] = [*given, kept[part], *arenas, numbers, merged.divisor != 1, decay]
            quietly(function, *arguments)

        in_halves(update, merged.num_rows, merged.num_rows * self._width)
        return True

    def _numbers(self, step: int) -> tuple[Array, bool]:
        """Return the numbers of the update for compiled loops, and whether the gradient includes the decay."""
        rescale, clip, wd = shared_scalars(self._optimizer)
        own = self._kernel.scalars(step)
        return np.array((1.0, 1.0, 1.0, rescale, -clip, clip, wd, *own), self._dtype), wd != 0.0

    def _after(self, update: TileUpdate, weight: Array, gradient: Array, slots: list[Array]) -> Array:
        if self.is_ours:
            return quietly(update, weight, gradient, slots)
        with np.errstate(all="ignore"):
            return update(weight, gradient, slots)

    def _tile_update(self, step: int) -> TileUpdate:
        numbers = (*shared_scalars(self._optimizer), *self._kernel.scalars(step))
        if self._goes_by_row:
            return self._row_wise(numbers)
        name = loop_name(self._kernel)
        loop = None if name is None else loop_for(name, self._dtype, self._dtype)
        compiled = None if loop is None else self._compiled(*self._numbers(step))
        by_numpy = self._by_numpy(numbers)

        def update(weight: Array, gradient: Array, slots: list[Array]) -> Array:
            function = None if loop is None else loop.ready(weight.size)
            if function is None or compiled is None:
                return by_numpy(weight, gradient, slots)
            return compiled(function, weight, gradient, slots)

        return update

    def _compiled(self, numbers: Array, decay: bool) -> Callable[..., Array]:
        def update(function: Any, weight: Array, gradient: Array, slots: list[Array]) -> Array:
            flat = gradient.reshape(-1)
            after = np.empty_like(weight)
            kept = [slot.reshape(-1) for slot in slots]
            out = after.reshape(-1)
            function(flat, flat, False, weight.reshape(-1), out, *kept, numbers, False, decay, None)
            return after

        return update

    def _by_numpy(self, numbers: tuple[float, ...]) -> TileUpdate:
        shared = Shared.of(numbers[:3], self._dtype)
        own = tuple(np.asarray(number, self._dtype) for number in numbers[3:])

        def update(weight: Array, gradient: Array, slots: list[Array]) -> Array:
            flat = weight.reshape(-1)
            scratch = Scratch.of_thread(self._dtype, flat.size)
            prepared = prepare_gradient(gradient.reshape(-1), flat, shared, scratch)
            kept = [slot.reshape(-1) for slot in slots]
            self._kernel.update_tile(flat, prepared, flat, kept, own, scratch)
            return weight

        return update

    def _row_wise(self, numbers: tuple[float, ...]) -> TileUpdate:
        """``s = s + mean(g²)`` with one ``s`` for a row; ``w − η' · (g / (√s + ε))``."""
        shared = Shared.of(numbers[:3], self._dtype)
        rate, epsilon = (np.asarray(number, self._dtype) for number in numbers[3:])
        count = np.asarray(self._width, self._dtype)

        def update(weight: Array, gradient: Array, slots: list[Array]) -> Array:
            scratch = Scratch.of_thread(self._dtype, weight.size)
            flat = prepare_gradient(gradient.reshape(-1), weight.reshape(-1), shared, scratch)
            prepared, total = flat.reshape(weight.shape), slots[0]
            total += row_sums(prepared * prepared) / count
            change = prepared / (np.sqrt(total) + epsilon)
            change *= rate
            weight -= change
            return weight

        return update


def row_sums(rows: Array) -> Array:
    """Return the sum of each row, shape (rows, 1), by adding the second half of the elements to the first, repeatedly.

    The order does not depend on NumPy's build. Overwrites the rows.
    """
    left = rows.shape[1]
    while left > 1:
        half = left // 2
        rows[:, :half] += rows[:, left - half : left]
        left -= half
    return rows[:, :1]
