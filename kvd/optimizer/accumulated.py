"""The relatives of Adagrad: each element has a learning rate of its own, from the squares of its gradients.

The letters, and the steps that all optimizers share, are those of :mod:`kvd.optimizer.rules`.
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
class AdaDelta(Optimizer):
    """AdaDelta (Zeiler 2012), as torch.optim.Adadelta (``epsilon`` is its ``eps``).

    ::

        v = ρ·v + (1 − ρ)·g²                        v, u start at 0
        d = √(u + ε) / √(v + ε) · g
        u = ρ·u + (1 − ρ)·d²
        w = w − η·d

    MXNet's AdaDelta has no learning rate and keeps the decay out of ``g``: ``w = w − (d + wd · w)``. Its ε is 1e-5 by
    default.

    Args:
        learning_rate, wd, rescale_grad, clip_gradient, lr_mult, wd_mult: see :class:`kvd.optimizer.Optimizer`.
        rho: the smoothing constant, in [0, 1].
        epsilon: > 0.

    Raises:
        ConfigError: a field is out of its range; ``setting`` names it.
    """

    learning_rate: float | Schedule = 1.0
    rho: float = 0.9
    epsilon: float = 1e-6
    wd: float = 0.0
    rescale_grad: float = 1.0
    clip_gradient: float | None = None
    lr_mult: Mapping[Any, float] = NO_MULTIPLIERS
    wd_mult: Mapping[Any, float] = NO_MULTIPLIERS

    def check(self) -> None:
        """Raise ConfigError if a field of this optimizer is out of its range."""
        require("rho", 0 <= self.rho <= 1, "in [0, 1]", self.rho)
        require("epsilon", self.epsilon > 0, "> 0", self.epsilon)


@dataclass(frozen=True, slots=True)
class Ftrl(Optimizer):
    """FTRL-Proximal (McMahan et al., "Ad Click Prediction: a View from the Trenches", 2013), algorithm 1; as in MXNet.

    ::

        z = z + g − (√(n + g²) − √n) / η · w        z, n start at 0
        n = n + g²
        w = −(z − clip(z, −l1, l1)) / ((β + √n) / η + wd)

    ``wd`` is the λ2 of the paper: it is not added to the gradient. Since ``z`` starts at 0, an element loses its first
    value with its first update, and is 0 until gradients of more than ``l1`` have come together. An update with a
    learning rate of 0 changes nothing. MXNet's ``lamda1`` is ``l1`` here.

    Args:
        learning_rate, rescale_grad, clip_gradient, lr_mult, wd_mult: see :class:`kvd.optimizer.Optimizer`.
        l1: strength of the L1 regularisation, which makes weights exactly 0, ≥ 0.
        beta: > 0.
        wd: strength of the L2 regularisation, ≥ 0.

    Raises:
        ConfigError: a field is out of its range; ``setting`` names it.
    """

    learning_rate: float | Schedule = 0.1
    l1: float = 0.01
    beta: float = 1.0
    wd: float = 0.0
    rescale_grad: float = 1.0
    clip_gradient: float | None = None
    lr_mult: Mapping[Any, float] = NO_MULTIPLIERS
    wd_mult: Mapping[Any, float] = NO_MULTIPLIERS

    decoupled_wd: ClassVar[bool] = True

    def check(self) -> None:
        """Raise ConfigError if a field of this optimizer is out of its range."""
        require("l1", self.l1 >= 0, "≥ 0", self.l1)
        require("beta", self.beta > 0, "> 0", self.beta)
