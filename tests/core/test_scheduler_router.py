"""The scheduler's router: runs that a scheduler without its record is told of, and their limits."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvd.core.machine import CallerPeer, InRun, PeerLost, Persist, Persisted, PersistFailed, Received, Send, Tick
from kvd.core.scheduler.machine import SchedulerSettings
from kvd.core.scheduler.router import SchedulerRouter
from kvd.core.scheduler.runs.table import MAX_KEPT, MAX_LIVE
from kvd.protocol.messages import (
    BIGGEST,
    MAX_MEMBERS,
    MAX_RUNS,
    NO_RANK,
    NO_RUN,
    NO_VIEW,
    PREPARED,
    Departure,
    Done,
    EndRun,
    Epoch,
    ErrorCode,
    Heartbeat,
    Join,
    Leave,
    NotYet,
    Refused,
    RunEntry,
    RunPhase,
    Say,
    Shutdown,
    StatusQuery,
    View,
    Welcome,
)
from tests.core.fakes import OPEN, cluster, server_id, worker_id

TIMEOUT_S = 10.0
READER = 900


class Scheduler:
    """A router whose records are saved at once, unless a test says otherwise."""

    def __init__(self) -> None:
        self.settings = settings = SchedulerSettings(cluster(2, 1), 1.0, TIMEOUT_S, TIMEOUT_S, break_on_loss=True)
        self.saves = True  # else the tokens of its records are in `unsaved`
        self.unsaved: list[int] = []
        self.router = SchedulerRouter(settings, 1, 1, 0.0)
        self.now = 0.0

    def step(self, event: Any) -> list[Any]:
        """The messages that it sends."""
        sent: list[Any] = []
        self.headers: list[tuple[int, Epoch]] = []  # of the messages
        events = [event]
        while events:
            for effect in self.router.step(events.pop(), self.now):
                if isinstance(effect, Persist) and self.saves:
                    events.append(Persisted(effect.token))
                elif isinstance(effect, Persist):
                    self.unsaved.append(effect.token)
                elif isinstance(effect, InRun):
                    messages = [own.message for own in effect.effects if isinstance(own, Send)]
                    self.headers += [(effect.run, effect.epoch)] * len(messages)
                    sent += messages
            self.router.validate()
        return sent

    def say(self, who: int, message: Any, run: int = NO_RUN, epoch: Epoch = NO_VIEW) -> list[Any]:
        return self.step(Received(CallerPeer(str(who).encode()), who, epoch, message, run=run))

    def server_joins(self, *runs: RunEntry) -> list[Any]:
        address = "tcp://server"
        return self.say(server_id(0), Join(1, "server", "s", address, "host", 50, 0, OPEN, runs=runs))

    def worker_joins(self, rank: int, token: str) -> list[Any]:
        join = Join(1, "worker", f"{token}-{rank}", "", "host", 60 + rank, rank, OPEN, job="train", token=token)
        return self.say(worker_id(rank), join)

    def wait(self, seconds: float) -> None:
        """Time passes; the server is alive, in the cluster and in every run."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            for run in (NO_RUN, *[entry.run for entry in self.router.runs.entries()]):
                self.say(server_id(0), Heartbeat("server", 0), run)
            self.step(Tick())

    def phases(self) -> list[RunPhase]:
        return [entry.phase for entry in self.router.runs.entries()]


def entry(run: int, phase: RunPhase, job: str = "train") -> RunEntry:
    return RunEntry(run, job, f"token-{run}", phase, 2)


@pytest.mark.parametrize(
    ("told", "after"),
    [
        (RunPhase.FORMING, RunPhase.FAILED),
        (RunPhase.RUNNING, RunPhase.FAILED),
        (RunPhase.CLOSING, RunPhase.ENDED),
        (RunPhase.ENDED, RunPhase.ENDED),
        (RunPhase.FAILED, RunPhase.FAILED),
    ],
)
def test_a_run_that_no_worker_comes_back_to_is_over_after_a_timeout(told: RunPhase, after: RunPhase) -> None:
    """Its workers died while there was no scheduler: the next program must not wait for them for ever."""
    scheduler = Scheduler()
    scheduler.server_joins(entry(77, told))
    scheduler.wait(TIMEOUT_S - 1)
    assert scheduler.phases() == [told]
    deadline = scheduler.router.next_deadline()
    assert told.is_over or (deadline is not None and deadline <= TIMEOUT_S)
    scheduler.wait(2)
    assert scheduler.phases() == [after]
    answers = scheduler.worker_joins(0, "next")
    assert any(isinstance(message, Welcome) for message in answers)


@pytest.mark.parametrize("run", [NO_RUN, 77])
def test_a_run_of_a_giant_number_of_workers_does_not_begin(run: int) -> None:
    """Looking who is missing would take the scheduler years."""
    scheduler = Scheduler()
    scheduler.server_joins(RunEntry(78, "train", "token-78", RunPhase.RUNNING, BIGGEST))
    giant = OPEN._replace(num_workers=BIGGEST)
    join = Join(1, "worker", "w", "", "host", 60, 0, giant, job="train", token="token")
    (refused,) = scheduler.say(worker_id(0), join, run)
    assert isinstance(refused, Refused)
    assert refused.error is ErrorCode.CONFIG_ERROR
    assert scheduler.phases() == []


def test_a_run_that_no_record_could_have_is_not_taken_over() -> None:
    """Else a scheduler could not read its own record when it starts again."""
    scheduler = Scheduler()
    fits, too_many = (RunEntry(run, f"job-{run}", "t", RunPhase.RUNNING, MAX_MEMBERS - run) for run in (1, 0))
    scheduler.server_joins(fits, too_many._replace(run=9))
    assert [entry.run for entry in scheduler.router.runs.entries()] == [1]
    SchedulerRouter.check_record(json.loads(json.dumps(scheduler.router.record())))


def test_a_run_that_a_worker_comes_back_to_goes_on() -> None:
    scheduler = Scheduler()
    scheduler.server_joins(entry(77, RunPhase.RUNNING))
    scheduler.wait(TIMEOUT_S / 2)
    join = Join(1, "worker", "w", "", "host", 60, 0, OPEN, job="train", token="token-77")
    assert any(isinstance(message, Welcome) for message in scheduler.say(worker_id(0), join, 77))
    for _ in range(20):
        scheduler.wait(1)
        scheduler.say(worker_id(0), Heartbeat("worker", 0), 77)
    assert scheduler.phases() == [RunPhase.RUNNING]


@pytest.mark.parametrize("phase", [RunPhase.RUNNING, RunPhase.ENDED])
def test_a_node_that_brings_any_number_of_runs_is_believed_up_to_a_limit(phase: RunPhase) -> None:
    scheduler = Scheduler()
    for turn in range(4):
        many = [entry(1000 * (turn + 1) + number, phase, f"j{turn}-{number}") for number in range(MAX_RUNS)]
        views = [message for message in scheduler.server_joins(*many) if isinstance(message, View)]
        assert all(len(view.runs) <= MAX_RUNS for view in views)
    kept = [found for found in scheduler.phases() if found is not RunPhase.GONE]
    assert len(kept) <= (MAX_LIVE if phase is RunPhase.RUNNING else MAX_KEPT)


def test_no_run_begins_before_all_servers_are_there() -> None:
    scheduler = Scheduler()
    answers = scheduler.worker_joins(0, "a")
    assert [type(message) for message in answers] == [NotYet, View]
    assert scheduler.phases() == []
    scheduler.server_joins()
    assert any(isinstance(message, Welcome) for message in scheduler.worker_joins(0, "a"))
    assert scheduler.phases() == [RunPhase.FORMING]


def test_an_answer_in_a_run_says_nothing_of_the_epoch_of_the_cluster() -> None:
    """A reader would wait for a view of the run that there never is."""
    scheduler = Scheduler()
    scheduler.server_joins()
    scheduler.worker_joins(0, "a")
    scheduler.worker_joins(1, "a")
    (entry,) = scheduler.router.runs.entries()
    machine = scheduler.router.machine_of(entry.run)
    assert machine is not None
    assert scheduler.router.epoch != machine.epoch
    for message in (StatusQuery(5), EndRun(6, "no such job"), Shutdown(7, force=False)):
        assert scheduler.say(READER, message, entry.run)
        assert scheduler.headers == [(entry.run, machine.epoch)]
    scheduler.say(READER, Heartbeat("worker", 0), 12345)
    assert scheduler.headers == [(12345, NO_VIEW)]


def test_a_reader_that_knew_the_view_of_the_cluster_does_not_renumber_those_of_the_run() -> None:
    scheduler = Scheduler()
    scheduler.server_joins()
    scheduler.worker_joins(0, "a")
    join = Join(1, "observer", "", "", "host", 90, NO_RANK, OPEN, job="train")
    scheduler.say(READER, join, epoch=Epoch(1, 99))
    (header, *_) = scheduler.headers
    assert header[1].generation == 1


def test_changes_wait_while_the_record_cannot_be_saved() -> None:
    scheduler = Scheduler()
    scheduler.server_joins()
    scheduler.saves = False
    answers = scheduler.worker_joins(0, "a")
    assert not any(isinstance(message, Welcome) for message in answers)
    scheduler.step(PersistFailed("disk full"))
    assert scheduler.router.explain(0.0)["cannot_save"] == "disk full"
    assert not any(isinstance(message, Welcome) for message in scheduler.worker_joins(1, "a"))
    scheduler.saves = True
    answers = scheduler.step(Persisted(scheduler.unsaved[-1]))  # the newest record has what the others had
    assert sum(isinstance(message, Welcome) for message in answers) == 2
    assert scheduler.router.explain(0.0)["cannot_save"] == ""
    assert scheduler.router.explain(0.0)["insecure"] is False


def test_a_prepared_run_belongs_to_the_first_program_that_comes() -> None:
    """It is found again by a scheduler that was restarted, and is bound to the program's token."""
    scheduler = Scheduler()
    scheduler.server_joins()
    scheduler.worker_joins(0, "operator")
    (before,) = scheduler.router.runs.entries()
    assert Done(7) in scheduler.say(worker_id(0), Say(7, PREPARED, 0, "[5]"), run=before.run)
    assert Done(8) in scheduler.say(worker_id(0), Leave(8, Departure.WITHDRAWN), run=before.run)
    (slot,) = scheduler.router.runs
    assert (slot.phase, slot.describe()["phase"]) == (RunPhase.FAILED, "prepared")
    scheduler.router = SchedulerRouter(scheduler.settings, 2, 2, 0.0, scheduler.router.record())
    scheduler.server_joins()
    (waits,) = scheduler.worker_joins(1, "program")
    assert isinstance(waits, NotYet), "the run has not heard its server"
    scheduler.say(server_id(0), Heartbeat("server", 0), run=before.run)
    scheduler.worker_joins(1, "program")
    (after,) = scheduler.router.runs.entries()
    assert (after.run, after.token, after.phase) == (before.run, "program", RunPhase.FORMING)
    refused = scheduler.worker_joins(2, "another")
    assert [answer.error for answer in refused if isinstance(answer, Refused)] == [ErrorCode.JOB_BUSY]


def test_a_run_that_an_operator_gave_up_is_not_prepared() -> None:
    scheduler = Scheduler()
    scheduler.server_joins()
    scheduler.worker_joins(0, "operator")
    (before,) = scheduler.router.runs.entries()
    scheduler.say(worker_id(0), Leave(8, Departure.WITHDRAWN), run=before.run)
    scheduler.worker_joins(1, "program")
    assert [entry.token for entry in scheduler.router.runs.entries()] == ["operator", "program"]


def test_a_run_of_which_all_processes_have_ended_is_not_called_running() -> None:
    """Until their time to be started again is over, its phase stays as it was."""
    scheduler = Scheduler()
    scheduler.server_joins()
    for rank in range(2):
        scheduler.worker_joins(rank, "program")
    (slot,) = scheduler.router.runs
    shown = [slot.describe()["phase"]]
    for rank in range(2):
        scheduler.step(PeerLost(worker_id(rank), "exit code 1"))
        shown.append(slot.describe()["phase"])
    assert shown == ["running", "running", "failing"]
    assert slot.phase is RunPhase.RUNNING
    scheduler.now += TIMEOUT_S
    scheduler.step(Tick())
    assert slot.describe()["phase"] == "failed"
