"""Many calls in flight at once: by plans the worker does, message by message, what it does without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvd.core import requests
from kvd.core.machine import SCHEDULER, Send, Tick
from kvd.core.requests import Versions
from kvd.core.worker.machine import WorkerMachine
from kvd.protocol.messages import (
    Done,
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
from tests.core.small_calls_harness import SmallCallSteps, without_plans
from tests.core.worker_harness import Harness, number, ready

KEYS = ("a", "b", "c", "d")
SMALL = 16 << 10

Happens = Callable[[Harness, Sequence[Send]], object]


def repeated(*, small: int = SMALL, **more: Any) -> Harness:
    """A worker that has pushed and pulled each of the keys twice, as a batch of its own."""
    harness = ready(*KEYS, batches=True, small=small, **more)
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


def run(
    name: str, *, kinds: Sequence[bool], planned: int = len(KEYS), small_calls: SmallCallSteps | None = None
) -> list[str]:
    """What the worker does."""
    harness = repeated()
    harness.small_calls = small_calls
    sends = [push(harness, key, pull=pull) for key, pull in zip(KEYS, kinds, strict=True)]
    assert harness.planned == planned
    EVENTS[name](harness, sends)
    push(harness, "d", pull=kinds[0])
    harness.machine.validate()
    harness.wait(5.0)
    harness.machine.validate()
    return [repr(effect) for effect in harness.effects]


@pytest.mark.parametrize("kinds", [(True,) * 4, (True, False, False, True)])
@pytest.mark.parametrize("name", EVENTS)
def test_the_same_is_done_without_plans(name: str, kinds: Sequence[bool]) -> None:
    with without_plans():
        expected = run(name, kinds=kinds, planned=0)
    assert run(name, kinds=kinds) == expected
    for every in (1, 2):
        steps = SmallCallSteps(WorkerMachine.step, every)
        assert run(name, kinds=kinds, small_calls=steps) == expected
        assert steps.begun


def test_requests_that_are_sent_again_say_what_they_have_said() -> None:
    """They keep their numbers and those of their steps, though one between them has ended."""
    harness = repeated()
    sends = [push(harness, key) for key in KEYS]
    values(harness, sends[1])
    harness.sent.clear()
    harness.wait(2.5)
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


def test_a_push_of_a_key_in_flight_has_a_plan_too() -> None:
    harness = repeated()
    sends = [push(harness, key) for key in (*KEYS[:2], "b")]
    assert harness.planned == 3
    assert [values_of(send).clock for send in sends] == [3, 3, 4]
    harness.wait(1.0)
    assert any(isinstance(send.message, Heartbeat) for send in harness.sent)
    heartbeat_is_answered(harness, sends)
    for send in sends:
        values(harness, send)
    assert len(harness.done) == harness._calls
    assert harness.result(harness._calls) == [Versions(4, 4)]


def test_pushes_of_another_place_wait_for_those_in_flight() -> None:
    harness = repeated()
    push(harness, "a", place=4)
    before = len(harness.sent)
    harness.push("b", pull=True, place=8)
    assert harness.planned == 1
    assert len(harness.sent) == before


def test_pushes_that_take_credit_are_in_flight_side_by_side() -> None:
    harness = repeated(small=0)
    push(harness, "a")
    push(harness, "b")
    assert harness.planned == 2


def test_nothing_overtakes_what_waits_for_credit() -> None:
    """A small push leaves after one that waits, as all have the same priority."""

    def run(small_calls: SmallCallSteps | None = None) -> list[str]:
        harness = repeated(small=1, credit=4, small_calls=small_calls)
        harness.know("large", "larger", spec=uint8(4))
        for _ in range(2):
            push(harness, "a")
            values(harness, harness.sent[-1])
        for key in ("large", "larger"):
            harness.push(key, spec=uint8(4))
        before = len(harness.sent)
        harness.push("a", pull=True)
        assert len(harness.sent) == before
        harness.settle()
        return [repr(effect) for effect in harness.effects]

    with without_plans():
        expected = run()
    steps = SmallCallSteps(WorkerMachine.step)
    assert run() == expected == run(steps)
    assert steps.begun


def test_a_retry_is_the_same_message_though_plans_were_forgotten() -> None:
    harness = repeated()
    send = push(harness, "a")
    harness.machine._plans.clear()
    harness.sent.clear()
    harness.wait(2.5)
    assert [again for again in harness.sent if isinstance(again.message, PushBatch)] == [send]
