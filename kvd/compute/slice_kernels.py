"""The arithmetic of optimizers that need a whole slice at once: LARS and LAMB for its norms, SGLD for its place."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvd.compute.kernels import Array, average, average_squares
from kvd.compute.noise import Noise
from kvd.compute.norms import norm
from kvd.compute.scratch import Scratch
from kvd.optimizer import LAMB, LARS, SGLD

_TILE = 2**14
"""Elements at a time, so that they stay in the cache; the bits do not depend on it."""


class Place(NamedTuple):
    """Identity of an update: the slice and the number of the update, from 1."""

    key: str
    slice_index: int
    step: int


class SliceKernel(Protocol):
    """Kernel for all n elements of a slice, otherwise like :class:`kvd.compute.kernels.Kernel`."""

    @property
    def slot_names(self) -> Sequence[str]:
        """The arrays that the optimizer keeps beside the weight; they start as zeros."""
        ...

    def scalars(self, step: int) -> tuple[float, ...]:
        """Return the numbers of update ``step``, counted from 1, that are the same for all elements; always as many."""
        ...

    def update_slice(
        self,
        weight: Array,
        gradient: Array,
        out: Array,
        slots: Sequence[Array],
        scalars: Sequence[float],
        place: Place,
    ) -> None:
        """Update one slice. The arguments are those of ``Kernel.update_tile``, for the whole slice, but:

        Args:
            gradient: free to be written to.
            scalars: what ``scalars(step)`` returned.
            place: of the slice.
        """
        ...


@dataclass(frozen=True, slots=True)
class LARSKernel:
    """``w − η·b`` with ``b = momentum·b + λ·(g + wd·w)``."""

    optimizer: LARS

    @property
    def slot_names(self) -> Sequence[str]:
        """``momentum``, if there is any."""
        return ("momentum",) if self.optimizer.momentum else ()

    def scalars(self, step: int) -> tuple[float, ...]:
        """Return the learning rate, the momentum, wd, eta and ε."""
        rule = self.optimizer
        return rule.rate(step), rule.momentum, rule.wd, rule.eta, rule.epsilon

    def update_slice(
        self,
        weight: Array,
        gradient: Array,
        out: Array,
        slots: Sequence[Array],
        scalars: Sequence[float],
        place: Place,
    ) -> None:
        """Update one slice; see :class:`SliceKernel`."""
        eta, epsilon = scalars[3:]
        of_weight, of_gradient = norm(weight), norm(gradient)
        trust = _quotient(eta * of_weight, of_gradient + scalars[2] * of_weight + epsilon, of_gradient)
        rate, momentum, wd, factor = _cast((*scalars[:3], trust), weight.dtype)
        for part, scratch in _tiles(weight):
            w, direction, change = weight[part], gradient[part], scratch.first
            if wd != 0:
                np.multiply(w, wd, out=change)
                np.add(direction, change, out=direction)
            np.multiply(direction, factor, out=direction)
            if slots:
                buffer = slots[0][part]
                np.multiply(buffer, momentum, out=buffer)
                direction = np.add(buffer, direction, out=buffer)
            np.multiply(direction, rate, out=change)
            np.subtract(w, change, out=out[part])


@dataclass(frozen=True, slots=True)
class LAMBKernel:
    """``w − η · φ(‖w‖) / ‖r‖ · r`` with ``r = m̂ / (√v̂ + ε) + wd·w``, in the order of Adam's kernel."""

    optimizer: LAMB

    @property
    def slot_names(self) -> Sequence[str]:
        """The first and the second moment."""
        return ("mean", "variance")

    def scalars(self, step: int) -> tuple[float, ...]:
        """β1, 1 − β1, β2, 1 − β2, √(1 − β2ᵗ) / (1 − β1ᵗ), ε·√(1 − β2ᵗ), wd, the learning rate, and both bounds."""
        rule = self.optimizer
        root, corrected = 1.0, 1.0
        if rule.bias_correction:
            root, corrected = math.sqrt(1.0 - rule.beta2**step), 1.0 - rule.beta1**step
        moments = rule.beta1, 1.0 - rule.beta1, rule.beta2, 1.0 - rule.beta2, root / corrected, rule.epsilon * root
        low = 0.0 if rule.lower_bound is None else rule.lower_bound
        high = math.inf if rule.upper_bound is None else rule.upper_bound
        return *moments, rule.wd, rule.rate(step), low, high

    def update_slice(
        self,
        weight: Array,
        gradient: Array,
        out: Array,
        slots: Sequence[Array],
        scalars: Sequence[float],
        place: Place,
    ) -> None:
        """Update one slice; see :class:`SliceKernel`."""
        beta1, rest1, beta2, rest2, scale, epsilon, wd = _cast(scalars[:7], weight.dtype)
        for part, scratch in _tiles(weight):
            g, mean, variance, change = gradient[part], slots[0][part], slots[1][part], scratch.first
            average(mean, g, beta1, rest1, change)
            average_squares(variance, g, beta2, rest2, change)
            np.sqrt(variance, out=change)
            np.add(change, epsilon, out=change)
            np.divide(mean, change, out=g)
            np.multiply(g, scale, out=g)
            if wd != 0:
                np.multiply(weight[part], wd, out=change)
                np.add(g, change, out=g)
        rate, low, high = scalars[7:]
        of_weight, of_direction = min(max(norm(weight), low), high), norm(gradient)
        (step_size,) = _cast((rate * _quotient(of_weight, of_direction, of_direction),), weight.dtype)
        for part, scratch in _tiles(weight):
            np.multiply(gradient[part], step_size, out=scratch.first)
            np.subtract(weight[part], scratch.first, out=out[part])


@dataclass(frozen=True, slots=True)
class SGLDKernel:
    """``w − η/2·g + √η·n``, where the noise is calculated in float64 and rounded once."""

    optimizer: SGLD

    @property
    def slot_names(self) -> Sequence[str]:
        """No slots."""
        return ()

    def scalars(self, step: int) -> tuple[float, ...]:
        """η / 2 and √η."""
        rate = self.optimizer.rate(step)
        return rate / 2.0, math.sqrt(rate)

    def update_slice(
        self,
        weight: Array,
        gradient: Array,
        out: Array,
        slots: Sequence[Array],
        scalars: Sequence[float],
        place: Place,
    ) -> None:
        """Update one slice; see :class:`SliceKernel`."""
        noise = Noise(self.optimizer.seed, *place)
        (half,) = _cast(scalars[:1], weight.dtype)
        for part, scratch in _tiles(weight):
            change, scattered = scratch.first, scratch.second
            drawn = noise.normal(part.start, part.stop - part.start)
            np.multiply(drawn, scalars[1], out=drawn)
            np.copyto(scattered, drawn, casting="same_kind")
            np.multiply(gradient[part], half, out=change)
            np.subtract(weight[part], change, out=change)
            np.add(change, scattered, out=out[part])


def _quotient(above: float, below: float, deciding: float) -> float:
    """``above / below``; 1 where the quotient says nothing, and 0 where a number is infinite or NaN."""
    if not (math.isfinite(above) and math.isfinite(below)):
        return 0.0
    return above / below if above > 0 and deciding > 0 else 1.0


def _tiles(weight: Array) -> Iterator[tuple[slice, Scratch]]:
    whole = Scratch.of_thread(weight.dtype, min(_TILE, weight.size))
    for start in range(0, weight.size, _TILE):
        stop = min(start + _TILE, weight.size)
        yield slice(start, stop), whole.cut(stop - start)


def _cast(numbers: Sequence[float], dtype: np.dtype[Any]) -> list[Array]:
    return [np.asarray(number, dtype) for number in numbers]
