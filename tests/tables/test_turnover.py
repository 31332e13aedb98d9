"""Rows that go make room for those that come: the memory of it, and updates that fail in the middle."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.initializer import Constant
from kvd.optimizer import SGD, Adagrad
from kvd.tables.description import RowSparse
from kvd.tables.lazy import LazyRule
from kvd.tables.row_index import RowIndex
from kvd.tables.table import Table
from tests.tables.test_keeping import int64, new_table, read

IDS = range(10)


def test_a_table_that_evicts_takes_at_most_1_3_times_its_rows_and_their_state() -> None:
    """Half of the rows are new in each update: if they came before the others went, it would be 1.5 times and more."""
    width, most = 64, 20_000
    table = Table(RowSparse(row_shape=(width,), max_rows=most), "t")
    chance = np.random.default_rng(5)
    rows = np.ones((most // 2, width), np.float32)
    for _ in range(8):
        table.update(Adagrad(0.1), chance.integers(0, 1 << 62, most // 2), rows)
    assert len(table) == most
    assert table.nbytes <= 1.3 * most * 2 * width * 4


def test_an_update_of_more_rows_than_the_limit_makes_only_those_that_stay() -> None:
    table = Table(RowSparse(row_shape=(64,), max_rows=1000), "t")
    updated = table.update(Adagrad(0.1), np.arange(20_000), np.ones((20_000, 64), np.float32))
    assert updated.ids.tolist() == table.ids().tolist() == list(range(19_000, 20_000))
    assert table.nbytes < 2 * 1000 * 2 * 64 * 4  # of so small a table the arenas have half to spare


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sets(st.sampled_from(IDS)), st.sampled_from(["made", "refused", "torn"])), max_size=16),
    st.sampled_from([{"max_rows": 4}, {"ttl_updates": 2}, {"admit_after": 2, "max_rows": 3, "track_updates": True}]),
)
def test_updates_that_fail_leave_no_trace(updates: list[tuple[set[int], str]], keeping: Any) -> None:
    """Whether an update never began or was torn after it had written: rows, state, and which ones go next."""
    table, model = new_table(**keeping), new_table(**keeping)
    optimizer = SGD(1.0, momentum=0.5)
    for named, what in updates:
        ids, rows = int64(sorted(named)), np.full((len(named), 2), 3.0)
        if what == "made":
            for one in (table, model):
                one.update(optimizer, ids, rows)
        else:
            torn = mock.patch.object(LazyRule, "apply", _torn(table.ids()))
            refused = mock.patch.object(RowIndex, "reserve", _no_memory)
            with torn if what == "torn" else refused, pytest.raises(MemoryError):
                table.update(optimizer, ids, rows)
        assert read(table, IDS).tolist() == read(model, IDS).tolist()
        assert table.slot_widths == model.slot_widths
        there = model.ids()
        assert table.ids().tolist() == there.tolist()
        for name in model.slot_widths:
            assert table.slot(name, there).tolist() == model.slot(name, there).tolist()
        mine, expected = table.keeping_state(), model.keeping_state()
        assert {name: array.tolist() for name, array in mine.items()} == {
            name: array.tolist() for name, array in expected.items()
        }


def test_a_new_row_in_the_place_of_another_begins_as_one_that_nobody_has_named() -> None:
    for initializer, first in ((None, 0.0), (Constant(0.5), 0.5)):
        given: Any = {} if initializer is None else {"initializer": initializer}
        table = Table(RowSparse(row_shape=(2,), max_rows=1, dtype="float64", **given), "t")
        for row in (1, 2):
            table.update(SGD(1.0, momentum=0.5), int64([row]), np.full((1, 2), 4.0))
        assert table.slot("momentum", int64([2])).tolist() == [[4.0, 4.0]]
        assert read(table, [1, 2]).tolist() == [[first, first], [first - 4.0, first - 4.0]]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.lists(st.integers(0, 700), min_size=1, max_size=500, unique=True), min_size=1, max_size=8))
def test_places_of_an_index_go_to_other_ids(batches: list[list[int]]) -> None:
    """Enough of them, so that the hash table is filled and cleared: 1024 slots."""
    index = RowIndex(removable=True)
    index.insert(np.arange(500))
    at = list(range(500))
    for number, chosen in enumerate(batches, 1):
        places = [place for place in chosen if place < 500]
        ids = [place + 1000 * number for place in places]
        index.replace(int64(places), int64(ids))
        for place, row in zip(places, ids, strict=True):
            at[place] = row
        assert index.ids().tolist() == at
        assert index.find(int64([*at, 999])).tolist() == [*range(500), -1]
    assert len(index._ids) == 1024


def _torn(there: Any) -> Any:
    """Writes to the rows that are made, which may lie in the places of others, and fails."""

    def apply(_: Any, step: int, places: Any, merged: Any, weights: Any, slots: Any, before: Any) -> None:
        made = places[~np.isin(merged.ids, there)]
        for arena in (weights, *slots):
            arena.put(made, np.full((len(made), arena.width), np.nan))
        raise MemoryError

    return apply


def _no_memory(*_: Any) -> Any:
    raise MemoryError
