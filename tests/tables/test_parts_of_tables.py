"""Which part of a table has which rows, and how a table stands in the spec of its key."""

from __future__ import annotations

import numpy as np
import pytest

from kvd import initializer
from kvd.errors import ProtocolError
from kvd.protocol.specs import Initial, KeySpec, TableSpec
from kvd.tables.description import RowSparse
from kvd.tables.parts import parts_of
from kvd.tables.wire import spec_of_table, table_of_spec

MASK = (1 << 64) - 1


def part_by_hand(row: int, parts: int) -> int:
    """With Python's numbers, which have no limit."""
    bits = row ^ 0xD1B54A32D192ED03
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MASK
    bits ^= bits >> 31
    return (bits >> 32) * parts >> 32


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 200])
def test_parts_are_those_calculated_by_hand(parts: int) -> None:
    ids = [0, 1, 2, 3, 1000, (1 << 32) + 1, (1 << 63) - 1]
    assert parts_of(np.array(ids), parts).tolist() == [part_by_hand(row, parts) for row in ids]


def test_the_first_rows_are_where_they_have_always_been() -> None:
    """Workers and servers of several builds have to agree, and tables in snapshots."""
    assert parts_of(np.arange(12), 4).tolist() == [2, 0, 3, 0, 0, 2, 3, 2, 0, 2, 1, 3]


@pytest.mark.parametrize("stride", [1, 2, 4, 1 << 20])
def test_rows_in_any_stride_lie_on_all_parts(stride: int) -> None:
    counts = np.bincount(parts_of(np.arange(8000) * stride, 4), minlength=4)
    assert counts.min() > 1800  # 2000 - 5 standard deviations of 39
    assert counts.max() < 2200


@pytest.mark.parametrize(
    "table",
    [
        RowSparse((10, 2, 3)),
        RowSparse((1, 4), "float64"),
        RowSparse(row_shape=()),
        RowSparse((10, 2), admit_after=3, ttl_updates=100, max_rows=5, track_updates=True),
        RowSparse(row_shape=(2,), max_bytes=1 << 40),
        RowSparse(row_shape=(64,), initializer=initializer.Constant(0.1)),
        RowSparse((10, 2), initializer=initializer.Uniform(-0.5, 0.25, seed=7)),
        RowSparse((10, 2), initializer=initializer.Normal(0.01, seed=1 << 53)),
    ],
)
def test_a_table_comes_back_from_its_spec(table: RowSparse) -> None:
    spec = spec_of_table(table, parts=2, slice_bytes=4096, merge="mean")
    assert (spec.dtype, spec.shape, spec.merge, spec.num_slices) == (table.dtype, table.row_shape, "mean", 2)
    assert table_of_spec(spec) == table


@pytest.mark.parametrize(
    "initial",
    [Initial("Ones"), Initial("Constant"), Initial("Zeros", (1.0,)), Initial("Uniform", (2.0, 1.0))],
)
def test_a_spec_of_no_table_is_refused(initial: Initial) -> None:
    with pytest.raises(ProtocolError):
        table_of_spec(KeySpec("float32", (4,), 4096, "", TableSpec(10, initial, 2)))


def test_the_spec_of_a_value_is_no_table() -> None:
    with pytest.raises(ProtocolError, match="no table"):
        table_of_spec(KeySpec("float32", (4,), 4096))
