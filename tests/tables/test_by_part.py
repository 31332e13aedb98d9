"""Rows in the order of the parts of their table, against dicts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvd.tables.by_part import ids_in_parts, rows_in_parts
from kvd.tables.parts import parts_of
from kvd.tables.row_values import Rows

LAST = (1 << 63) - 1
HIGHS = [40, 1 << 31, LAST]  # the first is sorted with its places, the others are not; with and without many duplicates


def some_ids(high: int, count: int, seed: int) -> Any:
    random = np.random.default_rng(seed)
    pool = random.integers(0, high, 60, np.int64)
    return random.choice(np.append(pool, [0, high - 1]), count)


def new_memory(nbytes: int) -> Any:
    return np.full(nbytes, 0xEE, np.uint8)


@pytest.mark.parametrize("high", HIGHS)
@pytest.mark.parametrize("parts", [1, 3, 200])
@pytest.mark.parametrize("count", [0, 1, 300])
def test_ids_to_pull_lie_part_by_part(high: int, parts: int, count: int) -> None:
    ids = some_ids(high, count, seed=2)
    asked = ids_in_parts(ids, parts)
    where = slice(None) if asked.where is None else asked.where
    assert asked.ids[where].tolist() == ids.tolist()
    assert len(asked.ranges) == parts
    found: list[int] = []
    for part, (offset, nbytes) in enumerate(asked.ranges):
        here = asked.ids[offset // 8 : (offset + nbytes) // 8]
        assert (parts_of(here, parts) == part).all()
        assert here.tolist() == sorted(set(here.tolist()))
        found += here.tolist()
    assert sorted(found) == sorted(set(ids.tolist()))


@pytest.mark.parametrize("repeated", [0, 10, 11])
def test_of_one_part_few_rows_are_asked_for_twice_so_that_they_arrive_in_order(repeated: int) -> None:
    ids = np.random.default_rng(5).permutation(np.append(np.arange(150), np.arange(repeated)))
    asked = ids_in_parts(ids, 1)
    assert len(asked.ids) == (150 if repeated == 11 else len(ids))
    assert (asked.where is None) == (repeated < 11)
    if repeated < 11:
        assert asked.ids.tolist() == ids.tolist()


@pytest.mark.parametrize("high", HIGHS)
@pytest.mark.parametrize("parts", [1, 3, 200])
@pytest.mark.parametrize(("count", "width", "dtype"), [(0, 2, "float32"), (1, 3, "float32"), (300, 5, "float64")])
def test_rows_to_push_lie_part_by_part_and_are_added_up(
    high: int, parts: int, count: int, width: int, dtype: str
) -> None:
    ids = some_ids(high, count, seed=3)
    rows = np.random.default_rng(4).standard_normal((count, width)).astype(dtype)
    expected: dict[int, Any] = {}
    for id_, row in zip(ids.tolist(), rows, strict=True):
        expected[id_] = expected[id_] + row if id_ in expected else row
    strided = np.repeat(rows, 2, axis=0)[::2]
    data, ranges = rows_in_parts(Rows(ids, strided), parts, new_memory)
    assert len(ranges) == parts
    found: dict[int, Any] = {}
    end = 0
    for part, (offset, nbytes) in enumerate(ranges):
        assert offset % 8 == 0
        assert end <= offset < end + 8
        end = offset + nbytes
        here, rest = divmod(nbytes, 8 + width * rows.itemsize)
        assert rest == 0
        own = data[offset : offset + here * 8].view(np.int64)
        assert (parts_of(own, parts) == part).all()
        assert own.tolist() == sorted(own.tolist())
        values = data[offset + here * 8 : end].view(dtype).reshape(here, width)
        found.update(zip(own.tolist(), values, strict=True))
    assert end == len(data)
    assert found.keys() == expected.keys()
    for id_, row in expected.items():
        assert found[id_].tobytes() == row.tobytes(), id_
