"""The memory in which the layers of an executor compute, kept from step to step.

Memory that the operating system gives out afresh costs more than the arithmetic of an element-wise layer does: each of
its pages is cleared, and comes with an interrupt. So an executor has its memory as long as it lives. What a caller gets
to keep (outputs, gradients) is never in it.

Images are stored batch last, as (channels, height, width, batch): each shift by a pixel is then a copy of long runs,
whatever the stride, and the results of a convolution come out of the matrix product in this order. The layers see
(batch, channels, height, width) all the same, as views: `axes_in_memory` finds the order again.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvd.parallel.device import Array, Device, Shape


class Workspace:
    """Arrays by name, whose contents last until the next array of that name.

    Attributes:
        dtype: of the computation.

    Arguments:
        device: where they are.
    """

    def __init__(self, device: Device, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self._device = device
        self._memory: dict[str, Array] = {}
        self._zeros: Array | None = None

    def array(self, name: str, shape: Shape, dtype: Any = None) -> Array:
        """A contiguous array with arbitrary contents, of the dtype of the computation unless another is given."""
        wanted = self.dtype if dtype is None else np.dtype(dtype)
        size = math.prod(shape)
        nbytes = size * wanted.itemsize
        memory = self._memory.get(name)
        if memory is None or memory.nbytes < nbytes:
            memory = self._memory[name] = self._device.xp.empty(nbytes, dtype=np.uint8)
        return memory[:nbytes].view(wanted).reshape(shape)

    def array_like(self, name: str, model: Array, dtype: Any = None) -> Array:
        """As `array`, in the shape of ``model`` and with the order of its axes in memory."""
        axes = axes_in_memory(model)
        made = self.array(name, tuple(model.shape[axis] for axis in axes), dtype)
        return made.transpose(sorted(range(len(axes)), key=axes.__getitem__))

    def gradient(self, shape: Shape, apart_from: Array) -> Array:
        """As `array`: the memory for the gradient that a layer returns, which lasts until the next layer has taken it.

        Arguments:
            apart_from: the gradient that it is computed from.
        """
        return self.array(self._other_gradient(apart_from), shape)

    def gradient_like(self, model: Array, apart_from: Array) -> Array:
        """As `gradient`, in the shape of ``model`` and with the order of its axes in memory."""
        return self.array_like(self._other_gradient(apart_from), model)

    def zeros(self, size: int) -> Array:
        """(size,), to be read only."""
        if self._zeros is None or len(self._zeros) < size:
            self._zeros = self._device.xp.zeros(size, dtype=self.dtype)
        return self._zeros[:size]

    def holds(self, array: Array) -> bool:
        """Whether an array lies here, or reaches into it."""
        xp = self._device.xp
        return any(xp.may_share_memory(array, memory) for memory in self._memory.values())

    def _other_gradient(self, taken: Array) -> str:
        """Which of the two memories for gradients the array ``taken`` does not lie in."""
        first = self._memory.get("gradient 0")
        shares = first is not None and self._device.xp.may_share_memory(taken, first)
        return "gradient 1" if shares else "gradient 0"


def axes_in_memory(array: Array) -> tuple[int, ...]:
    """The axes of an array, that with the longest steps first."""
    return tuple(sorted(range(array.ndim), key=lambda axis: -array.strides[axis]))


def in_memory_order(array: Array) -> Array:
    """A view of ``array`` with its axes in the order of memory: C-contiguous if there are no gaps."""
    return array.transpose(axes_in_memory(array))
