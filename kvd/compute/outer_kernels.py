"""The arithmetic of DelayedNesterov, as that of :mod:`kvd.compute.kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvd.compute.kernels import Array
from kvd.compute.scratch import Scratch
from kvd.optimizer import DelayedNesterov


@dataclass(frozen=True, slots=True)
class DelayedNesterovKernel:
    """``w − η·(k·m + g / N)``, where m takes in what N gradients were, and k is the momentum's share of this update."""

    optimizer: DelayedNesterov

    @property
    def slot_names(self) -> Sequence[str]:
        """The momentum, and the sum of the gradients that it has yet to take in."""
        return ("momentum", "sum")

    def scalars(self, step: int) -> tuple[float, ...]:
        """η, the momentum, 1 / N, k, and 1 if this update changes the momentum, else 0."""
        rule = self.optimizer
        is_full = step % rule.buffer_size == 0
        share = 1 - rule.activation * rule.buffer_size + rule.activation if is_full else rule.activation
        return rule.rate(step), rule.momentum, 1 / rule.buffer_size, share * rule.momentum, float(is_full)

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
        rate, momentum, part, share, is_full = scalars
        buffer, total = slots
        change, other = scratch.first, scratch.second
        np.add(total, gradient, out=total)
        if is_full:
            np.multiply(buffer, momentum, out=buffer)
            np.multiply(total, part, out=change)
            np.add(buffer, change, out=buffer)
            total.fill(0)
        np.multiply(gradient, part, out=other)
        np.multiply(buffer, share, out=change)
        np.add(change, other, out=change)
        np.multiply(change, rate, out=change)
        np.subtract(weight, change, out=out)
