"""Merging: the order, the three modes, and the dtypes."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvd.compute.merge import MergeMode, merge, merge_tile, plan_merge
from kvd.compute.tensors import DTYPES
from kvd.errors import DtypeMismatch, NotAllowed, ShapeMismatch

HALVES = ["float16", "bfloat16"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
INTEGERS = ["int8", "int32", "int64", "uint8"]


def merged(
    dtype: str, rows: list[list[float]], mode: MergeMode, samples: list[int] | None = None, tile: int = 65536
) -> list[float]:
    arrays = [np.array(row).astype(DTYPES[dtype]) for row in rows]
    out = np.full(arrays[0].shape, 99).astype(DTYPES[dtype])
    before = [array.copy() for array in arrays]
    merge(arrays, out, mode, samples, tile)
    for array, copy in zip(arrays, before, strict=True):
        assert array.tobytes() == copy.tobytes()
    return [float(value) for value in out]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_golden_table_of_sums_and_means(dtype: str) -> None:
    rows: list[list[float]] = [[1, 2, 60], [3, 5, 6], [8, 8, 0]]
    assert merged(dtype, rows, "sum") == [12, 15, 66]
    assert merged(dtype, rows, "mean") == [4, 5, 22]
    assert merged(dtype, rows[:1], "sum") == rows[0]
    assert merged(dtype, rows[:1], "mean") == rows[0]


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_golden_table_of_weights(dtype: str) -> None:
    # (1·2 + 3·4) / 4 = 3.5, (1·(−8) + 3·8) / 4 = 4, (1·0 + 3·1) / 4 = 0.75
    assert merged(dtype, [[2, -8, 0], [4, 8, 1]], "weighted", [1, 3]) == [3.5, 4, 0.75]
    assert merged(dtype, [[2, -8, 0], [4, 8, 1]], "weighted", [0, 3]) == [4, 8, 1]
    assert merged(dtype, [[2, -8, 0]], "weighted", [7]) == [2, -8, 0]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_worker_without_samples_does_not_count_whatever_it_sends(dtype: str, poison: float) -> None:
    assert merged(dtype, [[poison], [6], [poison], [3]], "weighted", [0, 2, 0, 1]) == [5]
    assert merged(dtype, [[poison], [poison]], "weighted", [0, 0]) == [0]


def test_a_nan_that_counts_is_kept() -> None:
    assert np.isnan(merged("float32", [[np.nan], [1]], "sum")).all()
    assert np.isnan(merged("float32", [[np.nan], [1]], "weighted", [1, 5])).all()


def test_the_order_of_the_list_is_the_order_of_the_additions() -> None:
    # In float32, 2²⁴ + 1 = 2²⁴: so the one survives only if the large numbers cancel first.
    large = float(2**24)
    assert merged("float32", [[large], [-large], [1]], "sum") == [1]
    assert merged("float32", [[large], [1], [-large]], "sum") == [0]
    assert merged("float32", [[1], [large], [-large]], "sum") == [0]
    # A fold from the right, or a tree ((a + b) + (c + d)), would keep both ones of this row.
    assert merged("float32", [[large], [1], [1], [-large]], "sum") == [0]


def test_float64_is_added_in_float64() -> None:
    assert merged("float64", [[2.0**24], [1], [-(2.0**24)]], "sum") == [1]
    assert merged("float64", [[2.0**53], [1], [-(2.0**53)]], "sum") == [0]


@pytest.mark.parametrize(("dtype", "large"), [("float16", 2048.0), ("bfloat16", 256.0)])
def test_halves_are_added_in_float32_and_rounded_once(dtype: str, large: float) -> None:
    # large + 1 is not representable in the half dtype: adding in it would lose every single one.
    assert merged(dtype, [[large], [1], [1], [1], [1]], "sum") == [large + 4]
    assert merged(dtype, [[large], [1], [-large]], "sum") == [1]


def test_a_sum_beyond_float16_comes_back_if_the_mean_fits() -> None:
    assert merged("float16", [[60000], [60000]], "mean") == [60000]
    assert merged("float16", [[60000], [60000]], "sum") == [np.inf]


def test_integers_wrap_around_and_their_mean_rounds_down() -> None:
    assert merged("int8", [[100], [100]], "sum") == [-56]
    assert merged("uint8", [[200], [100]], "sum") == [44]
    assert merged("int32", [[2**31 - 1], [1]], "sum") == [-(2**31)]
    assert merged("int64", [[-7, 7], [0, 0]], "mean") == [-4, 3]
    assert merged("int8", [[1]] * 300, "mean") == [0]  # 300 does not fit in int8; the sum wraps to 44
    assert merged("int8", [[-1]] * 130, "mean") == [0]  # the sum wraps to 126


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_have_no_weights(dtype: str) -> None:
    with pytest.raises(DtypeMismatch, match=dtype):
        merged(dtype, [[1], [2]], "weighted", [1, 1])


@pytest.mark.parametrize("mode", ["sum", "mean", "weighted"])
def test_nothing_is_merged_into_nothing(mode: MergeMode) -> None:
    assert merged("float32", [[], []], mode, [1, 2]) == []


def test_the_first_contribution_may_be_the_output() -> None:
    first = np.array([1, 2], np.float32)
    merge([first, np.array([10, 20], np.float32), np.array([100, 200], np.float32)], first, "sum")
    assert first.tolist() == [111, 222]


def test_a_tile_of_a_merge_lands_in_the_accumulator() -> None:
    rows = [np.arange(6, dtype=np.float16), np.full(6, 10, np.float16)]
    accumulator, scratch = np.empty(2, np.float32), np.empty(2, np.float32)
    for count, expected in ((1, [2, 3]), (2, [12, 13])):
        merge_tile(plan_merge(rows[:count], "sum", None, like=rows[0]), slice(2, 4), accumulator, scratch)
        assert accumulator.tolist() == expected
    single = np.arange(6, dtype=np.float32)
    merge_tile(plan_merge([single], "sum", None, like=single), slice(4, 6), accumulator, scratch)
    assert accumulator.tolist() == [4, 5]


def test_memory_that_may_not_be_written_is_only_read() -> None:
    frozen = np.frombuffer(bytes(9), np.uint8)[1:].view(np.float32)  # read-only, and not aligned
    out = np.empty(2, np.float32)
    merge([frozen, frozen], out, "weighted", [1, 1])
    assert out.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("rows", "mode", "samples", "error"),
    [
        ([], "sum", None, NotAllowed),
        ([[1, 2], [1]], "sum", None, ShapeMismatch),
        ([[1, 2], [[1, 2]]], "sum", None, ShapeMismatch),
        ([[1], [1]], "median", None, NotAllowed),
        ([[1], [1]], "weighted", None, NotAllowed),
        ([[1], [1]], "weighted", [1], ShapeMismatch),
        ([[1], [1]], "weighted", [1, -1], NotAllowed),
        ([[1], [1]], "weighted", [1, 0.5], NotAllowed),
        ([[1], [1]], "weighted", [1, True], NotAllowed),
        ([[1], [1]], "weighted", [1, 2**60], NotAllowed),
    ],
)
def test_what_makes_no_sense_is_refused(rows: list[Any], mode: Any, samples: Any, error: type[Exception]) -> None:
    arrays = [np.array(row, np.float32) for row in rows]
    out = np.full(arrays[0].shape if arrays else 1, 99, np.float32)
    with pytest.raises(error):
        merge(arrays, out, mode, samples)
    assert (out == 99).all()


def test_dtypes_are_not_mixed() -> None:
    narrow, wide = np.zeros(2, np.float32), np.zeros(2, np.float64)
    with pytest.raises(DtypeMismatch):
        merge([narrow, wide], np.zeros(2, np.float32), "sum")
    with pytest.raises(DtypeMismatch):
        merge([narrow], wide, "sum")
    with pytest.raises(DtypeMismatch):
        merge([np.zeros(2, np.int16)], np.zeros(2, np.int16), "sum")


def by_hand(column: list[float], mode: str, samples: list[int]) -> np.float32:
    """One element in float32, each step an exact rational number that is rounded once."""

    def rounded(exact: Fraction) -> Fraction:
        # A product or a sum of two float32 is rounded by float64 first only where that cannot matter: its 53 bits are
        # more than twice 24 plus two, for which double rounding is known to be harmless (Figueroa 1995).
        return Fraction(float(np.float32(float(exact))))

    if mode == "weighted":
        used = [(Fraction(value), count) for value, count in zip(column, samples, strict=True) if count]
        terms = [rounded(value * count) for value, count in used]
        divisor = Fraction(sum(samples))
    else:
        terms = [Fraction(value) for value in column]
        divisor = Fraction(len(column) if mode == "mean" else 1)
    if not terms:
        return np.float32(0)
    total = terms[0]
    for term in terms[1:]:
        total = rounded(total + term)
    return np.float32(float(total / divisor))


@given(
    st.lists(st.lists(st.floats(-1e6, 1e6, width=32), min_size=3, max_size=3), min_size=1, max_size=5),
    st.sampled_from(["sum", "mean", "weighted"]),
    st.lists(st.integers(0, 1000), min_size=5, max_size=5),
)
def test_every_element_is_a_left_fold_of_exactly_rounded_steps(rows: Any, mode: Any, samples: Any) -> None:
    result = merged("float32", rows, mode, samples[: len(rows)])
    for index, value in enumerate(result):
        assert value == by_hand([row[index] for row in rows], mode, samples[: len(rows)])


@given(
    st.data(),
    st.sampled_from(list(DTYPES)),
    st.sampled_from(["sum", "mean", "weighted"]),
    st.integers(0, 70),
    st.integers(1, 40),
    st.integers(1, 4),
    st.integers(0, 7),
)
def test_the_bits_depend_on_neither_tiles_nor_alignment(
    data: Any, dtype: str, mode: Any, size: int, tile: int, count: int, offset: int
) -> None:
    if mode == "weighted" and dtype in INTEGERS:
        mode = "mean"
    kind = DTYPES[dtype]
    raw = data.draw(hnp.arrays(np.uint8, (count, size * kind.itemsize)))
    arrays = [row.view(kind) for row in raw]
    if dtype in FLOATS:  # no promise is made about the payload of a NaN
        arrays = [np.where(np.isnan(array.astype(np.float64)), np.ones_like(array), array) for array in arrays]
    samples = data.draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    moved = []
    for array in arrays:
        memory = np.zeros(size * kind.itemsize + offset, np.uint8)
        memory[offset:] = array.view(np.uint8)
        moved.append(memory[offset:].view(kind))
    whole, parts = np.empty(size, kind), np.empty(size, kind)
    merge(arrays, whole, mode, samples)
    merge(moved, parts, mode, samples, tile)
    if dtype in FLOATS:
        same = (whole == parts) | (np.isnan(whole.astype(np.float64)) & np.isnan(parts.astype(np.float64)))
        assert same.all()
        assert (np.signbit(whole.astype(np.float64)) == np.signbit(parts.astype(np.float64))).all()
    else:
        assert whole.tobytes() == parts.tobytes()


def test_bfloat16_is_rounded_to_even() -> None:
    # 1 + 2⁻⁸ lies half way between 1 and the next bfloat16, 1 + 2⁻⁷; 1 + 3·2⁻⁸ half way between 1 + 2⁻⁷ and 1 + 2⁻⁶.
    assert merged("bfloat16", [[1, 1 + 2**-7], [2**-8, 2**-8]], "sum") == [1, 1 + 2**-6]
    assert np.dtype(ml_dtypes.bfloat16).itemsize == 2
