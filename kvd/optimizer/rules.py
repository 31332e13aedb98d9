"""Base class of all optimizers, and the most common ones: their fields, formulas and sources.

In every formula ``w`` is the weight, ``t`` the number of this update counted from 1, ``η`` the learning rate of update
``t``, and ``g`` the gradient after the steps that all optimizers share, in this order::

    g = clip(rescale_grad · merged, −clip_gradient, clip_gradient)      without clip_gradient: g = rescale_grad · merged
    g = g + wd · w                                                      except AdamW, Ftrl, LARS and LAMB

Where a difference from MXNet is named, it is from the last releases of MXNet 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kvd.errors import ConfigError
from kvd.optimizer.fields import normalise, require
from kvd.optimizer.multipliers import NO_MULTIPLIERS, Multipliers
from kvd.optimizer.schedule import Scaled, Schedule, limited, rate_at


class Optimizer:
    """The base of all optimizers; not one itself.

    To make your own, derive a frozen dataclass that has at least the first four fields below (any order, any defaults)
    and fields of the types ``float``, ``int``, ``bool`` or ``str`` (or None), or ``Mapping[Any, float]``, and define
    ``kernel()``: it returns the arithmetic, an object as ``kvd.compute.optimizers.Kernel`` describes it. Install it on
    the servers as an entry point of the group ``kvd.optimizers`` whose name is the name on the wire. Further rules go
    into ``check``.

    Attributes:
        learning_rate: a number ≥ 0 or a schedule.
        wd: weight decay, ≥ 0; the ``weight_decay`` of torch.optim.
        rescale_grad: a factor on the merged gradient, such as 1 / batch size.
        clip_gradient: the largest magnitude of an element of the rescaled gradient, > 0; None: any.
        lr_mult, wd_mult: factors ≥ 0 on the learning rate and the weight decay of some keys, such as
            ``{"fc1_bias": 2.0, "*_gamma": 0.0}``: the name of a key, or a pattern in which ``*`` stands for any text. A
            name goes before patterns, the first pattern that fits before later ones. At most 64 entries.
    """

    __slots__ = ()

    learning_rate: float | Schedule
    wd: float
    rescale_grad: float
    clip_gradient: float | None
    lr_mult: Mapping[Any, float]
    wd_mult: Mapping[Any, float]

    decoupled_wd: ClassVar[bool] = False
    """True if the rule itself decays the weight: ``wd · w`` is then not added to the gradient."""

    compensates_delay: ClassVar[bool] = False
    """True for DCASGD: asynchronous servers then keep the version that each worker has pulled."""

    is_by_slice: ClassVar[bool] = False
    """True for those of ours that calculate with all elements of a slice at once, or with its place."""

    needs_whole_keys: ClassVar[bool] = False
    """True if a server has to have all elements of a key: it refuses keys with several slices."""

    updates_rows: ClassVar[bool] = True
    """False if single rows of a table cannot be updated: more than the element itself goes into its update, or all
    elements are touched by each update."""

    def __post_init__(self) -> None:
        normalise(self)
        if not isinstance(self.learning_rate, Schedule):
            require("learning_rate", self.learning_rate >= 0, "≥ 0", self.learning_rate)
        require("wd", self.wd >= 0, "≥ 0", self.wd)
        if self.clip_gradient is not None:
            require("clip_gradient", self.clip_gradient > 0, "> 0, or None", self.clip_gradient)
        self.check()

    def check(self) -> None:
        """Raise ConfigError if a field of this optimizer is out of its range."""

    def rate(self, step: int) -> float:
        """Return the learning rate of update ``step``, counted from 1."""
        return rate_at(self.learning_rate, step)

    @property
    def differs_by_key(self) -> bool:
        """Return whether keys have learning rates or weight decays of their own."""
        return bool(getattr(self, "lr_mult", None) or getattr(self, "wd_mult", None))

    def for_key(self, key: str) -> Optimizer:
        """Return the optimizer with the learning rate and the weight decay of one key, without multipliers."""
        changes: dict[str, Any] = {}
        for name in ("lr_mult", "wd_mult"):
            factors = getattr(self, name, None)
            if not isinstance(factors, Multipliers) or not factors:
                continue
            changes[name] = NO_MULTIPLIERS
            factor, rate = factors.of(key), self.learning_rate
            if name == "wd_mult":
                changes["wd"] = limited(self.wd * factor)
            elif factor != 1:
                scaled = Scaled(rate, factor) if isinstance(rate, Schedule) else limited(rate * factor)
                changes["learning_rate"] = scaled
        return replace(self, **changes) if changes else self  # type: ignore[type-var]


@dataclass(frozen=True, slots=True)
class SGD(Optimizer):
    """Stochastic gradient descent, as torch.optim.SGD with ``dampening=0``.

    ::

        momentum = 0:   w = w − η·g
        else:           b = momentum·b + g          b starts at 0
                        w = w − η·b                 nesterov: w = w − η·(g + momentum·b)

    The learning rate stays outside of the momentum buffer (torch), not inside of it (MXNet): the two differ when the
    learning rate changes. With ``nesterov`` and ``wd`` they also differ at a constant rate: in what MXNet's NAG adds to
    its buffer, ``wd`` multiplies the weight that it has just updated, not the weight before.

    Args:
        learning_rate, wd, rescale_grad, clip_gradient, lr_mult, wd_mult: see :class:`Optimizer`.
        momentum: ≥ 0.
        nesterov: look ahead (Sutskever et al. 2013, as written in torch.optim.SGD); needs momentum > 0.

    Raises:
        ConfigError: a field is out of its range; ``setting`` names it.
    """

    learning_rate: float | Schedule
    momentum: float = 0.0
    wd: float = 0.0
    rescale_grad: float = 1.0
    clip_gradient: float | None = None
    nesterov: bool = False
    lr_mult: Mapping[Any, float] = NO_MULTIPLIERS
    wd_mult: Mapping[Any, float] = NO_MULTIPLIERS

    def check(self) -> None:
        """Raise ConfigError if a field of this optimizer is out of its range."""
        require("momentum", self.momentum >= 0, "≥ 0", self.momentum)
        if self.nesterov and self.momentum == 0:
            raise ConfigError("nesterov needs a momentum > 0", setting="nesterov")


@dataclass(frozen=True, slots=True)
class Adam(Optimizer):
    """Adam, as torch.optim.Adam without ``amsgrad`` (``beta1, beta2`` are its ``betas``, ``epsilon`` its ``eps``).

    ::

        m = β1·m + (1 − β1)·g                       m, v start at 0
        v = β2·v + (1 − β2)·g²
        w = w − η · m̂ / (√v̂ + ε)                   m̂ = m / (1 − β1ᵗ), v̂ = v / (1 − β2ᵗ)

    calculated in the order at the end of section 2 of Kingma and Ba, "Adam" (2015), with its ε̂ = ε·√(1 − β2ᵗ), which
    makes it equal to the formula above: ``w = w − (η·√(1 − β2ᵗ) / (1 − β1ᵗ)) · m / (√v + ε̂)``. MXNet's Adam has ε
    itself in place of ε̂, and it clips after the decay has been added: ``g = clip(rescale_grad · merged + wd · w)``.

    Args:
        learning_rate, wd, rescale_grad, clip_gradient, lr_mult, wd_mult: see :class:`Optimizer`.
        beta1, beta2: in [0, 1).
        epsilon: ≥ 0.

    Raises:
        ConfigError: a field is out of its range; ``setting`` names it.
    """

    learning_rate: float | Schedule = 1e-3
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
class AdamW(Optimizer):
    """Adam with decoupled weight decay, as torch.optim.AdamW (Loshchilov and Hutter 2019), ``wd=0.01`` by default.

    ::

        w = w·(1 − η·wd), then the three lines of Adam

    Args:
        learning_rate, rescale_grad, clip_gradient, lr_mult, wd_mult: see :class:`Optimizer`.
        beta1, beta2: in [0, 1).
        epsilon: ≥ 0.
        wd: the decay of the weight, not of the gradient, ≥ 0.

    Raises:
        ConfigError: a field is out of its range; ``setting`` names it.
    """

    learning_rate: float | Schedule = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    wd: float = 1e-2
    rescale_grad: float = 1.0
    clip_gradient: float | None = None
    lr_mult: Mapping[Any, float] = NO_MULTIPLIERS
    wd_mult: Mapping[Any, float] = NO_MULTIPLIERS

    decoupled_wd: ClassVar[bool] = True

    def check(self) -> None:
        """Raise ConfigError if a field of this optimizer is out of its range."""
        check_betas(self.beta1, self.beta2, self.epsilon)


@dataclass(frozen=True, slots=True)
class Adagrad(Optimizer):
    """Adagrad (Duchi et al. 2011), as torch.optim.Adagrad with ``initial_accumulator_value=0``.

    ::

        s = s + g²                                  s starts at 0
        w = w − η / (1 + (t − 1)·lr_decay) · g / (√s + ε)

    MXNet's AdaGrad has no ``lr_decay``, adds ε inside the root, and keeps the decay out of ``s``:
    ``s = s + g²; w = w − η · (g / √(s + ε) + wd · w)`` with the ``g`` before the decay. Its ε is 1e-7 by default.

    Args:
        learning_rate, wd, rescale_grad, clip_gradient, lr_mult, wd_mult: see :class:`Optimizer`.
        lr_decay: ≥ 0.
        epsilon: ≥ 0; the ``eps`` of torch.optim.

    Raises:
        ConfigError: a field is out of its range; ``setting`` names it.
    """

    learning_rate: float | Schedule = 1e-2
    lr_decay: float = 0.0
    epsilon: float = 1e-10
    wd: float = 0.0
    rescale_grad: float = 1.0
    clip_gradient: float | None = None
    lr_mult: Mapping[Any, float] = NO_MULTIPLIERS
    wd_mult: Mapping[Any, float] = NO_MULTIPLIERS

    def check(self) -> None:
        """Raise ConfigError if a field of this optimizer is out of its range."""
        require("lr_decay", self.lr_decay >= 0, "≥ 0", self.lr_decay)
        require("epsilon", self.epsilon >= 0, "≥ 0", self.epsilon)


@dataclass(frozen=True, slots=True)
class RowWiseAdagrad(Adagrad):
    """Adagrad with one accumulator for each row of a table, in place of one for each element.

    ::

        s = s + mean(g²)                            s starts at 0; the mean is over the row
        w = w − η / (1 + (t − 1)·lr_decay) · g / (√s + ε)

    The rule that FBGEMM, the library behind TorchRec, calls exact row-wise Adagrad. Its state is a number per row. In
    keys that are no tables each element counts as a row of its own: there it is :class:`Adagrad`.

    Args, and errors: those of :class:`Adagrad`.
    """


@dataclass(frozen=True, slots=True)
class RMSProp(Optimizer):
    """RMSProp (Hinton's lecture 6e), as torch.optim.RMSprop (``epsilon`` is its ``eps``).

    ::

        v = α·v + (1 − α)·g²                        v, a, b start at 0
        centered: a = α·a + (1 − α)·g;  d = √max(v − a², 0) + ε         (Graves 2013)      else: d = √v + ε
        momentum = 0:   w = w − η · g / d
        else:           b = momentum·b + g / d;  w = w − η·b

    The ``max`` is ours: rounding can make ``v − a²`` a little negative, where torch yields NaN.

    MXNet's RMSProp adds ε inside the root, ``√(v + ε)`` and ``√(v − a² + ε)``, and clips after the decay has been
    added. It has momentum if and only if it is centered (``gamma2``), with the learning rate inside the buffer. Its
    ``gamma1``, which is ``alpha`` here, is 0.9 by default.

    Args:
        learning_rate, wd, rescale_grad, clip_gradient, lr_mult, wd_mult: see :class:`Optimizer`.
        alpha: the smoothing constant, in [0, 1].
        epsilon: ≥ 0.
        momentum: ≥ 0.
        centered: divide by an estimate of the standard deviation instead of the root mean square.

    Raises:
        ConfigError: a field is out of its range; ``setting`` names it.
    """

    learning_rate: float | Schedule = 1e-2
    alpha: float = 0.99
    epsilon: float = 1e-8
    momentum: float = 0.0
    centered: bool = False
    wd: float = 0.0
    rescale_grad: float = 1.0
    clip_gradient: float | None = None
    lr_mult: Mapping[Any, float] = NO_MULTIPLIERS
    wd_mult: Mapping[Any, float] = NO_MULTIPLIERS

    def check(self) -> None:
        """Raise ConfigError if a field of this optimizer is out of its range."""
        require("alpha", 0 <= self.alpha <= 1, "in [0, 1]", self.alpha)
        require("epsilon", self.epsilon >= 0, "≥ 0", self.epsilon)
        require("momentum", self.momentum >= 0, "≥ 0", self.momentum)


def check_betas(beta1: float, beta2: float, epsilon: float) -> None:
    """Raise ConfigError if one of these three, which many optimizers have, is out of its range."""
    require("beta1", 0 <= beta1 < 1, "in [0, 1)", beta1)
    require("beta2", 0 <= beta2 < 1, "in [0, 1)", beta2)
    require("epsilon", epsilon >= 0, "≥ 0", epsilon)
