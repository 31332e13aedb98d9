"""The fused apply: every optimizer against its formula and against torch, masters, bits, and saved states."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvd.compute.optimizers import Kernel, SliceState, apply_update, kernel_of, scalars
from kvd.compute.scratch import Scratch
from kvd.compute.tensors import BFLOAT16, DTYPES
from kvd.errors import ConfigError, DtypeMismatch, NotAllowed, ProtocolError, ShapeMismatch
from kvd.optimizer import SGD, Adagrad, Adam, AdamW, Optimizer, RMSProp, schedule

Array = np.ndarray[Any, Any]
STEPS = 30
SIZE = 57


def gradients_of(dtype: Any, count: int = STEPS) -> list[Array]:
    random = np.random.default_rng(7)
    return [random.normal(size=SIZE).astype(dtype) for _ in range(count)]


def start(dtype: Any) -> Array:
    return np.random.default_rng(1).normal(size=SIZE).astype(dtype)


def trained(optimizer: Optimizer, weight: Array, gradients: Sequence[Array], tile: int = 65536) -> Array:
    """The weight after one update per gradient, each written to other memory than the last."""
    state = SliceState()
    current, following = weight.copy(), np.full_like(weight, 99)
    for gradient in gradients:
        served = current.copy()
        apply_update(optimizer, state, current, [gradient], following, "sum", tile=tile)
        assert current.tobytes() == served.tobytes()
        current, following = following, current
    assert state.step == len(gradients)
    return current


# --- The formulas once more, in float64, one number after the other -------------------------------------------------


def prepared(rule: Any, weight: float, gradient: float, wd: float) -> float:
    gradient *= rule.rescale_grad
    if rule.clip_gradient is not None:
        gradient = max(-rule.clip_gradient, min(rule.clip_gradient, gradient))
    return gradient + wd * weight


def by_sgd(rule: SGD, weight: float, gradients: Sequence[float]) -> float:
    velocity = 0.0
    for step, raw in enumerate(gradients, 1):
        gradient = prepared(rule, weight, raw, rule.wd)
        velocity = rule.momentum * velocity + gradient
        weight -= rule.rate(step) * (gradient + rule.momentum * velocity if rule.nesterov else velocity)
    return weight


def by_adam(rule: Adam | AdamW, weight: float, gradients: Sequence[float]) -> float:
    first = second = 0.0
    for step, raw in enumerate(gradients, 1):
        if isinstance(rule, AdamW):
            gradient = prepared(rule, weight, raw, 0.0)
            weight -= rule.rate(step) * rule.wd * weight
        else:
            gradient = prepared(rule, weight, raw, rule.wd)
        first = rule.beta1 * first + (1 - rule.beta1) * gradient
        second = rule.beta2 * second + (1 - rule.beta2) * gradient * gradient
        corrected = first / (1 - rule.beta1**step)
        weight -= rule.rate(step) * corrected / (math.sqrt(second / (1 - rule.beta2**step)) + rule.epsilon)
    return weight


def by_adagrad(rule: Adagrad, weight: float, gradients: Sequence[float]) -> float:
    total = 0.0
    for step, raw in enumerate(gradients, 1):
        gradient = prepared(rule, weight, raw, rule.wd)
        total += gradient * gradient
        rate = rule.rate(step) / (1 + (step - 1) * rule.lr_decay)
        weight -= rate * gradient / (math.sqrt(total) + rule.epsilon)
    return weight


def by_rmsprop(rule: RMSProp, weight: float, gradients: Sequence[float]) -> float:
    square = mean = velocity = 0.0
    for step, raw in enumerate(gradients, 1):
        gradient = prepared(rule, weight, raw, rule.wd)
        square = rule.alpha * square + (1 - rule.alpha) * gradient * gradient
        mean = rule.alpha * mean + (1 - rule.alpha) * gradient
        spread = max(square - mean * mean, 0) if rule.centered else square
        velocity = rule.momentum * velocity + gradient / (math.sqrt(spread) + rule.epsilon)
        weight -= rule.rate(step) * velocity
    return weight


def by_formula(rule: Optimizer, weight: Array, gradients: Sequence[Array]) -> Array:
    formulas: dict[type[Optimizer], Callable[..., float]] = {
        SGD: by_sgd,
        Adam: by_adam,
        AdamW: by_adam,
        Adagrad: by_adagrad,
        RMSProp: by_rmsprop,
    }
    columns = np.stack([gradient.astype(np.float64) for gradient in gradients]).T.tolist()
    starts = weight.astype(np.float64).tolist()
    return np.array([formulas[type(rule)](rule, w, column) for w, column in zip(starts, columns, strict=True)])


# --- The same by torch ----------------------------------------------------------------------------------------------

_TORCH_NAMES = {"wd": "weight_decay", "epsilon": "eps"}
_TORCH_CLASSES: dict[type[Optimizer], Any] = {
    SGD: torch.optim.SGD,
    Adam: torch.optim.Adam,
    AdamW: torch.optim.AdamW,
    Adagrad: torch.optim.Adagrad,
    RMSProp: torch.optim.RMSprop,
}


def by_torch(rule: Any, weight: Array, gradients: Sequence[Array]) -> Array:
    """torch.optim in the dtype of ``weight``, clipped and rescaled by hand, with the learning rate set at each step."""
    names = [name for name in rule.__dataclass_fields__ if name in ("momentum", "nesterov", "wd", "epsilon", "alpha")]
    options = {_TORCH_NAMES.get(name, name): getattr(rule, name) for name in names}
    options |= {name: getattr(rule, name) for name in ("centered", "lr_decay") if hasattr(rule, name)}
    if hasattr(rule, "beta1"):
        options["betas"] = (rule.beta1, rule.beta2)
    parameter = torch.tensor(weight)
    optimizer = _TORCH_CLASSES[type(rule)]([parameter], lr=rule.rate(1), **options)
    for step, gradient in enumerate(gradients, 1):
        optimizer.param_groups[0]["lr"] = rule.rate(step)
        parameter.grad = torch.tensor(gradient) * rule.rescale_grad
        if rule.clip_gradient is not None:
            parameter.grad = parameter.grad.clamp(-rule.clip_gradient, rule.clip_gradient)
        optimizer.step()
    return parameter.numpy()


RULES: list[Optimizer] = [
    SGD(0.1),
    SGD(0.1, wd=0.05),
    SGD(0.1, momentum=0.9),
    SGD(0.05, momentum=0.9, wd=0.05, rescale_grad=0.25, clip_gradient=0.3),
    SGD(0.05, momentum=0.8, nesterov=True, wd=0.01),
    SGD(schedule.Warmup(schedule.Cosine(0.2, 20), 5), momentum=0.9),
    Adam(0.01),
    Adam(0.01, beta1=0.5, beta2=0.9, epsilon=1e-3, wd=0.1, rescale_grad=2.0, clip_gradient=1.0),
    Adam(schedule.Step(0.05, 7, 0.5)),
    AdamW(0.01),
    AdamW(0.05, wd=0.3, clip_gradient=0.5),
    Adagrad(0.1),
    Adagrad(0.1, lr_decay=0.05, wd=0.02, epsilon=1e-4),
    RMSProp(0.01),
    RMSProp(0.01, alpha=0.9, momentum=0.9, wd=0.01),
    RMSProp(0.01, alpha=0.9, centered=True, epsilon=1e-3),
    RMSProp(0.01, alpha=0.8, centered=True, momentum=0.5, epsilon=1e-2, rescale_grad=0.5, clip_gradient=0.4),
]


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize(("dtype", "error"), [(np.float64, 1e-11), (np.float32, 2e-5)])
def test_every_optimizer_follows_its_formula(rule: Optimizer, dtype: Any, error: float) -> None:
    weight, gradients = start(dtype), gradients_of(dtype)
    result = trained(rule, weight, gradients)
    np.testing.assert_allclose(result, by_formula(rule, weight, gradients), rtol=error, atol=error)
    assert np.median(np.abs(result - weight)) > 100 * error, "nothing would be shown by weights that do not move"


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize(("dtype", "error"), [(np.float64, 1e-11), (np.float32, 2e-5)])
def test_every_optimizer_follows_torch(rule: Optimizer, dtype: Any, error: float) -> None:
    weight, gradients = start(dtype), gradients_of(dtype)
    result = trained(rule, weight, gradients)
    np.testing.assert_allclose(result, by_torch(rule, weight, gradients), rtol=error, atol=error)


def test_golden_steps_of_sgd_by_hand() -> None:
    # b₁ = 2, w₁ = 1 − 0.5·2 = 0; b₂ = 0.5·2 + 2 = 3, w₂ = 0 − 0.5·3 = −1.5: all exact in binary.
    rule = SGD(0.5, momentum=0.5)
    two = np.array([2], np.float32)
    assert trained(rule, np.array([1], np.float32), [two]).tolist() == [0]
    assert trained(rule, np.array([1], np.float32), [two, two]).tolist() == [-1.5]
    # The order: 8 is rescaled to 4, clipped to 3, and only then decayed: g = 3 + 0.5·1, w = 1 − 0.5·3.5.
    rule = SGD(0.5, wd=0.5, rescale_grad=0.5, clip_gradient=3)
    assert trained(rule, np.array([1], np.float32), [np.array([8], np.float32)]).tolist() == [-0.75]


def test_a_gradient_without_spread_does_not_make_centered_rmsprop_nan() -> None:
    # With a constant gradient v − a² tends to 0, and for many of these magnitudes rounding takes it below.
    constant = np.linspace(0.01, 3, SIZE).astype(np.float32)
    rule = RMSProp(1e-3, alpha=0.9, centered=True, epsilon=1e-3)
    assert np.isfinite(trained(rule, start(np.float32), [constant] * 400)).all()


def test_a_nan_in_the_gradient_shows_in_the_weight_also_when_clipped() -> None:
    poison = np.array([np.nan, 1], np.float32)
    result = trained(SGD(0.5, clip_gradient=1), np.zeros(2, np.float32), [poison])
    assert np.isnan(result[0])
    assert result[1] == -0.5


# --- Merging, dtypes and masters ------------------------------------------------------------------------------------


def test_what_is_applied_is_the_merge_in_order() -> None:
    large = 2.0**24
    for rows, expected in (([large, -large, 1], -1), ([large, 1, -large], 0)):
        contributions = [np.array([value], np.float32) for value in rows]
        out = np.empty(1, np.float32)
        apply_update(SGD(1.0), SliceState(), np.zeros(1, np.float32), contributions, out, "sum")
        assert out.tolist() == [expected]


@pytest.mark.parametrize(("mode", "merged"), [("sum", 12), ("mean", 6), ("weighted", 7)])
def test_the_mode_of_the_merge_reaches_the_optimizer(mode: Any, merged: float) -> None:
    contributions = [np.full(5, 4, np.float32), np.full(5, 8, np.float32)]
    out = np.empty(5, np.float32)
    apply_update(SGD(1.0), SliceState(), np.zeros(5, np.float32), contributions, out, mode, [1, 3])
    assert out.tolist() == [-merged] * 5


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_an_optimizer_the_merged_value_is_assigned(dtype: str) -> None:
    kind = DTYPES[dtype]
    current, out = np.full(3, 50).astype(kind), np.zeros(3).astype(kind)
    state = SliceState(step=4, master=np.ones(3, np.float32) if kind.itemsize == 2 else None)
    apply_update(None, state, current, [np.array([1, 2, 3]).astype(kind), np.full(3, 4).astype(kind)], out, "sum")
    assert out.astype(np.float64).tolist() == [5, 6, 7]
    assert (state.step, state.master) == (4, None)


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16])
@pytest.mark.parametrize("rule", [SGD(0.01, momentum=0.9), Adam(0.01), AdamW(0.01), RMSProp(0.001)], ids=repr)
def test_halves_are_updated_through_a_float32_master(dtype: Any, rule: Optimizer) -> None:
    weight, gradients = start(dtype), gradients_of(dtype)
    exact = by_formula(rule, weight, gradients)
    result = trained(rule, weight, gradients).astype(np.float64)
    # The master is right to float32; what is served is it, rounded once to 8 or 11 bits.
    np.testing.assert_allclose(result, exact, rtol=2.0**-8 if dtype == BFLOAT16 else 2.0**-11, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16])
def test_tiny_steps_do_not_stall_in_half_precision(dtype: Any) -> None:
    rule = SGD(2.0**-12)
    ones = [np.ones(4).astype(dtype)] * 1024
    naive = np.ones(4).astype(dtype)
    for gradient in ones:
        naive = (naive - (gradient.astype(np.float32) * np.float32(2.0**-12)).astype(dtype)).astype(dtype)
    assert (naive == 1).all(), "in the half dtype itself, 1 − 2⁻¹² is 1: it would stall"
    assert trained(rule, np.ones(4).astype(dtype), ones).astype(np.float64).tolist() == [0.75] * 4


def test_several_halves_are_merged_before_they_are_rounded() -> None:
    # 2048 + 1 is no float16: the ones must survive until the update.
    contributions = [np.array([value], np.float16) for value in (2048, 1, -2048)]
    out = np.empty(1, np.float16)
    apply_update(SGD(1.0), SliceState(), np.zeros(1, np.float16), contributions, out, "sum")
    assert out.tolist() == [-1]


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8"])
def test_an_optimizer_updates_no_integers(dtype: str) -> None:
    value = np.ones(2, DTYPES[dtype])
    with pytest.raises(DtypeMismatch, match=dtype):
        apply_update(SGD(0.1), SliceState(), value, [value], value.copy(), "sum")


# --- Bits -----------------------------------------------------------------------------------------------------------


def shifted(array: Array, offset: int) -> Array:
    """The same numbers in memory that begins ``offset`` bytes after a boundary."""
    memory = np.zeros(array.nbytes + 64, np.uint8)
    begin = -memory.ctypes.data % 64 + offset
    moved = memory[begin : begin + array.nbytes].view(array.dtype)
    moved[...] = array
    return moved


_BIT_DTYPES = st.sampled_from(["float16", "bfloat16", "float32", "float64"])


@given(
    st.sampled_from(RULES),
    _BIT_DTYPES,
    st.integers(0, 90),
    st.integers(1, 95),
    st.integers(0, 9),
    st.integers(0, 2**32),
)
def test_the_bits_depend_on_neither_tiles_nor_alignment(
    rule: Optimizer, dtype: str, size: int, tile: int, offset: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    states = SliceState(), SliceState()
    current = (random.normal(size=size) * 10.0 ** random.integers(-6, 4, size)).astype(DTYPES[dtype])
    for _ in range(3):
        contributions = [random.normal(size=size).astype(DTYPES[dtype]) for _ in range(2)]
        whole, parts = np.empty_like(current), shifted(current, offset)
        apply_update(rule, states[0], current, contributions, whole, "weighted", [2, 3])
        moved = [shifted(array, offset + 1) for array in contributions]
        apply_update(rule, states[1], shifted(current, offset), moved, parts, "weighted", [2, 3], tile)
        assert whole.tobytes() == parts.tobytes()
        current = whole
    for name, array in states[0].export().items():
        assert array.tobytes() == states[1].export()[name].tobytes()


def test_each_step_of_adam_is_one_rounded_float32_operation() -> None:
    rule = Adam(0.003, beta1=0.9, beta2=0.99, epsilon=1e-6, wd=0.01, rescale_grad=0.3, clip_gradient=0.2)
    single = np.float32
    weight, gradients = start(np.float32), gradients_of(np.float32, 5)
    expected = []
    for index in range(SIZE):
        w, m, v = weight[index], single(0), single(0)
        for step, values in enumerate(gradients, 1):
            root = math.sqrt(1 - 0.99**step)
            g = min(max(values[index] * single(0.3), single(-0.2)), single(0.2))
            g = g + w * single(0.01)
            m = m * single(0.9) + g * single(1 - 0.9)
            v = v * single(0.99) + g * g * single(1 - 0.99)
            w = w - m / (np.sqrt(v) + single(1e-6 * root)) * single(0.003 * root / (1 - 0.9**step))
        expected.append(w)
    assert trained(rule, weight, gradients, tile=8).tobytes() == np.array(expected, single).tobytes()


def test_the_scalars_of_another_server_are_used_as_they_are() -> None:
    rule = Adam(schedule.Cosine(0.1, 10), clip_gradient=2.0, wd=0.25)
    numbers = scalars(rule, 3)
    assert all(type(number) is float for number in numbers)
    assert numbers[:3] == (1.0, 2.0, 0.25)
    assert scalars(AdamW(), 1)[:3] == (1.0, math.inf, 0.0)
    results = []
    for chosen in (None, numbers, scalars(replace(rule, learning_rate=0.05), 3)):
        out = np.empty(SIZE, np.float32)
        state = SliceState(step=2)
        current, gradient = start(np.float32), gradients_of(np.float32)[0]
        apply_update(rule, state, current, [gradient], out, "sum", step_scalars=chosen)
        results.append(out.tobytes())
    assert results[0] == results[1] != results[2]
    with pytest.raises(NotAllowed, match="scalars"):
        apply_update(rule, SliceState(), current, [gradient], out, "sum", step_scalars=(1.0, 2.0))


# --- States ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("rule", [SGD(0.1), SGD(0.1, 0.9), Adam(), RMSProp(momentum=0.9, centered=True)], ids=repr)
def test_a_loaded_state_goes_on_with_the_same_bits(dtype: str, rule: Optimizer) -> None:
    kind = DTYPES[dtype]
    weight, gradients = start(kind), gradients_of(kind)
    state = SliceState()
    current, out = weight, np.empty_like(weight)
    for gradient in gradients[:10]:
        apply_update(rule, state, current, [gradient], out, "sum")
        current, out = out, np.empty_like(out)
    saved = state.export()
    for gradient in gradients[10:]:
        apply_update(rule, state, current, [gradient], out, "sum")
        current, out = out, np.empty_like(out)
    assert int(saved["step"]) == 10
    resumed = SliceState.load(saved)
    assert resumed.nbytes == sum(array.nbytes for name, array in saved.items() if name != "step")
    # Start again from the weights after ten updates, which follow from the first ten gradients.
    again, out = trained(rule, weight, gradients[:10]), np.empty_like(weight)
    for gradient in gradients[10:]:
        apply_update(rule, resumed, again, [gradient], out, "sum")
        again, out = out, np.empty_like(out)
    assert again.tobytes() == current.tobytes()
    assert resumed.step == STEPS


def test_slots_appear_when_they_are_first_needed() -> None:
    state, weight, gradient = SliceState(), start(np.float32), gradients_of(np.float32)[0]
    apply_update(SGD(0.1), state, weight, [gradient], np.empty_like(weight), "sum")
    assert (state.slots, state.master) == ({}, None)
    apply_update(SGD(0.1, 0.9), state, weight, [gradient], np.empty_like(weight), "sum")
    assert state.slots["momentum"].tobytes() == gradient.tobytes()
    assert set(kernel_of(RMSProp(momentum=0.1, centered=True)).slot_names) == {"square", "mean", "momentum"}


@pytest.mark.parametrize(
    "arrays",
    [
        {},
        {"step": np.array(-1)},
        {"step": np.array(1.0)},
        {"step": np.array([1])},
        {"step": np.array(1), "weight": np.zeros(2, np.float32)},
        {"step": np.array(1), "slot/mean": np.zeros(2, np.int32)},
        {"step": np.array(1), "slot/mean": np.zeros((2, 2), np.float32)},
        {"step": np.array(1), "master": np.zeros(2, np.float64)},
        {"step": np.array(1), "slot/mean": np.zeros(2, np.float32), "slot/variance": np.zeros(3, np.float32)},
    ],
)
def test_arrays_that_are_no_state_are_refused(arrays: dict[str, Array]) -> None:
    with pytest.raises(ProtocolError):
        SliceState.load(arrays)


def overlapping() -> tuple[Array, Array]:
    memory = np.zeros(6, np.float32)
    return memory[:4], memory[2:]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"out": np.zeros(3, np.float32)}, ShapeMismatch),
        ({"out": np.zeros(4, np.float64)}, DtypeMismatch),
        ({"current": np.zeros((2, 2), np.float32), "out": np.zeros((2, 2), np.float32)}, ShapeMismatch),
        ({"contributions": [np.zeros(3, np.float32)]}, ShapeMismatch),
        ({"contributions": [np.zeros(4, np.float64)]}, DtypeMismatch),
        ({"contributions": []}, NotAllowed),
        ({"mode": "weighted"}, NotAllowed),
        ({"state": SliceState(slots={"mean": np.zeros(3, np.float32)})}, ShapeMismatch),
        ({"state": SliceState(slots={"mean": np.zeros(4, np.float64)})}, DtypeMismatch),
        ({"state": SliceState(master=np.zeros(4, np.float32))}, DtypeMismatch),
        (dict(zip(("current", "out"), overlapping(), strict=True)), NotAllowed),
    ],
)
def test_a_refused_update_changes_nothing(changes: dict[str, Any], error: type[Exception]) -> None:
    arguments: dict[str, Any] = {
        "optimizer": Adam(),
        "state": SliceState(),
        "current": np.zeros(4, np.float32),
        "contributions": [np.ones(4, np.float32)],
        "out": np.zeros(4, np.float32),
        "mode": "sum",
    } | changes
    state = arguments["state"]
    names = set(state.slots)
    with pytest.raises(error):
        apply_update(**arguments)
    assert not arguments["out"].any()
    assert (state.step, set(state.slots)) == (0, names)


# --- Custom optimizers ----------------------------------------------------------------------------------------------


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
