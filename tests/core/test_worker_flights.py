"""Many calls in flight at once: with the lane the worker does, message by message, what it does without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvd.core import requests
from kvd.core.machine import SCHEDULER, Received, Send, Tick
from kvd.core.requests import Versions
from kvd.protocol.messages import (
    Done,
    Epoch,
    ErrorCode,
    Heartbeat,
    HeartbeatAck,
    NotYet,
    NotYetReason,
    PushBatch,
    Refused,
    SetOptimizer,
    Staged,
    Taken,
    Uncounted,
    Values,
)
from tests.core.fakes import uint8
from tests.core.worker_harness import Harness, number, ready
from tests.simulator.express import ExpressSteps

KEYS = ("a", "b", "c", "d")
SMALL = 16 << 10

Happens = Callable[[Harness, Sequence[Send]], object]


def repeated(*, lanes: bool = True, small: int = SMALL, **more: Any) -> Harness:
    """A worker that has pushed and pulled each of the keys twice, as a batch of its own."""
    harness = ready(*KEYS, batches=True, lanes=lanes, small=small, **more)
    for clock in (1, 2):
        for key in KEYS:
            push(harness, key)
            harness.values(type(harness.sent[0].message), (clock,), b"x")
    harness.sent.clear()
    return harness


def push(harness: Harness, *keys: str, **how: Any) -> Send:
    """The message of a pushpull."""
    harness.push(*keys, **{"pull": True, **how})
    while any(type(send.message).__name__ == "DeclareBatch" for send in harness.sent):
        harness.declared()
    return harness.sent[-1]


def in_flight(harness: Harness) -> int:
    return len(harness.machine._lane)


def values(harness: Harness, send: Send) -> None:
    clock = getattr(send.message, "clock", 0)
    harness.say(send.peer, Values(number(send), (clock,)), b"x")


def say(place: int, message: Any, *more: Any, payload: bytes | None = None) -> Happens:
    """The server says this of one of the pushes."""
    return lambda harness, sends: harness.say(sends[place].peer, message(number(sends[place]), *more), payload)


def heartbeat_is_answered(harness: Harness, sends: Sequence[Send]) -> None:
    harness.say(SCHEDULER, HeartbeatAck((), 1.0))


def wait(seconds: float) -> Happens:
    return lambda harness, sends: harness.wait(seconds)


def answers(*places: int) -> Happens:
    def happens(harness: Harness, sends: Sequence[Send]) -> None:
        for place in places:
            values(harness, sends[place])

    return happens


def both(*happens: Happens) -> Happens:
    return lambda harness, sends: [happen(harness, sends) for happen in happens]


def same_key(harness: Harness, sends: Sequence[Send]) -> None:
    push(harness, "b")


def take_optimizer(harness: Harness, sends: Sequence[Send]) -> None:
    """A call that waits until all pushes are staged: they are probed."""
    harness.call(requests.Control((SetOptimizer(0, None),), staged_first=True))


EVENTS: dict[str, Happens] = {
    "all answers": answers(0, 1, 2, 3),
    "all answers, the last first": answers(3, 2, 1, 0),
    "an answer twice": answers(1, 1, 0, 2, 3),
    "one is staged": both(say(1, Staged), answers(2, 0, 1, 3)),
    "one is refused": both(answers(2), say(1, Refused, ErrorCode.NOT_ALLOWED, "because"), answers(0, 3)),
    "one is refused in part": both(answers(3), say(0, Refused, ErrorCode.NOT_ALLOWED, "because", "", Taken.PART)),
    "one does not count": both(answers(0), say(1, Uncounted, (3,), payload=b"x")),
    "a batch is forgotten": both(answers(1), say(0, NotYet, NotYetReason.UNKNOWN_BATCH, "because")),
    "an attach is wanted": both(answers(1), say(0, NotYet, NotYetReason.NOT_ATTACHED, "because")),
    "one is of another kind": both(answers(2), say(1, Done), answers(0)),
    "one does not fit": both(answers(2), say(1, Values, (3,), payload=b"too much"), answers(0)),
    "a heartbeat is due": both(answers(2), wait(1.0), answers(0, 1, 3)),
    "a heartbeat is answered": both(answers(2), heartbeat_is_answered, answers(0, 1, 3)),
    "a tick": both(answers(1), lambda harness, sends: harness.step(Tick())),
    "retries are due": both(answers(1), wait(2.5), answers(0)),
    "the deadline": both(answers(1), wait(100.0)),
    "a push of a key in flight": both(answers(2), same_key, answers(0, 3, 1)),
    "a push of a key that has ended": both(answers(1), same_key, answers(0, 3, 2)),
    "a pull of a key in flight": both(answers(2), lambda harness, sends: harness.pull("a"), answers(0, 3)),
    "a list": both(answers(2), lambda harness, sends: push(harness, "c", "d"), answers(0, 3)),
    "a flush": both(answers(1), lambda harness, sends: harness.call(requests.Flush()), answers(0, 2, 3)),
    "a rewind": both(answers(1), lambda harness, sends: harness.call(requests.Rewind(0))),
    "an optimizer": both(answers(1), take_optimizer, answers(0, 2)),
    "a deletion": both(answers(1), lambda harness, sends: harness.call(requests.DeleteKeys(("a",)))),
    "a new view": both(answers(2), lambda harness, sends: harness.look(), answers(0, 1)),
    "the server was restarted": both(answers(2), lambda harness, sends: harness.restart_server()),
}


def run(name: str, *, kinds: Sequence[bool], lanes: bool = True, express: ExpressSteps | None = None) -> list[str]:
    """What the worker does, and what is under way at the end."""
    harness = repeated(lanes=lanes)
    harness._express = express
    sends = [push(harness, key, pull=pull) for key, pull in zip(KEYS, kinds, strict=True)]
    assert in_flight(harness) == (len(KEYS) if lanes else 0)
    EVENTS[name](harness, sends)
    push(harness, "d", pull=kinds[0])
    harness.machine.validate()
    harness.wait(5.0)
    harness.machine.validate()
    return [repr(effect) for effect in harness.effects]


@pytest.mark.parametrize("kinds", [(True,) * 4, (True, False, False, True)])
@pytest.mark.parametrize("name", EVENTS)
def test_the_same_is_done_without_the_lane(name: str, kinds: Sequence[bool]) -> None:
    ordinary = run(name, kinds=kinds, lanes=False)
    assert run(name, kinds=kinds) == ordinary
    assert run(name, kinds=kinds, express=ExpressSteps(every=1)) == ordinary
    assert run(name, kinds=kinds, express=ExpressSteps(every=1, waits=False)) == ordinary


def test_calls_that_become_ordinary_ones_say_what_they_have_said() -> None:
    """They keep the numbers of their requests and of their steps, though one between them has ended."""
    harness = repeated()
    sends = [push(harness, key) for key in KEYS]
    values(harness, sends[1])
    harness.sent.clear()
    harness.wait(2.5)
    assert in_flight(harness) == 0
    assert [send for send in harness.sent if isinstance(send.message, PushBatch)] == [sends[0], *sends[2:]]


def test_steps_are_settled_up_to_the_oldest_push_in_flight() -> None:
    harness = repeated()
    first = push(harness, "a")
    for clock in (3, 4, 5):
        message = values_of(push(harness, "b"))
        assert (message.clock, message.step, message.settled) == (clock, clock, 2)
        values(harness, harness.sent[-1])
    values(harness, first)
    message = values_of(push(harness, "c"))
    assert (message.clock, message.step, message.settled) == (3, 5, 4)


def values_of(send: Send) -> PushBatch:
    assert isinstance(send.message, PushBatch)
    return send.message


def test_heartbeats_and_answers_to_ordinary_calls_leave_calls_in_flight() -> None:
    harness = repeated()
    sends = [push(harness, key) for key in KEYS[:2]]
    ordinary = push(harness, "b")
    assert in_flight(harness) == 0  # a second push of a key in flight makes all of them ordinary ones
    sends += [push(harness, key) for key in KEYS[2:]]
    assert in_flight(harness) == 2
    harness.wait(1.0)
    assert any(isinstance(send.message, Heartbeat) for send in harness.sent)
    heartbeat_is_answered(harness, sends)
    for send in (*sends[:2], ordinary):
        values(harness, send)
    assert in_flight(harness) == 2
    for send in sends[2:]:
        values(harness, send)
    assert in_flight(harness) == 0
    assert len(harness.done) == harness._calls
    assert harness.result(harness._calls) == [Versions(3, 3)]


def test_a_message_of_a_newer_view_does_not() -> None:
    harness = repeated()
    push(harness, "a")
    harness.step(Received(SCHEDULER, 1, Epoch(1, 2), HeartbeatAck((), 1.0)))
    assert in_flight(harness) == 0


def test_pushes_of_another_place_wait_for_those_in_flight() -> None:
    harness = repeated()
    push(harness, "a", place=4)
    before = len(harness.sent)
    harness.push("b", pull=True, place=8)
    assert in_flight(harness) == 0
    assert len(harness.sent) == before


def test_a_push_that_takes_credit_goes_alone() -> None:
    harness = repeated(small=0)
    push(harness, "a")
    assert in_flight(harness) == 1
    push(harness, "b")
    assert in_flight(harness) == 0


def test_nothing_overtakes_what_waits_for_credit() -> None:
    """A small push leaves after one that waits, as all have the same priority."""
    told = []
    for lanes in (True, False):
        harness = repeated(lanes=lanes, small=1, credit=4)
        harness.know("large", "larger", spec=uint8(4))
        for key in ("large", "larger"):
            harness.push(key, spec=uint8(4))
        harness.push("a")
        assert in_flight(harness) == 0
        told.append([repr(effect) for effect in harness.effects])
    assert told[0] == told[1]


def test_as_many_are_in_flight_as_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.core.worker.lane.MOST_FLIGHTS", 2)
    harness = repeated()
    push(harness, "a")
    push(harness, "b")
    assert in_flight(harness) == 2
    push(harness, "c")
    assert in_flight(harness) == 0
    push(harness, "d")
    assert in_flight(harness) == 1


def test_plans_are_kept_for_the_calls_that_were_sent_by_them() -> None:
    """The worker may forget its plans meanwhile: a retry is the same message all the same."""
    harness = repeated()
    send = push(harness, "a")
    harness.machine._lane._plans.clear()
    harness.sent.clear()
    harness.wait(2.5)
    assert [again for again in harness.sent if isinstance(again.message, PushBatch)] == [send]
