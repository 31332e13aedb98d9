"""Calls that are made again and again: with the lane the worker does, message by message, what it does without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvd.core import requests
from kvd.core.machine import SCHEDULER, LocalCall, Send, Tick
from kvd.core.requests import Versions
from kvd.core.worker.lane import MAX_ANSWERS
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
from tests.core.fakes import SLICE, uint8
from tests.core.worker_harness import Harness, number, ready

Happens = Callable[[Harness], object]


def repeated(*keys: str, lanes: bool = True, **more: Any) -> Harness:
    """A worker that has pushed and pulled these keys twice, as a batch."""
    harness = ready(*keys, batches=True, lanes=lanes, **more)
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


def is_in_lane(harness: Harness) -> bool:
    return harness.machine._lane.is_busy


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
def test_the_same_is_done_without_the_lane(name: str, how: dict[str, bool]) -> None:
    told = []
    for way in ({"express": True}, {}, {"lanes": False}):
        harness = repeated("w", **way)
        push(harness, **how)
        is_express = "express" in way and how["pull"]
        assert (harness.machine.express.in_flight is not None) is is_express
        assert is_in_lane(harness) is (not is_express and "lanes" not in way)
        INTERRUPTIONS[name](harness)
        if len(harness.done) < harness._calls:
            answered = say(Values, (3,), payload=b"x") if how["pull"] else say(Done)
            answered(harness)
        push(harness, **how)
        harness.wait(5.0)
        told.append([repr(effect) for effect in harness.effects])
    assert told[0] == told[1] == told[2]


def test_a_call_that_is_answered_in_the_lane_moves_its_keys_on() -> None:
    harness = repeated("w")
    for clock in (3, 4, 5):
        call = push(harness)
        assert is_in_lane(harness)
        message = harness.sent[0].message
        assert isinstance(message, PushBatch)
        assert (message.clock, message.step, message.settled) == (clock, clock, clock - 1)
        answer(harness, clock)
        assert not is_in_lane(harness)
        assert harness.result(call) == [Versions(clock, clock)]


def test_pushes_in_the_lane_count_as_steps() -> None:
    harness = repeated("w")
    harness.know("v")
    for clock in (3, 4, 5):
        push(harness)
        answer(harness, clock)
    harness.push("v")
    message = harness.sent[0].message
    assert isinstance(message, Push)
    assert (message.parts[0].clock, message.step, message.settled) == (1, 5, 4)


def test_a_pull_that_is_repeated_is_in_the_lane() -> None:
    harness = repeated("w")
    for _ in range(3):
        call = harness.pull("w")
        while "DeclareBatch" in kinds(harness):
            harness.declared()
        was_in_lane = is_in_lane(harness)
        send = harness.sent[0]
        harness.values(type(send.message), (2,), b"x")
        assert harness.result(call) == [Versions(2, 2)]
    assert was_in_lane
    assert isinstance(send.message, PullBatch)


def test_a_pull_in_the_lane_says_which_keys_it_finds() -> None:
    found: list[Any] = []
    harness = repeated("w")
    for _ in range(3):
        harness.pull("w", finds=found.append)
        while "DeclareBatch" in kinds(harness):
            harness.declared()
        was_in_lane = is_in_lane(harness)
        answer(harness, 2)
    assert was_in_lane
    assert found == [[uint8(1)]] * 3


def test_a_pull_in_the_lane_is_no_push() -> None:
    """A broadcast asks whether this program has pushed to the key, or only its predecessor."""
    harness = repeated("w")
    assert harness.machine.has_pushed("w")
    harness.call(requests.Rewind(0))
    harness.pull("w")
    assert is_in_lane(harness)
    assert not harness.machine.has_pushed("w")
    answer(harness, 0)
    push(harness)
    assert is_in_lane(harness)
    assert harness.machine.has_pushed("w")
    assert not harness.machine.has_pushed("v")


def test_a_list_in_several_messages() -> None:
    """Two servers; one has answered when another call comes. Without the lane all is the same."""
    told = []
    for lanes in (True, False):
        harness = Harness(servers=2, batches=True, lanes=lanes)
        keys = [harness.key_in(0), harness.key_in(1)]
        harness.know(*keys)
        for clock in (1, 2):
            push(harness, *keys)
            while harness.sent:
                answer(harness, clock)
        call = push(harness, *keys)
        assert kinds(harness) == ["PushBatch", "PushBatch"]
        assert is_in_lane(harness) is lanes
        answer(harness, 3)
        assert is_in_lane(harness) is lanes
        other = harness.pull(keys[0])
        assert not is_in_lane(harness)
        answer(harness, 3)
        answer(harness, 3)
        assert harness.result(call) == [Versions(3, 3)] * 2
        assert harness.result(other) == [Versions(3, 3)]
        told.append([repr(effect) for effect in harness.effects])
    assert told[0] == told[1]


@pytest.mark.parametrize("more", [{"cast": True}, {"any_version": True}, {"some_rows": True}, {"some_encoded": True}])
def test_calls_that_are_not_plain_go_the_general_way(more: dict[str, Any]) -> None:
    harness = repeated("w")
    transfer = requests.Transfer((requests.Item("w", uint8(1), "source w", "target w"),), True, True, **more)
    assert not harness.machine._lane.begin(LocalCall(99, transfer, 60.0), transfer, harness.now)


def test_nothing_goes_by_the_lane_while_anything_else_is_under_way() -> None:
    harness = repeated("w")
    harness.know("v")
    harness.push("v")
    push(harness)
    assert not is_in_lane(harness)


def test_keys_with_different_clocks_go_the_general_way() -> None:
    harness = repeated("v", "w")
    push(harness, "v", "w")
    assert is_in_lane(harness)
    answer(harness, 3, 2)
    harness.push("v")
    harness.settle()
    push(harness, "v", "w")
    assert not is_in_lane(harness)


def test_a_value_that_was_not_checked_goes_the_general_way() -> None:
    harness = repeated("w")
    call = harness.push("w", spec=KeySpec("uint8", (2,), SLICE))
    assert not is_in_lane(harness)
    assert isinstance(harness.error(call), ShapeMismatch)


def test_a_worker_that_has_left_the_rounds_is_told_so() -> None:
    harness = repeated("w")
    harness.call(requests.Depart(Departure.DONE))
    leave = next(send for send in harness.sent if isinstance(send.message, Leave))
    harness.reply(leave, Done)
    harness.sent.clear()
    call = push(harness)
    assert not is_in_lane(harness)
    assert isinstance(harness.error(call), NotAllowed)


def test_a_server_that_says_staged_for_ever_fills_no_memory() -> None:
    harness = repeated("w")
    push(harness)
    for _ in range(MAX_ANSWERS):
        say(Staged)(harness)
    assert is_in_lane(harness)
    say(Staged)(harness)
    assert not is_in_lane(harness)
    values(harness)


def test_the_lane_is_a_setting() -> None:
    harness = repeated("w", lanes=False)
    push(harness)
    assert not is_in_lane(harness)
    values(harness)
    assert len(harness.done) == harness._calls
