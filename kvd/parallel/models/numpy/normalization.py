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
        xp, axes, columns = frame.xp, _other_axes(x.shape), _as_column(x.shape)
        if frame.is_train:
            mean, var = self._batch_statistics(frame, x)
        else:
            mean, var = frame.aux["running_mean"], frame.aux["running_var"]
        scale = 1.0 / xp.sqrt(var + self.epsilon)
        normalized = (x - mean.reshape(columns)) * scale.reshape(columns)
        frame.saved.update(normalized=normalized, scale=scale, axes=axes)
        return normalized * frame.params["gamma"].reshape(columns) + frame.params["beta"].reshape(columns)

    def backward(self, frame: Frame, grad: Array) -> Array | None:
        """With m values per channel: ∂x = γ · scale · (∂y - Σ∂y / m - x̂ · Σ(∂y · x̂) / m); see the paper, section 3."""
        xp, columns = frame.xp, _as_column(grad.shape)
        normalized, scale, axes = (frame.saved.pop(name) for name in ("normalized", "scale", "axes"))
        grad_gamma = xp.sum(grad * normalized, axis=axes)
        grad_beta = xp.sum(grad, axis=axes)
        frame.store_gradient("gamma", grad_gamma)
        frame.store_gradient("beta", grad_beta)
        if not frame.needs_input_gradient:
            return None
        count = _values_per_channel(grad.shape)
        centred = grad - (grad_beta / count).reshape(columns) - normalized * (grad_gamma / count).reshape(columns)
        return centred * (frame.params["gamma"] * scale).reshape(columns)

    def _batch_statistics(self, frame: Frame, x: Array) -> tuple[Array, Array]:
        """Mean and biased variance of the batch, which also move the running ones."""
        xp, axes, count = frame.xp, _other_axes(x.shape), _values_per_channel(x.shape)
        if count < 2:
            raise ValueError(
                f"{frame.name}: one value per channel on {frame.device} has no variance: "
                "use a larger batch or fewer devices"
            )
        mean = xp.mean(x, axis=axes)
        var = xp.mean(xp.square(x - mean.reshape(_as_column(x.shape))), axis=axes)
        for state, value in (("running_mean", mean), ("running_var", var * (count / (count - 1)))):
            running = frame.aux[state]
            running *= self.momentum
            running += value * (1.0 - self.momentum)
        return mean, var


def _other_axes(shape: Shape) -> tuple[int, ...]:
    """Every axis but the channels'."""
    return (0, *range(2, len(shape)))


def _as_column(shape: Shape) -> Shape:
    """The shape in which (channels,) broadcasts against ``shape``."""
    return (1, -1, *(1 for _ in shape[2:]))


def _values_per_channel(shape: Shape) -> int:
    return shape[0] * math.prod(shape[2:])
