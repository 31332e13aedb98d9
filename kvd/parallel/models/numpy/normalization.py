"""Batch normalization."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvd.errors import ConfigError
from kvd.parallel.device import Array, HostArray, Shape
from kvd.parallel.models.numpy.layer import Frame, Layer


@dataclass(frozen=True)
class BatchNorm(Layer):
    """γ (x - mean) / √(var + epsilon) + β over every axis but the second: (batch, channels, …) → the same.

    Ioffe and Szegedy 2015 (arXiv:1502.03167), algorithms 1 and 2. In training, mean and (biased) variance are those
    of the rows *of this device*; otherwise the running ones. Training updates those:
    running ← momentum · running + (1 - momentum) · batch, where the variance of the batch is the unbiased one. So
    ``momentum=0.9`` is MXNet's spelling of torch's 0.1, and the numbers are torch's (MXNet's running variance is
    biased). Parameters ``gamma`` and ``beta``, states ``running_mean`` and ``running_var``, each (channels,).

    Raises:
        ConfigError: ``momentum`` is not in [0, 1], ``epsilon`` not above 0, or the input has no second axis.
        ValueError: in training, a single value per channel: it has no variance, and all gradients would be 0.
    """

    momentum: float = 0.9
    epsilon: float = 1e-5

    kind: ClassVar[str] = "batchnorm"
    keeps_output: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.momentum <= 1.0:
            raise ConfigError(f"batchnorm: momentum must be in [0, 1], not {self.momentum!r}", setting="momentum")
        if not self.epsilon > 0.0:
            raise ConfigError(f"batchnorm: epsilon must be above 0, not {self.epsilon!r}", setting="epsilon")

    def output_shape(self, shape: Shape) -> Shape:
        if len(shape) < 2:
            raise ConfigError(f"{self.name or self.kind} takes (batch, channels, …), but its input has shape {shape}")
        return shape

    def parameter_shapes(self, shape: Shape) -> dict[str, Shape]:
        return {"gamma": (shape[1],), "beta": (shape[1],)}

    def aux_shapes(self, shape: Shape) -> dict[str, Shape]:
        return {"running_mean": (shape[1],), "running_var": (shape[1],)}

    def initial(self, name: str, shape: Shape, generator: np.random.Generator) -> HostArray:
        return (np.ones if name in ("gamma", "running_var") else np.zeros)(shape, np.float32)

    def forward(self, frame: Frame, x: Array) -> Array:
        xp, columns, params = frame.xp, _as_column(x.shape), frame.params
        mean = self._batch_mean(frame, x) if frame.is_train else frame.aux["running_mean"]
        normalized = xp.subtract(x, mean.reshape(columns), out=frame.kept_like("normalized", x))
        if frame.is_train:
            var = xp.mean(self._product(frame, normalized, normalized), axis=_other_axes(x.shape))
            self._move(frame, mean, var, _values_per_channel(x.shape))
        else:
            var = frame.aux["running_var"]
        scale = 1.0 / xp.sqrt(var + self.epsilon)
        normalized *= scale.reshape(columns)
        frame.saved.update(normalized=normalized, scale=scale)
        y = xp.multiply(normalized, params["gamma"].reshape(columns), out=frame.kept_like("y", x))
        y += params["beta"].reshape(columns)
        return y

    def backward(self, frame: Frame, grad: Array) -> Array | None:
        """With m values per channel: ∂x = γ · scale · (∂y - Σ∂y / m - x̂ · Σ(∂y · x̂) / m); see the paper, section 3."""
        xp, columns, axes = frame.xp, _as_column(grad.shape), _other_axes(grad.shape)
        normalized, scale = frame.saved.pop("normalized"), frame.saved.pop("scale")
        grad_gamma = xp.sum(self._product(frame, grad, normalized), axis=axes)
        grad_beta = xp.sum(grad, axis=axes)
        frame.store_gradient("gamma", grad_gamma)
        frame.store_gradient("beta", grad_beta)
        if not frame.needs_input_gradient:
            return None
        count = _values_per_channel(grad.shape)
        into = frame.workspace.gradient_like(normalized, apart_from=grad)
        xp.subtract(grad, (grad_beta / count).reshape(columns), out=into)
        into -= self._product(frame, normalized, (grad_gamma / count).reshape(columns))
        into *= (frame.params["gamma"] * scale).reshape(columns)
        return into

    def _batch_mean(self, frame: Frame, x: Array) -> Array:
        if _values_per_channel(x.shape) < 2:
            raise ValueError(
                f"{frame.name}: one value per channel on {frame.device} has no variance: "
                "use a larger batch or fewer devices"
            )
        return frame.xp.mean(x, axis=_other_axes(x.shape))

    def _move(self, frame: Frame, mean: Array, var: Array, count: int) -> None:
        """Move the running statistics towards those of the batch."""
        for state, value in (("running_mean", mean), ("running_var", var * (count / (count - 1)))):
            running = frame.aux[state]
            running *= self.momentum
            running += value * (1.0 - self.momentum)

    def _product(self, frame: Frame, first: Array, second: Array) -> Array:
        """``first · second``, until the next call."""
        return frame.xp.multiply(first, second, out=frame.workspace.array_like("product", first))


def _other_axes(shape: Shape) -> tuple[int, ...]:
    """Every axis but the channels'."""
    return (0, *range(2, len(shape)))


def _as_column(shape: Shape) -> Shape:
    """The shape in which (channels,) broadcasts against ``shape``."""
    return (1, -1, *(1 for _ in shape[2:]))


def _values_per_channel(shape: Shape) -> int:
    return shape[0] * math.prod(shape[2:])
