"""The memory of rows that are pushed, and of those that are copied for a snapshot."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvd.core.machine import KeepRows
from kvd.core.server.memory_use import rows_need
from kvd.optimizer import FTML, SGD, Adagrad, Adam, Ftrl, RMSProp, RowWiseAdagrad
from kvd.optimizer.registry import slots_of
from kvd.protocol.messages import Captured, CaptureWhen, ErrorCode, Surveyed
from kvd.tables.contributions import Contributed
from kvd.tables.description import RowSparse
from kvd.tables.lazy import LazyRule
from kvd.tables.part import TablePart
from kvd.tables.row_values import Rows
from kvd.tables.wire import spec_of_table
from tests.compute.test_custom_optimizers import SignDescent
from tests.core.fake_tables import ROW, table
from tests.core.server_harness import Harness, kinds, refusal
from tests.core.tables_harness import push_rows, with_table
from tests.core.test_server_captures import Operator

OTHER_RUN = 999
TEN, OF_TEN = range(10), 10 * (8 + ROW)
AS_IT_IS = CaptureWhen.AS_IT_IS
OPTIMIZERS = [
    None,
    SGD(0.1),
    SGD(0.1, momentum=0.9),
    Adagrad(0.1),
    RowWiseAdagrad(0.1),
    Adam(0.1),
    Ftrl(0.1),
    RMSProp(0.1, centered=True, momentum=0.9),
    FTML(0.1),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("width", [1, 64])
def test_new_rows_take_no_more_memory_than_was_asked_for(optimizer: Any, width: int) -> None:
    """A real table that evicts, which takes the most: what was pushed, and what it takes after the update."""
    description = RowSparse(row_shape=(width,), max_rows=1 << 20)
    part = TablePart(description, "t")
    count = 30_000
    ids, rows = np.arange(count), np.ones((count, width), np.float32)
    pushed = ids.nbytes + rows.nbytes
    part.update(optimizer, [Contributed(Rows(ids, rows), 1)], "sum")
    spare = 8 * (64 << 10)  # of so small a table each array has 64 KiB to spare
    assert (
        pushed + part.nbytes
        <= rows_need(spec_of_table(description, parts=1, slice_bytes=4096), pushed, optimizer) + spare
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS[1:], ids=lambda each: type(each).__name__)
def test_slots_are_those_that_the_rule_keeps(optimizer: Any) -> None:
    assert slots_of(optimizer) == len(LazyRule(optimizer, "t", 4, np.dtype(np.float32)).slot_widths)


def test_an_installed_optimizer_may_keep_as_much_as_any() -> None:
    assert slots_of(SignDescent(0.1)) == slots_of(FTML(0.1)) == 3
    assert slots_of(None) == 0


def granted(harness: Harness) -> int:
    return harness.memory.of_others(OTHER_RUN)


def with_ten_rows(memory: int) -> tuple[Harness, Operator]:
    harness = with_table(memory=memory, mode="async")
    push_rows(harness, 0, 1, TEN)
    return harness, Operator(harness)


NEED = rows_need(table(), OF_TEN, None)


def test_rows_that_are_kept_for_a_snapshot_count() -> None:
    harness, operator = with_ten_rows(1 << 20)
    before = granted(harness)
    harness.hold = True
    operator.capture(0, "t", when=AS_IT_IS)
    assert granted(harness) == before + 10 * ROW  # before they are copied
    copying = next(job for job in harness.jobs if isinstance(job, KeepRows))
    harness.hold = False
    harness.finish(copying)
    push_rows(harness, 1, 1, [])
    other = rows_need(table(), 8 + ROW, None)
    push_rows(harness, 1, 2, [500])
    assert granted(harness) == before + 10 * ROW + ROW
    assert other > ROW
    operator.done()
    push_rows(harness, 1, 3, [501])
    assert granted(harness) == before + 2 * ROW


def test_a_copy_for_which_there_is_no_memory_is_refused_and_training_goes_on() -> None:
    harness, operator = with_ten_rows(NEED)
    for clock in range(2, 3 + (NEED // 2 - 10 * ROW) // ROW):  # until a copy takes more than there is
        assert kinds(push_rows(harness, 0, clock, [clock])) == ["Done"]
    told = refusal([operator.answer(operator.capture(0, "t", when=AS_IT_IS))])
    assert (told.error, told.key) == (ErrorCode.NOT_ALLOWED, "t")
    assert "server 0 has no memory for a copy of table 't': it would take it to 0 MiB, its limit is 0 MiB" in told.text
    assert kinds(push_rows(harness, 1, 1, [7])) == ["Done"]


def test_rows_that_are_pushed_go_before_copies() -> None:
    harness, operator = with_ten_rows(10 * ROW + NEED + ROW)
    assert isinstance(operator.answer(operator.capture(0, "t", when=AS_IT_IS)).message, Captured)
    assert operator.kept_nbytes == 10 * ROW
    assert kinds(push_rows(harness, 1, 1, TEN)) == ["Done"]
    assert operator.kept_nbytes == 0
    again = operator.capture(0, "t", when=AS_IT_IS, number=1)
    assert isinstance(operator.answer(again).message, Surveyed)  # it has ended: the next one has another number
