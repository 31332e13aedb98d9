"""The arithmetic of Signum, as that of :mod:`kvd.compute.kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvd.compute.kernels import Array
from kvd.compute.scratch import Scratch
from kvd.optimizer import Signum


@dataclass(frozen=True, slots=True)
class SignumKernel:
    """``(1 − η·wd_lh)·w − η·sign(b)`` with ``b = momentum·b + (1 − momentum)·g``."""

    optimizer: Signum

    @property
    def slot_names(self) -> Sequence[str]:
        """``momentum``, if there is any."""
        return ("momentum",) if self.optimizer.momentum else ()

    def scalars(self, step: int) -> tuple[float, ...]:
        """Return the learning rate, the momentum, 1 − momentum, and the factor of the decay."""
        rule = self.optimizer
        rate = rule.rate(step)
        return rate, rule.momentum, 1.0 - rule.momentum, 1.0 - rate * rule.wd_lh

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
        rate, momentum, rest, decay = scalars
        change = scratch.first
        direction = gradient
        if slots:
            direction = slots[0]
            np.multiply(gradient, rest, out=change)
            np.multiply(direction, momentum, out=direction)
            np.add(direction, change, out=direction)
        np.sign(direction, out=change)
        np.multiply(change, rate, out=change)
        if decay != 1:
            weight = np.multiply(weight, decay, out=out)
        np.subtract(weight, change, out=out)
