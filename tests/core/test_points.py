"""Points, at which workers wait until all have come: what the scheduler does for `kv.join(until=…)`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvd.core.machine import CallerPeer, Send
from kvd.core.scheduler.barriers import points as module
from kvd.core.scheduler.barriers.points import NOT_KNOWN, Points
from kvd.core.scheduler.runs.record import Record
from kvd.protocol.messages import (
    Departure,
    Done,
    Enter,
    ErrorCode,
    Leave,
    NodeName,
    NotYet,
    Refused,
    StandBy,
    Standing,
    TakePart,
    Taking,
    Together,
    View,
    WaitNews,
    WaitReport,
)
from tests.core.fakes import OPEN, cluster, of, said, server_id, worker_id
from tests.core.scheduler_harness import Harness

PEER = CallerPeer(b"peer")
NAME = "until:epoch 0"


def stand_by(request: int, steps: int = 5, *, name: str = NAME, generation: int = 0, standing: Any = None) -> StandBy:
    return StandBy(request, name, generation, steps, standing or Standing.WAITS)


def three_workers(*, hold: bool = False, **more: Any) -> Harness:
    harness = Harness(cluster(workers=3, mode="", merge=""), **more)
    for rank in range(3):
        harness.worker(rank)
    harness.hold = hold
    return harness


def answers(effects: Any) -> dict[int, Any]:
    """What was answered, by request."""
    kinds = (Together, Refused, NotYet, Done)
    return {message.request: message for message in said(effects) if isinstance(message, kinds)}


def states(harness: Harness) -> list[str]:
    return [harness.states()[f"worker {rank}"] for rank in range(3)]


# ── together ──


def test_all_take_part_again_in_one_view_which_is_saved_before_anybody_is_told() -> None:
    harness = three_workers()
    assert answers(harness.say(worker_id(0), stand_by(10, 5))) == {}
    assert answers(harness.say(worker_id(2), stand_by(30, 9))) == {}
    assert states(harness) == ["idle", "active", "idle"]
    harness.hold = True
    effects = harness.say(worker_id(1), stand_by(20, 7))
    assert said(effects) == []
    assert states(harness) == ["active"] * 3
    effects = harness.saved()
    views = [message for message in said(effects) if isinstance(message, View)]
    assert {member.state for view in views for member in view.members if member.role == "worker"} == {"active"}
    assert answers(effects) == {request: Together(request, 9, True) for request in (10, 20, 30)}
    kinds = [type(message) for message in said(effects)]
    assert kinds.index(Together) > max(place for place, kind in enumerate(kinds) if kind is View)


def test_who_comes_late_or_again_is_told_at_once_and_does_not_idle() -> None:
    harness = three_workers()
    for rank in range(3):
        harness.say(worker_id(rank), stand_by(10 + rank, rank))
    assert answers(harness.say(worker_id(0), stand_by(10, 0))) == {10: Together(10, 2, True)}  # a repeated request
    harness.worker(1, life=1)
    assert answers(harness.say(worker_id(1, 1), stand_by(5, 1))) == {5: Together(5, 2, False)}  # a new process
    assert states(harness) == ["active"] * 3


def test_the_same_name_again_is_the_next_generation() -> None:
    harness = three_workers()
    for generation, steps in ((0, 4), (1, 11)):
        for rank in range(3):
            effects = harness.say(worker_id(rank), stand_by(10 + rank, steps, generation=generation))
        assert answers(effects)[12] == Together(12, steps, True)
    assert answers(harness.say(worker_id(0), stand_by(99))) == {99: Together(99, 4, True)}


def test_those_who_have_left_for_good_are_not_waited_for() -> None:
    harness = three_workers()
    harness.say(worker_id(0), stand_by(10))
    harness.say(worker_id(1), Leave(20, Departure.DONE))
    assert answers(harness.say(worker_id(2), Leave(30, Departure.LEFT)))[10] == Together(10, 5, True)
    assert states(harness) == ["active", "done", "left"]
    refused = answers(harness.say(worker_id(1), stand_by(21)))[21]
    assert (refused.error, "has left the rounds" in refused.text) == (ErrorCode.NOT_ALLOWED, True)


def test_one_who_waits_may_leave_for_good() -> None:
    harness = three_workers()
    harness.say(worker_id(0), stand_by(10))
    harness.say(worker_id(0), Leave(11, Departure.DONE))
    assert states(harness)[0] == "done"
    harness.say(worker_id(1), stand_by(20, 7))
    assert answers(harness.say(worker_id(2), stand_by(30, 9))) == {
        20: Together(20, 9, True),
        30: Together(30, 9, True),
    }


def test_barriers_do_not_wait_for_those_at_a_point_and_points_wait_for_those_at_barriers() -> None:
    harness = three_workers()
    harness.say(worker_id(1), Enter(20, "user:b", 0))
    harness.say(worker_id(2), Enter(30, "user:b", 0))
    assert set(answers(harness.say(worker_id(0), stand_by(10)))) == {20, 30}
    assert states(harness)[0] == "idle"


def test_a_worker_waits_at_one_point() -> None:
    harness = three_workers()
    harness.say(worker_id(0), stand_by(10, name="until:a"))
    harness.say(worker_id(1), stand_by(20, name="until:b"))
    assert harness.machine.explain(0.0)["barriers"] == {"until:a": [0], "until:b": [1]}
    harness.say(worker_id(0), stand_by(11, name="until:b"))
    assert harness.machine.explain(0.0)["barriers"] == {"until:b": [0, 1]}
    assert set(answers(harness.say(worker_id(2), stand_by(30, name="until:b")))) == {11, 20, 30}


@pytest.mark.parametrize("who", [server_id(0), 12345])
def test_only_workers_of_the_run_wait_at_points(who: int) -> None:
    harness = three_workers()
    harness.join("server", server_id(0), "s", settings=OPEN)
    answer = answers(harness.say(who, stand_by(10)))[10]
    assert isinstance(answer, Refused if who == server_id(0) else NotYet)
    assert states(harness) == ["active"] * 3


def test_a_run_has_so_many_points_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_POINTS", 4)
    points = Points()
    for number in range(2):
        assert points.take(0, 1, PEER, stand_by(number, name=f"until:{number}")) is None
        points.settle([0], [])
    refused: Any = points.take(0, 1, PEER, stand_by(9, name="until:more"))
    assert (refused.error, "4 points" in refused.text) == (ErrorCode.NOT_ALLOWED, True)
    assert points.take(0, 1, PEER, stand_by(9, name="until:1")) == Together(9, 5, True)
    again: Any = points.take(0, 1, PEER, stand_by(9, name="until:1", generation=1))
    assert again.error is ErrorCode.NOT_ALLOWED
    far: Any = points.take(0, 1, PEER, stand_by(9, name="until:0", generation=1 << 40))
    assert far.error is ErrorCode.NOT_ALLOWED


# ── deaths ──


def test_the_rounds_wait_for_the_successor_of_one_who_died_at_a_point() -> None:
    harness = three_workers()
    harness.say(worker_id(0), stand_by(10))
    harness.kill(worker_id(0))
    assert states(harness)[0] == "dead"
    harness.worker(0, life=1)
    assert states(harness)[0] == "active"
    assert answers(harness.say(worker_id(0, 1), stand_by(3))) == {}
    assert states(harness)[0] == "idle"


def test_one_who_was_only_silent_waits_on() -> None:
    harness = three_workers(break_on_loss=False)
    harness.say(worker_id(0), stand_by(10))
    for seconds in (5, 10, 15, 20, 21):
        harness.now = float(seconds)
        for rank in (1, 2):
            harness.beat(rank)
    assert states(harness)[0] == "dead"
    harness.beat(0)
    assert states(harness)[0] == "idle"
    harness.say(worker_id(1), stand_by(20))
    assert set(answers(harness.say(worker_id(2), stand_by(30)))) == {10, 20, 30}


def test_the_dead_break_a_point_and_who_comes_again_meets_the_successor() -> None:
    harness = three_workers()
    harness.say(worker_id(0), stand_by(10))
    refused = answers(harness.kill(worker_id(1)))[10]
    assert (refused.error, refused.nodes) == (ErrorCode.BARRIER_BROKEN, (NodeName("worker", 1),))
    assert "'epoch 0'" in refused.text
    assert states(harness) == ["idle", "dead", "active"]
    assert answers(harness.say(worker_id(0), stand_by(10)))[10] == refused  # the same request, the same answer
    again = harness.machine.record()
    assert answers(harness.say(worker_id(0), stand_by(11)))[11].error is ErrorCode.BARRIER_BROKEN
    harness.worker(1, life=1)
    for rank, life in ((0, 0), (1, 1)):
        assert answers(harness.say(worker_id(rank, life), stand_by(12))) == {}
    assert len(answers(harness.say(worker_id(2), stand_by(12)))) == 1  # all have the same number here
    assert states(harness) == ["active"] * 3
    restarted = three_workers(saved=json.loads(json.dumps(again)), generation=2)
    assert answers(restarted.say(worker_id(0), stand_by(10)))[10] == refused


def test_where_the_others_wait_for_the_dead_nothing_breaks() -> None:
    harness = three_workers(break_on_loss=False)
    harness.say(worker_id(0), stand_by(10))
    assert answers(harness.kill(worker_id(1))) == {}


def test_where_the_others_go_on_without_the_dead_the_point_does_too() -> None:
    harness = three_workers(break_on_loss=False, shrink_on_loss=True)
    harness.say(worker_id(0), stand_by(10, 5))
    harness.say(worker_id(2), stand_by(30, 9))
    assert set(answers(harness.kill(worker_id(1)))) == {10, 30}
    assert states(harness) == ["active", "lost", "active"]


def test_a_lost_worker_is_told_too_and_takes_no_part_by_that() -> None:
    harness = three_workers(break_on_loss=False, shrink_on_loss=True)
    harness.kill(worker_id(1))
    harness.beat(1)
    assert states(harness)[1] == "back"
    harness.say(worker_id(1), stand_by(20, 7))
    assert states(harness)[1] == "back"
    harness.say(worker_id(0), stand_by(10, 5))
    assert answers(harness.say(worker_id(2), stand_by(30, 5))) == {n: Together(n, 7, True) for n in (10, 20, 30)}
    assert states(harness) == ["active", "back", "active"]
    harness.say(worker_id(1), stand_by(21, generation=1))
    harness.say(worker_id(1), TakePart(22, Taking.IN))  # it does something else
    assert harness.machine.explain(0.0)["barriers"] == {}


# ── the scheduler is restarted ──


def test_a_scheduler_with_its_record_knows_who_waits_and_what_was_passed() -> None:
    harness = three_workers()
    for rank in range(3):
        harness.say(worker_id(rank), stand_by(10 + rank, rank))
    harness.say(worker_id(0), stand_by(20, 5, generation=1))
    saved = json.loads(json.dumps(harness.disk))
    again = three_workers(saved=saved, generation=2)
    assert states(again) == ["idle", "active", "active"]
    assert answers(again.say(worker_id(1), stand_by(11))) == {11: Together(11, 2, True)}
    again.say(worker_id(1), stand_by(21, 6, generation=1))
    again.say(worker_id(2), stand_by(22, 7, generation=1))
    assert set(answers(again.say(worker_id(0), stand_by(20, 5, generation=1)))) == {20, 21, 22}
    Record.from_plain({key: value for key, value in saved.items() if "point" not in key})  # of an earlier kvd


def test_a_scheduler_without_its_record_is_told_by_those_who_have_passed() -> None:
    harness = three_workers(generation=2)
    assert answers(harness.say(worker_id(0), stand_by(10, 5))) == {}
    told = answers(harness.say(worker_id(1), stand_by(20, 9, standing=Standing.KNOWS)))
    assert told == {10: Together(10, 9, True), 20: Together(20, 9, False)}
    assert states(harness) == ["active"] * 3
    asked = stand_by(30, 7, standing=Standing.ASKS)
    assert answers(harness.say(worker_id(2), asked)) == {30: Together(30, 9, False)}
    unknown = stand_by(31, 7, name="until:other", standing=Standing.ASKS)
    assert isinstance(answers(harness.say(worker_id(2), unknown))[31], NotYet)
    assert states(harness) == ["active"] * 3


def test_a_generation_that_nobody_knows_is_asked_for_again() -> None:
    points = Points()
    assert points.take(0, 1, PEER, stand_by(1, generation=1)) is None
    assert isinstance(points.take(1, 2, PEER, stand_by(1, generation=0)), NotYet)
    assert points.take(0, 1, PEER, stand_by(2, 3, generation=0, standing=Standing.KNOWS)) == Together(2, 3, False)
    assert points.take(1, 2, PEER, stand_by(1, generation=0)) == Together(1, 3, False)
    assert points.open() == {NAME: [0]}


@pytest.mark.parametrize(
    "points",
    [
        [["until:a", [-2], []]],
        [["until:a", [1], []], ["until:a", [1], []]],
        [["", [1], []]],
        [["until:a", [NOT_KNOWN] * 3, [[0, 1, 2, []]]]],
        [["until:a"]],
        "until:a",
    ],
)
def test_what_no_scheduler_writes_is_refused(points: Any) -> None:
    harness = three_workers()
    plain = harness.machine.record()
    plain["points"] = points
    with pytest.raises((ValueError, TypeError)):
        Record.from_plain(plain)


def test_who_is_missing_is_said() -> None:
    harness = three_workers()
    harness.say(worker_id(0), stand_by(10))
    harness.say(worker_id(1), stand_by(20))
    report = WaitReport(90, (), (NAME,), True, 5, 0, ("line",))
    sent = of(Send, harness.say(worker_id(0), report, view=harness.machine.epoch))
    (news,) = [send.message for send in sent if isinstance(send.message, WaitNews)]
    assert [(wait.name, wait.absent) for wait in news.barriers] == [(NAME, (2,))]
