"""Calls that are made again and again: by plans the worker does, message by message, what it does without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvd.core import requests
from kvd.core.machine import SCHEDULER, Send, Tick
from kvd.core.requests import Versions
from kvd.core.worker.machine import WorkerMachine
from kvd.errors import NotAllowed, ShapeMismatch
from kvd.protocol.messages import (
    Departure,
    Done,
    ErrorCode,
    Leave,
    NotYet,
    NotYetReason,
    PullBatch,
    Push,
    PushBatch,
    Refused,
    Staged,
    Taken,
    Uncounted,
    Values,
)
from kvd.protocol.specs import KeySpec
from tests.core.fakes import SLICE, cluster, uint8
from tests.core.small_calls_harness import SmallCallSteps, without_plans
from tests.core.worker_harness import Harness, number, ready

Happens = Callable[[Harness], object]


def repeated(*keys: str, **more: Any) -> Harness:
    """A worker that has pushed and pulled these keys twice, as a batch."""
    harness = ready(*keys, batches=True, **more)
    for clock in (1, 2):
        push(harness, *keys)
        answer(harness, clock, len(keys))
    return harness


def push(harness: Harness, *keys: str, pull: bool = True) -> int:
    call = harness.push(*(keys or ("w",)), pull=pull)
    while any(kind == "DeclareBatch" for kind in kinds(harness)):
        harness.declared()
    return call


def kinds(harness: Harness) -> list[str]:
    return [type(send.message).__name__ for send in harness.sent]


def answer(harness: Harness, clock: int, parts: int = 1) -> None:
    kind = type(harness.sent[0].message)
    harness.values(kind, (clock,), *[b"x"] * parts)


def newest(harness: Harness) -> Send:
    """The newest push, which is not taken from what was sent."""
    return [send for send in harness.sent if isinstance(send.message, PushBatch)][-1]


def values(harness: Harness, clock: int = 3) -> None:
    """Answers the newest push."""
    send = newest(harness)
    harness.say(send.peer, Values(number(send), (clock,)), b"x")


def say(message: Any, *more: Any, payload: bytes | None = None) -> Happens:
    """The server says this of the newest push."""

    def happens(harness: Harness) -> None:
        send = newest(harness)
        harness.say(send.peer, message(number(send), *more), payload)

    return happens


def both(*happens: Happens) -> Happens:
    return lambda harness: [happen(harness) for happen in happens]


def take_back(harness: Harness) -> None:
    harness.call(requests.TakeBack((("source w", b"copy"),)))


INTERRUPTIONS: dict[str, Happens] = {
    "the answer": values,
    "the answer, twice": both(values, values),
    "staged, then the answer": both(say(Staged), values),
    "an answer with a payload that does not fit": say(Values, (3,), payload=b"too much"),
    "an answer with too many versions": say(Values, (3, 3), payload=b"x"),
    "another kind of answer": say(Done),
    "an answer to nothing": lambda harness: harness.say(newest(harness).peer, Values(10_000, (3,)), b"x"),
    "an answer of somebody else": lambda harness: harness.say(SCHEDULER, Values(number(newest(harness)), (3,)), b"x"),
    "it does not count": say(Uncounted, (3,), payload=b"x"),
    "it is refused": say(Refused, ErrorCode.NOT_ALLOWED, "because"),
    "it is refused, and taken in part": say(Refused, ErrorCode.NOT_ALLOWED, "because", "", Taken.PART),
    "the batch is forgotten": say(NotYet, NotYetReason.UNKNOWN_BATCH, "because"),
    "the server wants an attach": say(NotYet, NotYetReason.NOT_ATTACHED, "because"),
    "time passes": lambda harness: harness.wait(1.0),
    "a retry is due": lambda harness: harness.wait(2.5),
    "staged, and a probe is due": lambda harness: (harness.wait(1.0), say(Staged)(harness), harness.wait(3.0)),
    "the deadline": lambda harness: harness.wait(100.0),
    "a tick": lambda harness: harness.step(Tick()),
    "another push": lambda harness: push(harness),
    "a pull": lambda harness: harness.pull("w"),
    "another key": lambda harness: harness.push("v"),
    "a list": lambda harness: harness.push("v", "w"),
    "a flush": lambda harness: harness.call(requests.Flush()),
    "a rewind": lambda harness: harness.call(requests.Rewind(0)),
    "the clock": lambda harness: harness.call(requests.ClockOf("w")),
    "a barrier": lambda harness: harness.call(requests.Barrier("here")),
    "a deletion": lambda harness: harness.call(requests.DeleteKeys(("w",))),
    "the caller takes its array back": take_back,
    "a new view": lambda harness: harness.look(),
    "the server was restarted": lambda harness: harness.restart_server(),
}


@pytest.mark.parametrize("how", [{"pull": True}, {"pull": False}])
@pytest.mark.parametrize("name", INTERRUPTIONS)
def test_the_same_is_done_without_plans(name: str, how: dict[str, bool]) -> None:
    def run(small_calls: SmallCallSteps | None = None, planned: int = 1) -> list[str]:
        harness = repeated("w", small_calls=small_calls)
        push(harness, **how)
        assert harness.planned == planned
        INTERRUPTIONS[name](harness)
        if len(harness.done) < harness._calls:
            answered = say(Values, (3,), payload=b"x") if how["pull"] else say(Done)
            answered(harness)
        push(harness, **how)
        harness.wait(5.0)
        return [repr(effect) for effect in harness.effects]

    with without_plans():
        expected = run(planned=0)
    assert run() == expected
    steps = SmallCallSteps(WorkerMachine.step)
    assert run(steps) == expected
    assert steps.begun or not how["pull"]


def test_a_call_by_a_plan_moves_its_keys_on() -> None:
    harness = repeated("w")
    for clock in (3, 4, 5):
        call = push(harness)
        assert harness.planned == 1
        message = harness.sent[0].message
        assert isinstance(message, PushBatch)
        assert (message.clock, message.step, message.settled) == (clock, clock, clock - 1)
        answer(harness, clock)
        assert harness.planned == 0
        assert harness.result(call) == [Versions(clock, clock)]


def test_pushes_by_plans_count_as_steps() -> None:
    harness = repeated("w")
    harness.know("v")
    for clock in (3, 4, 5):
        push(harness)
        answer(harness, clock)
    harness.push("v")
    message = harness.sent[0].message
    assert isinstance(message, Push)
    assert (message.parts[0].clock, message.step, message.settled) == (1, 5, 4)


def test_a_pull_that_is_repeated_has_a_plan() -> None:
    harness = repeated("w")
    for _ in range(3):
        call = harness.pull("w")
        while "DeclareBatch" in kinds(harness):
            harness.declared()
        planned = harness.planned
        send = harness.sent[0]
        harness.values(type(send.message), (2,), b"x")
        assert harness.result(call) == [Versions(2, 2)]
    assert planned == 1
    assert isinstance(send.message, PullBatch)


def test_a_pull_by_a_plan_says_which_keys_it_finds() -> None:
    found: list[Any] = []
    harness = repeated("w")
    for _ in range(3):
        harness.pull("w", finds=found.append)
        while "DeclareBatch" in kinds(harness):
            harness.declared()
        planned = harness.planned
        answer(harness, 2)
    assert planned == 1
    assert found == [[uint8(1)]] * 3


def test_a_pull_by_a_plan_is_no_push() -> None:
    """A broadcast asks whether this program has pushed to the key, or only its predecessor."""
    harness = repeated("w")
    assert harness.machine.has_pushed("w")
    harness.call(requests.Rewind(0))
    harness.pull("w")
    assert harness.planned == 1
    assert not harness.machine.has_pushed("w")
    answer(harness, 0)
    push(harness)
    assert harness.planned == 1
    assert harness.machine.has_pushed("w")
    assert not harness.machine.has_pushed("v")


def test_a_list_in_several_messages() -> None:
    """Two servers; one has answered when another call comes. Without a plan all is the same."""

    def run() -> list[str]:
        harness = Harness(servers=2, batches=True)
        keys = [harness.key_in(0), harness.key_in(1)]
        harness.know(*keys)
        for clock in (1, 2):
            push(harness, *keys)
            while harness.sent:
                answer(harness, clock)
        call = push(harness, *keys)
        assert kinds(harness) == ["PushBatch", "PushBatch"]
        answer(harness, 3)
        other = harness.pull(keys[0])
        answer(harness, 3)
        answer(harness, 3)
        assert harness.result(call) == [Versions(3, 3)] * 2
        assert harness.result(other) == [Versions(3, 3)]
        return [repr(effect) for effect in harness.effects]

    with without_plans():
        expected = run()
    assert run() == expected


@pytest.mark.parametrize("more", [{"cast": True}, {"some_rows": True}, {"some_encoded": True}])
def test_calls_whose_messages_depend_on_their_values_have_no_plan(more: dict[str, Any]) -> None:
    harness = repeated("w")
    transfer = requests.Transfer((requests.Item("w", uint8(1), "source w", "target w"),), True, True, **more)
    assert harness.machine._plans.of_items(transfer) is None


def test_calls_on_several_keys_are_in_flight_by_plans() -> None:
    harness = ready("v", "w", batches=True)
    for clock in (1, 2):
        push(harness, "w")
        answer(harness, clock)
    harness.push("v")
    push(harness)
    assert harness.planned == 1


def test_a_second_push_of_a_key_is_by_a_plan_as_far_as_rounds_may_run_ahead() -> None:
    harness = repeated("w", settings=cluster(2, 1, rounds_ahead=2))
    for number_in_flight in (1, 2, 2):
        push(harness)
        assert harness.planned == number_in_flight
    assert [getattr(send.message, "clock", 0) for send in harness.sent] == [3, 4]
    answer(harness, 3)
    assert [getattr(send.message, "clock", 0) for send in harness.sent] == [4, 5]
    assert kinds(harness) == ["PushBatch", "PushBatch"]


def test_keys_with_different_clocks_have_no_plan() -> None:
    harness = repeated("v", "w")
    push(harness, "v", "w")
    assert harness.planned == 1
    answer(harness, 3, 2)
    harness.push("v")
    harness.settle()
    push(harness, "v", "w")
    assert harness.planned == 0


def test_a_value_that_was_not_checked_is_checked() -> None:
    harness = repeated("w")
    call = harness.push("w", spec=KeySpec("uint8", (2,), SLICE))
    assert harness.planned == 0
    assert isinstance(harness.error(call), ShapeMismatch)


def test_a_worker_that_has_left_the_rounds_is_told_so() -> None:
    harness = repeated("w")
    harness.call(requests.Depart(Departure.DONE))
    leave = next(send for send in harness.sent if isinstance(send.message, Leave))
    harness.reply(leave, Done)
    harness.sent.clear()
    call = push(harness)
    assert harness.planned == 0
    assert isinstance(harness.error(call), NotAllowed)
