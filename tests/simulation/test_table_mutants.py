"""Tests of the simulator: broken builds of tables, each of which a campaign must catch within some seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kvd.core.machine import Apply
from kvd.core.server.rounds import SliceLog
from kvd.core.worker.push_window import PushWindow, end_pulls
from kvd.node.jobs.table_parts import TableParts
from kvd.tables import by_part
from kvd.tables.duplicates import InOrder, firsts
from kvd.tables.earlier_rows import EarlierRows
from kvd.tables.part import TablePart
from kvd.tables.table import Table
from tests.simulation.mutants_harness import check_caught
from tests.simulator.campaign import CAMPAIGNS


def the_newest_rows(patch: pytest.MonkeyPatch) -> None:
    """A pull gets the rows as they are, whichever version it asks for."""
    read = TablePart.read
    patch.setattr(TablePart, "read", lambda own, version, ids, allocate: read(own, own.version, ids, allocate))


def rows_in_two_versions(patch: pytest.MonkeyPatch) -> None:
    """Of the rows that were put aside, half are forgotten."""
    lay_over = EarlierRows.lay_over

    def forgetful(earlier: EarlierRows, out: Any, ids: Any, updates: int) -> None:
        newest, is_forgotten = out.copy(), ids % 2 == 0
        lay_over(earlier, out, ids, updates)
        out[is_forgotten] = newest[is_forgotten]

    patch.setattr(EarlierRows, "lay_over", forgetful)


def twice_the_same_row(patch: pytest.MonkeyPatch) -> None:
    """Of the rows that one worker pushes of one id, only the first leaves it."""

    def first_only(given: InOrder, rows: Any, ids: Any, out: Any) -> None:
        distinct = firsts(given.ids)
        ids[:], out[:] = given.ids[distinct], rows[given.places[distinct]]

    patch.setattr(by_part, "add_up_into", first_only)


def without_the_others(patch: pytest.MonkeyPatch) -> None:
    """If a worker has pushed no row, the round has no rows of the later ones."""
    apply = TableParts.apply

    def hasty(parts: TableParts, job: Apply) -> Any:
        given = job.contributions
        empty = [place for place, each in enumerate(given) if each.span is not None and not each.span.nbytes]
        return apply(parts, job._replace(contributions=given[: empty[0]] if empty else given))

    patch.setattr(TableParts, "apply", hasty)


def counted_twice(patch: pytest.MonkeyPatch) -> None:
    """An asynchronous push that comes again counts again."""
    stage = SliceLog.stage

    def again(log: SliceLog, contribution: Any, push: Any) -> None:
        stage(log, contribution, push)
        if not log.sync and contribution.clock == 3 and contribution.rank == 1 and contribution.span is not None:
            log._staging.arrived.append(contribution)

    patch.setattr(SliceLog, "stage", again)
    patch.setattr(SliceLog, "validate", lambda log: None)


def rows_that_are_read_take_memory(patch: pytest.MonkeyPatch) -> None:
    """Reading makes rows."""
    read = Table.read

    def making(table: Table, ids: Any, out: Any) -> None:
        read(table, ids, out)
        distinct, first = np.unique(ids, return_index=True)
        table.store(distinct, out[first], {})

    patch.setattr(Table, "read", making)


def a_failed_step_is_not_made_again(patch: pytest.MonkeyPatch) -> None:
    """A push that was taken in part only is taken for one that counts."""

    def settle(windows: Sequence[PushWindow], failure: Any, is_untaken: bool, pulled: Sequence[int] = ()) -> None:
        end_pulls(windows, pulled)
        for window in windows:
            window.open_pushes -= 1
            window.failing_pushes -= failure is not None

    patch.setattr("kvd.core.worker.transfer.settle_pushes", settle)
    patch.setattr(PushWindow, "rewind", lambda window, clock: None)


MUTANTS: list[tuple[Callable[[pytest.MonkeyPatch], None], str, str]] = [
    (the_newest_rows, "tables, far ahead", "the pushes make it"),
    (rows_in_two_versions, "tables, far ahead", "the pushes make it"),
    (twice_the_same_row, "tables", "the pushes make it"),
    (without_the_others, "tables", "the pushes make it"),
    (counted_twice, "tables, async, nasty", "pushes"),
    (rows_that_are_read_take_memory, "tables", "keeps"),
    (a_failed_step_is_not_made_again, "tables, refusals", ""),
]


@pytest.mark.parametrize(("mutate", "campaign", "complaint"), MUTANTS, ids=[mutant[0].__name__ for mutant in MUTANTS])
def test_mutant_is_caught(
    mutate: Callable[[pytest.MonkeyPatch], None], campaign: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_caught(mutate, CAMPAIGNS[campaign], complaint, monkeypatch)
