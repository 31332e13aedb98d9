"""Optimizers that bring a kernel of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from kvd.compute.optimizers import Kernel, SliceState, apply_update
from kvd.compute.scratch import Scratch
from kvd.errors import ConfigError
from kvd.optimizer import SGD, Optimizer, schedule
from tests.compute.optimizer_harness import Array, trained


@dataclass(frozen=True, slots=True)
class SignKernel:
    """w − η·sign(m), m = decay·m + g: a custom kernel with a slot."""

    optimizer: SignDescent

    @property
    def slot_names(self) -> Sequence[str]:
        return ("trace",)

    def scalars(self, step: int) -> tuple[float, ...]:
        return self.optimizer.rate(step), self.optimizer.decay

    def update_tile(
        self,
        weight: Array,
        gradient: Array,
        out: Array,
        slots: Sequence[Array],
        scalars: Sequence[Array],
        scratch: Scratch,
    ) -> None:
        rate, decay = scalars
        trace = slots[0]
        np.multiply(trace, decay, out=trace)
        np.add(trace, gradient, out=trace)
        np.sign(trace, out=scratch.second)
        np.multiply(scratch.second, rate, out=scratch.second)
        np.subtract(weight, scratch.second, out=out)


@dataclass(frozen=True, slots=True)
class SignDescent(SGD):
    """A custom optimizer, derived from a built-in one to see that its own kernel counts."""

    decay: float = 0.5

    def kernel(self) -> Kernel:
        return SignKernel(self)


@dataclass(frozen=True, slots=True)
class Idle(Optimizer):
    learning_rate: float | schedule.Schedule
    wd: float = 0.0
    rescale_grad: float = 1.0
    clip_gradient: float | None = None


def test_a_custom_optimizer_brings_its_own_arithmetic() -> None:
    # traces: (4, −1) → signs (+, −); then 0.5·4 − 3 = −1 and −0.5 + 0 → signs (−, −).
    gradients = [np.array([4, -1], np.float32), np.array([-3, 0], np.float32)]
    for tile in (1, 2):
        result = trained(SignDescent(0.25), np.zeros(2, np.float32), gradients, tile)
        assert result.tolist() == [0.0, 0.5]


def test_an_optimizer_without_arithmetic_is_refused() -> None:
    value = np.zeros(2, np.float32)
    with pytest.raises(ConfigError, match=r"kernel\(\)"):
        apply_update(Idle(0.1), SliceState(), value, [value], value.copy(), "sum")


class FailingKernel(SignKernel):
    """Calculates one tile, and raises an error in the next."""

    def update_tile(
        self,
        weight: Array,
        gradient: Array,
        out: Array,
        slots: Sequence[Array],
        scalars: Sequence[Array],
        scratch: Scratch,
    ) -> None:
        if gradient[0] == 13:
            raise ZeroDivisionError
        SignKernel.update_tile(self, weight, gradient, out, slots, scalars, scratch)


@dataclass(frozen=True, slots=True)
class Failing(SignDescent):
    def kernel(self) -> Kernel:
        return FailingKernel(self)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_kernel_that_raises_an_error_in_a_later_tile_has_changed_nothing(dtype: type) -> None:
    rule, state = Failing(0.25), SliceState()
    current: Array = np.zeros(2, dtype)
    for gradients in ([1, 1], [2, 2]):
        before = state.copy()
        with pytest.raises(ZeroDivisionError):
            apply_update(rule, state, current, [np.array([5, 13], dtype)], current.copy(), "sum", tile=1)
        assert repr(state) == repr(before)
        out: Array = np.empty(2, dtype)
        apply_update(rule, state, current, [np.array(gradients, dtype)], out, "sum", tile=1)
        current = out
    assert state.slots["trace"].tolist() == [2.5, 2.5]
