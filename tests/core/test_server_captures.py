"""Captures of a server: what is kept of slices and their states, at which moment, and for how long."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core.machine import Apply, CallerPeer, Effect, Export, Received, Send, Tick
from kvd.core.places import PlaceKind, place_of
from kvd.core.server.captures import EXPIRES_S, LOOK_S
from kvd.errors import NotAllowed
from kvd.optimizer import SGD, to_wire
from kvd.protocol.messages import (
    Capture,
    Captured,
    CaptureDone,
    CapturedSlice,
    CaptureWhen,
    Delete,
    Done,
    Epoch,
    ErrorCode,
    FetchCaptured,
    KeyId,
    NotYet,
    NotYetReason,
    Reached,
    SetOptimizer,
    SliceId,
    Surveyed,
    UpdateOptimizer,
    Values,
)
from kvd.protocol.specs import KeySpec
from tests.core.fakes import cluster, of, one, read, said
from tests.core.server_harness import Harness, ready, refusal

AS_IT_IS, COMPLETE, OVER, BEFORE_NEXT = CaptureWhen
SPEED = SGD(0.5, momentum=0.9)


class Operator:
    """Somebody who takes a snapshot of the harness's server."""

    def __init__(self, harness: Harness, incarnation: int = 800) -> None:
        self.harness = harness
        self.incarnation = incarnation
        self.peer = CallerPeer(b"operator %d" % incarnation)
        self.now = 0.0
        self._request = 0

    def say(self, message: Any) -> list[Effect]:
        return self.harness.step(Received(self.peer, self.incarnation, Epoch(1, 1), message), self.now)

    def capture(
        self, step: int, *keys: str, when: CaptureWhen = BEFORE_NEXT, number: int = 1, request: int = 0
    ) -> list[Effect]:
        self._request = request or self._request + 1
        return self.say(Capture(self._request, number, step, when, tuple(SliceId(key, 0) for key in keys or ("w",))))

    def fetch(self, *keys: str, number: int = 1) -> tuple[tuple[int, ...], list[bytes]]:
        """The versions, and the bytes of slices and states in the order in which they come."""
        effects = self.say(FetchCaptured(50, number, tuple(SliceId(key, 0) for key in keys or ("w",))))
        answer = self.answer(effects)
        assert isinstance(answer.message, Values)
        return answer.message.versions, [read(span) for span in answer.payload]

    def done(self, number: int = 1) -> list[Effect]:
        return self.say(CaptureDone(99, number))

    def answer(self, effects: list[Effect]) -> Send:
        return one([effect for effect in of(Send, effects) if effect.peer == self.peer])

    def kept(self, effects: list[Effect]) -> list[tuple[int, int]]:
        """The versions and steps of the slices of the only answer."""
        answer = self.answer(effects).message
        assert isinstance(answer, Captured)
        return [(slice_.version, slice_.step) for slice_ in answer.kept]

    @property
    def kept_nbytes(self) -> int:
        return int(self.harness.explain()["bytes_captured"])


def two_keys(**more: Any) -> tuple[Harness, Operator]:
    """Keys of two bytes with an optimizer, pushed by two workers. Each state has eight bytes."""
    harness = Harness(**more)
    for key in ("w", "v"):
        harness.init(key, b"\0\0", KeySpec("float16", (1,), 1 << 10))
    for rank in range(2):
        harness.say(rank, SetOptimizer(harness.request(), to_wire(SPEED)))
    return harness, Operator(harness)


def round_(harness: Harness, key: str, clock: int, *, value: bytes = b"\1\1", **more: Any) -> list[Effect]:
    effects: list[Effect] = []
    for rank in range(2):
        effects += harness.push(rank, clock, value, key=key, **{"step": clock, **more})
    return effects


def passed(effects: list[Effect], operator: Operator) -> bool:
    return isinstance(operator.answer(effects).message, Surveyed)


# ── the moment ──


def test_a_slice_is_kept_just_before_its_next_round() -> None:
    harness, operator = two_keys()
    round_(harness, "w", 1)
    assert operator.capture(2) == []
    assert not of(Captured, said(round_(harness, "w", 2)))
    effects = round_(harness, "w", 3)
    assert operator.kept(effects) == [(2, 2)]
    jobs = [type(effect) for effect in effects if isinstance(effect, Export | Apply)]
    assert jobs == [Export, Apply]  # the state is copied before the update that replaces it
    assert operator.fetch() == ((2,), [b"\2\2", b"momentum"])
    assert harness.value("w") == b"\2\2"  # the sum of the third round, which is another version by now
    assert operator.kept_nbytes == 10


def test_the_update_waits_for_the_copy_and_for_nothing_else() -> None:
    harness, operator = two_keys()
    round_(harness, "w", 1)
    operator.capture(1)
    harness.hold = True
    round_(harness, "w", 2)
    export = one(harness.jobs)
    assert isinstance(export, Export)
    effects = round_(harness, "v", 1)  # another slice goes on
    assert [type(job) for job in harness.jobs] == [Export, Apply]
    effects = harness.finish(export)
    assert operator.kept(effects) == [(1, 1)]
    assert len(of(Apply, effects)) == 1


def test_all_slices_are_of_the_same_step_though_one_is_pushed_less_often() -> None:
    harness, operator = two_keys()
    round_(harness, "w", 1)
    round_(harness, "v", 1, step=1)
    operator.capture(3, "w", "v")
    for clock in (2, 3):
        round_(harness, "w", clock)
    assert not of(Captured, said(round_(harness, "w", 4)))  # kept, and waits for the other one
    round_(harness, "w", 5)
    assert operator.kept(round_(harness, "v", 2, step=5)) == [(3, 3), (1, 1)]
    assert operator.fetch("w", "v")[0] == (3, 1)


def test_a_step_that_has_passed_is_answered_with_what_there_is() -> None:
    harness, operator = two_keys()
    for clock in (1, 2):
        round_(harness, "w", clock)
    assert said(operator.capture(1, "w", "v")) == [Surveyed(1, 0, 2, 1, True, 0)]
    assert operator.kept_nbytes == 0


@pytest.mark.parametrize("when", [COMPLETE, OVER])
def test_a_complete_step_is_kept_at_once(when: CaptureWhen) -> None:
    harness, operator = two_keys()
    round_(harness, "w", 1)
    assert operator.kept(operator.capture(1, when=when)) == [(1, 1)]


def test_a_step_that_may_bring_more_is_waited_for_until_it_is_over() -> None:
    """`v` was pushed in step 1, and perhaps will be in step 2."""
    harness, operator = two_keys()
    round_(harness, "v", 1, step=1)
    round_(harness, "w", 1)
    round_(harness, "w", 2)
    assert operator.kept(operator.capture(2, "v", when=OVER)) == [(1, 1)]
    assert operator.capture(2, "v", when=COMPLETE, number=2) == []
    effects = round_(harness, "w", 3, settled=2)
    assert operator.kept(effects) == [(1, 1)]


def test_a_slice_as_it_is_waits_for_the_update_that_is_under_way() -> None:
    harness, operator = two_keys()
    harness.hold = True
    round_(harness, "w", 1)
    assert operator.capture(0, when=AS_IT_IS) == []
    effects = harness.finish(one(harness.jobs))
    effects += harness.finish(one([job for job in harness.jobs if isinstance(job, Export)]))
    assert operator.kept(effects) == [(1, 1)]


def test_without_an_optimizer_there_is_no_state() -> None:
    harness = ready()
    operator = Operator(harness)
    round_(harness, "w", 1, value=b"\1")
    answer = operator.answer(operator.capture(1, when=COMPLETE)).message
    assert answer == Captured(1, ((),), (None,), (CapturedSlice(1, 1, 0, 0, 0),), (Reached(0, 0), Reached(1, 0)))
    assert operator.fetch() == ((1,), [b"\2"])


def test_the_hyperparameters_are_those_of_the_next_round() -> None:
    harness, operator = two_keys()
    round_(harness, "w", 1)
    operator.capture(1)
    for rank in range(2):
        harness.say(rank, UpdateOptimizer(harness.request(), {"learning_rate": 0.25}))
    answer = operator.answer(round_(harness, "w", 2)).message
    assert isinstance(answer, Captured)
    assert answer.optimizers == (to_wire(SGD(0.25, momentum=0.9)),)
    assert answer.slots == ((("momentum", "float32"),),)
    assert answer.kept == (CapturedSlice(1, 1, 7, 0, 0),)


def test_fused_slices_are_kept_together() -> None:
    harness, operator = two_keys()
    for clock in (1, 2):
        for rank in range(2):
            if clock == 1:
                harness.declare(rank, 1, "w", "v")
            harness.push_batch(rank, clock, b"\1\1", b"\2\2", step=clock)
    assert harness.groups == [["w", "v"]]
    operator.capture(2, "v", "w")
    effects: list[Effect] = []
    for rank in range(2):
        effects += harness.push_batch(rank, 3, b"\1\1", b"\2\2", step=3)
    assert operator.kept(effects) == [(2, 2), (2, 2)]
    assert operator.fetch("v", "w") == ((2, 2), [b"\4\4", b"momentum", b"\2\2", b"momentum"])


def test_one_of_two_fused_slices() -> None:
    harness, operator = two_keys()
    for rank in range(2):
        harness.declare(rank, 1, "w", "v")
        harness.push_batch(rank, 1, b"\1\1", b"\2\2", step=1)
    assert operator.kept(operator.capture(1, "v", when=COMPLETE)) == [(1, 1)]
    assert operator.fetch("v") == ((1,), [b"\4\4", b"momentum"])
    assert passed(operator.say(FetchCaptured(51, 1, (SliceId("w", 0),))), operator)


def test_programs_in_loops_say_how_many_steps_they_have_made() -> None:
    harness, operator = two_keys()
    for clock in (1, 2, 3):
        round_(harness, "w", clock, place=place_of(PlaceKind.STEP, clock + 6))
    harness.push(0, 4, b"\1\1", place=place_of(PlaceKind.STEP, 10))  # one is ahead
    answer = operator.answer(operator.capture(3, when=COMPLETE)).message
    assert isinstance(answer, Captured)
    made = place_of(PlaceKind.OUTSIDE, 10)  # the steps with the numbers 0 to 9
    assert answer.reached == (Reached(0, made), Reached(1, made))


# ── asynchronous ──


def test_asynchronous_slices_are_kept_at_a_version() -> None:
    harness, operator = two_keys(settings=cluster(2, mode="async"))
    harness.push(0, 1, b"\1\1")
    assert operator.kept(operator.capture(0, "w", "v", when=AS_IT_IS)) == [(1, 1), (0, 0)]
    assert operator.kept(operator.capture(1, when=COMPLETE, number=2)) == [(1, 1)]
    assert operator.capture(2, when=COMPLETE, number=3) == []
    effects = harness.push(1, 1, b"\1\1")
    assert operator.kept(effects)[0][0] == 2
    assert passed(operator.capture(1, when=COMPLETE, number=4), operator)
    assert refusal(operator.capture(3, when=BEFORE_NEXT, number=5)).error is ErrorCode.NOT_ALLOWED


# ── who has it, and for how long ──


def test_one_operator_at_a_time() -> None:
    harness, operator = two_keys()
    other = Operator(harness, 801)
    operator.capture(0, when=AS_IT_IS)
    answer = other.answer(other.capture(0, when=AS_IT_IS)).message
    assert isinstance(answer, NotYet)
    assert answer.reason is NotYetReason.BUSY
    assert passed(other.say(FetchCaptured(51, 1, (SliceId("w", 0),))), other)  # it is not his
    assert said(other.done()) == [Done(99)]
    assert operator.fetch()[0] == (0,)
    operator.done()
    assert operator.kept_nbytes == 0
    assert other.kept(other.capture(0, when=AS_IT_IS)) == [(0, 0)]


def test_who_is_silent_is_forgotten() -> None:
    harness, operator = two_keys()
    operator.capture(0, when=AS_IT_IS)
    operator.now = EXPIRES_S / 2
    operator.fetch()
    harness.step(Tick(), EXPIRES_S)
    assert operator.kept_nbytes == 10
    assert harness.machine.next_deadline() is not None
    harness.step(Tick(), EXPIRES_S * 1.5)
    assert operator.kept_nbytes == 0


def test_a_request_that_comes_again_is_answered_again_and_not_after_its_end() -> None:
    harness, operator = two_keys()
    round_(harness, "w", 1)
    assert operator.capture(1, request=7) == []
    operator.peer = CallerPeer(b"a new connection")
    assert operator.capture(1, request=7) == []
    assert operator.kept(round_(harness, "w", 2)) == [(1, 1)]
    assert operator.kept(operator.capture(1, request=7)) == [(1, 1)]
    operator.done()
    assert passed(operator.capture(1, request=7), operator)
    assert passed(operator.capture(5, request=8), operator)  # of the same capture
    assert operator.kept_nbytes == 0


def test_those_who_wait_when_the_capture_ends_are_told() -> None:
    harness, operator = two_keys()
    assert operator.capture(5, number=1) == []
    effects = operator.capture(9, number=2)
    assert passed(effects, operator)
    effects = operator.done(2)
    assert [type(message) for message in said(effects)] == [Surveyed, Done]
    round_(harness, "w", 1)
    assert operator.kept_nbytes == 0


def test_a_state_that_cannot_be_copied_ends_the_request_and_not_the_training() -> None:
    harness, operator = two_keys()
    round_(harness, "w", 1)
    operator.capture(1)
    harness.hold = True
    round_(harness, "w", 2)
    harness.error = NotAllowed("no memory")
    effects = harness.finish(one(harness.jobs))
    assert "no memory" in refusal(effects).text
    harness.error = None
    harness.finish(one(of(Apply, harness.jobs)))
    assert harness.machine.table.slices["w", 0].log.version == 2


def test_a_key_that_is_deleted_meanwhile() -> None:
    harness, operator = two_keys()
    assert operator.capture(5) == []
    for rank in range(2):
        harness.say(rank, Delete(harness.request(), (KeyId("w", 0),)))
    effects = harness.step(Tick(), LOOK_S)
    assert refusal(effects).error is ErrorCode.KEY_NOT_FOUND
    assert refusal(effects).key == "w"
    assert harness.machine.next_deadline() is not None


def test_what_is_not_here_is_refused() -> None:
    _, operator = two_keys()
    assert refusal(operator.capture(0, "x")).error is ErrorCode.KEY_NOT_FOUND
    assert refusal(operator.capture(0, "w", "w")).error is ErrorCode.PROTOCOL_ERROR


def test_the_rest_of_a_step_that_is_over_is_kept_when_the_operator_says_so() -> None:
    """`v` is not pushed any more, and no round of it comes that would end its step 2."""
    harness, operator = two_keys()
    round_(harness, "v", 1, step=1)
    round_(harness, "w", 1)
    operator.capture(2, "w", "v")
    round_(harness, "w", 2)
    round_(harness, "w", 3)
    effects = operator.capture(2, "w", "v", when=OVER)
    assert [type(message) for message in said(effects)] == [Surveyed, Captured]  # the first request was given up
    assert operator.fetch("w", "v")[0] == (2, 1)
