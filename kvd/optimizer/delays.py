"""Optimizers with delay compensation: they account for updates since a worker pulled the weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvd.optimizer.fields import require
from kvd.optimizer.multipliers import NO_MULTIPLIERS
from kvd.optimizer.rules import SGD
from kvd.optimizer.schedule import Schedule


@dataclass(frozen=True, slots=True)
class DCASGD(SGD):
    """Delay-compensated asynchronous SGD (Zheng et al. 2017), for `dist_async`.

    A gradient that arrives was taken at the weight that its worker pulled, ``p``, and is applied to ``w``, which others
    have changed since. The gradient at ``w`` is estimated from that::

        g = merged + λ · rescale_grad · merged² · (w − p)

    and then goes the way of SGD: rescaled, clipped, decayed, and with momentum if there is any. For a push of a worker
    that has not pulled the key since it was started, since this optimizer was set, or since another server took the key
    over, it is plain SGD; and so it is in all types but `dist_async`, where nothing comes between.

    The servers keep for each worker the version that it pulled last: so many more copies of the values count against
    their memory. In MXNet's DCASGD, whose ``lamda`` is λ, servers keep one weight for all workers, that before the
    latest update; it clips before it compensates, and its learning rate is in the momentum buffer.

    Args:
        learning_rate, momentum, wd, rescale_grad, clip_gradient, nesterov: see :class:`kvd.optimizer.SGD`.
        lr_mult, wd_mult: see :class:`kvd.optimizer.Optimizer`.
        compensation: λ, ≥ 0.

    Raises:
        ConfigError: a field is out of its range; ``setting`` names it.
    """

    learning_rate: float | Schedule
    compensation: float = 0.04
    lr_mult: Mapping[Any, float] = NO_MULTIPLIERS
    wd_mult: Mapping[Any, float] = NO_MULTIPLIERS

    compensates_delay: ClassVar[bool] = True
    updates_rows: ClassVar[bool] = False

    def check(self) -> None:
        """Raise ConfigError if a field of this optimizer is out of its range."""
        SGD.check(self)
        require("compensation", self.compensation >= 0, "≥ 0", self.compensation)
