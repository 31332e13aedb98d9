"""Convolution over images, as one matrix product over patches (im2col)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kvd.errors import ConfigError
from kvd.parallel.device import Array, HostArray, Shape
from kvd.parallel.models.numpy.layer import Frame, Layer, require_axes, require_positive
from kvd.parallel.models.numpy.layers import Initializer, initial_weight, require_initializer


@dataclass(frozen=True)
class Conv2D(Layer):
    """Cross-correlation, as torch's Conv2d: (batch, in, height, width) → (batch, channels, out height, out width).

    A side of length n becomes ⌊(n + 2·padding - kernel) / stride⌋ + 1. Parameters: ``weight`` (channels, in, kernel,
    kernel) and ``bias`` (channels,) unless ``use_bias`` is False. ``kernel``, ``stride`` and ``padding`` apply to both
    directions; the padding is zeros. The ``initializer`` is ``"he"`` or ``"glorot"``.

    Raises:
        ConfigError: a size that is not above 0, a negative padding, an input that is not a batch of images, or images
            smaller than the kernel.
    """

    channels: int
    kernel: int
    stride: int = 1
    padding: int = 0
    use_bias: bool = True
    initializer: Initializer = "he"

    kind: ClassVar[str] = "conv2d"

    def __post_init__(self) -> None:
        require_positive(self, channels=self.channels, kernel=self.kernel, stride=self.stride)
        if self.padding < 0:
            raise ConfigError(f"conv2d: padding must not be negative: {self.padding}", setting="padding")
        require_initializer(self, self.initializer)

    def output_shape(self, shape: Shape) -> Shape:
        require_axes(self, shape, 4, "(batch, channels, height, width)")
        sides = tuple((side + 2 * self.padding - self.kernel) // self.stride + 1 for side in shape[2:])
        if min(sides) < 1:
            raise ConfigError(
                f"{self.name or self.kind}: images of {shape[2]} × {shape[3]} with padding {self.padding} "
                f"are smaller than the kernel of {self.kernel} × {self.kernel}"
            )
        return (shape[0], self.channels, *sides)

    def parameter_shapes(self, shape: Shape) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {"weight": (self.channels, shape[1], self.kernel, self.kernel)}
        return shapes | {"bias": (self.channels,)} if self.use_bias else shapes

    def initial(self, name: str, shape: Shape, generator: np.random.Generator) -> HostArray:
        if name == "bias":
            return np.zeros(shape, np.float32)
        area = self.kernel * self.kernel
        return initial_weight(self.initializer, shape, shape[1] * area, shape[0] * area, generator)

    def forward(self, frame: Frame, x: Array) -> Array:
        xp, weight = frame.xp, frame.params["weight"]
        batch, _, height, width = self.output_shape(x.shape)
        columns = _patches(xp, self._padded(xp, x), self.kernel, self.stride, height, width)
        frame.saved["columns"], frame.saved["shape"] = columns, x.shape
        y = xp.matmul(columns, weight.reshape(self.channels, -1).T)
        if self.use_bias:
            y += frame.params["bias"]
        # (batch·height·width, channels) → channels first, contiguous for the layer that comes next
        return xp.ascontiguousarray(y.reshape(batch, height, width, self.channels).transpose(0, 3, 1, 2))

    def backward(self, frame: Frame, grad: Array) -> Array | None:
        xp, weight = frame.xp, frame.params["weight"].reshape(self.channels, -1)
        columns, shape = frame.saved.pop("columns"), frame.saved.pop("shape")
        rows = grad.transpose(0, 2, 3, 1).reshape(-1, self.channels)

        def weight_gradient(out: Array | None) -> Array:
            flat = None if out is None else out.reshape(weight.shape)  # a view: gradient arrays are contiguous
            return xp.matmul(rows.T, columns, out=flat).reshape(frame.params["weight"].shape)

        frame.compute_gradient("weight", weight_gradient)
        if self.use_bias:
            frame.compute_gradient("bias", lambda out: xp.sum(rows, axis=0, out=out))
        if not frame.needs_input_gradient:
            return None
        return self._add_patches(xp, xp.matmul(rows, weight), shape, grad.shape[2:])

    def _padded(self, xp: Any, x: Array) -> Array:
        p = self.padding
        if p == 0:
            return x
        batch, channels, height, width = x.shape
        padded = xp.zeros((batch, channels, height + 2 * p, width + 2 * p), dtype=x.dtype)
        padded[:, :, p:-p, p:-p] = x
        return padded

    def _add_patches(self, xp: Any, columns: Array, shape: Shape, sides: Shape) -> Array:
        """The transpose of `_patches`: each element of a patch is added to the pixel that it was read from.

        Pixels of one offset within the kernel never overlap, so the additions happen in the order of the offsets.
        """
        batch, channels, height, width = shape
        p, k, s = self.padding, self.kernel, self.stride
        patches = columns.reshape(batch, *sides, channels, k, k)
        padded = xp.zeros((batch, channels, height + 2 * p, width + 2 * p), dtype=columns.dtype)
        for i in range(k):
            for j in range(k):
                target = padded[:, :, i : i + s * sides[0] : s, j : j + s * sides[1] : s]
                target += patches[:, :, :, :, i, j].transpose(0, 3, 1, 2)
        return padded[:, :, p : p + height, p : p + width]


def _patches(xp: Any, x: Array, kernel: int, stride: int, height: int, width: int) -> Array:
    """(batch, channels, …, …) → (batch·height·width, channels·kernel·kernel): one row per place of the kernel."""
    batch, channels = x.shape[:2]
    along_batch, along_channel, along_row, along_column = x.strides
    windows = xp.lib.stride_tricks.as_strided(
        x,
        shape=(batch, height, width, channels, kernel, kernel),
        strides=(along_batch, along_row * stride, along_column * stride, along_channel, along_row, along_column),
    )
    return windows.reshape(batch * height * width, channels * kernel * kernel)
