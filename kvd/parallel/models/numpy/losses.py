"""Losses: the last layer of a model that is trained, from which backward starts.

The output of a loss is a prediction; its backward gives the gradient of the *mean* loss. The mean is taken over the
``normalization`` of `Model.bind`, the number of samples of the whole batch. So the gradients of the devices that share
the batch are summed, not averaged, and parts of unequal size count by their size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from kvd.errors import ConfigError, ShapeMismatch
from kvd.parallel.device import Array, Shape
from kvd.parallel.models.numpy.ids import whole_numbers
from kvd.parallel.models.numpy.layer import Frame


@dataclass(frozen=True)
class Loss:
    """The description of a loss.

    Attributes:
        name: of the output: ``"<name>_output"``; None: the kind and 0.
    """

    name: str | None = None

    kind: ClassVar[str] = "loss"

    def check(self, shape: Shape) -> None:
        """Raise ConfigError if predictions cannot have this shape (batch first)."""

    def label_shape(self, shape: Shape) -> Shape:
        """The shape that labels have for predictions of ``shape``."""
        raise NotImplementedError

    def forward(self, frame: Frame, x: Array) -> Array:
        """The output for the last layer's output ``x``."""
        raise NotImplementedError

    def backward(self, frame: Frame, output: Array, label: Array, normalization: int) -> Array:
        """The gradient of the mean loss with respect to the last layer's output."""
        raise NotImplementedError

    def fitted_label(self, frame: Frame, label: Array, shape: Shape) -> Array:
        """``label`` in the shape for predictions of ``shape``; axes of length 1 may be missing or extra.

        Raises:
            ShapeMismatch: it differs in other axes.
        """
        wanted = self.label_shape(shape)
        if label.shape == wanted:
            return label
        if _without_ones(label.shape) != _without_ones(wanted):
            raise ShapeMismatch(f"{frame.name}: labels have shape {label.shape}, not {wanted}")
        return label.reshape(wanted)


@dataclass(frozen=True)
class SoftmaxCrossEntropy(Loss):
    """Softmax over the last axis and the mean of -log p[label].

    Input: (batch, …, classes). Labels: (batch, …), whole numbers in [0, classes) in any dtype. Output: the
    probabilities. Gradient: (p - onehot(label)) / rows, rows being the labels of the whole batch: the normalization
    times the positions per sample. That is torch's ``cross_entropy`` with ``reduction="mean"`` (which has the classes
    on axis 1); MXNet's SoftmaxOutput sums instead unless told otherwise.

    Raises:
        ConfigError: the input has no axis of classes.
        ValueError: in backward, a label that is not a whole number in [0, classes).
    """

    kind: ClassVar[str] = "softmaxcrossentropy"

    def check(self, shape: Shape) -> None:
        if len(shape) < 2:
            raise ConfigError(f"{self.kind} takes (batch, …, classes), but its input has shape {shape}")

    def label_shape(self, shape: Shape) -> Shape:
        return shape[:-1]

    def forward(self, frame: Frame, x: Array) -> Array:
        xp = frame.xp
        p = x - xp.max(x, axis=-1, keepdims=True)  # the largest exponent is 0: nothing overflows
        xp.exp(p, out=p)
        p /= xp.sum(p, axis=-1, keepdims=True)
        return p

    def backward(self, frame: Frame, output: Array, label: Array, normalization: int) -> Array:
        xp, classes = frame.xp, output.shape[-1]
        fitted = self.fitted_label(frame, label, output.shape)
        ids = whole_numbers(xp, fitted, classes, f"{frame.name}: label").reshape(-1)
        grad = frame.workspace.gradient((len(ids), classes), apart_from=output)
        grad[...] = output.reshape(-1, classes)
        grad[xp.arange(len(ids)), ids] -= 1
        grad *= 1.0 / (normalization * math.prod(output.shape[1:-1]))
        return grad.reshape(output.shape)


@dataclass(frozen=True)
class MeanSquaredError(Loss):
    """The mean of (prediction - label)² over all elements of the whole batch, as torch's ``mse_loss``.

    Input and labels: (batch, …). Output: the predictions. Gradient: 2 (prediction - label) / elements, elements being
    the normalization times the elements per sample.
    """

    kind: ClassVar[str] = "meansquarederror"

    def label_shape(self, shape: Shape) -> Shape:
        return shape

    def forward(self, frame: Frame, x: Array) -> Array:
        return x

    def backward(self, frame: Frame, output: Array, label: Array, normalization: int) -> Array:
        grad = frame.workspace.gradient(output.shape, apart_from=output)
        fitted = self.fitted_label(frame, label, output.shape).astype(frame.dtype, copy=False)
        frame.xp.subtract(output, fitted, out=grad)
        grad *= 2.0 / (normalization * math.prod(output.shape[1:]))
        return grad


def _without_ones(shape: Shape) -> Shape:
    return tuple(length for length in shape if length != 1)
