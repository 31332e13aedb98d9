"""Numbers that a peer may set: none leads to a state that only the end of a daemon would end."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from kvd.core.server.counted_steps import MAX_RANGES, CountedSteps
from kvd.core.server.resume import MOST_AHEAD
from kvd.errors import ProtocolError
from kvd.optimizer import SGD, to_wire
from kvd.protocol import messages as m
from kvd.protocol.codec import decode, encode
from kvd.protocol.messages import (
    BIGGEST,
    MOST_COUNTED,
    MOST_PID,
    NO_VIEW,
    Activate,
    Done,
    Drop,
    Enter,
    ErrorCode,
    Init,
    Join,
    KeyId,
    Message,
    NewSlice,
    Outdated,
    SetOptimizer,
    UpdateOptimizer,
)
from kvd.protocol.specs import KeySpec
from tests.core.access_harness import SAMPLES
from tests.core.fakes import cluster, one, said, worker_id
from tests.core.scheduler_harness import Harness as SchedulerHarness
from tests.core.server_harness import ready, refusal

CLAIMS = {  # which fields a receiver counts on from, by message
    m.Enter: ["generation"],
    m.StandBy: ["generation", "steps"],
    m.Init: ["creation"],
    m.Publish: ["creation"],
    m.ClockQuery: ["place"],
    m.Activate: ["clock", "creation"],
    m.ComeTo: ["place"],
    m.TakeStep: ["first", "total", "done"],
    m.Push: ["step", "settled", "place"],
    m.PushBatch: ["clock", "step", "settled", "place"],
    m.PullBatch: ["clock"],
    m.StoreState: ["step", "creation"],
    m.ReadSlices: ["number", "step"],
    m.ReadDone: ["number"],
    m.Capture: ["number", "step"],
    m.FetchCaptured: ["number"],
    m.CaptureDone: ["number"],
}


def sent(message: Message) -> Message:
    return decode(encode(message, 7, NO_VIEW)).message


def changed(message: Any, **fields: Any) -> Any:
    return type(message)(**{name: getattr(message, name) for name in message.__slots__} | fields)


@pytest.mark.parametrize(("kind", "field"), [(kind, field) for kind, fields in CLAIMS.items() for field in fields])
def test_a_claim_leaves_room_to_count_on_from_it(kind: Any, field: str) -> None:
    sample = SAMPLES[kind]
    assert sent(changed(sample, **{field: MOST_COUNTED})) == changed(sample, **{field: MOST_COUNTED})
    for number in (MOST_COUNTED + 1, BIGGEST):
        with pytest.raises(ProtocolError, match="expected a whole number"):
            sent(changed(sample, **{field: number}))


@pytest.mark.parametrize(
    "message",
    [
        m.Push(1, (m.Part("w", 0, MOST_COUNTED + 1),), 0, 1, False),
        m.Pull(1, (m.Part("w", 0, 1, MOST_COUNTED + 1),)),
        m.Drop(1, (KeyId("w", MOST_COUNTED + 1),)),
        m.DeclareBatch(1, 1, (m.SliceId("w", 0, MOST_COUNTED + 1),)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_so_do_claims_in_lists(message: Message) -> None:
    with pytest.raises(ProtocolError):
        sent(message)


def test_a_join_is_of_a_process_that_can_be() -> None:
    """The kernel's call would raise for others, and no process would be watched any more."""
    assert sent(changed(SAMPLES[Join], pid=MOST_PID)) == changed(SAMPLES[Join], pid=MOST_PID)
    with pytest.raises(ProtocolError):
        sent(changed(SAMPLES[Join], pid=MOST_PID + 1))


def test_every_message_can_be_sent_with_the_numbers_of_the_samples() -> None:
    assert {type(sent(message)) for message in SAMPLES.values()} == set(get_args(Message))


# ── servers ──


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_worker_that_says_it_is_far_ahead_closes_no_rounds(mode: str) -> None:
    """The only worker: its server closed one round after the other, 2⁶¹ of them, and answered nobody any more."""
    harness = ready(settings=cluster(1, mode=mode), workers=1)
    for clock in (MOST_COUNTED, MOST_AHEAD + 3):
        refused = refusal(harness.say(0, Activate(9, "w", clock)))
        assert (refused.error, refused.key) == (ErrorCode.NOT_ALLOWED, "w")
    assert said(harness.push(0, 1))[-1] == Done(harness.request() - 1)
    assert said(harness.say(0, Activate(10, "w", 3))) == [Done(10)]
    assert Done(11) in said(harness.push(0, 4, request=11))


def test_a_creation_that_is_as_large_as_it_may_be_is_answered() -> None:
    """The server asks for one that an Init can carry: none is larger."""
    harness = ready()
    assert said(harness.say(1, Drop(8, (KeyId("none", MOST_COUNTED),)))) == [Done(8)]
    effects = harness.say(0, Init(9, (KeySpec("uint8", (1,), 4096),), (NewSlice("v", 0, 0),)), b"\1")
    assert sent(one(said(effects))) == Outdated(9, MOST_COUNTED)


def test_the_same_number_for_two_requests_of_control_ends_nothing() -> None:
    """The answer to the first was not kept, and that to the second was looked up."""
    harness = ready()
    harness.say(0, SetOptimizer(5, to_wire(SGD(0.5))))
    assert said(harness.say(0, UpdateOptimizer(6, {"learning_rate": 0.25}))) == [Done(6)]
    assert said(harness.say(0, SetOptimizer(6, None))) == []
    assert harness.explain()["optimizer"] == to_wire(SGD(0.25))


def test_steps_that_a_worker_makes_up_take_a_bounded_memory() -> None:
    steps = CountedSteps()
    for number in range(2 * MAX_RANGES):
        steps.add(10 * number)
    steps.validate()
    assert len(steps.starts) == MAX_RANGES
    assert 10 * (2 * MAX_RANGES - 1) in steps
    assert 10 * (2 * MAX_RANGES - 1) + 1 not in steps


# ── the scheduler ──


def test_a_barrier_of_any_generation_is_recorded_and_left() -> None:
    harness = SchedulerHarness(cluster(1, 1))
    harness.worker(0)
    assert Done(5) in said(harness.say(worker_id(0), Enter(5, "user:a", MOST_COUNTED)))
    again = SchedulerHarness(cluster(1, 1), saved=harness.disk, generation=2)
    assert Done(6) in said(again.say(worker_id(0), Enter(6, "user:a", MOST_COUNTED)))
    assert Done(7) in said(again.say(worker_id(0), Enter(7, "user:b", 0)))
