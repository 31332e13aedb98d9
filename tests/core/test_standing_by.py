"""A worker stands by at a point, and takes part again: the order of what it asks, and what a server answers."""

from __future__ import annotations

from typing import Any

from kvd.core import requests
from kvd.core.machine import SCHEDULER, Received
from kvd.core.places import PlaceKind, place_of
from kvd.errors import BarrierBroken, KvdError, NotAllowed
from kvd.protocol.messages import (
    ClockQuery,
    Clocks,
    ComeTo,
    Done,
    Enter,
    Epoch,
    ErrorCode,
    NodeName,
    NotYet,
    Push,
    StandBy,
    Standing,
    StepInto,
    TheyAre,
    Together,
    WhereAre,
)
from tests.core.fakes import NodePeer, cluster, member, one, said, worker_id
from tests.core.server_harness import Harness as Server
from tests.core.server_harness import ready as server
from tests.core.worker_harness import Harness, ready

AFTER_9 = place_of(PlaceKind.OUTSIDE, 9)


def stand_by(worker: Harness, steps: int = 5) -> int:
    return worker.call(requests.StandBy("until:a", steps))


def together(worker: Harness, steps: int = 9, *, waited: bool = True, change: int = 1) -> None:
    """The scheduler, whose newest view has this number, says that all have come."""
    asked: Any = worker.take(StandBy).message
    worker.step(Received(SCHEDULER, 1, Epoch(1, change), Together(asked.request, steps, waited)))


def tell_clock(worker: Harness, clock: int) -> None:
    send = worker.take(ClockQuery)
    request: Any = send.message
    worker.say(send.peer, Clocks(request.request, clock, clock, clock, clock))


def test_it_pushes_when_the_servers_know_the_view_and_it_knows_the_clocks() -> None:
    worker = ready()
    call = stand_by(worker)
    asked = one(worker.waiting(StandBy))
    assert (asked.name, asked.generation, asked.steps, asked.standing) == ("until:a", 0, 5, Standing.WAITS)
    together(worker)
    assert worker.waiting(ClockQuery) == []
    early = worker.push("w")
    assert isinstance(worker.error(early), NotAllowed)
    worker.reply(worker.take(StepInto), Done)
    tell_clock(worker, 7)
    come_to: Any = worker.take(ComeTo)
    assert come_to.message.place == AFTER_9
    assert call not in worker.done
    worker.reply(come_to, Done)
    assert worker.result(call) == 9
    worker.push("w")
    assert worker.clocks(Push) == [("w", 0, 8)]


def test_it_waits_for_the_view_in_which_all_take_part() -> None:
    worker = ready()
    stand_by(worker)
    together(worker, change=worker.epoch + 1)
    assert worker.waiting(StepInto) == []
    worker.look()
    assert len(worker.waiting(StepInto)) == 1


def test_the_farthest_is_where_it_said_that_it_is() -> None:
    worker = ready()
    call = stand_by(worker, 9)
    together(worker)
    worker.reply(worker.take(StepInto), Done)
    tell_clock(worker, 9)
    assert worker.waiting(ComeTo) == []
    assert worker.result(call) == 9


def test_a_program_whose_predecessor_has_gone_on_asks_and_does_not_stand_by() -> None:
    worker = ready()
    worker.machine._clocks._predecessor.place = place_of(PlaceKind.STEP, 10)
    call = stand_by(worker)
    assert one(worker.waiting(StandBy)).standing is Standing.ASKS
    together(worker, waited=False)
    assert worker.result(call) == 9
    assert worker.waiting(StepInto) == worker.waiting(ComeTo) == []


def test_a_program_whose_predecessor_has_come_there_only_waits_for_the_servers() -> None:
    worker = ready()
    worker.machine._clocks._predecessor.place = AFTER_9
    call = stand_by(worker, 9)
    assert one(worker.waiting(StandBy)).standing is Standing.WAITS
    together(worker, waited=False)
    send = worker.take(WhereAre)
    assert send.message.frozen  # type: ignore[union-attr]
    worker.say(send.peer, TheyAre(send.message.request, 0, 0))  # type: ignore[union-attr]
    assert worker.result(call) == 9


def test_after_a_break_it_stands_by_and_comes_again_to_the_same_point() -> None:
    worker = ready()
    call = stand_by(worker)
    worker.refuse(StandBy, ErrorCode.BARRIER_BROKEN, nodes=(NodeName("worker", 1),))
    assert isinstance(worker.error(call), BarrierBroken)
    assert "again" in str(worker.error(worker.push("w")))
    stand_by(worker)
    assert one(worker.waiting(StandBy)).generation == 0


def test_one_that_the_scheduler_does_not_let_wait_takes_part() -> None:
    worker = ready()
    call = stand_by(worker)
    worker.refuse(StandBy, ErrorCode.NOT_ALLOWED)
    assert isinstance(worker.error(call), KvdError)
    worker.push("w")
    assert worker.clocks(Push) == [("w", 0, 1)]


def test_it_says_again_that_it_stands_by_if_that_is_forgotten() -> None:
    worker = ready()
    call = worker.call(requests.StandBy("until:a", 5), timeout_s=1.0)
    worker.wait(2.0)
    assert worker.error(call) is not None
    worker.sent.clear()
    worker.look(member("worker", 0, "idle"))
    assert worker.waiting(StandBy) == []
    worker.look(member("worker", 0))
    assert one(worker.waiting(StandBy)).steps == 5


def test_with_a_bounded_staleness_all_wait_until_all_are_level() -> None:
    worker = ready(settings=cluster(2, 1, mode="async", staleness=1))
    call = stand_by(worker)
    together(worker)
    worker.reply(worker.take(StepInto), Done)
    tell_clock(worker, 9)
    entered = worker.take(Enter)
    assert entered.message.name == "level:a"  # type: ignore[union-attr]
    worker.reply(entered, Done)
    worker.reply(worker.take(ComeTo), Done)
    assert worker.result(call) == 9


# ── the server ──


def ask(harness: Server, message: Any, change: int) -> list[Any]:
    """Worker 0 asks, and knows the view of this number."""
    who = worker_id(0)
    peer: Any = NodePeer(who)
    return said(harness.step(Received(peer, who, Epoch(1, change), message)))


def test_a_server_with_an_older_view_does_not_let_a_worker_go_on_though_it_is_named_there() -> None:
    harness = server()
    harness.look(member("worker", 1, "idle"))
    for message in (StepInto(50, 0, 0), WhereAre(51, True)):
        assert isinstance(one(ask(harness, message, harness.epoch + 1)), NotYet)
    harness.look(member("worker", 1))
    assert ask(harness, StepInto(50, 0, 0), harness.epoch) == [Done(50)]


def test_the_rounds_go_on_without_the_idle_and_what_they_have_staged_counts() -> None:
    harness = server()
    harness.push(1, 1, b"\5")  # its answer is on its way
    harness.look(member("worker", 1, "idle"))
    harness.push(0, 1, b"\1")
    assert harness.value("w") == b"\6"
    harness.push(0, 2, b"\2")
    assert harness.value("w") == b"\2"
    clocks = one(said(harness.say(1, ClockQuery(60, "w"))))
    assert (clocks.highest, clocks.passed_by) == (2, True)
    harness.look(member("worker", 1))
    harness.push(0, 3, b"\3")
    assert harness.value("w") == b"\2"
    assert said(harness.say(1, StepInto(61, 0, 0))) == [Done(61)]
    clocks = one(said(harness.say(1, ClockQuery(62, "w"))))
    assert (clocks.highest, clocks.passed_by) == (2, False)
    harness.push(1, 3, b"\1")
    assert harness.value("w") == b"\4"


def test_who_comes_in_behind_the_last_step_of_its_loop_is_behind_the_loop() -> None:
    """A successor of it would take the points after the loop for passed otherwise."""
    harness = server()
    assert said(harness.say(1, StepInto(50, 3, 6))) == [Done(50)]
    assert one(said(harness.say(1, WhereAre(51, True)))).own == place_of(PlaceKind.STEP, 6)
    assert said(harness.say(0, StepInto(52, 3, 6, is_past_loop=True))) == [Done(52)]
    assert one(said(harness.say(0, WhereAre(53, True)))).own == place_of(PlaceKind.OUTSIDE, 6)
