"""Tables with limits, when rows are stored again or an update fails."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvd.errors import NotAllowed
from kvd.initializer import Constant
from kvd.optimizer import SGD
from kvd.tables.contributions import Contributed
from kvd.tables.copies import checksum_of
from kvd.tables.description import RowSparse
from kvd.tables.part import TablePart
from kvd.tables.row_values import Rows
from tests.compute.test_custom_optimizers import Failing
from tests.tables.test_keeping import WIDTH, int64, new_table, read


@pytest.mark.parametrize("keeping", [{}, {"max_rows": 4}, {"admit_after": 1, "track_updates": True}])
def test_a_copy_of_a_table_needs_no_updates_that_failed(keeping: dict[str, Any]) -> None:
    """A backup never gets them, and is to have the same checksum as its leader."""
    description = RowSparse(row_shape=(WIDTH,), dtype="float64", initializer=Constant(0.5), **keeping)
    leader, backup = TablePart(description, "t"), TablePart(description, "t")
    for number, optimizer in enumerate([Failing(0.1), SGD(1.0), Failing(0.1), SGD(1.0)]):
        ids = int64([3 * number, 3 * number + 1])
        pushed = [Contributed(Rows(ids, np.full((2, WIDTH), 13.0)), 1)]
        if isinstance(optimizer, Failing):
            with pytest.raises(ZeroDivisionError):
                leader.update(optimizer, pushed, "sum")
        else:
            for part in (leader, backup):
                part.update(optimizer, pushed, "sum")
        assert checksum_of(leader) == checksum_of(backup)
        assert leader.table.ids().tolist() == backup.table.ids().tolist()
    assert read(leader.table, [0, 3, 9]).tolist() == [[0.5] * WIDTH, [-12.5] * WIDTH, [-12.5] * WIDTH]


@pytest.mark.parametrize("keeping", [{"max_rows": 2}, {"ttl_updates": 1}])
def test_rows_that_are_stored_again_are_evicted_once(keeping: dict[str, Any]) -> None:
    """A worker 0 that dies while it restores a snapshot stores the same rows again when it is restarted."""
    once, again = new_table(**keeping), new_table(**keeping)
    rows = np.ones((3, WIDTH))
    once.store(int64([3, 5, 7]), rows, {})
    again.store(int64([3, 7]), rows[:2], {})
    again.store(int64([3, 5, 7]), rows, {})
    for number in range(4):
        went = [
            table.update(SGD(learning_rate=0.5), int64([20 + number]), np.ones((1, WIDTH))).evicted.ids.tolist()
            for table in (once, again)
        ]
        assert went[0] == went[1]
        assert again.ids().tolist() == once.ids().tolist()


def test_an_assignment_without_memory_for_its_rows_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    table = new_table(max_rows=1)
    table.assign(int64([1]), np.ones((1, WIDTH)))
    with monkeypatch.context() as context:
        context.setattr("kvd.tables.merged_rows.MergedRows.rows", _no_memory)
        with pytest.raises(MemoryError):
            table.assign(int64([2]), np.ones((1, WIDTH)))
    assert table.ids().tolist() == [1]
    assert table.assign(int64([3]), np.ones((1, WIDTH))).evicted.ids.tolist() == [1]
    assert table.ids().tolist() == [3]


def test_an_update_counts_once_if_there_is_no_memory_to_put_rows_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are changed by then, so a worker that was refused would push them again."""
    description = RowSparse(row_shape=(WIDTH,), dtype="float64", initializer=Constant(0.5), max_rows=2)
    part, whole = TablePart(description, "t"), TablePart(description, "t")
    for number in range(4):
        pushed = [Contributed(Rows(int64([7, 10 + number]), np.ones((2, WIDTH))), 1)]
        whole.update(SGD(0.25), pushed, "sum")
        if number != 2:
            part.update(SGD(0.25), pushed, "sum")
            continue
        with monkeypatch.context() as context:
            context.setattr("kvd.tables.earlier_rows._with", _no_memory)
            part.update(SGD(0.25), pushed, "sum")
        assert part.version == 3
        assert part.read(3, int64([7]), _memory).view(np.float64).tolist() == [0.5 - 3 * 0.25] * WIDTH
        with pytest.raises(NotAllowed, match="version 2 of table 't' is not kept any more"):
            part.read(2, int64([7]), _memory)
    assert part.version == whole.version == 4
    assert part.table.ids().tolist() == whole.table.ids().tolist() == [7, 13]
    assert read(part.table, [7, 10, 13]).tolist() == read(whole.table, [7, 10, 13]).tolist()
    np.testing.assert_array_equal(part.read(3, int64([7, 13]), _memory), whole.read(3, int64([7, 13]), _memory))


def _memory(nbytes: int) -> Any:
    return np.empty(nbytes, np.uint8)


def _no_memory(*_: Any) -> Any:
    raise MemoryError
