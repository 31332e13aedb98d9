"""The arithmetic of Adamax, Nadam and FTML, as that of :mod:`kvd.compute.kernels`."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvd.compute.accumulated_kernels import inverse_rate
from kvd.compute.kernels import Array, average, average_squares
from kvd.compute.scratch import Scratch
from kvd.optimizer import FTML, Adamax, Nadam

_NOTHING = 2.0**-54
"""What is smaller changes no number of about 1 that it is added to or subtracted from."""


@dataclass(frozen=True, slots=True)
class AdamaxKernel:
    """``w − η / (1 − β1ᵗ) · m / u`` with ``u = max(β2·u, |g| + ε)``."""

    optimizer: Adamax

    @property
    def slot_names(self) -> Sequence[str]:
        """The first moment, and the greatest magnitude."""
        return ("mean", "norm")

    def scalars(self, step: int) -> tuple[float, ...]:
        """β1, 1 − β1, β2, ε and η / (1 − β1ᵗ)."""
        rule = self.optimizer
        step_size = rule.rate(step) / (1.0 - rule.beta1**step)
        return rule.beta1, 1.0 - rule.beta1, rule.beta2, rule.epsilon, step_size

    def update_tile(
        self,
        weight: Array,
        gradient: Array,
        out: Array,
        slots: Sequence[Array],
        scalars: Sequence[Array],
        scratch: Scratch,
    ) -> None:
        """Update one tile; see :class:`kvd.compute.kernels.Kernel`."""
        beta1, rest1, beta2, epsilon, step_size = scalars
        mean, norm = slots
        change = scratch.first
        average(mean, gradient, beta1, rest1, change)
        np.absolute(gradient, out=change)
        np.add(change, epsilon, out=change)
        np.multiply(norm, beta2, out=norm)
        np.maximum(norm, change, out=norm)
        np.divide(mean, norm, out=change)
        np.multiply(change, step_size, out=change)
        np.subtract(weight, change, out=out)


@dataclass(frozen=True, slots=True)
class NadamKernel:
    """``w − (a·g + b·m) / (√v + ε̂)``, where a and b say how far momentum looks ahead; ε̂ is that of Adam."""

    optimizer: Nadam

    @property
    def slot_names(self) -> Sequence[str]:
        """The first and the second moment."""
        return ("mean", "variance")

    def scalars(self, step: int) -> tuple[float, ...]:
        """β1, 1 − β1, β2, 1 − β2, a, b and ε̂ = ε·√(1 − β2ᵗ)."""
        rule = self.optimizer
        root = math.sqrt(1.0 - rule.beta2**step)
        step_size = rule.rate(step) * root
        product = _product_of_momenta(rule.beta1, rule.momentum_decay, step)
        now = _momentum(rule.beta1, rule.momentum_decay, step)
        following = _momentum(rule.beta1, rule.momentum_decay, step + 1)
        of_gradient = step_size * (1.0 - now) / (1.0 - product)
        of_mean = step_size * following / (1.0 - product * following)
        return rule.beta1, 1.0 - rule.beta1, rule.beta2, 1.0 - rule.beta2, of_gradient, of_mean, rule.epsilon * root

    def update_tile(
        self,
        weight: Array,
        gradient: Array,
        out: Array,
        slots: Sequence[Array],
        scalars: Sequence[Array],
        scratch: Scratch,
    ) -> None:
        """Update one tile; see :class:`kvd.compute.kernels.Kernel`."""
        beta1, rest1, beta2, rest2, of_gradient, of_mean, epsilon = scalars
        mean, variance = slots
        change, other = scratch.first, scratch.second
        average(mean, gradient, beta1, rest1, change)
        average_squares(variance, gradient, beta2, rest2, change)
        np.multiply(gradient, of_gradient, out=change)
        np.multiply(mean, of_mean, out=other)
        np.add(change, other, out=change)
        np.sqrt(variance, out=other)
        np.add(other, epsilon, out=other)
        np.divide(change, other, out=change)
        np.subtract(weight, change, out=out)


def _momentum(beta1: float, decay: float, step: int) -> float:
    return beta1 * (1.0 - 0.5 * math.pow(0.96, step * decay))


@functools.lru_cache(maxsize=256)  # the slices of a key, and of others, are at the same step
def _product_of_momenta(beta1: float, decay: float, step: int) -> float:
    """μ_1 ⋯ μ_t in at most some thousand multiplications, whatever the step.

    As long as the power counts, the factors are less than one by half of it, and the product soon is nothing; once it
    no longer counts, all factors are β1.
    """
    product = 1.0
    for each in range(1, step + 1):
        if math.pow(0.96, each * decay) < _NOTHING:
            return product * math.pow(beta1, step - each + 1)
        product *= _momentum(beta1, decay, each)
        if product < _NOTHING:
            return 0.0
    return product


@dataclass(frozen=True, slots=True)
class FTMLKernel:
    """``−z / d`` with ``z = β1·z + (1 − β1)·g − (d − β1·d') · w``, where d' is the ``d`` before."""

    optimizer: FTML

    @property
    def slot_names(self) -> Sequence[str]:
        """``v``, ``d`` and ``z``."""
        return ("variance", "denominator", "linear")

    def scalars(self, step: int) -> tuple[float, ...]:
        """β1, 1 − β1, β2, 1 − β2, (1 − β1ᵗ) / η / √(1 − β2ᵗ) and (1 − β1ᵗ) / η · ε, infinite at a rate of 0."""
        rule = self.optimizer
        inverse = (1.0 - rule.beta1**step) * inverse_rate(rule.rate(step))
        scale = inverse / math.sqrt(1.0 - rule.beta2**step)
        return rule.beta1, 1.0 - rule.beta1, rule.beta2, 1.0 - rule.beta2, scale, inverse * rule.epsilon

    def update_tile(
        self,
        weight: Array,
        gradient: Array,
        out: Array,
        slots: Sequence[Array],
        scalars: Sequence[Array],
        scratch: Scratch,
    ) -> None:
        """Update one tile; see :class:`kvd.compute.kernels.Kernel`."""
        beta1, rest1, beta2, rest2, scale, offset = scalars
        if not np.isfinite(scale):
            np.copyto(out, weight)
            return
        variance, denominator, linear = slots
        change, other = scratch.first, scratch.second
        average_squares(variance, gradient, beta2, rest2, change)
        average(linear, gradient, beta1, rest1, change)
        np.sqrt(variance, out=change)
        np.multiply(change, scale, out=change)
        np.add(change, offset, out=change)
        np.multiply(denominator, beta1, out=other)
        np.subtract(change, other, out=other)
        np.multiply(other, weight, out=other)
        np.subtract(linear, other, out=linear)
        np.copyto(denominator, change)
        np.divide(linear, change, out=change)
        np.negative(change, out=out)
