"""A worker that is late, or was lost: how it takes part again, and how long it stays out."""

from __future__ import annotations

import pytest

from kvd.core import requests
from kvd.core.machine import SCHEDULER, Received
from kvd.core.membership import ViewState
from kvd.core.places import START, PlaceKind, place_of
from kvd.core.requests import Loop, Return, Returned, TakePartAgain
from kvd.core.worker.return_pause import MOST_GRACES, ReturnPause
from kvd.errors import NotResumed
from kvd.protocol.messages import (
    ClockQuery,
    Clocks,
    Done,
    Epoch,
    Push,
    StepInto,
    TakePart,
    Taking,
    TheyAre,
    Uncounted,
    WhereAre,
)
from tests.core.fakes import cluster, from_scheduler, member, server_id, view
from tests.core.worker_harness import Harness

LOOP = Loop(0, 9)
STEP_3 = place_of(PlaceKind.STEP, 3)


def late() -> Harness:
    harness = Harness(1, settings=cluster(2, quorum=1, quorum_grace_s=1.0))
    harness.know("w")
    harness.look(member("worker", 1, "back"))
    assert harness.machine.is_apart
    return harness


def where_are(harness: Harness, *, frozen: bool) -> None:
    """Answers where the others are: in step 3."""
    send = harness.take(WhereAre)
    assert isinstance(send.message, WhereAre)
    assert send.message.frozen == frozen
    harness.say(send.peer, TheyAre(send.message.request, STEP_3, 0))


def taken(harness: Harness, taking: Taking) -> None:
    """Answers the worker's TakePart: the scheduler has done so."""
    send = harness.take(TakePart)
    assert isinstance(send.message, TakePart)
    assert (send.peer, send.message.taking) == (SCHEDULER, taking)
    harness.step(from_scheduler(Done(send.message.request), (1, harness.epoch)))


def return_up_to_the_clocks(harness: Harness) -> int:
    """Everything but the answer about the clocks of its key."""
    call = harness.call(TakePartAgain(LOOP))
    where_are(harness, frozen=False)
    harness.look(member("worker", 1, "returning"))
    taken(harness, Taking.IN)
    where_are(harness, frozen=True)
    step_into = harness.take(StepInto)
    assert isinstance(step_into.message, StepInto)
    assert step_into.message.step == 4
    harness.reply(step_into, Done)
    return call


def clocks(harness: Harness) -> None:
    send = harness.take(ClockQuery)
    assert isinstance(send.message, ClockQuery)
    harness.say(send.peer, Clocks(send.message.request, 4, 4, 4, 4))


def test_it_takes_part_in_the_step_after_that_of_the_others() -> None:
    harness = late()
    call = return_up_to_the_clocks(harness)
    clocks(harness)
    assert harness.result(call) == Returned(Return.NOW, 4)
    assert not harness.machine.is_apart
    taken(harness, Taking.ARRIVED)
    harness.push("w", place=place_of(PlaceKind.STEP, 4))
    assert harness.clocks() == [("w", 0, 5)]


def test_a_worker_that_is_late_again_on_its_way_back_asks_later() -> None:
    harness = late()
    call = return_up_to_the_clocks(harness)
    harness.look(member("worker", 1, "back"))
    clocks(harness)
    assert harness.result(call).how is Return.LATER
    assert harness.machine.is_apart
    taken(harness, Taking.OUT)
    again = return_up_to_the_clocks(harness)
    clocks(harness)
    assert harness.result(again) == Returned(Return.NOW, 4)


@pytest.mark.parametrize(("state", "is_alone"), [("active", False), ("dead", False), ("lost", True), ("done", True)])
def test_it_keeps_step_with_a_dead_worker_that_rounds_wait_for(state: str, is_alone: bool) -> None:
    """Such a worker may go on where it was, in a step that this one would skip."""
    harness = late()
    harness.look(member("worker", 0, state))
    harness.call(TakePartAgain(LOOP))
    assert bool(harness.waiting(TakePart)) is is_alone
    assert bool(harness.waiting(WhereAre)) is not is_alone


@pytest.mark.parametrize(("state", "goes_on"), [("back", True), ("active", False), ("returning", False)])
def test_a_worker_that_is_not_alone_any_more_lets_the_other_one_choose_the_step(state: str, goes_on: bool) -> None:
    """All were lost in the first step. It has begun that step, and the other one has not: both come in with their next
    step, and no server could tell that these are two."""
    harness = late()
    harness.look(member("worker", 0, "back"))
    call = harness.call(TakePartAgain(LOOP))
    harness.look(member("worker", 0, state), member("worker", 1, "returning"))
    taken(harness, Taking.IN)
    send = harness.take(WhereAre)
    assert isinstance(send.message, WhereAre)
    harness.say(send.peer, TheyAre(send.message.request, START, place_of(PlaceKind.STEP, 0)))
    assert bool(harness.waiting(StepInto)) is goes_on
    if not goes_on:
        assert harness.result(call).how is Return.LATER
        taken(harness, Taking.OUT)


def test_an_old_view_throws_nobody_out_who_is_on_its_way_back() -> None:
    """The view in which it was late may come after it has asked."""
    harness = late()
    call = harness.call(TakePartAgain(LOOP))
    where_are(harness, frozen=False)
    harness.look(member("worker", 1, "back"))  # of another change
    harness.look(member("worker", 1, "returning"))
    taken(harness, Taking.IN)
    where_are(harness, frozen=True)
    harness.reply(harness.take(StepInto), Done)
    clocks(harness)
    assert harness.result(call).how is Return.NOW


def test_a_push_that_a_server_did_not_count_says_it_before_the_view() -> None:
    harness = Harness(1, settings=cluster(2, quorum=1, quorum_grace_s=1.0))
    harness.know("w")
    call = harness.push("w", place=STEP_3)
    sent = harness.take(Push)
    assert isinstance(sent.message, Push)
    newer = Epoch(1, harness.epoch + 1)
    harness.step(Received(sent.peer, server_id(0), newer, Uncounted(sent.message.request)))
    assert isinstance(harness.result(call), requests.UncountedVersions)
    assert harness.machine.is_apart


def test_outside_of_loops_it_is_told_what_to_do() -> None:
    harness = late()
    error = harness.error(harness.push("w"))
    assert isinstance(error, NotResumed)
    assert "it was late by more than quorum_grace_s, silent for longer than worker_timeout_s" in str(error)
    assert "kv.resume()" in str(error)


# ── how long it stays out ──


def at_step(step: int) -> int:
    return place_of(PlaceKind.STEP, step)


def pause_of(*states: str, quorum: int = 2) -> ReturnPause:
    seen = ViewState()
    workers = [member("worker", rank, state) for rank, state in enumerate(states)]
    seen.update(Epoch(1, 1), view(cluster(len(states), quorum=quorum, quorum_grace_s=0.5), workers))
    return ReturnPause(seen)


def test_who_was_late_once_comes_back_at_once() -> None:
    pause = pause_of("active", "active", "back")
    assert pause.next_s(at_step(3)) == 0.0
    pause.came_into(5)
    assert pause.next_s(at_step(6)) == 0.0  # step 5 has counted


def test_who_is_late_in_each_step_in_which_it_comes_back_stays_out_twice_as_long_each_time() -> None:
    pause = pause_of("active", "active", "back")
    pauses, step = [], 3
    for _ in range(8):
        pauses.append(pause.next_s(at_step(step)))
        step += 2
        pause.came_into(step)
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    assert max(pauses) == MOST_GRACES * 0.5
    assert pause.next_s(at_step(step + 1)) == 0.0  # it has given something
    assert pause.next_s(place_of(PlaceKind.OUTSIDE, step)) == 0.0


@pytest.mark.parametrize(
    ("states", "is_needed"),
    [
        (("active", "active", "back"), False),
        (("active", "returning", "back"), False),
        (("active", "dead", "back"), True),
        (("active", "lost", "back"), True),
        (("active", "done", "back"), True),
    ],
)
def test_it_does_not_stay_out_when_the_others_are_too_few(states: tuple[str, ...], is_needed: bool) -> None:
    assert pause_of(*states).is_needed is is_needed


def test_without_a_quorum_nobody_stays_out() -> None:
    pause = pause_of("active", "back", quorum=0)
    assert not pause.is_needed
