"""Outer optimizers for workers that train alone for many steps and then push the change of their weights.

The letters, and the steps that all optimizers share, are those of :mod:`kvd.optimizer.rules`. What is pushed is the
weight before minus the weight after, so that it stands where a gradient does. For workers that meet in rounds
(`dist_sync`, DiLoCo) ``SGD(0.7, momentum=0.9, nesterov=True)`` with ``merge="mean"`` is such an optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvd.optimizer.fields import require
from kvd.optimizer.multipliers import NO_MULTIPLIERS
from kvd.optimizer.rules import Optimizer
from kvd.optimizer.schedule import Schedule


@dataclass(frozen=True, slots=True)
class DelayedNesterov(Optimizer):
    """Delayed Nesterov (Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024), algorithm 3.

    For `dist_async`, where every push is an update of its own: Nesterov's momentum, applied at each of them, makes
    training diverge. Here it takes in the mean of ``N = buffer_size`` pushes at a time, and a push by itself counts
    with 1 / N, so that N pushes together make a step of the usual size::

        s = s + g                                   s, m start at 0
        if t mod N = 0:     m = momentum·m + s / N;  s = 0
                            w = w − η·((1 − c·N + c)·momentum·m + g / N)
        else:               w = w − η·(c·momentum·m + g / N)

    ``c`` is ``activation``: with 0 the momentum moves the weight once in N pushes, with 1 / N a little in each. With
    ``buffer_size=1`` it is SGD with Nesterov's momentum.

    Args:
        learning_rate, wd, rescale_grad, clip_gradient, lr_mult, wd_mult: see :class:`kvd.optimizer.Optimizer`.
        buffer_size: a whole number ≥ 1; the number of workers is a good choice.
        momentum: ≥ 0.
        activation: from 0 to 1 / buffer_size.

    Raises:
        ConfigError: a field is out of its range; ``setting`` names it.
    """

    learning_rate: float | Schedule
    buffer_size: int
    momentum: float = 0.9
    activation: float = 0.0
    wd: float = 0.0
    rescale_grad: float = 1.0
    clip_gradient: float | None = None
    lr_mult: Mapping[Any, float] = NO_MULTIPLIERS
    wd_mult: Mapping[Any, float] = NO_MULTIPLIERS

    updates_rows: ClassVar[bool] = False

    def check(self) -> None:
        """Raise ConfigError if a field of this optimizer is out of its range."""
        require("buffer_size", self.buffer_size >= 1, "≥ 1", self.buffer_size)
        require("momentum", self.momentum >= 0, "≥ 0", self.momentum)
        is_allowed = 0 <= self.activation <= 1 / self.buffer_size
        require("activation", is_allowed, "from 0 to 1 / buffer_size", self.activation)
