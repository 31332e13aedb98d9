"""Rows in the order of the parts of their table, against dicts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvd.compute.compiled import kernels_in_use, warm_up
from kvd.optimizer import SGD
from kvd.tables import by_part, duplicates
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


# ── compiled loops ──


@pytest.fixture
def compiled() -> None:
    if not warm_up(SGD(1.0), of_rows=True):
        pytest.skip(kernels_in_use())


@pytest.mark.parametrize("high", HIGHS)
@pytest.mark.parametrize("parts", [1, 2, 200])
@pytest.mark.parametrize("count", [0, 1, 300, 3000])
@pytest.mark.usefixtures("compiled")
def test_compiled_loops_give_what_numpy_gives(
    high: int, parts: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(count)
    for ids in (some_ids(high, count, seed=6), random.integers(0, LAST, count), np.arange(count, dtype=np.int64)[::-1]):
        rows = random.standard_normal((count, 3)).astype(np.float32)
        found = rows_in_parts(Rows(ids, rows), parts, new_memory), ids_in_parts(ids, parts)
        with monkeypatch.context() as patch:
            for module in (by_part, duplicates):
                patch.setattr(module, "id_loop", lambda name, count: None)
            expected = rows_in_parts(Rows(ids, rows), parts, new_memory), ids_in_parts(ids, parts)
        (pushed, asked), (same_pushed, same_asked) = found, expected
        assert pushed.ranges == same_pushed.ranges
        assert pushed.data.tobytes() == same_pushed.data.tobytes()
        assert asked.ranges == same_asked.ranges
        assert asked.ids.tobytes() == same_asked.ids.tobytes()
        if asked.where is None or same_asked.where is None:
            assert asked.where is same_asked.where
        else:
            assert asked.where.tolist() == same_asked.where.tolist()


@pytest.mark.usefixtures("compiled")
def test_ids_that_do_not_ascend_are_seen_by_the_compiled_loop_too() -> None:
    for ids, ascend in ([[], True], [[4], True], [[1, 4, 9], True], [[1, 4, 4], False], [[4, 1, 9], False]):
        assert duplicates.are_ascending(np.array(ids, np.int64)) == ascend


@pytest.mark.parametrize("parts", [2, 3])
def test_of_several_parts_few_rows_are_asked_for_twice_so_that_they_need_not_be_sorted(parts: int) -> None:
    ids = np.random.default_rng(5).permutation(np.append(np.arange(150), np.arange(10)))
    asked = ids_in_parts(ids, parts)
    assert asked.where is not None
    assert asked.ids[asked.where].tolist() == ids.tolist()
    for part, (offset, nbytes) in enumerate(asked.ranges):
        here = asked.ids[offset // 8 : (offset + nbytes) // 8]
        assert here.tolist() == ids[parts_of(ids, parts) == part].tolist()
