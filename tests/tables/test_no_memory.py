"""Where there is no memory: what has begun to count counts, and what is refused leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvd.initializer import Constant
from kvd.optimizer import SGD, Adagrad, Optimizer, RowWiseAdagrad
from kvd.tables.candidates import Candidates
from kvd.tables.contributions import Contributed
from kvd.tables.description import RowSparse
from kvd.tables.numbered_ids import NumberedIds
from kvd.tables.part import TablePart
from kvd.tables.row_arena import RowArena
from kvd.tables.row_index import RowIndex
from kvd.tables.row_values import Rows
from kvd.tables.stored_rows import StoredRows
from kvd.tables.table import Table
from kvd.tables.turnover import Turnover
from tests.tables.test_keeping import WIDTH, int64, new_table, read


@contextmanager
def no_more_memory() -> Iterator[None]:
    """Nothing of a table can grow."""
    with pytest.MonkeyPatch.context() as patch:
        resize, numbered = RowArena._resize, NumberedIds.reserve

        def resized(arena: RowArena, room: int) -> None:
            if room > len(arena._rows):
                raise MemoryError
            resize(arena, room)

        def reserved(queue: NumberedIds, more: int) -> None:
            if queue._tail + more > queue._entries.shape[1]:
                raise MemoryError
            numbered(queue, more)

        patch.setattr(RowArena, "_resize", resized)
        patch.setattr(NumberedIds, "reserve", reserved)
        patch.setattr(RowIndex, "_make_slots", _no_memory)
        yield


@pytest.mark.parametrize(
    "keeping",
    [
        {"max_rows": 300},
        {"ttl_updates": 2},
        {"admit_after": 2, "ttl_updates": 3},
        {"track_updates": True, "max_rows": 400},
    ],
)
def test_what_comes_after_an_update_needs_no_memory(monkeypatch: pytest.MonkeyPatch, keeping: dict[str, Any]) -> None:
    """The rows are changed by then: an error would have them pushed again."""
    table, settle = new_table(**keeping), Turnover.settle

    def settled(turnover: Turnover, seats: Any) -> Rows:
        with no_more_memory():
            return settle(turnover, seats)

    monkeypatch.setattr(Turnover, "settle", settled)
    random = np.random.default_rng(3)
    for _ in range(60):
        ids = np.unique(random.integers(0, 3000, random.integers(1, 500)))
        table.update(SGD(0.5), ids, np.ones((len(ids), WIDTH)))
    assert table.step == 60


def test_candidates_that_have_room_need_no_memory() -> None:
    """Also where so many come at once that several generations follow each other."""
    random = np.random.default_rng(7)
    given, model = Candidates(8), Candidates(8)
    for rows in (0, 0, 0, 64, 0, 100):
        ids = np.sort(random.choice(10_000, random.integers(1, 60), replace=False)) + 0
        for candidates in (given, model):
            counts = candidates.counts(ids) + 1
            candidates.reserve(len(ids), rows)
            if candidates is model:
                candidates.set(ids, counts, rows)
                continue
            with no_more_memory():
                candidates.set(ids, counts, rows)
        assert {name: array.tolist() for name, array in given.state().items()} == {
            name: array.tolist() for name, array in model.state().items()
        }


def test_slots_that_were_reserved_are_enough_after_rows_were_replaced() -> None:
    """Of the 1024 slots 600 are taken or gone; 30 more go, and 20 more are taken: look-ups would take too long then."""
    index = RowIndex(removable=True)
    index.insert(np.arange(300))
    for number in range(10):
        index.replace(np.arange(30), 1000 + 30 * number + np.arange(30))
    index.reserve(20)
    taken = 5000 + np.arange(30)
    with no_more_memory():
        index.replace(np.arange(30), taken, 20)
        index.insert(7000 + np.arange(20))
    assert index.ids().tolist() == [*taken, *range(30, 300), *range(7000, 7020)]
    assert index.find(index.ids()).tolist() == list(range(320))
    assert len(index._ids) == 1024


def adagrad_table(**keeping: Any) -> Table:
    table = new_table(**keeping)
    table.update(Adagrad(0.5), int64([1, 2]), np.full((2, WIDTH), 3.0))
    return table


def all_of(table: Table) -> Any:
    slots = {name: table.slot(name, table.ids()).tolist() for name in table.slot_widths}
    return table.ids().tolist(), read(table, table.ids()).tolist(), slots, table.step


@pytest.mark.parametrize("keeping", [{}, {"max_rows": 8}])
def test_rows_for_which_there_is_no_memory_leave_no_trace(keeping: dict[str, Any]) -> None:
    """What the optimizer keeps of the others is there, also under names that the refused rows have, too."""
    table = adagrad_table(**keeping)
    before, ids, of_row = all_of(table), np.arange(40_000), np.ones((40_000, 1))
    slots = {"sum": of_row, "other": of_row}
    assert "sum" in table.slot_widths
    with no_more_memory():
        for refused in (
            lambda: table.store(ids, np.ones((40_000, WIDTH)), slots),
            lambda: table.store_state(ids, slots, is_first=False),
            lambda: table.store_state(ids, slots, is_first=True),
            lambda: table.load(ids + 100, np.ones((40_000, WIDTH)), slots),
            lambda: table.update(RowWiseAdagrad(0.5), ids, np.ones((40_000, WIDTH))),
        ):
            with pytest.raises(MemoryError):
                refused()
            assert all_of(table) == before
            assert [array.shape for array in table.rows_at(slice(0, 2))] == [(2, WIDTH)] * 2
    table.update(Adagrad(0.5), int64([1]), np.full((1, WIDTH), 4.0))
    assert table.slot("sum", int64([1, 2])).tolist() == [[25.0] * WIDTH, [9.0] * WIDTH]


def test_state_that_is_refused_leaves_that_of_a_part() -> None:
    part = TablePart(RowSparse(row_shape=(WIDTH,), dtype="float64"), "t")
    part.update(Adagrad(0.5), [Contributed(Rows(int64([1, 2]), np.full((2, WIDTH), 3.0)), 1)], "sum")
    before, ids = all_of(part.table), np.arange(40_000)
    stored = StoredRows(ids, np.zeros((len(ids), 0)), {"sum": np.ones((len(ids), WIDTH))}, 9)
    with no_more_memory(), pytest.raises(MemoryError):
        part.store_state(stored, is_first=True)
    assert all_of(part.table) == before


@pytest.mark.parametrize("optimizer", [None, SGD(0.25)])
def test_an_update_does_not_begin_without_memory_for_its_merged_rows(optimizer: Optimizer | None) -> None:
    """The copy on another server is made of them; the push is refused, and made again."""
    part = TablePart(RowSparse(row_shape=(WIDTH,), dtype="float64", initializer=Constant(0.5)), "t")
    pushed = [Contributed(Rows(int64([7]), np.full((1, WIDTH), 2.0)), 1)] * 2
    part.update(optimizer, pushed, "sum")
    before = all_of(part.table)
    with pytest.raises(MemoryError):
        part.update(optimizer, pushed, "sum", _no_memory)
    assert (part.version, all_of(part.table)) == (1, before)
    made = part.update(optimizer, pushed, "sum", lambda nbytes: np.empty(nbytes, np.uint8))
    assert made is not None
    assert made.view(np.int64)[0] == 7
    assert made[8:].view(np.float64).tolist() == [4.0] * WIDTH
    assert part.version == 2


def _no_memory(*_: Any) -> Any:
    raise MemoryError
