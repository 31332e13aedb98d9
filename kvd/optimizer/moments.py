"""The relatives of Adam: they divide a mean of the gradients by what a second mean says of their size.

The letters, and the steps that all optimizers share, are those of :mod:`kvd.optimizer.rules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvd.optimizer.fields import require
from kvd.optimizer.multipliers import NO_MULTIPLIERS
from kvd.optimizer.rules import Optimizer, check_betas
from kvd.optimizer.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Adamax(Optimizer):
    """Adamax, as torch.optim.Adamax (Kingma and Ba 2015, section 7).

    ::

        m = β1·m + (1 − β1)·g                       m, u start at 0
        u = max(β2·u, |g| + ε)
        w = w − η / (1 − β1ᵗ) · m / u

    MXNet's Adamax has no ε, so an element whose gradients were all 0 becomes NaN. That of MXNet 1 also clips after the
    decay is added.

    Args:
        learning_rate, wd, rescale_grad, clip_gradient, lr_mult, wd_mult: see :class:`kvd.optimizer.Optimizer`.
        beta1, beta2: in [0, 1).
        epsilon: ≥ 0.

    Raises:
        ConfigError: a field is out of its range; ``setting`` names it.
    """

    learning_rate: float | Schedule = 2e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    wd: float = 0.0
    rescale_grad: float = 1.0
    clip_gradient: float | None = None
    lr_mult: Mapping[Any, float] = NO_MULTIPLIERS
    wd_mult: Mapping[Any, float] = NO_MULTIPLIERS

    def check(self) -> None:
        """Raise ConfigError if a field of this optimizer is out of its range."""
        check_betas(self.beta1, self.beta2, self.epsilon)


@dataclass(frozen=True, slots=True)
class Nadam(Optimizer):
    """Adam with Nesterov momentum (Dozat 2016), as torch.optim.NAdam.

    ::

        m = β1·m + (1 − β1)·g                       m, v start at 0
        v = β2·v + (1 − β2)·g²
        w = w − η · (μ_{t+1} · m / (1 − μ_1 ⋯ μ_{t+1}) + (1 − μ_t) · g / (1 − μ_1 ⋯ μ_t)) / (√v̂ + ε)

    with v̂ = v / (1 − β2ᵗ) and μ_i = β1·(1 − 0.96^(i · momentum_decay) / 2).

    MXNet's Nadam has one product of the μ for all keys, which it multiplies at each update of each of them, and it
    clips after the decay has been added. Its learning rate is 0.001 by default, its ``schedule_decay`` is
    ``momentum_decay`` here.

    Args:
        learning_rate, wd, rescale_grad, clip_gradient, lr_mult, wd_mult: see :class:`kvd.optimizer.Optimizer`.
        beta1, beta2: in [0, 1).
        epsilon: ≥ 0.
        momentum_decay: how fast μ rises from half of β1 to β1, ≥ 0.

    Raises:
        ConfigError: a field is out of its range; ``setting`` names it.
    """

    learning_rate: float | Schedule = 2e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    momentum_decay: float = 4e-3
    wd: float = 0.0
    rescale_grad: float = 1.0
    clip_gradient: float | None = None
    lr_mult: Mapping[Any, float] = NO_MULTIPLIERS
    wd_mult: Mapping[Any, float] = NO_MULTIPLIERS

    def check(self) -> None:
        """Raise ConfigError if a field of this optimizer is out of its range."""
        check_betas(self.beta1, self.beta2, self.epsilon)
        require("momentum_decay", self.momentum_decay >= 0, "≥ 0", self.momentum_decay)


@dataclass(frozen=True, slots=True)
class FTML(Optimizer):
    """Follow the moving leader (Zheng and Kwok, "Follow the Moving Leader in Deep Learning", 2017), algorithm 1.

    ::

        v = β2·v + (1 − β2)·g²                      v, d, z start at 0
        e = (1 − β1ᵗ) / η · (√(v / (1 − β2ᵗ)) + ε)
        z = β1·z + (1 − β1)·g − (e − β1·d) · w
        d = e
        w = −z / d

    ``z`` remembers the weights: those that are assigned from outside while it trains are forgotten little by little.
    An update with a learning rate of 0 changes nothing, which is the limit of the formula. MXNet's FTML clips after
    the decay has been added.

    Args:
        learning_rate, wd, rescale_grad, clip_gradient, lr_mult, wd_mult: see :class:`kvd.optimizer.Optimizer`.
        beta1, beta2: in [0, 1).
        epsilon: > 0.

    Raises:
        ConfigError: a field is out of its range; ``setting`` names it.
    """

    learning_rate: float | Schedule = 2.5e-3
    beta1: float = 0.6
    beta2: float = 0.999
    epsilon: float = 1e-8
    wd: float = 0.0
    rescale_grad: float = 1.0
    clip_gradient: float | None = None
    lr_mult: Mapping[Any, float] = NO_MULTIPLIERS
    wd_mult: Mapping[Any, float] = NO_MULTIPLIERS

    def check(self) -> None:
        """Raise ConfigError if a field of this optimizer is out of its range."""
        check_betas(self.beta1, self.beta2, self.epsilon)
        require("epsilon", self.epsilon > 0, "> 0", self.epsilon)
