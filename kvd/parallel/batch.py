"""The input of a group: the description of an array, and one batch of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from kvd.errors import ConfigError
from kvd.parallel.device import Shape

#: NumPy knows the name once ml_dtypes is imported.
BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class DataDesc:
    """The description of one input, label or output array.

    Two descriptions are equal when all four fields are (MXNet's compares name and shape only, and so misses changes
    of dtype and layout).

    Attributes:
        name: what the model calls the array.
        shape: of the whole batch, the batch axis included.
        dtype: its NumPy name.
        layout: one letter per axis; the batch axis is where the ``N`` stands. As in MXNet the default is ``"NCHW"``
            whatever the number of axes, and only the position of the ``N`` matters. ``None`` means axis 0. A layout
            without ``N`` means that the array has no batch axis: every device gets all of it.

    Raises:
        ConfigError: a negative length, an unknown dtype, or a batch axis outside of the shape.
    """

    name: str
    shape: Shape
    dtype: str = "float32"
    layout: str | None = "NCHW"

    def __post_init__(self) -> None:
        shape = tuple(int(length) for length in self.shape)
        if any(length < 0 for length in shape):
            raise ConfigError(f"{self.name}: shape {shape} has a negative length", setting=self.name)
        try:
            dtype = np.dtype(self.dtype).name
        except TypeError as error:
            raise ConfigError(f"{self.name}: {self.dtype!r} is not a dtype", setting=self.name) from error
        if self.batch_axis >= len(shape):
            raise ConfigError(
                f"{self.name}: layout {self.layout!r} puts the batch on axis {self.batch_axis}, "
                f"but shape {shape} has {len(shape)} axes",
                setting=self.name,
            )
        object.__setattr__(self, "shape", shape)  # frozen: lists and dtype objects become their canonical spelling
        object.__setattr__(self, "dtype", dtype)

    @property
    def batch_axis(self) -> int:
        """``layout.find("N")``: the batch axis, -1 if there is none; 0 if the layout is None."""
        return 0 if self.layout is None else self.layout.find("N")

    @property
    def batch_size(self) -> int | None:
        """The length of the batch axis; None if there is none."""
        return None if self.batch_axis < 0 else self.shape[self.batch_axis]

    @property
    def batch_first_shape(self) -> Shape:
        """The shape with the batch axis moved to the front; the shape itself if there is none."""
        axis = self.batch_axis
        return self.shape if axis < 0 else (self.shape[axis], *self.shape[:axis], *self.shape[axis + 1 :])

    def with_batch_size(self, batch_size: int) -> DataDesc:
        """The same description with another length of the batch axis; itself if there is none."""
        if self.batch_axis < 0:
            return self
        shape = list(self.shape)
        shape[self.batch_axis] = batch_size
        return replace(self, shape=tuple(shape))


@dataclass
class DataBatch:
    """One batch: the data arrays and, for training, the label arrays, each in the order of its descriptions.

    The arrays may be of any kind that NumPy reads without a copy, or CuPy arrays for CUDA devices.
    """

    data: Sequence[Any]
    label: Sequence[Any] | None = None
