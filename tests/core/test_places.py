"""Where a program is: what servers remember of it, where a successor goes on, and which pushes wait."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvd.core import requests
from kvd.core.places import START, Inheritance, PlaceKind, Stopped, kind_of, place_of, step_of
from kvd.core.worker.step_loops import Replay, StepLoops
from kvd.errors import NotAllowed, NotResumed
from kvd.protocol.messages import (
    ABSENT,
    ADD,
    ASSIGN,
    Attach,
    ClockQuery,
    Clocks,
    ComeTo,
    Done,
    Part,
    Push,
    Welcome,
)
from tests.core.fakes import from_scheduler, member, said
from tests.core.server_harness import Harness, ready
from tests.core.worker_harness import Harness as Worker

OUTSIDE, STEP, SHARED = PlaceKind


def at(step: int, kind: PlaceKind = STEP) -> int:
    return place_of(kind, step)


def test_places_are_in_the_order_of_the_program() -> None:
    places = [place_of(kind, step) for step in range(3) for kind in PlaceKind]
    assert places == sorted(set(places))
    assert places[0] == START
    assert [(kind_of(place), step_of(place)) for place in places] == [(k, step) for step in range(3) for k in PlaceKind]


# ── what a server remembers ──


def push(harness: Harness, rank: int, clock: int, place: int, how: int = ADD, life: int = 0) -> None:
    """A push of one byte to the key "w"."""
    message = Push(100 + clock, (Part("w", 0, clock),), how, 1, False, place=place)
    harness.say(rank, message, b"" if how == ABSENT else b"\1", life=life)


@pytest.mark.parametrize(
    ("pushes", "asked", "answer"),
    [
        # pushes of rank 1 as (place, how), of which all count → (place, begun, trained); asked at which place
        ([(START, ADD)] * 3, START, (START, 0, True)),
        ([(START, ASSIGN)] * 3, START, (START, 0, False)),
        ([(START, ASSIGN), (at(0), ADD), (at(1), ADD)], at(1), (at(1), 2, True)),
        ([(START, ASSIGN), (at(0), ADD), (at(1), ADD)], at(2), (at(1), 3, True)),  # of another key
        ([(at(0), ASSIGN), (at(0), ASSIGN)], at(0), (at(0), 0, False)),
        ([(at(0), ADD), (at(1, OUTSIDE), ASSIGN)], at(1, OUTSIDE), (at(1, OUTSIDE), 1, False)),
    ],
)
def test_a_successor_learns_where_its_predecessor_stopped(
    pushes: list[tuple[int, int]], asked: int, answer: tuple[int, int, bool]
) -> None:
    harness = ready()
    for clock, (place, how) in enumerate(pushes, 1):
        push(harness, 1, clock, place, how)
        push(harness, 0, clock, place, how if how == ADD else ABSENT)
    push(harness, 1, len(pushes) + 1, pushes[-1][0])  # staged only: it is dropped, and was made at the same place
    harness.look(member("worker", 1, life=1))
    counted = len(pushes)
    expected, begun, trained = answer
    attached = Clocks(1, counted, counted, counted, counted, expected, trained=trained)
    assert said(harness.attach(1, life=1)) == [attached]
    clocks = Clocks(2, counted, counted, counted, counted, expected, begun)
    assert said(harness.say(1, ClockQuery(2, "w", asked), life=1)) == [clocks]


def test_a_program_that_begins_anew_has_no_place() -> None:
    harness = ready()
    for clock in (1, 2):
        for rank in (0, 1):
            push(harness, rank, clock, at(clock))
    assert said(harness.say(1, ComeTo(9, START))) == [Done(9)]
    harness.look(member("worker", 1, life=1), member("worker", 0, life=1))
    assert said(harness.attach(1, life=1)) == [Clocks(1, 2, 2, 2, 2)]
    assert said(harness.attach(0, life=1)) == [Clocks(1, 2, 2, 2, 2, at(2), trained=True)]


def test_a_place_without_a_push_begins_at_the_newest_clock() -> None:
    harness = ready()
    for rank in (0, 1):
        push(harness, rank, 1, START)
    harness.say(1, ComeTo(9, at(0)))
    harness.look(member("worker", 1, life=1))
    assert said(harness.attach(1, life=1)) == [Clocks(1, 1, 1, 1, 1, at(0))]
    assert said(harness.say(1, ClockQuery(2, "w", at(0)), life=1)) == [Clocks(2, 1, 1, 1, 1, at(0), 1)]


# ── where a worker goes on ──


def successor(*answers: Clocks, predecessor: str | None = "dead") -> Worker:
    """A worker of rank 1 whose servers say this of its predecessor."""
    harness = Worker(rank=1, joined=False, servers=len(answers))
    harness.attach = False
    harness.step(from_scheduler(Welcome(1, 1, predecessor), (1, 0)))  # type: ignore[arg-type]
    harness.look()
    for answer in answers:
        attach = harness.take(Attach)
        message: Any = attach.message
        harness.say(attach.peer, replace(answer, request=message.request))
    return harness


@pytest.mark.parametrize(
    ("place", "first"),
    [(START, 4), (at(3), 3), (at(3, OUTSIDE), 4), (at(3, SHARED), 4)],
)
def test_only_a_step_is_made_again(place: int, first: int) -> None:
    harness = successor(Clocks(0, 4, 4, 4, 4, place, trained=True))
    assert harness.machine.stopped() == (place, True, harness.machine._clocks.inherited, False)
    clock = harness.call(requests.ClockOf("w"))
    harness.found()
    query = harness.take(ClockQuery)
    asked: Any = query.message
    assert asked.place == place
    harness.say(query.peer, Clocks(asked.request, 4, 4, 4, 4, place, 3))
    assert harness.result(clock) == first
    resumed = harness.call(requests.Resume())
    for told in [harness.take(ComeTo)] if place != START else []:
        harness.reply(told, Done)
    harness.result(resumed)
    assert harness.result(harness.call(requests.ClockOf("w"))) == 4


# ── which pushes wait ──


def test_pushes_of_a_step_wait_for_those_of_the_step_before() -> None:
    harness = Worker(rank=0)
    for key in ("a", "b"):
        harness.push(key, place=at(0))
        harness.found()
    harness.push("a", place=at(1))
    flushed = harness.call(requests.Flush())
    assert harness.clocks() == [("a", 0, 1), ("b", 0, 1)]
    harness.reply(harness.take(Push), Done)
    assert harness.clocks() == [("b", 0, 1)]
    harness.reply(harness.take(Push), Done)
    assert harness.clocks() == [("a", 0, 2)]
    assert flushed not in harness.done
    harness.reply(harness.take(Push), Done)
    assert harness.result(flushed) is None


# ── the loops of a program ──


def loops(stopped: Stopped | None = None, *, is_strict: bool = True) -> StepLoops:
    return StepLoops(stopped, is_strict=is_strict)


def walk(program: StepLoops, *totals: int) -> list[list[int]]:
    """The steps of one loop after the other, each of which pushes "w"."""
    seen = []
    for total in totals:
        steps = list(range(program.begin(total, ["w"]), total))
        for step in steps:
            program.enter(step)
            assert program.take_pushes(["w"])
            program.leave()
            program.validate()
        program.end()
        program.validate()
        seen.append(steps)
    return seen


@pytest.mark.parametrize(
    ("place", "seen"),
    [
        (START, [[0, 1, 2], [0, 1]]),
        (at(0), [[0, 1, 2], [0, 1]]),
        (at(2), [[2], [0, 1]]),
        (at(3, OUTSIDE), [[], [0, 1]]),
        (at(3), [[], [0, 1]]),
        (at(4), [[], [1]]),
        (at(5, OUTSIDE), [[], []]),
        (at(99), [[], []]),
    ],
)
def test_a_program_goes_on_where_its_predecessor_stopped(place: int, seen: list[list[int]]) -> None:
    program = loops(Stopped(place))
    assert walk(program, 3, 2) == seen


@pytest.mark.parametrize(
    ("place", "before", "after"),
    [
        (START, "resume", True),
        (at(0), False, True),
        (at(2), False, True),
        (at(3, OUTSIDE), False, "resume"),
        (at(5, OUTSIDE), False, False),
    ],
)
def test_pushes_outside_of_loops_are_known_by_their_place(place: int, before: object, after: object) -> None:
    """True: it is pushed; False: the predecessor has done that; "resume": nobody knows."""

    def pushed(program: StepLoops) -> object:
        try:
            return program.take_pushes(["w"])
        except NotResumed:
            return "resume"

    program = loops(Stopped(place, True))
    assert pushed(program) == before
    walk(program, 3)
    assert pushed(program) == after
    program.resume()
    assert pushed(program) is True
    assert loops(Stopped(place, True), is_strict=False).take_pushes(["w"]) == (place == START)


@pytest.mark.parametrize(
    ("stopped", "first", "second"),
    [
        (None, Replay.NEW, Replay.NEW),
        (Stopped(START), Replay.PERHAPS, Replay.NEW),
        (Stopped(at(1)), Replay.PASSED, Replay.NEW),
        (Stopped(at(3, OUTSIDE)), Replay.PASSED, Replay.PERHAPS),
        (Stopped(at(4)), Replay.PASSED, Replay.PASSED),
    ],
)
def test_broadcasts_are_repeated_as_their_place_says(stopped: Stopped | None, first: Replay, second: Replay) -> None:
    program = loops(stopped)
    assert program.take_broadcasts(["c"]) is first
    walk(program, 3)
    assert program.take_broadcasts(["c"]) is second


def test_a_loop_cannot_be_continued_as_one_of_another_kind() -> None:
    for shared in (False, True):
        program = loops(Stopped(at(1, STEP if shared else SHARED)), is_strict=False)
        with pytest.raises(NotAllowed, match=r"stopped in a loop over kv.steps that was shared where this one is not"):
            program.begin(3, None, shared=shared)


@pytest.mark.parametrize(
    ("stopped", "shared", "missed"),
    [
        (None, False, ""),
        (Stopped(START), False, ""),
        (Stopped(at(0)), False, ""),
        (Stopped(at(1)), False, "restarted"),
        (Stopped(at(9)), False, "restarted"),
        (Stopped(START), True, ""),
        (Stopped(at(0, SHARED)), True, "restarted"),
        (Stopped(START, is_new=True), True, "joined"),
        (Stopped(START, is_new=True), False, ""),  # it makes all of its own, or the others say with which it continues
    ],
)
def test_a_process_knows_whether_its_loop_skips_steps_that_it_has_not_made(
    stopped: Stopped | None, shared: bool, missed: str
) -> None:
    program = loops(stopped, is_strict=not shared)
    program.begin(3, None, shared=shared)
    assert program.has_missed_steps == bool(missed)
    assert missed in str(program.missed_steps_error())
    program.catch_up()
    program.end()
    if stopped is None or step_of(stopped.place) < 3:
        program.begin(3, None, shared=shared)
        assert not program.has_missed_steps


def test_steps_that_the_others_make_without_a_late_worker_are_missed() -> None:
    program = loops()
    program.begin(9, None)
    program.enter(0)
    assert not program.has_missed_steps
    program.miss_steps()
    assert program.has_missed_steps
    assert "the other workers continued without this one" in str(program.missed_steps_error())
    program.catch_up()
    assert not program.has_missed_steps
    program.miss_steps()
    program.end()
    program.resume()
    assert not program.has_missed_steps
    program.go_on_at(9)
    assert not program.has_missed_steps
    program.go_on_at(10)
    assert program.has_missed_steps


def test_keys_that_no_step_can_have_left_so_are_named() -> None:
    left = {"a": Inheritance(at(7), 8, 7), "b": Inheritance(at(6), 7, 7), "c": Inheritance(at(3), 4, 4)}
    program = loops(Stopped(at(7), True, left.get))
    with pytest.raises(NotAllowed, match=r"different clocks: .* last push of 'c' \(4 count\)"):
        program.begin(9, ["a", "b", "c"])
    assert loops(Stopped(at(7), True, left.get)).begin(9, ["a", "b"]) == 7
    assert not loops(None).is_inside
