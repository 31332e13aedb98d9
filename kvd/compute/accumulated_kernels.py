"""The arithmetic of AdaDelta and Ftrl, as that of :mod:`kvd.compute.kernels`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvd.compute.kernels import Array, average_squares
from kvd.compute.scratch import Scratch
from kvd.optimizer import AdaDelta, Ftrl


@dataclass(frozen=True, slots=True)
class AdaDeltaKernel:
    """``w − η·d`` with ``d = √(u + ε) / √(v + ε) · g``."""

    optimizer: AdaDelta

    @property
    def slot_names(self) -> Sequence[str]:
        """The averages of g² and of d²."""
        return ("square", "delta")

    def scalars(self, step: int) -> tuple[float, ...]:
        """η, ρ, 1 − ρ and ε."""
        rule = self.optimizer
        return rule.rate(step), rule.rho, 1.0 - rule.rho, rule.epsilon

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
        rate, rho, rest, epsilon = scalars
        square, delta = slots
        change, other = scratch.first, scratch.second
        average_squares(square, gradient, rho, rest, other)
        np.add(delta, epsilon, out=change)
        np.sqrt(change, out=change)
        np.add(square, epsilon, out=other)
        np.sqrt(other, out=other)
        np.divide(change, other, out=change)
        np.multiply(change, gradient, out=change)
        average_squares(delta, change, rho, rest, other)
        np.multiply(change, rate, out=change)
        np.subtract(weight, change, out=out)


@dataclass(frozen=True, slots=True)
class FtrlKernel:
    """``−(z − clip(z, −l1, l1)) / ((β + √n) / η + wd)``."""

    optimizer: Ftrl

    @property
    def slot_names(self) -> Sequence[str]:
        """``z`` and ``n``."""
        return ("linear", "square")

    def scalars(self, step: int) -> tuple[float, ...]:
        """1 / η, β / η + wd, and l1. The first two are infinite at a learning rate of 0."""
        rule = self.optimizer
        inverse = inverse_rate(rule.rate(step))
        return inverse, rule.beta * inverse + rule.wd, rule.l1

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
        inverse, offset, l1 = scalars
        if not (np.isfinite(inverse) and np.isfinite(offset)):
            np.copyto(out, weight)
            return
        linear, square = slots
        change, root = scratch.first, scratch.second
        np.sqrt(square, out=root)
        np.multiply(gradient, gradient, out=change)
        np.add(square, change, out=square)
        np.sqrt(square, out=change)
        np.subtract(change, root, out=root)
        np.multiply(root, inverse, out=root)
        np.multiply(root, weight, out=root)
        np.add(linear, gradient, out=linear)
        np.subtract(linear, root, out=linear)
        np.multiply(change, inverse, out=change)
        np.add(change, offset, out=change)
        np.clip(linear, -l1, l1, out=root)
        np.subtract(root, linear, out=root)
        np.divide(root, change, out=out)


def inverse_rate(rate: float) -> float:
    """1 / η; infinite for a rate so small that it counts as 0."""
    return 1.0 / rate if rate > 0 and 1.0 / rate < math.inf else math.inf
