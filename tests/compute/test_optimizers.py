"""The fused apply: merges, dtypes, float32 masters, and bits that do not depend on tiles."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.compute.optimizers import SliceState, apply_update, scalars
from kvd.compute.tensors import BFLOAT16, DTYPES
from kvd.errors import DtypeMismatch, NotAllowed
from kvd.optimizer import SGD, Adam, AdamW, Optimizer, RMSProp, schedule
from tests.compute.optimizer_harness import RULES, SIZE, Array, by_formula, gradients_of, start, trained


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
    # The master is exact to float32; the served weight is the master, rounded once to 8 or 11 bits.
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
