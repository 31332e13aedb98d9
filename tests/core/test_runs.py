"""Runs: their phases, and which one a worker belongs to."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core.machine import CallerPeer
from kvd.core.scheduler.machine import SchedulerMachine
from kvd.core.scheduler.membership.roster import MemberEvent, Roster
from kvd.core.scheduler.runs.phase import TRANSITIONS, RunEvent, RunLife
from kvd.core.scheduler.runs.table import Choice, Runs, RunSlot
from kvd.protocol.messages import Join, RunPhase
from tests.core.fakes import OPEN

FORMING, RUNNING, CLOSING, ENDED, FAILED, GONE = RunPhase


def join(**changes: Any) -> Join:
    fields: dict[str, Any] = {"node_id": "w", "job": "train", "token": ""}
    fields.update(changes)
    return Join(1, "worker", fields.pop("node_id"), "", "host", 77, -1, OPEN, **fields)


# ── phases ──


def roster(*states: str, workers: int = 2) -> Roster:
    """A roster of which the first workers are in these states."""
    made = Roster(0, workers)
    for rank, state in enumerate(states):
        seat, _ = made.take_seat(join(node_id=f"w{rank}"), rank, 100 + rank, CallerPeer(b"peer"))
        event = {"left": MemberEvent.LEFT, "dead": MemberEvent.DECLARED_DEAD}.get(state)
        if event is not None:
            made.transition(seat, event)
    return made


@pytest.mark.parametrize(
    ("before", "states", "after"),
    [
        (FORMING, ["active"], FORMING),
        (FORMING, ["active", "active"], RUNNING),
        (FORMING, ["dead"], FAILED),
        (FORMING, ["left"], FAILED),  # it never began
        (RUNNING, ["active", "dead"], RUNNING),
        (RUNNING, ["left", "active"], RUNNING),
        (RUNNING, ["left", "left"], ENDED),
        (RUNNING, ["dead", "left"], FAILED),
        (RUNNING, ["dead", "dead"], FAILED),
        (RUNNING, [], RUNNING),  # of a scheduler without its record: the workers have yet to come back
        (CLOSING, ["left", "active"], CLOSING),
        (CLOSING, ["left", "left"], ENDED),
        (CLOSING, ["left", "dead"], ENDED),  # all its work was done
        (FAILED, ["dead", "dead"], FAILED),
        (FAILED, ["active", "dead"], RUNNING),
        (FAILED, ["active"], FORMING),
        (ENDED, ["left", "left"], ENDED),
        (ENDED, ["left", "active"], CLOSING),
    ],
)
def test_the_phase_follows_the_workers(before: RunPhase, states: list[str], after: RunPhase) -> None:
    life = RunLife(before)
    assert life.observe(roster(*states)) == (after is not before)
    assert life.phase is after
    assert not life.observe(roster(*states))


def test_the_exit_barrier_closes_a_run_that_runs() -> None:
    life = RunLife(RUNNING)
    assert life.observe(roster("active", "active"), exit_passed=True)
    assert life.phase is CLOSING


@pytest.mark.parametrize(("before", "after"), [(FORMING, FAILED), (RUNNING, FAILED), (CLOSING, ENDED)])
def test_a_run_that_all_give_up_before_it_begins_has_failed(before: RunPhase, after: RunPhase) -> None:
    life = RunLife(before)
    life.give_back(roster())
    assert life.phase is after


def test_every_phase_but_gone_has_its_row() -> None:
    assert set(TRANSITIONS) == set(RunPhase) - {GONE}
    assert {event for row in TRANSITIONS.values() for event in row} == set(RunEvent)


# ── which run ──


class Fake:
    """As much of a run's machine as `Runs` looks at."""

    def __init__(
        self, phase: RunPhase, *node_ids: str, lost: bool = False, prepared: bool = False, elastic: bool = False
    ) -> None:
        self.phase = phase
        self.roster = Roster(0, 2)
        for rank, node_id in enumerate(node_ids):
            self.roster.take_seat(join(node_id=node_id), rank, 100 + rank, CallerPeer(b"peer"))
        self.lost = lost
        self.is_prepared = prepared
        self.num_workers = self.most_workers = 2
        self.takes_newcomers = elastic

    def seems_lost(self) -> bool:
        return self.lost


def slot(run: int, phase: RunPhase, *node_ids: str, token: str = "", job: str = "train", **more: bool) -> RunSlot:
    machine: Any = None if phase is GONE else Fake(phase, *node_ids, **more)
    kept: SchedulerMachine | None = machine
    return RunSlot(run, job, token, kept)


TABLE: list[tuple[str, list[RunSlot], Join, Choice, int | None]] = [
    ("the first of all", [], join(), Choice.BEGIN, None),
    ("another job is running", [slot(1, RUNNING, job="else")], join(), Choice.BEGIN, None),
    ("it is forming", [slot(1, FORMING)], join(), Choice.ENTER, 1),
    ("a token's is forming, mine has none", [slot(1, FORMING, token="a")], join(), Choice.ENTER, 1),
    ("a stranger while it runs", [slot(1, RUNNING, "w0", "w1")], join(), Choice.JOB_BUSY, 1),
    ("restarted by hand", [slot(1, RUNNING, "w", "w1")], join(), Choice.ENTER, 1),
    ("a newcomer", [slot(1, RUNNING, "w0", "w1", elastic=True)], join(), Choice.ENTER, 1),
    ("a newcomer of nobody", [slot(1, RUNNING, "w0", "w1", elastic=True, lost=True)], join(), Choice.WAIT, 1),
    ("a newcomer at the end", [slot(1, CLOSING, "w0", "w1", elastic=True)], join(), Choice.WAIT, 1),
    ("another token's newcomer", [slot(1, RUNNING, token="a", elastic=True)], join(token="b"), Choice.JOB_BUSY, 1),
    ("it is closing", [slot(1, CLOSING, "w")], join(), Choice.WAIT, 1),
    ("all its processes have ended", [slot(1, RUNNING, "w0", lost=True)], join(), Choice.WAIT, 1),
    ("it has ended", [slot(1, ENDED, "w")], join(), Choice.BEGIN, None),
    ("it has failed", [slot(1, FAILED, "w")], join(), Choice.BEGIN, None),
    ("my token's is forming", [slot(1, FORMING, token="a")], join(token="a"), Choice.ENTER, 1),
    ("my token's is running", [slot(1, RUNNING, token="a")], join(token="a"), Choice.ENTER, 1),
    ("my token's is closing", [slot(1, CLOSING, token="a")], join(token="a"), Choice.JOB_ENDED, 1),
    ("my token's has ended", [slot(1, ENDED, token="a")], join(token="a"), Choice.JOB_ENDED, 1),
    ("my token's is gone", [slot(1, GONE, token="a")], join(token="a"), Choice.JOB_ENDED, 1),
    ("my token's has failed", [slot(1, FAILED, token="a")], join(token="a"), Choice.ENTER, 1),
    (
        "my token's has failed, and the next is running",
        [slot(1, FAILED, token="a"), slot(2, RUNNING, token="b")],
        join(token="a"),
        Choice.JOB_ENDED,
        1,
    ),
    (
        "my token's has ended, and the next is running",
        [slot(1, ENDED, token="a"), slot(2, RUNNING, token="b")],
        join(token="a"),
        Choice.JOB_ENDED,
        1,
    ),
    ("another token is running", [slot(1, RUNNING, token="a")], join(token="b"), Choice.JOB_BUSY, 1),
    ("another token is forming", [slot(1, FORMING, token="a")], join(token="b"), Choice.JOB_BUSY, 1),
    ("another token, same node", [slot(1, RUNNING, "w", token="a")], join(token="b"), Choice.JOB_BUSY, 1),
    ("another token has ended", [slot(1, ENDED, token="a")], join(token="b"), Choice.BEGIN, None),
    ("an operator of one that runs", [slot(1, RUNNING, "w0")], join(operator=True), Choice.ENTER, 1),
    ("an operator of one that has ended", [slot(1, ENDED, "w0")], join(operator=True), Choice.ENTER, 1),
    ("an operator of none", [slot(1, GONE)], join(operator=True), Choice.BEGIN, None),
    ("a prepared one, no token", [slot(1, FAILED, prepared=True)], join(), Choice.ENTER, 1),
    ("a prepared one, any token", [slot(1, FAILED, token="a", prepared=True)], join(token="b"), Choice.ENTER, 1),
    ("one that was prepared", [slot(1, FAILED, "w", token="a")], join(token="b"), Choice.BEGIN, None),
    ("one that ended after it", [slot(1, ENDED, prepared=True)], join(), Choice.BEGIN, None),
    ("a later one runs", [slot(1, FAILED, prepared=True), slot(2, RUNNING, "x")], join(), Choice.JOB_BUSY, 2),
    ("too many", [slot(run, RUNNING, job=f"j{run}") for run in range(1, 17)], join(), Choice.TOO_MANY, None),
]


@pytest.mark.parametrize(
    ("slots", "wanted", "choice", "run"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_where_a_worker_belongs(slots: list[RunSlot], wanted: Join, choice: Choice, run: int | None) -> None:
    decision = Runs(slots).choose(wanted)
    assert decision.choice is choice
    assert (None if decision.slot is None else decision.slot.run) == run


def test_a_reader_sees_the_latest_run_that_is_complete() -> None:
    runs = Runs([slot(10, ENDED), slot(11, FAILED), slot(12, FORMING)])
    read = runs.readable("train")
    assert read is not None
    assert read.run == 11
    assert runs.readable("train@a") is runs.find(10)
    assert runs.readable("train@ff") is None
    assert runs.readable("else") is None
    only = Runs([slot(12, FORMING)])
    assert only.readable("train") is only.find(12)


def test_the_oldest_runs_that_are_over_go_first() -> None:
    runs = Runs([slot(1, RUNNING), *[slot(run, ENDED) for run in range(2, 11)]])
    excess = runs.excess()
    assert excess is not None
    assert excess.run == 2
    excess.machine = None
    assert runs.excess() is None
