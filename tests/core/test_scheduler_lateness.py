"""The scheduler: workers that are late, as servers say."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core.machine import LogEntry, Persisted, Send, Tick, Unsaved
from kvd.core.scheduler.membership.participation import LOG_INTERVAL_S
from kvd.core.scheduler.membership.views import TOLD_AT_ONCE
from kvd.protocol.messages import (
    Departure,
    Done,
    Enter,
    ErrorCode,
    Heartbeat,
    Late,
    Leave,
    Refused,
    TakePart,
    Taking,
    View,
)
from tests.core.fakes import OPEN, cluster, of, said, server_id, worker_id
from tests.core.scheduler_harness import Harness, answer

SERVER = server_id(0)


def ready(workers: int = 3, quorum: int = 2, **more: Any) -> Harness:
    harness = Harness(cluster(workers, quorum=quorum, quorum_grace_s=1.0), **more)
    harness.join("server", SERVER, "s")
    for rank in range(workers):
        harness.worker(rank)
    return harness


def late(harness: Harness, *ranks: int, view: tuple[int, int] | None = None, who: int = SERVER) -> list[Any]:
    return harness.say(who, Late(5, ranks), view=harness.machine.epoch if view is None else view)


def take(harness: Harness, rank: int, taking: Taking) -> list[Any]:
    return harness.say(worker_id(rank), TakePart(30, taking), view=harness.machine.epoch)


def pass_without(harness: Harness, *silent: int) -> list[Any]:
    """20 s pass, in which these workers are silent."""
    effects: list[Any] = []
    for _ in range(42):
        harness.now += 0.5
        effects += harness.say(SERVER, Heartbeat("server", 0), view=harness.machine.epoch)
        for rank in {0, 1, 2} - set(silent):
            effects += harness.beat(rank)
        effects += harness.step(Tick())
    return effects


def states(harness: Harness) -> str:
    """The state of each worker, in the order of ranks."""
    return " ".join(state for name, state in sorted(harness.states().items()) if name.startswith("worker"))


def test_the_rounds_go_on_without_a_late_worker_and_the_view_says_why() -> None:
    harness = ready()
    effects = late(harness, 2)
    assert states(harness) == "active active back"
    view = next(message for message in said(effects, worker_id(2)) if isinstance(message, View))
    member = next(member for member in view.members if (member.role, member.rank) == ("worker", 2))
    assert member.reason == "late: 2 or more others have waited for it for 1 s"
    assert isinstance(said(effects, SERVER)[-1], Done)
    (line,) = of(LogEntry, effects)
    assert (line.level, line.text) == ("info", "worker 2 is late: the rounds go on without it until its next step")


def test_the_server_is_answered_when_the_view_is_saved() -> None:
    harness = ready()
    harness.hold = True
    effects = late(harness, 2)
    assert not said(effects)
    (unsaved,) = of(Unsaved, effects)
    assert [type(message) for message in said(harness.step(Persisted(unsaved.token)), SERVER)] == [View, Done]


@pytest.mark.parametrize("ranks", [(1, 2), (0, 1, 2)])
def test_a_quorum_stays(ranks: tuple[int, ...]) -> None:
    harness = ready()
    effects = late(harness, *ranks)
    assert states(harness) == "active active active"
    assert isinstance(answer(effects, Done), Done)
    assert not of(Unsaved, effects)


def test_of_two_servers_that_find_different_workers_late_the_first_decides() -> None:
    """Each of two workers waits for the other's push, of different keys."""
    harness = ready(2, 1)
    late(harness, 1)
    assert states(harness) == "active back"
    late(harness, 0)
    assert states(harness) == "active back"


def test_a_server_that_does_not_know_the_newest_view_speaks_of_the_past() -> None:
    harness = ready()
    before = harness.machine.epoch
    late(harness, 2)
    take(harness, 2, Taking.IN)
    assert states(harness) == "active active returning"
    late(harness, 2, view=before)
    assert states(harness) == "active active returning"
    take(harness, 2, Taking.ARRIVED)
    late(harness, 2, view=before)
    late(harness, 2, view=(before.generation + 1, before.change + 9))  # that of another start of the scheduler
    assert states(harness) == "active active active"
    late(harness, 2)
    assert states(harness) == "active active back"


def test_a_worker_that_does_not_find_its_way_back_is_late_again() -> None:
    harness = ready()
    late(harness, 2)
    take(harness, 2, Taking.IN)
    late(harness, 2)
    assert states(harness) == "active active back"
    take(harness, 2, Taking.ARRIVED)  # it does not know yet
    assert states(harness) == "active active back"


@pytest.mark.parametrize("departure", [Departure.DONE, Departure.LEFT])
def test_who_has_left_is_not_late(departure: Departure) -> None:
    harness = ready()
    harness.say(worker_id(2), Leave(9, departure))
    late(harness, 2)
    assert states(harness) in ("active active done", "active active left")
    late(harness, 7)  # there is no such rank


def test_without_a_quorum_nobody_is_late() -> None:
    harness = ready(3, 0)
    late(harness, 2)
    assert states(harness) == "active active active"


def test_only_servers_say_who_is_late() -> None:
    harness = ready()
    refused = answer(late(harness, 2, who=worker_id(0)), Refused)
    assert (refused.error, refused.text) == (ErrorCode.NOT_ALLOWED, "worker 0 cannot say who is late: servers do")
    assert states(harness) == "active active active"


def test_barriers_do_not_wait_for_a_late_worker() -> None:
    harness = ready()
    for rank in (0, 1):
        harness.say(worker_id(rank), Enter(40, "user:there", 0))
    effects = late(harness, 2)
    assert {type(said(effects, worker_id(rank))[-1]) for rank in (0, 1)} == {Done}
    entered = harness.say(worker_id(2), Enter(40, "user:there", 0))
    assert isinstance(said(entered, worker_id(2))[-1], Done)  # it passes, too


# ── deaths ──


@pytest.mark.parametrize("setting", ["wait", "fail", "shrink"])
def test_a_worker_that_dies_is_lost_while_a_quorum_is_left(setting: str) -> None:
    harness = ready(break_on_loss=setting == "fail", shrink_on_loss=setting == "shrink")
    pass_without(harness, 2)
    assert states(harness) == "active active lost"
    pass_without(harness, 1, 2)
    assert states(harness) == ("active lost lost" if setting == "shrink" else "active dead lost")


def test_a_death_that_left_too_few_is_a_loss_once_there_are_enough() -> None:
    harness = ready()
    late(harness, 2)
    effects = pass_without(harness, 1)
    assert states(harness) == "active dead back"
    assert "fewer workers than the quorum are left to go on without worker 1: start it again" in [
        entry.text for entry in of(LogEntry, effects)
    ]
    take(harness, 2, Taking.IN)
    assert states(harness) == "active lost returning"


def test_the_successor_of_a_late_worker_takes_no_part_yet() -> None:
    harness = ready()
    late(harness, 2)
    harness.worker(2, life=1)
    assert states(harness) == "active active back"


# ── the log ──


def test_a_worker_that_is_late_again_and_again_fills_no_log() -> None:
    harness = ready()
    lines: list[str] = []
    for _ in range(50):
        effects = late(harness, 2) + take(harness, 2, Taking.IN) + take(harness, 2, Taking.ARRIVED)
        lines += [entry.text for entry in of(LogEntry, effects) if entry.level != "debug"]
        harness.now += 0.02
    assert lines == ["worker 2 is late: the rounds go on without it until its next step"]
    harness.now = LOG_INTERVAL_S
    (entry,) = [entry for entry in of(LogEntry, late(harness, 2)) if entry.level == "info"]
    assert entry.text.endswith(", and was 49 times more since the last line about it")


# ── settings ──


def test_a_store_without_rounds_is_refused() -> None:
    harness = Harness(cluster(3, mode="", quorum=2, quorum_grace_s=1.0))
    wanted = OPEN._replace(mode="async")
    refused = answer(harness.join("worker", worker_id(0), "w", settings=wanted), Refused)
    assert (refused.error, refused.key) == (ErrorCode.CONFIG_ERROR, "quorum")
    assert "asynchronous types have no rounds: use dist_sync, or start the scheduler without --quorum" in refused.text
    harness.worker(0)
    assert states(harness) == "active"


def test_the_quorum_survives_the_scheduler() -> None:
    harness = ready()
    late(harness, 2)
    settings = cluster(3, quorum=2, quorum_grace_s=1.0)
    again = Harness(settings, saved=harness.disk, generation=2)
    assert states(again) == "active active back"
    late(again, 1, view=harness.machine.epoch)
    assert states(again) == "active active back"
    take(again, 2, Taking.IN)
    take(again, 2, Taking.ARRIVED)
    late(again, 1)
    assert states(again) == "active back active"


def all_are_back() -> Harness:
    """Three workers that were lost one after the other, and are heard again."""
    harness = ready(3, 0, break_on_loss=False, shrink_on_loss=True)
    pass_without(harness, 1, 2)
    for rank in (1, 2):
        harness.beat(rank)
    pass_without(harness, 0)
    harness.beat(0)
    assert states(harness) == "back back back"
    return harness


def test_where_nobody_takes_part_one_worker_comes_in_and_the_others_follow() -> None:
    """Two that come in at once would each choose a step, as neither finds the other in any."""
    harness = all_are_back()
    assert isinstance(answer(take(harness, 1, Taking.IN), Done), Done)
    for rank in (0, 2):
        refused = answer(take(harness, rank, Taking.IN), Refused)
        assert refused.error == ErrorCode.NOT_ALLOWED
        assert "worker 1 comes in first, as nobody takes part" in refused.text
    assert isinstance(answer(take(harness, 1, Taking.IN), Done), Done)  # it asks again, as the answer was lost
    assert states(harness) == "back returning back"
    take(harness, 1, Taking.ARRIVED)
    for rank in (0, 2):
        assert isinstance(answer(take(harness, rank, Taking.IN), Done), Done)
    assert states(harness) == "returning active returning"


@pytest.mark.parametrize("how", [Taking.OUT, None])
def test_nobody_waits_for_one_that_does_not_come_in_after_all(how: Taking | None) -> None:
    harness = all_are_back()
    take(harness, 1, Taking.IN)
    if how is None:
        pass_without(harness, 1)
    else:
        take(harness, 1, how)
    assert isinstance(answer(take(harness, 2, Taking.IN), Done), Done)
    assert states(harness) in ("back back returning", "back lost returning")


def test_one_that_comes_in_while_announcements_pause_asks_a_second_time_at_most() -> None:
    """It asks until it knows the view that lets it in, which among many nodes may be announced later."""
    harness = Harness(cluster(TOLD_AT_ONCE + 1)._replace(max_workers=TOLD_AT_ONCE + 5))
    harness.join("server", SERVER, "s")
    for rank in range(TOLD_AT_ONCE + 2):
        harness.worker(rank)
    rank = TOLD_AT_ONCE + 1
    known = harness.machine.epoch
    told = harness.say(worker_id(rank), TakePart(30, Taking.IN), view=known)
    assert [message for message in said(told) if isinstance(message, View | Done)] == [Done(30)]
    assert harness.machine.epoch > known
    again = harness.say(worker_id(rank), TakePart(31, Taking.IN), view=known)
    own = [send.message for send in of(Send, again) if send.peer == worker_id(rank)]
    assert [type(message) for message in own] == [View, Done]
