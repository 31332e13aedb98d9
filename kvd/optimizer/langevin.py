"""Descent with noise, which draws samples where others look for a minimum.

The letters, and the steps that all optimizers share, are those of :mod:`kvd.optimizer.rules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvd.optimizer.multipliers import NO_MULTIPLIERS
from kvd.optimizer.rules import Optimizer
from kvd.optimizer.schedule import Schedule


@dataclass(frozen=True, slots=True)
class SGLD(Optimizer):
    """Stochastic gradient Langevin dynamics (Welling and Teh 2011).

    ::

        w = w − η/2 · g + √η · n                    n: a standard normal number for each element and update

    The noise is a function of ``seed``, the key, the slice, the update and the place of the element in its slice: every
    replica has the same, and so has a job that runs again with slices of the same size. It is the quantile function of
    Wichura's algorithm AS 241, right to seven digits, of 52 bits that hashes of these numbers give: so it is as normal
    as that up to ±8 standard deviations, and the noise of different elements and updates is as independent as hashes
    are. As MXNet's SGLD, whose noise comes from the generator of its process.

    Args:
        learning_rate, wd, rescale_grad, clip_gradient, lr_mult, wd_mult: see :class:`kvd.optimizer.Optimizer`.
        seed: a whole number of at most 2**53 in size.

    Raises:
        ConfigError: a field is out of its range; ``setting`` names it.
    """

    learning_rate: float | Schedule
    seed: int = 0
    wd: float = 0.0
    rescale_grad: float = 1.0
    clip_gradient: float | None = None
    lr_mult: Mapping[Any, float] = NO_MULTIPLIERS
    wd_mult: Mapping[Any, float] = NO_MULTIPLIERS

    is_by_slice: ClassVar[bool] = True
    updates_rows: ClassVar[bool] = False
