"""The slices of keys, against tables worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import DtypeMismatch, MergeMismatch, ProtocolError, ShapeMismatch
from kvd.protocol.codec import decode, encode
from kvd.protocol.messages import NO_VIEW, NewKey, Publish
from kvd.protocol.specs import DTYPES, MERGES, Initial, Keeping, KeySpec, TableSpec, padded, payload_nbytes


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes", "spans"),
    [
        ("float32", (), 4, [(0, 4)]),  # 0-d: one element
        ("float64", (0,), 0, [(0, 0)]),  # empty: one empty slice
        ("float32", (3, 0, 5), 0, [(0, 0)]),
        ("uint8", (4095,), 4095, [(0, 4095)]),
        ("uint8", (4096,), 4096, [(0, 4096)]),
        ("uint8", (4097,), 4097, [(0, 4096), (4096, 1)]),
        ("float32", (1024,), 4096, [(0, 4096)]),
        ("float32", (1025,), 4100, [(0, 4096), (4096, 4)]),
        ("bfloat16", (3, 2048), 12288, [(0, 4096), (4096, 4096), (8192, 4096)]),
        ("int64", (1, 1537), 12296, [(0, 4096), (4096, 4096), (8192, 4096), (12288, 8)]),
    ],
)
def test_the_slices_of_a_key(dtype: str, shape: tuple[int, ...], nbytes: int, spans: list[tuple[int, int]]) -> None:
    spec = KeySpec(dtype, shape, 4096)
    assert spec.nbytes == nbytes
    assert spec.num_slices == len(spans)
    assert [spec.span(index) for index in range(spec.num_slices)] == spans
    assert [spec.slice_nbytes(index) for index in range(spec.num_slices)] == [length for _, length in spans]


@given(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 60), max_size=3), st.integers(1, 8))
def test_slices_cover_the_value_without_gaps_or_overlaps(dtype: str, shape: list[int], blocks: int) -> None:
    spec = KeySpec(dtype, tuple(shape), 64 * blocks)
    end = 0
    for index in range(spec.num_slices):
        offset, length = spec.span(index)
        assert offset == end
        assert 0 <= length <= spec.slice_bytes
        assert length % DTYPES[dtype].itemsize == 0
        end += length
    assert end == spec.nbytes


def test_a_table_has_a_slice_for_each_part_and_no_bytes() -> None:
    spec = KeySpec("float32", (4, 5), 4096, "", TableSpec(1000, Initial("Zeros"), 3))
    assert (spec.nbytes, spec.num_slices, spec.row_nbytes) == (0, 3, 80)
    assert [spec.span(index) for index in range(3)] == [(0, 0)] * 3
    assert [spec.num_rows(nbytes) for nbytes in (0, 8, 80, 88, 96, 880)] == [0, None, None, 1, None, 10]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dtype": "int32"}, "float32 or float64"),
        ({"shape": (0, 4)}, "a row of a table has 1 to"),
        ({"shape": (1 << 20, 9)}, "a row of a table has 1 to"),
        ({"table": TableSpec(-2, Initial("Zeros"), 1)}, "a whole number from -1"),
        ({"table": TableSpec(1, Initial("Zeros"), 0)}, "a whole number from 1"),
        ({"table": TableSpec(1, Initial("", (), 0), 1)}, "a text of 1"),
        ({"table": TableSpec(1, Initial("Zeros"), 1, Keeping(0))}, "a whole number from 1"),
        ({"table": TableSpec(1, Initial("Zeros"), 1, Keeping(ttl_updates=-1))}, "a whole number from 0"),
        ({"table": TableSpec(1, Initial("Zeros"), 1, Keeping(max_rows=(1 << 40) + 1))}, "a whole number from 0"),
        ({"table": TableSpec(1, Initial("Zeros"), 1, Keeping(max_bytes=-1))}, "a whole number from 0"),
        ({"table": TableSpec(1, Initial("Zeros", (math.nan,), 0), 1)}, "a finite number"),
    ],
)
def test_a_table_that_cannot_be_is_refused(change: dict[str, Any], text: str) -> None:
    spec = KeySpec("float32", (4,), 4096, "", TableSpec(1000, Initial("Zeros"), 3))
    message = Publish(1, (replace(spec, **change),), (NewKey("w", 0),))
    with pytest.raises(ProtocolError, match=text):
        decode(encode(message, 7, NO_VIEW))


def test_the_dtypes_are_those_of_the_documentation() -> None:
    sizes = {name: (dtype.itemsize, dtype.is_float) for name, dtype in DTYPES.items()}
    assert sizes == {
        "float16": (2, True),
        "float32": (4, True),
        "float64": (8, True),
        "bfloat16": (2, True),
        "int8": (1, False),
        "int32": (4, False),
        "int64": (8, False),
        "uint8": (1, False),
    }


def test_check_same_accepts_the_same_shape_and_dtype_with_any_slice_size() -> None:
    KeySpec("float32", (2, 3), 4096).check_same(KeySpec("float32", (2, 3), 8192), "w")


def test_check_same_names_the_shapes_the_key_and_the_node() -> None:
    with pytest.raises(ShapeMismatch, match=r"'w' has shape \(2, 3\), the given value has \(3, 2\)") as caught:
        KeySpec("float32", (2, 3), 4096).check_same(KeySpec("float32", (3, 2), 4096), "w", "server 1")
    assert (caught.value.key, caught.value.node) == ("w", "server 1")


def test_check_same_names_the_dtypes() -> None:
    with pytest.raises(DtypeMismatch, match="'w' has dtype float32, the given value has float64") as caught:
        KeySpec("float32", (2,), 4096).check_same(KeySpec("float64", (2,), 4096), "w")
    assert (caught.value.key, caught.value.node) == ("w", "")


def test_check_merge_takes_the_merge_of_the_cluster_where_none_is_named() -> None:
    plain, mean = KeySpec("float32", (2,), 4096), KeySpec("float32", (2,), 4096, "mean")
    for default, one, other in [("mean", plain, mean), ("mean", mean, plain), ("", plain, plain), ("sum", mean, mean)]:
        one.check_merge(other, "w", default)
    with pytest.raises(
        MergeMismatch, match="'w' is merged by 'mean', and this init wants 'sum', that of the"
    ) as caught:
        mean.check_merge(plain, "w", "sum")
    assert caught.value.key == "w"
    with pytest.raises(MergeMismatch, match="is merged by 'sum', and this init wants 'mean': pass merge='sum'"):
        plain.check_merge(mean, "w", "")


@pytest.mark.parametrize("merge", ["", *MERGES])
def test_the_merge_of_a_key_travels(merge: str) -> None:
    message = Publish(1, (KeySpec("float32", (2,), 4096, merge),), (NewKey("w", 0),))
    assert decode(encode(message, 1, NO_VIEW)).message == message


@pytest.mark.parametrize("merge", ["avg", "mean ", "MEAN", "weighted!", 1, None])
def test_no_other_merge_is_taken_from_the_wire(merge: Any) -> None:
    message = Publish(1, (KeySpec("float32", (2,), 4096, merge),), (NewKey("w", 0),))
    with pytest.raises(ProtocolError):
        decode(encode(message, 1, NO_VIEW))


@pytest.mark.parametrize(("nbytes", "next_part"), [(0, 0), (1, 8), (7, 8), (8, 8), (9, 16), (4096, 4096)])
def test_parts_start_at_multiples_of_eight(nbytes: int, next_part: int) -> None:
    assert padded(nbytes) == next_part


@pytest.mark.parametrize(
    ("lengths", "nbytes"),
    [([], 0), ([0], 0), ([5], 5), ([5, 3], 11), ([8, 8], 16), ([1, 1, 1], 17), ([0, 4], 4), ([4, 0], 8)],
)
def test_all_parts_but_the_last_are_padded(lengths: list[int], nbytes: int) -> None:
    assert payload_nbytes(lengths) == nbytes
