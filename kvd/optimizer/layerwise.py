"""Optimizers whose steps are measured by the norm of a whole value, for large batches.

The letters, and the steps that all optimizers share, are those of :mod:`kvd.optimizer.rules`; ‖·‖ is the Euclidean norm
of all elements of a key. A server has to have all of them: a key with several slices is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvd.errors import ConfigError
from kvd.optimizer.fields import require
from kvd.optimizer.multipliers import NO_MULTIPLIERS
from kvd.optimizer.rules import Optimizer, check_betas
from kvd.optimizer.schedule import Schedule


@dataclass(frozen=True, slots=True)
class LARS(Optimizer):
    """SGD with a rate for each layer (You et al., "Large Batch Training of Convolutional Networks", 2017).

    ::

        d = λ · (g + wd · w)                        λ = eta · ‖w‖ / (‖g‖ + wd · ‖w‖ + ε)
        b = momentum·b + d                          b starts at 0; momentum = 0: b = d
        w = w − η·b

    with λ = 1 where ‖w‖ or ‖g‖ is 0, and λ = 0 where one of them is infinite or NaN. g is clipped before its norm is
    measured; MXNet clips afterwards. As in :class:`kvd.optimizer.SGD`
    the learning rate is outside of the momentum buffer, where the paper and MXNet have it inside; at a constant rate
    the two take the same steps. MXNet's LARS leaves λ out for keys that end with ``gamma``, ``beta`` or ``bias``, and
    its LBSGD with ``warmup_strategy="lars"`` has other limits for λ.

    Args:
        learning_rate, wd, rescale_grad, clip_gradient, lr_mult, wd_mult: see :class:`kvd.optimizer.Optimizer`.
        momentum: ≥ 0.
        eta: the trust coefficient, > 0.
        epsilon: ≥ 0.

    Raises:
        ConfigError: a field is out of its range; ``setting`` names it.
    """

    learning_rate: float | Schedule
    momentum: float = 0.0
    wd: float = 0.0
    rescale_grad: float = 1.0
    clip_gradient: float | None = None
    eta: float = 1e-3
    epsilon: float = 0.0
    lr_mult: Mapping[Any, float] = NO_MULTIPLIERS
    wd_mult: Mapping[Any, float] = NO_MULTIPLIERS

    decoupled_wd: ClassVar[bool] = True
    is_by_slice: ClassVar[bool] = True
    needs_whole_keys: ClassVar[bool] = True
    updates_rows: ClassVar[bool] = False

    def check(self) -> None:
        """Raise ConfigError if a field of this optimizer is out of its range."""
        require("momentum", self.momentum >= 0, "≥ 0", self.momentum)
        require("eta", self.eta > 0, "> 0", self.eta)
        require("epsilon", self.epsilon >= 0, "≥ 0", self.epsilon)


@dataclass(frozen=True, slots=True)
class LAMB(Optimizer):
    """Adam with a rate for each layer (You et al., "Large Batch Optimization for Deep Learning", 2020), algorithm 2.

    ::

        m = β1·m + (1 − β1)·g                       m, v start at 0
        v = β2·v + (1 − β2)·g²
        r = m̂ / (√v̂ + ε) + wd · w                   m̂ = m / (1 − β1ᵗ), v̂ = v / (1 − β2ᵗ)
        w = w − η · φ(‖w‖) / ‖r‖ · r                 φ(x) = min(max(x, lower_bound), upper_bound)

    with 1 in place of φ / ‖r‖ where one of the two is 0, and 0 where one of them is infinite or NaN. As in MXNet.

    Args:
        learning_rate, wd, rescale_grad, clip_gradient, lr_mult, wd_mult: see :class:`kvd.optimizer.Optimizer`.
        beta1, beta2: in [0, 1).
        epsilon: ≥ 0.
        lower_bound, upper_bound: of ‖w‖ in the quotient, ≥ 0; None: none.
        bias_correction: False: m̂ = m and v̂ = v.

    Raises:
        ConfigError: a field is out of its range; ``setting`` names it.
    """

    learning_rate: float | Schedule = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-6
    wd: float = 0.0
    rescale_grad: float = 1.0
    clip_gradient: float | None = None
    lower_bound: float | None = None
    upper_bound: float | None = None
    bias_correction: bool = True
    lr_mult: Mapping[Any, float] = NO_MULTIPLIERS
    wd_mult: Mapping[Any, float] = NO_MULTIPLIERS

    decoupled_wd: ClassVar[bool] = True
    is_by_slice: ClassVar[bool] = True
    needs_whole_keys: ClassVar[bool] = True
    updates_rows: ClassVar[bool] = False

    def check(self) -> None:
        """Raise ConfigError if a field of this optimizer is out of its range."""
        check_betas(self.beta1, self.beta2, self.epsilon)
        low, high = self.lower_bound, self.upper_bound
        require("lower_bound", low is None or low >= 0, "≥ 0, or None", low)
        require("upper_bound", high is None or high >= 0, "≥ 0, or None", high)
        if low is not None and high is not None and low > high:
            raise ConfigError(f"lower_bound {low} is above upper_bound {high}", setting="lower_bound")
