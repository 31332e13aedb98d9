"""Learning rates that change with the number of updates made.

A schedule is pure data with one function, ``at(step)``: the learning rate of update ``step``, counted from 1. Steps
are updates of a key on its server, not epochs. It crosses the wire as its name and its numbers.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from kvd.errors import ConfigError
from kvd.optimizer.fields import normalise, require

__all__ = ["Cosine", "Polynomial", "Schedule", "Step", "Warmup", "SCHEDULES"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The base of the schedules below."""

    def __post_init__(self) -> None:
        normalise(self)
        self._check()

    def _check(self) -> None:
        """Raise ConfigError if a field is out of its range."""

    def at(self, step: int) -> float:
        """Return the learning rate of update ``step`` ≥ 1."""
        raise NotImplementedError(f"{type(self).__name__} does not say its learning rate")


@dataclass(frozen=True, slots=True)
class Step(Schedule):
    """``base · factor^⌊(t − 1) / step⌋``: multiplied by ``factor`` after every ``step`` updates.

    The rule of torch.optim.lr_scheduler.StepLR (``step_size``, ``gamma``) and of MXNet's FactorScheduler.

    Args:
        base: the first learning rate, ≥ 0.
        step: updates at one learning rate, ≥ 1.
        factor: in (0, 1].
    """

    base: float
    step: int
    factor: float

    def _check(self) -> None:
        require("base", self.base >= 0, "≥ 0", self.base)
        require("step", self.step >= 1, "≥ 1", self.step)
        require("factor", 0 < self.factor <= 1, "in (0, 1]", self.factor)

    def at(self, step: int) -> float:
        """Return the learning rate of update ``step`` ≥ 1."""
        drops = (step - 1) // self.step
        return float(self.base * self.factor**drops)


@dataclass(frozen=True, slots=True)
class Cosine(Schedule):
    """``final + (base − final) · (1 + cos(π · n / steps)) / 2`` with ``n = min(t − 1, steps)``.

    Loshchilov and Hutter, "SGDR" (2017), equation 5, without restarts; torch.optim.lr_scheduler.CosineAnnealingLR with
    ``T_max=steps, eta_min=final`` up to ``steps``. Afterwards it stays at ``final``. MXNet's CosineScheduler
    (``max_update=steps``) is one step ahead: it has n = t, so its first update already has less than ``base``.

    Args:
        base: the first learning rate, ≥ 0.
        steps: updates until ``final`` is reached, ≥ 1.
        final: the last learning rate, ≥ 0.
    """

    base: float
    steps: int
    final: float = 0.0

    def _check(self) -> None:
        _check_way(self.base, self.steps, self.final)

    def at(self, step: int) -> float:
        """Return the learning rate of update ``step`` ≥ 1."""
        done = min(step - 1, self.steps) / self.steps
        return self.final + (self.base - self.final) * ((1.0 + math.cos(math.pi * done)) / 2.0)


@dataclass(frozen=True, slots=True)
class Polynomial(Schedule):
    """``final + (base − final) · (1 − n / steps)^power`` with ``n = min(t − 1, steps)``.

    torch.optim.lr_scheduler.PolynomialLR (``total_iters=steps``). ``power=1`` is a straight line; afterwards it stays
    at ``final``. MXNet's PolyScheduler (``max_update=steps``) is one step ahead: it has n = t, so its first update
    already has less than ``base``. Its ``pwr`` is 2 by default.

    Args:
        base: the first learning rate, ≥ 0.
        steps: updates until ``final`` is reached, ≥ 1.
        final: the last learning rate, ≥ 0.
        power: > 0.
    """

    base: float
    steps: int
    final: float = 0.0
    power: float = 1.0

    def _check(self) -> None:
        _check_way(self.base, self.steps, self.final)
        require("power", self.power > 0, "> 0", self.power)

    def at(self, step: int) -> float:
        """Return the learning rate of update ``step`` ≥ 1."""
        left = 1.0 - min(step - 1, self.steps) / self.steps
        return float(self.final + (self.base - self.final) * left**self.power)


@dataclass(frozen=True, slots=True)
class Warmup(Schedule):
    """``inner(1) · t / steps`` for the first ``steps`` updates, then ``inner`` from its beginning.

    The gradual warm-up of Goyal et al., "Accurate, Large Minibatch SGD" (2017), section 2.2: a straight line that
    reaches the first learning rate of ``inner`` at update ``steps``.

    Args:
        inner: a learning rate ≥ 0, or another schedule that is no Warmup itself.
        steps: updates until the full learning rate, ≥ 1.
    """

    inner: float | Schedule
    steps: int

    def _check(self) -> None:
        require("steps", self.steps >= 1, "≥ 1", self.steps)
        # Warm-ups do not nest, so that every schedule has a limited depth, even one that a peer made up.
        if isinstance(self.inner, Warmup):
            raise ConfigError("inner must not be a Warmup itself", setting="inner")
        if isinstance(self.inner, float):
            require("inner", self.inner >= 0, "≥ 0", self.inner)

    def at(self, step: int) -> float:
        """Return the learning rate of update ``step`` ≥ 1."""
        if step > self.steps:
            return rate_at(self.inner, step - self.steps)
        return rate_at(self.inner, 1) * (step / self.steps)


@dataclass(frozen=True, slots=True)
class Scaled(Schedule):
    """``inner · factor``: what is left of another schedule for one key. It never crosses the wire."""

    inner: Schedule
    factor: float

    def at(self, step: int) -> float:
        """Return the learning rate of update ``step`` ≥ 1."""
        return limited(self.inner.at(step) * self.factor)


SCHEDULES: dict[str, type[Schedule]] = {cls.__name__: cls for cls in (Step, Cosine, Polynomial, Warmup)}
"""The schedules by the name that they have on the wire."""


def limited(number: float) -> float:
    """Return the number, or the largest float instead of infinity."""
    return min(number, sys.float_info.max)


def rate_at(learning_rate: float | Schedule, step: int) -> float:
    """Return the learning rate of update ``step`` ≥ 1, of a number or a schedule."""
    return learning_rate.at(step) if isinstance(learning_rate, Schedule) else learning_rate


def _check_way(base: float, steps: int, final: float) -> None:
    require("base", base >= 0, "≥ 0", base)
    require("steps", steps >= 1, "≥ 1", steps)
    require("final", final >= 0, "≥ 0", final)
