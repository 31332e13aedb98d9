"""What a push is answered: one test per row of the table, and the table in the documentation."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kvd.core.machine import Effect
from kvd.core.server.admission import TABLE, Decision, Row
from kvd.core.server.progress import PushRequest, Refusal, WorkerProgress
from kvd.core.server.rounds import PushStatus, SliceLog
from kvd.protocol.messages import Done, ErrorCode, NotYet, NotYetReason, Part, Push, Refused, Staged, Taken
from tests.core.fakes import member, one, said, worker_id
from tests.core.server_harness import Harness, ready

ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"
FACTS = list(product(PushStatus, (False, True), (False, True), (False, True)))


def matching(status: PushStatus, *facts: bool) -> list[Row]:
    return [
        row
        for row in TABLE
        if row.status is status and all(wanted in (None, fact) for wanted, fact in zip(row[1:4], facts, strict=True))
    ]


@pytest.mark.parametrize(("status", "probe", "refused", "outdated"), FACTS)
def test_exactly_one_row_matches(status: PushStatus, probe: bool, refused: bool, outdated: bool) -> None:
    assert len(matching(status, probe, refused, outdated)) == 1


def prepared(status: PushStatus, refused: bool, outdated: bool) -> tuple[Harness, int]:
    """A server with one key, and the clock of a push by worker 1 (request 50) that is in this state there."""
    harness = ready()
    for clock in (1, 2):
        harness.push(0, clock)
    clock = {PushStatus.KNOWN: 1, PushStatus.NEXT: 2, PushStatus.OUT_OF_TURN: 9, PushStatus.MISSED: 1}[status]
    if status is PushStatus.MISSED:
        harness.look(member("worker", 1, "left"))
    else:
        harness.push(1, 1, request=20)
    log: SliceLog = harness.machine.table.slices["w", 0].log
    progress = log.progress.setdefault(1, WorkerProgress())
    if refused:
        progress.last_refusal = Refusal(PushRequest(worker_id(1), 50), ErrorCode.KEY_EXISTS, "told before")
    if outdated:
        progress.last_request = PushRequest(worker_id(1), 51)
    assert log.status_of(1, clock) is status
    return harness, clock


def push(harness: Harness, clock: int, probe: bool) -> list[Effect]:
    message = Push(50, (Part("w", 0, clock),), 0, 1, False, probe)
    return harness.say(1, message, b"" if probe else b"\1")


@pytest.mark.parametrize(("status", "probe", "refused", "outdated"), FACTS)
def test_a_push_is_answered_as_its_row_says(status: PushStatus, probe: bool, refused: bool, outdated: bool) -> None:
    row = one(matching(status, probe, refused, outdated))
    harness, clock = prepared(status, refused, outdated)
    log = harness.machine.table.slices["w", 0].log
    before = (log.staged_nbytes, log.version)
    answers = said(push(harness, clock, probe), worker_id(1))
    assert ((log.staged_nbytes, log.version) != before) is (row.decision is Decision.STAGE)
    check: Any = {
        Decision.STAGE: lambda: isinstance(answers[-1], Done | Staged),
        Decision.TAKEN_BEFORE: lambda: answers == [Done(50)],
        Decision.MISSED: lambda: (answers[0].error, answers[0].taken) == (ErrorCode.NOT_ALLOWED, Taken.PART),
        Decision.REFUSED_BEFORE: lambda: answers == [Refused(50, ErrorCode.KEY_EXISTS, "told before", "w")],
        Decision.SEND_NEXT: lambda: (
            isinstance(one(answers), NotYet)
            and (answers[0].reason, answers[0].next_clock) == (NotYetReason.OUT_OF_TURN, 2)
        ),
    }[row.decision]
    assert check(), answers


def test_the_documentation_shows_the_same_table() -> None:
    """A row there: | clock | probe | refused before | out of date | answer |, with an empty cell for either."""
    cells = {None: "", False: "no", True: "yes"}
    expected = [
        (row.status.value, cells[row.probe], cells[row.refused_before], cells[row.outdated], row.decision.value)
        for row in TABLE
    ]
    text = ARCHITECTURE.read_text(encoding="utf-8")
    section = text[text.index("| the clock is | probe | refused before | out of date | answer |") :]
    rows = re.findall(r"^\|(.*)\|(.*)\|(.*)\|(.*)\|(.*)\|$", section.split("\n\n")[0], re.MULTILINE)[2:]
    assert [tuple(cell.strip() for cell in row) for row in rows] == expected
