"""Convolution over images, as matrix products with their patches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvd.errors import ConfigError
from kvd.parallel.device import Array, HostArray, Shape
from kvd.parallel.models.numpy.layer import Frame, Layer, require_axes, require_positive
from kvd.parallel.models.numpy.layers import Initializer, initial_weight, require_initializer
from kvd.parallel.models.numpy.patches import COLUMNS_NBYTES, Patches


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
    keeps_output: ClassVar[bool] = False

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
        images = frame.saved["images"] = self._padded(frame, _batch_last(x))
        batch, channels, height, width = self.output_shape(x.shape)
        y = frame.kept("y", (channels, height, width, batch))
        weight = frame.params["weight"].reshape(channels, -1)
        patches = self._patches(frame, images, y)
        for rows in patches.tiles():
            part = _matrix(y, rows)
            frame.xp.matmul(weight, patches.columns(images, rows), out=part)
            if self.use_bias:
                part += frame.params["bias"][:, None]
        return _batch_first(y)

    def backward(self, frame: Frame, grad: Array) -> Array | None:
        xp, weight, images = frame.xp, frame.params["weight"], frame.saved.pop("images")
        pixels = _batch_last(grad)
        if not pixels.flags.c_contiguous:
            pixels = frame.workspace.array("pixels", pixels.shape)
            pixels[...] = _batch_last(grad)
        patches = self._patches(frame, images, pixels)

        def weight_gradient(out: Array | None) -> Array:
            total = xp.empty_like(weight) if out is None else out
            self._put_weight_gradient(frame, patches, images, pixels, total.reshape(self.channels, -1))
            return total

        frame.compute_gradient("weight", weight_gradient)
        if self.use_bias:
            flat = pixels.reshape(self.channels, -1)
            frame.compute_gradient("bias", lambda out: xp.sum(flat, axis=1, out=out))
        if not frame.needs_input_gradient:
            return None
        into = frame.workspace.gradient(images.shape, apart_from=pixels)
        into[...] = 0
        for rows in patches.tiles():
            columns = patches.memory(rows)
            xp.matmul(weight.reshape(self.channels, -1).T, _matrix(pixels, rows), out=columns)
            patches.add(columns, into, rows)
        return _batch_first(_inside(into, self.padding))

    def _put_weight_gradient(self, frame: Frame, patches: Patches, images: Array, pixels: Array, total: Array) -> None:
        """Fill (channels, in·kernel·kernel), which is a view of a gradient array: those are contiguous.

        OpenBLAS is faster where the result has more rows than columns.
        """
        is_wide = total.shape[1] > total.shape[0]
        part = frame.workspace.array("part of a gradient", total.shape[::-1] if is_wide else total.shape)
        for rows in patches.tiles():
            columns, grads = patches.columns(images, rows), _matrix(pixels, rows)
            if is_wide:
                frame.xp.matmul(columns, grads.T, out=part)
            else:
                frame.xp.matmul(grads, columns.T, out=part)
            gradient = part.T if is_wide else part
            if rows.start == 0:
                total[...] = gradient
            else:
                total += gradient

    def _padded(self, frame: Frame, images: Array) -> Array:
        """The images with zeros around them, contiguous."""
        p = self.padding
        if p == 0 and images.flags.c_contiguous:
            return images
        channels, height, width, batch = images.shape
        padded = frame.kept("padded", (channels, height + 2 * p, width + 2 * p, batch))
        if p:
            padded[:, :p] = padded[:, -p:] = 0
            padded[:, p:-p, :p] = padded[:, p:-p, -p:] = 0
        _inside(padded, p)[...] = images
        return padded

    def _patches(self, frame: Frame, images: Array, pixels: Array) -> Patches:
        limit_nbytes = COLUMNS_NBYTES[frame.device.kind]
        sizes = images.shape, pixels.shape[1:3], limit_nbytes
        return Patches(frame.xp, frame.workspace, self.kernel, self.stride, *sizes)


def _batch_last(array: Array) -> Array:
    """A view of images (batch, channels, height, width) as (channels, height, width, batch)."""
    return array.transpose(1, 2, 3, 0)


def _batch_first(array: Array) -> Array:
    """The inverse of `_batch_last`."""
    return array.transpose(3, 0, 1, 2)


def _inside(padded: Array, padding: int) -> Array:
    """The view of images (channels, height, width, batch) without their padding."""
    height, width = padded.shape[1:3]
    return padded[:, padding : height - padding, padding : width - padding]


def _matrix(images: Array, rows: slice) -> Array:
    """The view (channels, rows·width·batch) of some rows of images (channels, height, width, batch)."""
    return images[:, rows].reshape(len(images), -1)
