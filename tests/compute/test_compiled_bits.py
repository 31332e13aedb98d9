"""Compiled loops give the very bits of the NumPy kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvd.compute.compiled import kernels_in_use, warm_up
from kvd.compute.merge import TILE
from kvd.compute.optimizers import SliceState, apply_update
from kvd.compute.tensors import BFLOAT16, DTYPES
from kvd.optimizer import SGD, Adagrad, Adam, AdamW, Optimizer, RMSProp, schedule
from tests.compute.compiled_harness import (
    FLOATS,
    assert_both_agree,
    assert_same_bits,
    needs_numba,
    only_compiled,
    updates,
)

RULES: list[Optimizer] = [
    SGD(0.1),
    SGD(0.1, wd=0.05, rescale_grad=0.3, clip_gradient=0.7),
    SGD(0.1, momentum=0.9),
    SGD(0.05, momentum=0.9, wd=1e-60, rescale_grad=0.25, clip_gradient=1e-60),
    SGD(0.05, momentum=0.8, nesterov=True, wd=0.01),
    Adam(schedule.Warmup(schedule.Cosine(0.2, 20), 5)),
    Adam(0.01, beta1=0.5, beta2=0.9, epsilon=0.0, wd=0.1, rescale_grad=2.0, clip_gradient=1.0),
    AdamW(0.05, wd=0.3, clip_gradient=1e300),
    Adagrad(0.1, lr_decay=0.05, wd=0.02, epsilon=0.0),
    RMSProp(0.01, wd=0.01),
    RMSProp(0.01, alpha=0.9, momentum=0.9),
    RMSProp(0.01, alpha=0.9, centered=True, epsilon=0.0),
    RMSProp(0.01, alpha=0.8, centered=True, momentum=0.5, epsilon=1e-2, rescale_grad=0.5, clip_gradient=0.4),
]


@needs_numba
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_every_optimizer_has_the_bits_of_its_numpy_kernel(rule: Optimizer, dtype: str) -> None:
    assert warm_up(rule, DTYPES[dtype]), kernels_in_use()
    for count in (1, 2, 3, 5):
        for mode in ("sum", "mean", "weighted"):
            assert_both_agree(rule, dtype, 500, count, mode)
        for size in (0, 1, 7):
            assert_both_agree(rule, dtype, size, count, "weighted")


@needs_numba
@pytest.mark.parametrize("size", [TILE - 1, TILE, TILE + 1, 3 * TILE])
@pytest.mark.parametrize(("rule", "dtype"), [(SGD(0.1, 0.9), "float32"), (Adam(), "bfloat16"), (Adam(), "float64")])
def test_the_bits_do_not_depend_on_the_tiles(rule: Optimizer, dtype: str, size: int) -> None:
    assert warm_up(rule, DTYPES[dtype]), kernels_in_use()
    for count in (1, 2, 3):
        assert_both_agree(rule, dtype, size, count, "weighted", steps=2)


@needs_numba
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mode", ["sum", "mean", "weighted"])
def test_a_merge_has_the_bits_of_numpy(dtype: str, mode: Any) -> None:
    assert warm_up(None, DTYPES[dtype]), kernels_in_use()
    for size in (0, 1, 7, TILE - 1, TILE, TILE + 1, 3 * TILE):
        for count in (1, 2, 3, 5):
            assert_both_agree(None, dtype, size, count, mode, steps=1)
    with only_compiled() as used:
        updates(None, dtype, 7, 2, mode, 1)
    assert used == (["merge"] if mode != "sum" or dtype in ("float16", "bfloat16") else [])


@needs_numba
def test_nothing_is_contracted_to_a_fused_multiply_add() -> None:
    # x·x = 1 + 2⁻¹¹ + 2⁻²⁴ is rounded to 1 + 2⁻¹¹ by a multiplication, and not at all by a fused one.
    x = 1 + 2.0**-12
    rule = SGD(x, momentum=0.5)
    assert warm_up(rule)
    out = np.empty(64, np.float32)
    with only_compiled():
        apply_update(
            rule, SliceState(), np.full(64, 1 + 2.0**-11, np.float32), [np.full(64, x, np.float32)], out, "sum"
        )
    assert not out.any()


@needs_numba
def test_every_half_is_widened_and_rounded_as_numpy_does_it() -> None:
    from kvd.compute import jit

    patterns = np.arange(2**16, dtype=np.uint16)
    pairs: list[tuple[Any, Any, Any, Any]] = [
        (np.dtype(np.float16), np.int16, jit.wide_float16, jit.narrow_float16),
        (BFLOAT16, np.uint16, jit.wide_bfloat16, jit.narrow_bfloat16),
    ]
    for dtype, bits, wide, narrow in pairs:
        halves = patterns.view(dtype)
        widened = np.array([wide(value) for value in patterns.view(bits)], np.float32)
        assert_same_bits(widened, halves.astype(np.float32), f"{dtype} widened")
        # Every half, what lies in the middle between two of them, and the float32 on either side of both.
        finite = widened[np.isfinite(widened)]
        ordered = np.unique(finite).astype(np.float64)
        spaced = np.concatenate([finite, ((ordered[:-1] + ordered[1:]) / 2).astype(np.float32)])
        infinity = np.float32(np.inf)
        values = np.concatenate([spaced, np.nextafter(spaced, infinity), np.nextafter(spaced, -infinity), widened])
        with np.errstate(all="ignore"):
            expected = values.astype(dtype)
        rounded = np.array([narrow(value) for value in values]).astype(np.uint16).view(dtype)
        assert_same_bits(rounded, expected, f"rounded to {dtype}")


@needs_numba
def test_a_nan_of_bfloat16_has_one_pattern_for_each_sign() -> None:
    from kvd.compute import jit

    patterns = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFC12345], np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        expected = patterns.astype(BFLOAT16).view(np.uint16).tolist()
    assert [jit.narrow_bfloat16(value) for value in patterns] == expected == [0x7FC0, 0x7FC0, 0xFFC0, 0xFFC0]


@needs_numba
def test_memory_that_is_read_only_and_not_aligned_is_taken_and_strides_are_left_to_numpy() -> None:
    rule = SGD(0.5, momentum=0.5)
    assert warm_up(rule)
    frozen = np.frombuffer(b"\0" + np.arange(8, dtype=np.float32).tobytes(), np.float32, 8, 1)
    results = []
    for given in (frozen, np.arange(8, dtype=np.float32).repeat(2)[::2]):
        out = np.empty(8, np.float32)
        apply_update(rule, SliceState(), np.ones(8, np.float32), [given, given], out, "sum")
        results.append(out.tolist())
    assert results == [[1 - 0.5 * 2 * value for value in range(8)]] * 2
    backwards = np.empty(8, np.float32)[::-1]
    apply_update(rule, SliceState(), np.ones(8, np.float32), [frozen, frozen], backwards, "sum")
    assert backwards.tolist() == results[0]
