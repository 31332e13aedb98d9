"""A replica that applies the merged gradient has the bits of the server that merged it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvd.compute.compiled import kernels_in_use, warm_up
from kvd.compute.merge import TILE, accumulator_dtype
from kvd.compute.optimizers import SliceState, apply_update
from kvd.compute.tensors import DTYPES
from kvd.errors import DtypeMismatch, NotAllowed, ShapeMismatch
from kvd.optimizer import SGD, Adam, Optimizer
from tests.compute.compiled_harness import (
    FLOATS,
    Array,
    assert_same_bits,
    needs_numba,
    numbers,
    only_compiled,
    only_numpy,
)
from tests.compute.test_compiled_bits import RULES
from tests.compute.test_custom_optimizers import SignDescent

MODES = ("sum", "mean", "weighted")


def by_hand(given: list[Array], mode: str, samples: list[int]) -> Array:
    """The merge as the table in `kvd.compute.merge` says, one number after the other."""
    wide: Any = accumulator_dtype(given[0].dtype).type
    counted = [(array, 1) for array in given]
    if mode == "weighted":
        counted = [(array, number) for array, number in zip(given, samples, strict=True) if number]
    merged = []
    with np.errstate(all="ignore"):
        for column in range(given[0].size):
            total: Any = None
            for array, number in counted:
                term = wide(array[column]) * wide(number) if mode == "weighted" else wide(array[column])
                total = term if total is None else total + term
            if mode == "mean" and len(given) > 1:
                total = total / wide(len(given))
            if mode == "weighted":
                total = total / wide(sum(samples))
            merged.append(total)
    return np.array(merged, wide)


def three_servers(rule: Optimizer, dtype: str, size: int, count: int, mode: Any, tile: int = TILE) -> None:
    """One that merges and updates, one that keeps what it merged, and a third that is given that."""
    random = np.random.default_rng([size, count])
    what = f"{rule} {dtype} {size} {count} {mode}"
    wide = accumulator_dtype(DTYPES[dtype])
    states = [SliceState(), SliceState(), SliceState()]
    weights = [numbers(random, size, dtype)] * 3
    samples = [*random.integers(0, 4, count - 1).tolist(), 3]
    for step in range(3):
        given = [numbers(random, size, dtype) for _ in range(count)]
        outs = [np.empty_like(weights[0]) for _ in range(3)]
        merged = np.full(size, 7, wide)
        apply_update(rule, states[0], weights[0], given, outs[0], mode, samples, tile)
        apply_update(rule, states[1], weights[1], given, outs[1], mode, samples, tile, merged=merged)
        assert_same_bits(merged, by_hand(given, mode, samples), f"{what}, what was merged")
        merged.flags.writeable = False
        apply_update(rule, states[2], weights[2], [merged], outs[2], mode, [], tile, is_merged=True)
        for place, other in enumerate(outs[1:]):
            assert_same_bits(outs[0], other, f"{what}, step {step}, server {place + 1}")
        weights = outs
    expected = states[0].export()
    for state in states[1:]:
        exported = state.export()
        assert expected.keys() == exported.keys()
        for name, array in expected.items():
            if name == "step":
                assert array == exported[name]
            else:
                assert_same_bits(array, exported[name], f"{what}, {name}")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rule", [*RULES, SignDescent(0.1)], ids=repr)
def test_numpy_gives_every_server_the_same_bits(rule: Optimizer, dtype: str) -> None:
    with only_numpy():
        for count in range(1, 6):
            for mode in MODES:
                three_servers(rule, dtype, 200, count, mode)
        three_servers(rule, dtype, 200, 2, "weighted", tile=64)
        three_servers(rule, dtype, 0, 2, "sum")


#: Each rule and each dtype. `test_compiled_bits` has all pairs, without the merged gradients.
COMPILED = [(rule, FLOATS[place % len(FLOATS)]) for place, rule in enumerate(RULES)]


@needs_numba
@pytest.mark.parametrize(("rule", "dtype"), COMPILED, ids=repr)
def test_compiled_loops_give_every_server_the_same_bits(rule: Optimizer, dtype: str) -> None:
    assert warm_up(rule, DTYPES[dtype], keeps_merged=True), kernels_in_use()
    with only_compiled() as used:
        for count in range(1, 6):
            for mode in MODES:
                three_servers(rule, dtype, 200, count, mode)
        three_servers(rule, dtype, 200, 2, "weighted", tile=64)
        three_servers(rule, dtype, 0, 2, "sum")
    assert used


@needs_numba
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_server_with_compiled_loops_and_a_replica_without_have_the_same_bits(dtype: str) -> None:
    rule = Adam(0.01, wd=0.1, clip_gradient=1.0)
    assert warm_up(rule, DTYPES[dtype], keeps_merged=True), kernels_in_use()
    random = np.random.default_rng(5)
    given = [numbers(random, 1000, dtype) for _ in range(2)]
    current = numbers(random, 1000, dtype)
    merged, outs = np.empty(1000, accumulator_dtype(current.dtype)), [np.empty_like(current) for _ in range(2)]
    with only_compiled():
        apply_update(rule, SliceState(), current, given, outs[0], "mean", merged=merged)
    with only_numpy():
        apply_update(rule, SliceState(), current, [merged], outs[1], is_merged=True)
    assert_same_bits(outs[0], outs[1], dtype)


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    value, wide = np.ones(3, np.float16), np.ones(3, np.float32)
    state = SliceState()
    for expected, given, options in (
        (DtypeMismatch, [value], {"is_merged": True}),
        (ShapeMismatch, [np.ones(2, np.float32)], {"is_merged": True}),
        (NotAllowed, [wide, wide], {"is_merged": True}),
        (NotAllowed, [], {"is_merged": True}),
        (DtypeMismatch, [value], {"merged": value.copy()}),
        (ShapeMismatch, [value], {"merged": np.ones(2, np.float32)}),
    ):
        with pytest.raises(expected):
            apply_update(SGD(0.1, momentum=0.5), state, value, given, value.copy(), **options)
    for options in ({"is_merged": True}, {"merged": wide.copy()}):
        with pytest.raises(NotAllowed, match="without an optimizer"):
            apply_update(None, state, wide, [wide], wide.copy(), **options)
    assert state == SliceState()
