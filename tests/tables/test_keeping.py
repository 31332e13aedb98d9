"""Which rows a table keeps, against a dict that is looked through after every update."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.errors import NotAllowed
from kvd.initializer import Constant
from kvd.optimizer import SGD, Adagrad
from kvd.protocol.specs import Keeping
from kvd.tables.candidates import Candidates
from kvd.tables.contributions import Contributed
from kvd.tables.description import RowSparse
from kvd.tables.keeper import ROW_OVERHEAD_NBYTES, Keeper
from kvd.tables.part import TablePart
from kvd.tables.row_index import RowIndex
from kvd.tables.row_values import Rows
from kvd.tables.table import Table
from tests.compute.test_custom_optimizers import Failing

WIDTH = 2
NBYTES = WIDTH * 8 + ROW_OVERHEAD_NBYTES  # of a row of float64 without state
EVERY_ID = [*range(12), 1 << 40, (1 << 63) - 1]


def int64(numbers: Any) -> Any:
    return np.array(numbers, np.int64)


def new_table(parts: int = 1, dtype: str = "float64", **keeping: Any) -> Table:
    description = RowSparse(row_shape=(WIDTH,), dtype=dtype, initializer=Constant(0.5), **keeping)
    return Table(description, "t", parts)


def read(table: Table, ids: Any) -> Any:
    out = np.empty((len(ids), WIDTH), table.description.numpy_dtype)
    table.read(int64(ids), out)
    return out


@dataclass
class Model:
    """The rules of docs/tables.md, in a loop over all rows. SGD with momentum 0.5 and rate 1, or none."""

    admit_after: int = 1
    ttl_updates: int | None = None
    most: int | None = None
    number: int = 0
    weights: dict[int, Any] = field(default_factory=dict)
    momenta: dict[int, Any] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    named: dict[int, int] = field(default_factory=dict)

    def push(self, pushed: list[tuple[int, float]], *, momentum: bool = True) -> set[int]:
        """The rows that go."""
        self.number += 1
        for row in {row for row, _ in pushed} - set(self.weights):
            self.named[row] = self.named.get(row, 0) + 1
            if self.named[row] == self.admit_after:
                del self.named[row]
                self.weights[row], self.momenta[row] = 0.5, 0.0
        for row in {row for row, _ in pushed} & set(self.weights):
            total = sum(value for other, value in pushed if other == row)
            self.last[row] = self.number
            self.momenta[row] = 0.5 * self.momenta[row] + total
            self.weights[row] = self.weights[row] - self.momenta[row] if momentum else total
        gone = set()
        if self.ttl_updates is not None:
            gone = {row for row, last in self.last.items() if last <= self.number - self.ttl_updates}
        by_age = sorted(self.last.keys() - gone, key=lambda row: (self.last[row], row))
        if self.most is not None:
            gone |= set(by_age[: max(0, len(by_age) - self.most)])
        for row in gone:
            del self.weights[row], self.momenta[row], self.last[row]
        return gone


PUSHES = st.lists(
    st.lists(st.tuples(st.sampled_from(EVERY_ID), st.integers(-8, 8).map(float)), max_size=12), max_size=14
)


@settings(max_examples=80, deadline=None)
@given(
    PUSHES,
    st.sampled_from([1, 2, 3]),
    st.none() | st.integers(1, 4),
    st.none() | st.integers(1, 6),
    st.booleans(),
)
def test_a_table_keeps_the_rows_that_the_rules_say(
    pushes: list[Any], admit_after: int, ttl_updates: int | None, most: int | None, in_bytes: bool
) -> None:
    limit: Any = (
        {"max_bytes": None if most is None else most * (NBYTES + WIDTH * 8)} if in_bytes else {"max_rows": most}
    )
    table = new_table(admit_after=admit_after, ttl_updates=ttl_updates, **limit)
    model = Model(admit_after, ttl_updates, most)
    for pushed in pushes:
        before = dict(zip(EVERY_ID, read(table, EVERY_ID).tolist(), strict=True))
        rows = np.array([[value, value] for _, value in pushed]).reshape(-1, WIDTH)
        there = set(model.weights)
        updated = table.update(SGD(1.0, momentum=0.5), int64([row for row, _ in pushed]), rows)
        gone = model.push(pushed)
        assert updated.ids.tolist() == sorted({row for row, _ in pushed} & set(model.weights))
        assert updated.evicted.ids.tolist() == sorted(gone & there)
        assert updated.evicted.rows.tolist() == [before[row] for row in sorted(gone & there)]
        assert table.ids().tolist() == sorted(model.weights)
        expected = [[model.weights.get(row, 0.5)] * WIDTH for row in EVERY_ID]
        assert read(table, EVERY_ID).tolist() == expected


def test_rows_that_replace_others_are_counted_and_evicted_as_well() -> None:
    table, model = new_table(admit_after=2, max_rows=2), Model(2, None, 2)
    for pushed in ([(1, 2.0)], [(1, 3.0), (2, 4.0)], [(2, 5.0), (3, 1.0)], [(3, 7.0)], [(1, 1.0)], [(1, 8.0)]):
        there = set(model.weights)
        updated = table.assign(int64([row for row, _ in pushed]), np.array([[value, value] for _, value in pushed]))
        assert set(updated.evicted.ids.tolist()) == model.push(pushed, momentum=False) & there
        assert read(table, [1, 2, 3]).tolist() == [[model.weights.get(row, 0.5)] * WIDTH for row in (1, 2, 3)]
    assert table.ids().tolist() == [1, 3]


def test_no_update_is_an_update_too() -> None:
    table = new_table(ttl_updates=2)
    table.update(SGD(1.0), int64([4]), np.ones((1, WIDTH)))
    for expected in ([], [4]):
        assert table.update(SGD(1.0), int64([]), np.ones((0, WIDTH))).evicted.ids.tolist() == expected


def test_every_part_has_its_share_of_a_limit() -> None:
    for table, most in ((new_table(parts=3, max_rows=10), 4), (new_table(parts=3, max_bytes=10 * NBYTES), 3)):
        table.update(SGD(1.0), np.arange(50), np.ones((50, WIDTH)))
        assert table.ids().tolist() == list(range(50 - most, 50))
    tiny = new_table(max_bytes=1)
    tiny.update(SGD(1.0), np.arange(50), np.ones((50, WIDTH)))
    assert tiny.ids().tolist() == [49]


def test_the_state_of_the_optimizer_counts_in_a_limit_of_bytes() -> None:
    table = new_table(max_bytes=10 * NBYTES)
    table.update(SGD(1.0), np.arange(50), np.ones((50, WIDTH)))
    assert len(table) == 10
    table.update(Adagrad(1.0), int64([]), np.ones((0, WIDTH)))
    assert len(table) == 10 * NBYTES // (NBYTES + 8 * WIDTH)


@pytest.mark.parametrize("keeping", [{"ttl_updates": 3}, {"max_rows": 900}], ids=str)
def test_many_rows_that_come_and_go_take_no_more_memory_than_those_that_are_there(keeping: dict[str, int]) -> None:
    """Places are used again, in the hash table as well; many updates, so that it is cleared many times."""
    table = new_table(dtype="float32", **keeping)
    chance = np.random.default_rng(3)
    for number in range(150):
        ids = chance.integers(0, 1 << 62, 300)
        table.update(Adagrad(0.1), ids, np.ones((300, WIDTH), np.float32))
        assert table.ids()[np.searchsorted(table.ids(), ids)].tolist() == ids.tolist()
        assert len(table) == min(900, 300 * (number + 1))
    assert table.nbytes < 400_000  # of which two arenas have 64 KiB to spare each, and the queue 80 KiB


def test_an_update_looks_at_few_rows_besides_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if none is evicted for long, and hot rows are named again and again."""
    table = new_table(ttl_updates=5, max_rows=10_000)
    table.update(SGD(1.0), np.arange(10_000), np.zeros((10_000, WIDTH)))
    looked_at = []
    find = RowIndex.find

    def counted(index: RowIndex, ids: Any) -> Any:
        looked_at.append(len(ids))
        return find(index, ids)

    monkeypatch.setattr(RowIndex, "find", counted)
    for _ in range(500):
        table.update(SGD(1.0), np.arange(20), np.zeros((20, WIDTH)))
    assert len(table) == 20
    assert sum(looked_at) < 500 * 20 * 4 + 3 * 10_000


def test_memory_is_given_back_after_a_crowd() -> None:
    table = new_table(ttl_updates=2)
    table.update(SGD(1.0, momentum=0.9), np.arange(200_000), np.ones((200_000, WIDTH)))
    crowded = table.nbytes
    for _ in range(2):
        table.update(SGD(1.0, momentum=0.9), int64([7]), np.ones((1, WIDTH)))
    assert len(table) == 1
    assert table._columns.weights.nbytes < 1 << 18 < crowded
    assert read(table, [7])[0, 0] == 0.5 - 1 - 1.9 - 2.71


def test_an_update_that_fails_counts_for_nothing() -> None:
    table = new_table(dtype="float32", admit_after=2, max_rows=3)
    rows = np.ones((1, WIDTH), np.float32)
    table.update(SGD(1.0), int64([9]), rows)
    with pytest.raises(ZeroDivisionError):
        table.update(Failing(0.1), int64([9]), 13 * rows)
    assert len(table) == 0
    table.update(SGD(1.0), int64([9]), rows)
    assert read(table, [9]).tolist() == [[-0.5] * WIDTH]


def test_a_table_that_keeps_all_rows_has_no_keeper() -> None:
    """And pays for none."""
    table = new_table()
    assert table._keeper is None
    assert table.nbytes == RowIndex().nbytes
    assert table.update(SGD(1.0), int64([1]), np.ones((1, WIDTH))).evicted.ids.tolist() == []


# ── versions of a part ──


def test_evicted_rows_can_be_read_as_long_as_their_version_is_kept() -> None:
    part = TablePart(RowSparse(row_shape=(1,), dtype="float64", max_rows=2), "t")
    seen = []
    for number, ids in enumerate(([1, 2], [2, 3], [4, 5], [1, 9])):
        rows = np.full((2, 1), number + 1.0)
        part.update(None, [Contributed(Rows(int64(ids), rows), 1)], "sum")
        seen.append(part.read(part.version, np.arange(10), lambda n: np.empty(n, np.uint8)).view(np.float64))
        for version in range(max(1, part.version - 2), part.version + 1):
            again = part.read(version, np.arange(10), lambda n: np.empty(n, np.uint8)).view(np.float64)
            assert again.tolist() == seen[version - 1].tolist()
    assert [row.nonzero()[0].tolist() for row in seen] == [[1, 2], [2, 3], [4, 5], [1, 9]]


# ── candidates ──


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 25), max_size=12), max_size=12), st.integers(1, 6))
def test_the_candidates_that_were_named_last_are_remembered(updates: list[list[int]], remembered: int) -> None:
    candidates = Candidates(remembered)
    model: dict[int, int] = {}
    for named in updates:
        ids = int64(sorted(set(named)))
        counts = candidates.counts(ids)
        assert [(row, count) for row, count in zip(ids.tolist(), counts.tolist(), strict=True) if count] == [
            (row, count) for row, count in zip(ids.tolist(), counts.tolist(), strict=True) if model.get(row) == count
        ]
        candidates.set(ids, counts + 1, 0)
        for row, count in zip(ids.tolist(), counts.tolist(), strict=True):
            model.pop(row, None)  # dicts are in the order of the last naming
            model[row] = count + 1
        latest = list(model)[-remembered:]
        assert candidates.counts(int64(latest)).tolist() == [model[row] for row in latest]
        assert len(candidates) <= 4 * remembered


def test_a_candidate_that_was_admitted_begins_at_zero_in_both_generations() -> None:
    candidates = Candidates(2)
    candidates.set(int64([1, 2]), int64([1, 1]), 0)  # the old generation now
    candidates.set(int64([3]), int64([1]), 0)
    candidates.forget(int64([1, 3]))
    assert candidates.counts(int64([1, 2, 3])).tolist() == [0, 1, 0]


def test_a_large_table_remembers_more_candidates() -> None:
    candidates = Candidates(2)
    candidates.set(np.arange(100), np.ones(100, np.int64), 400)
    candidates.set(np.arange(100, 150), np.ones(50, np.int64), 400)
    assert candidates.counts(np.arange(150)).all()
    assert not Candidates(2).counts(np.arange(150)).any()


# ── what has changed ──


def noted(keeper: Keeper, index: RowIndex, ids: list[int]) -> Any:
    """One update; the rows that go."""
    named = int64(sorted(set(ids)))
    mask = keeper.admitted(named)
    changed = named[mask] if mask is not None else named
    gone = keeper.begin(changed, index.find(changed), 8)
    there, stays = gone[index.find(gone) >= 0], changed[~np.isin(changed, gone)]
    index.insert(stays[index.find(stays) < 0])
    keeper.require(len(index))
    keeper.note(stays, index.find(stays), len(index) + len(gone) - len(there))
    keeper.moved(index.remove(index.find(there)))
    keeper.evicted()
    return gone.tolist()


KEEPINGS = [
    Keeping(admit_after=2, ttl_updates=3, max_rows=5, track_updates=True),
    Keeping(max_bytes=4 * (8 + ROW_OVERHEAD_NBYTES), track_updates=True),
]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 12), max_size=8), max_size=14), st.sampled_from(KEEPINGS), st.integers(0, 13))
def test_changes_since_an_update_and_a_copy_of_the_state(updates: Any, keeping: Keeping, copied_at: int) -> None:
    index = RowIndex(removable=True)
    keeper = Keeper(keeping, 1, index, remembered=3)
    copy_index = RowIndex(removable=True)
    copy = Keeper(keeping, 1, copy_index, remembered=3)
    rows: list[set[int]] = [set()]
    last: dict[int, int] = {}
    for number, ids in enumerate(updates, 1):
        distinct = sorted(set(ids))
        is_known = keeper.admitted(int64(distinct))
        last |= {row: number for place, row in enumerate(distinct) if is_known is None or is_known[place]}
        gone = noted(keeper, index, ids)
        if number > copied_at + 1:
            assert noted(copy, copy_index, ids) == gone
        if number == copied_at + 1:
            copy_index.insert(np.sort(index.ids())[::-1])  # at other places
            assert copy.restore({name: array.copy() for name, array in keeper.state().items()})
        if number > copied_at:
            mine, theirs = keeper.state(), copy.state()
            assert mine.keys() == theirs.keys()
            assert all(np.array_equal(mine[name], theirs[name]) for name in mine)
        rows.append(set(index.ids().tolist()))
        for since in range(number):
            changed = {row for row in rows[-1] if last[row] > since}
            assert keeper.updated_since(since).tolist() == sorted(changed)
            evicted = set(keeper.evicted_since(since).tolist())
            assert not evicted & rows[-1]
            assert rows[since] - rows[-1] <= evicted
            assert rows[-1] == (rows[since] - evicted) | changed


@pytest.mark.parametrize(
    ("keeping", "expected"), [(Keeping(max_rows=3), [[], [1], [2]]), (Keeping(ttl_updates=2), [[], [1, 2], [5]])]
)
def test_rows_that_were_there_before_the_first_update_are_the_oldest(keeping: Keeping, expected: Any) -> None:
    index = RowIndex(removable=True)
    keeper = Keeper(keeping, 1, index)
    index.insert(int64([2, 1]))
    assert keeper.restore({"number": int64([0, 0]), "ids": int64([1, 2]), "last": int64([0, 0])})
    assert [noted(keeper, index, [row]) for row in (5, 6, 7)] == expected


def test_evictions_that_are_too_long_ago_are_not_known() -> None:
    index = RowIndex(removable=True)
    keeper = Keeper(Keeping(max_rows=2, track_updates=True), 1, index, evictions=3)
    for row in range(7):
        noted(keeper, index, [row])
    assert keeper.evicted_since(4).tolist() == [2, 3, 4]
    with pytest.raises(NotAllowed, match="after update 3 is not known any more, only after 4: export the whole"):
        keeper.evicted_since(3)
    assert keeper.restore(keeper.state())
    with pytest.raises(NotAllowed, match="export the whole table"):
        keeper.evicted_since(3)


def test_a_table_that_only_tracks_updates_keeps_no_order() -> None:
    index = RowIndex()
    keeper = Keeper(Keeping(track_updates=True), 1, index)
    assert noted_without_evictions(keeper, index, [3, 1]) == noted_without_evictions(keeper, index, [1]) == []
    assert [keeper.updated_since(number).tolist() for number in range(3)] == [[1, 3], [1], []]
    assert keeper.evicted_since(0).tolist() == []


def noted_without_evictions(keeper: Keeper, index: RowIndex, ids: list[int]) -> Any:
    index.insert(int64([row for row in ids if index.find(int64([row]))[0] < 0]))
    keeper.require(len(index))
    gone = keeper.begin(int64(sorted(ids)), index.find(int64(sorted(ids))), 8)
    keeper.note(int64(ids), index.find(int64(ids)), len(index))
    return gone.tolist()


# ── what a program says ──


@pytest.mark.parametrize("name", ["admit_after", "ttl_updates", "max_rows", "max_bytes"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True, 1 << 70])
def test_a_number_that_is_none_is_refused(name: str, value: Any) -> None:
    options: Any = {name: value}
    with pytest.raises(NotAllowed, match=f"{name} of a table is a whole number from 1 to"):
        RowSparse(shape=(3, 2), **options)
