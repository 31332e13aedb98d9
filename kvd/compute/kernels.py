"""The arithmetic of the optimizers on one tile, in the order in which each element is calculated.

The formulas stand in :mod:`kvd.optimizer.rules`; here is how they are rounded. Each line of a ``update_tile`` is one
IEEE operation per element in the compute dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvd.compute.scratch import Scratch
from kvd.optimizer import SGD, Adagrad, Adam, AdamW, Optimizer, RMSProp

Array = np.ndarray[Any, Any]

KEEPING = "_keeping"
"""Ends the name of a compiled loop that keeps the merged gradient: a replica is given it."""

ROWS = "_rows"
"""Ends the name of a compiled loop that updates some rows of a table where they lie."""

ROW_LOOPS = frozenset({"sgd", "sgd_momentum", "adam", "adagrad"})
"""The compiled loops that there are for rows as well."""

MERGE_LOOPS = ("take_rows", "add_rows", "join_rows")
"""The compiled loops that merge rows, whatever is done with them."""

ID_LOOPS = ("find_ids", "put_ids", "sort_ids", "merge_ids", "are_ascending", "count_ids", "split_ids", "part_ids")
"""The compiled loops on row ids."""


class Kernel(Protocol):
    """The arithmetic of one optimizer with its fields; what ``kernel()`` of a custom optimizer returns."""

    @property
    def slot_names(self) -> Sequence[str]:
        """The arrays that the optimizer keeps beside the weight; they start as zeros."""
        ...

    def scalars(self, step: int) -> tuple[float, ...]:
        """Return the numbers of update ``step``, counted from 1, that are the same for all elements; always as many."""
        ...

    def update_tile(
        self,
        weight: Array,
        gradient: Array,
        out: Array,
        slots: Sequence[Array],
        scalars: Sequence[Array],
        scratch: Scratch,
    ) -> None:
        """Update one tile of n elements. All arrays have shape (n,) and one dtype, float32 or float64.

        Args:
            weight: the weight before; only read, unless it is ``out`` itself.
            gradient: merged, rescaled, clipped, and with ``wd · w`` added unless ``decoupled_wd``; only read.
            out: receives the weight after; another array than ``weight`` or the very same.
            slots: in the order of ``slot_names``; updated in place.
            scalars: what ``scalars(step)`` returned, as 0-d arrays of the dtype.
            scratch: ``first`` and ``second`` are free to use; ``gradient`` may be the gradient.
        """
        ...


def loop_name(kernel: object) -> str | None:
    """Return the loop of :mod:`kvd.compute.jit` that equals a built-in kernel; None for all other kernels."""
    # By the very type: a kernel derived from a built-in one may calculate something else.
    kind = type(kernel)
    if kind is AdamKernel:
        return "adam"
    if kind is AdagradKernel:
        return "adagrad"
    if kind is SGDKernel:
        sgd: SGD = kernel.optimizer  # type: ignore[attr-defined]
        return ("sgd_nesterov" if sgd.nesterov else "sgd_momentum") if sgd.momentum else "sgd"
    if kind is RMSPropKernel:
        rmsprop: RMSProp = kernel.optimizer  # type: ignore[attr-defined]
        return "rmsprop" + "_centered" * rmsprop.centered + "_momentum" * bool(rmsprop.momentum)
    return None


def shared_scalars(optimizer: Optimizer) -> tuple[float, float, float]:
    """The numbers of the steps that all optimizers share: rescale_grad, clip_gradient or infinity, coupled wd or 0."""
    clip = math.inf if optimizer.clip_gradient is None else optimizer.clip_gradient
    return optimizer.rescale_grad, clip, 0.0 if optimizer.decoupled_wd else optimizer.wd


def prepare_gradient(gradient: Array, weight: Array, shared: Shared, scratch: Scratch) -> Array:
    """Return ``clip(rescale · gradient) + wd · weight``, without the steps that ``shared`` leaves out.

    The result is ``gradient`` itself, or lies in ``scratch.gradient``; ``gradient`` is only written to if it lies
    there already. NaN stays NaN.
    """
    if shared.rescale is not None:
        gradient = np.multiply(gradient, shared.rescale, out=scratch.gradient)
    if shared.clip is not None:
        gradient = np.clip(gradient, shared.lowest, shared.clip, out=scratch.gradient)
    if shared.wd is not None:
        np.multiply(weight, shared.wd, out=scratch.first)
        gradient = np.add(gradient, scratch.first, out=scratch.gradient)
    return gradient


def average(mean: Array, gradient: Array, beta: Array, rest: Array, change: Array) -> None:
    """``mean = beta·mean + rest·gradient``; overwrites ``change``."""
    np.multiply(gradient, rest, out=change)
    np.multiply(mean, beta, out=mean)
    np.add(mean, change, out=mean)


def average_squares(square: Array, values: Array, beta: Array, rest: Array, change: Array) -> None:
    """``square = beta·square + rest·values²``; overwrites ``change``."""
    np.multiply(values, values, out=change)
    np.multiply(change, rest, out=change)
    np.multiply(square, beta, out=square)
    np.add(square, change, out=square)


@dataclass(frozen=True, slots=True)
class Shared:
    """The numbers of the shared steps, 0-d in the compute dtype; None for a step that changes nothing.

    Attributes:
        rescale: None for 1.
        clip, lowest: the bound and its negative; None for infinity.
        wd: None for 0.
    """

    rescale: Array | None
    clip: Array | None
    lowest: Array | None
    wd: Array | None

    @classmethod
    def of(cls, numbers: Sequence[float], dtype: np.dtype[Any]) -> Shared:
        """Cast what ``shared_scalars`` returned."""
        rescale, clip, wd = numbers
        return cls(
            rescale=None if rescale == 1.0 else np.asarray(rescale, dtype),
            clip=None if clip == math.inf else np.asarray(clip, dtype),
            lowest=None if clip == math.inf else np.asarray(-clip, dtype),
            wd=None if wd == 0.0 else np.asarray(wd, dtype),
        )


@dataclass(frozen=True, slots=True)
class SGDKernel:
    """``w − η·b`` with ``b = momentum·b + g``, or ``w − η·g`` without momentum."""

    optimizer: SGD

    @property
    def slot_names(self) -> Sequence[str]:
        """``momentum``, if there is any."""
        return ("momentum",) if self.optimizer.momentum else ()

    def scalars(self, step: int) -> tuple[float, ...]:
        """Return the learning rate and the momentum."""
        return self.optimizer.rate(step), self.optimizer.momentum

    def update_tile(
        self,
        weight: Array,
        gradient: Array,
        out: Array,
        slots: Sequence[Array],
        scalars: Sequence[Array],
        scratch: Scratch,
    ) -> None:
        """Update one tile; see :class:`Kernel`."""
        rate, momentum = scalars
        change = scratch.first
        direction = gradient
        if slots:
            buffer = slots[0]
            np.multiply(buffer, momentum, out=buffer)
            np.add(buffer, gradient, out=buffer)
            direction = buffer
            if self.optimizer.nesterov:
                np.multiply(buffer, momentum, out=change)
                direction = np.add(gradient, change, out=change)
        np.multiply(direction, rate, out=change)
        np.subtract(weight, change, out=out)


@dataclass(frozen=True, slots=True)
class AdamKernel:
    """Adam and AdamW, in the order at the end of section 2 of Kingma and Ba (2015)."""

    optimizer: Adam | AdamW

    @property
    def slot_names(self) -> Sequence[str]:
        """The first and the second moment."""
        return ("mean", "variance")

    def scalars(self, step: int) -> tuple[float, ...]:
        """β1, 1 − β1, β2, 1 − β2, η·√(1 − β2ᵗ) / (1 − β1ᵗ), ε·√(1 − β2ᵗ), and the factor of the decay."""
        rule = self.optimizer
        rate = rule.rate(step)
        root = math.sqrt(1.0 - rule.beta2**step)
        decay = 1.0 - rate * rule.wd if rule.decoupled_wd else 1.0
        step_size = rate * root / (1.0 - rule.beta1**step)
        return rule.beta1, 1.0 - rule.beta1, rule.beta2, 1.0 - rule.beta2, step_size, rule.epsilon * root, decay

    def update_tile(
        self,
        weight: Array,
        gradient: Array,
        out: Array,
        slots: Sequence[Array],
        scalars: Sequence[Array],
        scratch: Scratch,
    ) -> None:
        """Update one tile; see :class:`Kernel`."""
        beta1, rest1, beta2, rest2, step_size, epsilon, decay = scalars
        mean, variance = slots
        change = scratch.first
        np.multiply(gradient, rest1, out=change)
        np.multiply(mean, beta1, out=mean)
        np.add(mean, change, out=mean)
        np.multiply(gradient, gradient, out=change)
        np.multiply(change, rest2, out=change)
        np.multiply(variance, beta2, out=variance)
        np.add(variance, change, out=variance)
        np.sqrt(variance, out=change)
        np.add(change, epsilon, out=change)
        np.divide(mean, change, out=change)
        np.multiply(change, step_size, out=change)
        if decay != 1:
            weight = np.multiply(weight, decay, out=out)
        np.subtract(weight, change, out=out)


@dataclass(frozen=True, slots=True)
class AdagradKernel:
    """``w − η' · (g / (√s + ε))`` with ``s = s + g²``."""

    optimizer: Adagrad

    @property
    def slot_names(self) -> Sequence[str]:
        """The sum of the squares."""
        return ("sum",)

    def scalars(self, step: int) -> tuple[float, ...]:
        """Return the decayed learning rate and ε."""
        rule = self.optimizer
        return rule.rate(step) / (1.0 + (step - 1) * rule.lr_decay), rule.epsilon

    def update_tile(
        self,
        weight: Array,
        gradient: Array,
        out: Array,
        slots: Sequence[Array],
        scalars: Sequence[Array],
        scratch: Scratch,
    ) -> None:
        """Update one tile; see :class:`Kernel`."""
        rate, epsilon = scalars
        total = slots[0]
        change = scratch.first
        np.multiply(gradient, gradient, out=change)
        np.add(total, change, out=total)
        np.sqrt(total, out=change)
        np.add(change, epsilon, out=change)
        np.divide(gradient, change, out=change)
        np.multiply(change, rate, out=change)
        np.subtract(weight, change, out=out)


@dataclass(frozen=True, slots=True)
class RMSPropKernel:
    """``w − η · (g / d)``, or ``w − η·b`` with ``b = momentum·b + g / d``."""

    optimizer: RMSProp

    @property
    def slot_names(self) -> Sequence[str]:
        """``square``, then ``mean`` if centered, then ``momentum`` if there is any."""
        rule = self.optimizer
        return ("square", *(("mean",) if rule.centered else ()), *(("momentum",) if rule.momentum else ()))

    def scalars(self, step: int) -> tuple[float, ...]:
        """η, α, 1 − α, ε and the momentum."""
        rule = self.optimizer
        return rule.rate(step), rule.alpha, 1.0 - rule.alpha, rule.epsilon, rule.momentum

    def update_tile(
        self,
        weight: Array,
        gradient: Array,
        out: Array,
        slots: Sequence[Array],
        scalars: Sequence[Array],
        scratch: Scratch,
    ) -> None:
        """Update one tile; see :class:`Kernel`."""
        rate, alpha, rest, epsilon, momentum = scalars
        change = scratch.first
        self._denominator(gradient, slots, alpha, rest, scratch)
        np.add(change, epsilon, out=change)
        np.divide(gradient, change, out=change)
        direction = change
        if self.optimizer.momentum:
            direction = slots[-1]
            np.multiply(direction, momentum, out=direction)
            np.add(direction, change, out=direction)
        np.multiply(direction, rate, out=change)
        np.subtract(weight, change, out=out)

    def _denominator(
        self, gradient: Array, slots: Sequence[Array], alpha: Array, rest: Array, scratch: Scratch
    ) -> None:
        """Update the averages and leave the root, without ε, in ``scratch.first``."""
        square, change, other = slots[0], scratch.first, scratch.second
        np.multiply(gradient, gradient, out=change)
        np.multiply(change, rest, out=change)
        np.multiply(square, alpha, out=square)
        np.add(square, change, out=square)
        if not self.optimizer.centered:
            np.sqrt(square, out=change)
            return
        mean = slots[1]
        np.multiply(gradient, rest, out=change)
        np.multiply(mean, alpha, out=mean)
        np.add(mean, change, out=mean)
        np.multiply(mean, mean, out=other)
        np.subtract(square, other, out=change)
        np.maximum(change, 0, out=change)
        np.sqrt(change, out=change)
