"""Steps of one size, in the direction of a sign.

The letters, and the steps that all optimizers share, are those of :mod:`kvd.optimizer.rules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvd.optimizer.fields import require
from kvd.optimizer.multipliers import NO_MULTIPLIERS
from kvd.optimizer.rules import Optimizer
from kvd.optimizer.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Signum(Optimizer):
    """signSGD with momentum (Bernstein et al., "signSGD: Compressed Optimisation for Non-Convex Problems", 2018).

    ::

        momentum = 0:   w = (1 − η·wd_lh)·w − η·sign(g)
        else:           b = momentum·b + (1 − momentum)·g           b starts at 0
                        w = (1 − η·wd_lh)·w − η·sign(b)

    As MXNet's Signum, but ``wd`` is part of ``g`` here even without momentum, where MXNet's takes it for ``wd_lh``.

    Args:
        learning_rate, wd, rescale_grad, clip_gradient, lr_mult, wd_mult: see :class:`kvd.optimizer.Optimizer`.
        momentum: in [0, 1).
        wd_lh: decay of the weight itself, not of the gradient (Loshchilov and Hutter 2019), ≥ 0.

    Raises:
        ConfigError: a field is out of its range; ``setting`` names it.
    """

    learning_rate: float | Schedule = 0.01
    momentum: float = 0.9
    wd: float = 0.0
    rescale_grad: float = 1.0
    clip_gradient: float | None = None
    wd_lh: float = 0.0
    lr_mult: Mapping[Any, float] = NO_MULTIPLIERS
    wd_mult: Mapping[Any, float] = NO_MULTIPLIERS

    def check(self) -> None:
        """Raise ConfigError if a field of this optimizer is out of its range."""
        require("momentum", 0 <= self.momentum < 1, "in [0, 1)", self.momentum)
        require("wd_lh", self.wd_lh >= 0, "≥ 0", self.wd_lh)
