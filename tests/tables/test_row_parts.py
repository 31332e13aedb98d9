"""The parts of a table alone: the index against a dict, the merge against sums in a loop."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvd.compute.compiled import warm_up
from kvd.optimizer import SGD
from kvd.tables.duplicates import add_up_into, added_up, in_order, of_both
from kvd.tables.row_arena import Moves, RowArena
from kvd.tables.row_index import RowIndex
from tests.compute.compiled_harness import needs_numba, only_compiled, only_numpy

IDS = st.integers(0, 20) | st.integers(0, (1 << 63) - 1)


def int64(numbers: list[int]) -> np.ndarray:
    return np.array(numbers, np.int64)


@pytest.fixture(params=["numpy", pytest.param("compiled", marks=needs_numba)])
def _either_way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Once with NumPy, and once with compiled loops."""
    if request.param == "compiled":
        assert warm_up(SGD(0.1), of_rows=True)
    with only_numpy() if request.param == "numpy" else only_compiled():
        yield


EITHER_WAY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
LISTS = st.lists(IDS, max_size=60)


@pytest.mark.usefixtures("_either_way")
@EITHER_WAY
@given(LISTS)
def test_ids_are_sorted_with_equal_ones_in_their_order(ids: list[int]) -> None:
    ordered, order, num_distinct = in_order(int64(ids))
    assert list(zip(ordered.tolist(), order.tolist(), strict=True)) == sorted(zip(ids, range(len(ids)), strict=True))
    assert num_distinct == len(set(ids))


@pytest.mark.usefixtures("_either_way")
@EITHER_WAY
@given(LISTS, LISTS)
def test_two_lists_become_one(first: list[int], second: list[int]) -> None:
    lists = [sorted(set(first)), sorted(set(second))]
    ids, left, right = of_both(int64(lists[0]), int64(lists[1]))
    assert ids.tolist() == sorted({*first, *second})
    for places, among in zip((left, right), lists, strict=True):
        assert places.tolist() == [among.index(id_) if id_ in among else -1 for id_ in ids.tolist()]


@pytest.mark.usefixtures("_either_way")
@EITHER_WAY
@given(st.lists(st.lists(IDS, max_size=300), max_size=8))
def test_the_index_is_a_dict(batches: list[list[int]]) -> None:
    index, model = RowIndex(), dict[int, int]()
    for batch in batches:
        fresh = [number for number in dict.fromkeys(batch) if number not in model]
        assert index.insert(int64(fresh)).tolist() == [len(model) + place for place in range(len(fresh))]
        model |= {number: len(model) + place for place, number in enumerate(fresh)}
        asked = [*batch, 5, 1 << 40]
        assert index.find(int64(asked)).tolist() == [model.get(number, -1) for number in asked]
        assert index.ids().tolist() == list(model)
        assert len(index) == len(model)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.lists(IDS, max_size=200), st.lists(st.integers(0, 200), max_size=200)), max_size=10))
def test_the_index_is_a_dict_also_when_ids_are_removed(batches: list[tuple[list[int], list[int]]]) -> None:
    """Places are those from 0 to n - 1 all the time, and the arena has each row at its place."""
    index, arena, known = RowIndex(removable=True), RowArena(1, np.dtype(np.int64)), set[int]()
    for batch, removed in batches:
        fresh = [number for number in dict.fromkeys(batch) if number not in known]
        arena.require(len(known) + len(fresh))
        assert not arena.where_they_lie()[len(known) : len(known) + len(fresh)].any()
        arena.put(index.insert(int64(fresh)), int64(fresh)[:, None])
        known |= set(fresh)
        places = int64([place for place in dict.fromkeys(removed) if place < len(known)])
        known -= set(index.ids_at(places).tolist())
        arena.close_up(index.remove(places))
        asked = int64([*batch, *known, 5, 1 << 40])
        found = index.find(asked)
        assert (found >= 0).tolist() == [number in known for number in asked.tolist()]
        assert sorted(index.find(int64(sorted(known))).tolist()) == list(range(len(known)))
        there = asked[found >= 0]
        assert index.ids_at(index.find(there)).tolist() == there.tolist()
        assert arena.where_they_lie()[index.find(there), 0].tolist() == there.tolist()
        assert (len(index), set(index.ids().tolist())) == (len(known), known)


def test_an_index_whose_ids_come_and_go_stays_as_large_as_it_is() -> None:
    index = RowIndex(removable=True)
    index.insert(np.arange(500, dtype=np.int64))
    for first in range(500, 40_500, 100):
        index.remove(index.find(np.arange(first - 500, first - 400, dtype=np.int64)))
        index.insert(np.arange(first, first + 100, dtype=np.int64))
    assert len(index._ids) == 1024
    assert np.sort(index.ids()).tolist() == list(range(40_000, 40_500))


@pytest.mark.usefixtures("_either_way")
@pytest.mark.parametrize("step", [1, 2, 1024, 1 << 20, 1 << 40])
def test_ids_in_regular_steps_are_found_in_few_rounds(step: int) -> None:
    """With ids of a pattern, a poor hash would put many into few slots; here each look-up ends soon."""
    index = RowIndex()
    ids = np.arange(4000, dtype=np.int64) * step
    index.insert(ids)
    assert index.find(ids).tolist() == list(range(4000))
    taken = index._ids != -1
    longest = max(len(run) for run in "".join("x" if slot else " " for slot in taken).split())
    assert longest < 100


def test_the_index_takes_48_bytes_a_row_at_most() -> None:
    index = RowIndex()
    for first in range(0, 40_000, 997):
        index.insert(np.arange(first, first + 997, dtype=np.int64))
        assert index.nbytes <= max(48 * len(index), 12 * 1024)


@pytest.mark.usefixtures("_either_way")
@EITHER_WAY
@given(
    st.lists(st.tuples(st.integers(0, 6), st.floats(-1e6, 1e6, width=32)), max_size=60),
    st.integers(1, 7),
)
def test_rows_of_the_same_place_are_added_in_order(pushed: list[tuple[int, float]], tile: int) -> None:
    places = np.array([place for place, _ in pushed], np.intp)
    rows = np.array([[value, -value / 3] for _, value in pushed], np.float32).reshape(-1, 2)
    expected: dict[int, np.ndarray] = {}
    for place, row in zip(places.tolist(), rows, strict=True):
        expected[place] = expected[place] + row if place in expected else row
    merged = added_up(places, rows)
    assert merged.ids.tolist() == sorted(expected)
    for first in range(0, merged.num_rows, tile):
        part = slice(first, min(first + tile, merged.num_rows))
        taken = merged.take(part, np.empty((part.stop - part.start, 2), np.float32))
        assert [row.tobytes() for row in taken] == [expected[place].tobytes() for place in merged.ids[part].tolist()]
    for laid_out in (rows, np.asfortranarray(rows)):
        ids, out = np.full(len(expected), -7), np.full((len(expected), 2), np.nan, np.float32)
        add_up_into(in_order(places), laid_out, ids, out)
        assert ids.tolist() == sorted(expected)
        assert [row.tobytes() for row in out] == [expected[place].tobytes() for place in ids.tolist()]


def test_an_arena_grows_in_small_steps_and_keeps_its_rows() -> None:
    arena = RowArena(8, np.dtype(np.float64))
    expected = np.zeros((5000, 8))
    for count in range(1, 5001, 50):
        arena.require(count)
        expected[count - 1] = count
        arena.put(np.array([count - 1]), np.full((1, 8), float(count)))
        assert arena.nbytes <= count * 64 * 17 / 16 + (64 << 10)
    found = arena.take(np.arange(count), np.empty((count, 8)))
    assert np.array_equal(found, expected[:count])


def test_a_large_arena_grows_in_small_steps_and_keeps_its_rows() -> None:
    arena = RowArena(1 << 17, np.dtype(np.float64))  # rows of 1 MiB, in large pages from the 33rd on
    for count in range(20, 61, 8):
        arena.require(count)
        arena.put(np.array([count - 1]), np.full((1, arena.width), float(count)))
        assert arena.nbytes <= count * 17 / 16 * (1 << 20) + (3 << 20)
    found = arena.where_they_lie()
    assert np.flatnonzero(found[:, 7]).tolist() == list(range(19, 60, 8))
    assert (found[19::8] == np.arange(20, len(found) + 1, 8)[:, None])[:6].all()


def test_an_arena_that_gets_no_memory_is_as_it_was() -> None:
    arena = RowArena(1 << 17, np.dtype(np.float64))
    for count in (2, 40):
        arena.require(count)
        arena.put(np.array([1]), np.full((1, arena.width), 7.0))
        nbytes = arena.nbytes
        with pytest.raises(MemoryError):
            arena.require(1 << 40)
        assert arena.nbytes == nbytes
        assert arena.where_they_lie()[1, 0] == 7


@pytest.mark.usefixtures("_either_way")
def test_ids_may_lie_anywhere_in_memory() -> None:
    spread = np.arange(400).reshape(200, 2)[:, 0]
    index = RowIndex()
    index.insert(spread)
    assert index.find(spread[::-2]).tolist() == list(range(199, -1, -2))
    assert in_order(spread[::-1])[1].tolist() == list(range(199, -1, -1))
    assert of_both(spread[::2], spread[1::2])[0].tolist() == spread.tolist()


@pytest.mark.parametrize("large_from", [1 << 20, 1 << 40])
def test_an_arena_gives_memory_back_and_grows_again(large_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In large pages and without."""
    monkeypatch.setattr("kvd.tables.row_arena._LARGE_FROM_NBYTES", large_from)
    arena = RowArena(8, np.dtype(np.float64))
    arena.require(100_000)
    arena.put(np.arange(100_000), np.arange(100_000.0)[:, None].repeat(8, axis=1))
    arena.close_up(Moves(np.array([99_998, 99_999]), np.array([3, 7]), 99_000, 100_000))
    arena.close_up(Moves(np.zeros(0, np.intp), np.zeros(0, np.intp), 10, 99_000))
    assert arena.nbytes <= 2 << 20
    expected = np.array([0, 1, 2, 99_998, 4, 5, 6, 99_999, 8, 9])
    for count in (10, 50_000, 100_000):
        arena.require(count)
        rows = arena.where_they_lie()[:count, 0]
        assert rows[:10].tolist() == expected.tolist()
        assert not rows[10:].any()
        del rows
