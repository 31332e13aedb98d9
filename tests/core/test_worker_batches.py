"""Batches: a worker declares slices that it sends together again, and names them by a number from then on."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core import requests
from kvd.core.machine import Copy, Span
from kvd.core.outbox import RETRY_FIRST_S, RETRY_SOON_S
from kvd.core.requests import Versions
from kvd.core.worker import transfer_plans as transfer_plans_module
from kvd.core.worker.not_yet import MAX_ATTEMPTS
from kvd.errors import NodeLost, NotAllowed, ProtocolError, RequestTimeout
from kvd.protocol.messages import (
    ABSENT,
    ANY_CLOCK,
    DeclareBatch,
    Done,
    ErrorCode,
    NotYetReason,
    Pull,
    PullBatch,
    Push,
    PushBatch,
    SliceId,
    Staged,
    Taken,
)
from tests.core.fakes import SLICE, copies, of, uint8
from tests.core.worker_harness import Harness, ready


def batch_harness(*keys: str, **more: Any) -> Harness:
    return ready(*keys, batches=True, **more)


def kinds(harness: Harness) -> list[str]:
    return [type(send.message).__name__ for send in harness.sent]


def settle(harness: Harness, kind: Any = PushBatch) -> None:
    harness.reply(harness.take(kind), Done)


def test_a_push_of_many_slices_goes_as_a_batch_at_once() -> None:
    harness = batch_harness("a", "b")
    call = harness.push("a", "b", samples=5, how=0, pull=True)
    assert kinds(harness) == ["DeclareBatch", "PushBatch"]
    batch = harness.declared()
    assert batch.slice_ids == (SliceId("a", 0), SliceId("b", 0))
    send = harness.take(PushBatch)
    assert send.message == PushBatch(send.message.request, batch.batch, 1, 0, 5, True, step=1)  # type: ignore[union-attr]
    assert send.payload == (Span("source a", 0, 1), Span("source b", 0, 1))
    harness.sent.append(send)
    effects = harness.values(PushBatch, (1,), b"x", b"y")
    assert [(target, source.offset) for target, _, source in copies(effects)] == [("target a", 0), ("target b", 8)]
    assert harness.result(call) == [Versions(1, 1)] * 2


def test_a_push_of_one_slice_or_a_pull_goes_as_a_batch_the_second_time() -> None:
    harness = batch_harness("a", "b")
    harness.push("a")
    harness.settle()
    harness.push("a")
    assert kinds(harness) == ["DeclareBatch", "PushBatch"]
    assert harness.declared().slice_ids == (SliceId("a", 0),)
    settle(harness)
    for kind in ("Pull", "PullBatch"):
        call = harness.pull("b", "a")
        assert kinds(harness)[-1] == "Pull"  # the clocks of a and b differ, and a batch has only one
        harness.values(Pull, (0, 2), b"x", b"y")
        assert harness.result(call) == [Versions(0, 0), Versions(2, 2)], kind
    for expected in (["Pull"], ["DeclareBatch", "PullBatch"], ["PullBatch"]):
        call = harness.pull("b")
        assert kinds(harness) == expected
        if "DeclareBatch" in expected:
            harness.declared()
        harness.values(PullBatch if "PullBatch" in expected else Pull, (0,), b"x")
        assert harness.result(call) == [Versions(0, 0)]


def test_a_batch_is_declared_once_and_another_order_of_its_keys_is_another_batch() -> None:
    harness = batch_harness("a", "b")
    numbers = []
    for keys in (("a", "b"), ("a", "b"), ("b", "a"), ("a", "b"), ("b", "a")):
        harness.push(*keys)
        while harness.waiting(DeclareBatch):
            harness.declared()
        numbers.append(harness.waiting(PushBatch)[0].batch)
        settle(harness)
    assert numbers == [1, 1, 2, 1, 2]
    assert harness.machine.explain(0.0)["clocks"] == {"a": 5, "b": 5}


def test_keys_whose_clocks_differ_are_named_one_by_one() -> None:
    harness = batch_harness("a", "b")
    harness.push("a")
    harness.settle()
    harness.push("a", "b")
    assert harness.clocks() == [("a", 0, 2), ("b", 0, 1)]
    assert kinds(harness) == ["Push"]


def test_a_pull_of_any_version_by_batch() -> None:
    harness = batch_harness("a", "b")
    for _ in range(2):
        harness.pull("a", "b", any_version=True)
    assert harness.waiting(PullBatch)[0].clock == ANY_CLOCK


def test_an_observer_declares_nothing() -> None:
    harness = batch_harness("a", role="observer")
    for _ in range(3):
        harness.pull("a")
    assert kinds(harness) == ["Pull"] * 3


def test_each_server_gets_a_batch_of_its_own_slices() -> None:
    harness = Harness(servers=2, batches=True)
    spec = uint8(2 * SLICE)
    harness.know("v", "w", spec=spec)
    harness.push("v", "w", spec=spec)
    batches = {message.batch: message.slice_ids for message in harness.waiting(DeclareBatch)}
    pushed = [message.batch for message in harness.waiting(PushBatch)]
    assert sorted(place for batch in pushed if batch in batches for place in batches[batch]) == sorted(
        place for message in harness.waiting(DeclareBatch) for place in message.places
    )
    everything = [place for slice_ids in batches.values() for place in slice_ids]
    everything += [place[:2] for place in harness.clocks(Push)]
    assert sorted(everything) == [("v", 0), ("v", 1), ("w", 0), ("w", 1)]


# ── a batch that the server does not know ─────────────────────────────────────────────────────────────────────────────


def test_a_batch_that_the_server_does_not_know_is_declared_again_under_its_number() -> None:
    harness = batch_harness("a", "b")
    call = harness.push("a", "b")
    first = harness.take(DeclareBatch).message  # it is lost
    original = harness.waiting(PushBatch)[0]
    harness.postpone(PushBatch, NotYetReason.UNKNOWN_BATCH)
    again = harness.declared()
    assert (again.batch, again.slice_ids) == (first.batch, first.slice_ids)  # type: ignore[union-attr]
    harness.wait(RETRY_SOON_S)
    assert harness.waiting(PushBatch) == [original]
    settle(harness)
    assert harness.result(call) == [None, None]
    harness.wait(10 * RETRY_FIRST_S)
    assert set(kinds(harness)) <= {"DeclareBatch", "Heartbeat", "Join"}
    assert len({message.batch for message in harness.waiting(DeclareBatch)}) == 1  # the lost declaration is retried


def test_a_batch_is_declared_again_even_if_its_plan_was_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_plans_module, "MAX_PLANS", 1)
    harness = batch_harness("a", "b", "c", "d")
    harness.push("a", "b")
    harness.push("c", "d")  # the plan of the first is forgotten
    first = harness.waiting(PushBatch)[0]
    harness.declared()
    harness.postpone(PushBatch, NotYetReason.UNKNOWN_BATCH)
    batches = {message.batch: message.slice_ids for message in harness.waiting(DeclareBatch)}
    assert batches[first.batch] == (SliceId("a", 0), SliceId("b", 0))
    settle(harness)
    harness.wait(RETRY_SOON_S)
    assert harness.waiting(PushBatch) == [first]
    settle(harness)
    harness.push("a", "b")
    assert harness.waiting(PushBatch)[0].batch not in batches  # a new plan has a new number


def test_a_staged_push_is_sent_whole_when_its_batch_was_forgotten() -> None:
    """The server has forgotten the batch but has the bytes. The worker cannot know; the clock tells the server."""
    harness = batch_harness("a", "b")
    harness.push("a", "b")
    harness.declared()
    send = harness.take(PushBatch)
    harness.reply(send, Staged)
    harness.wait(RETRY_FIRST_S)
    assert [message.probe for message in harness.waiting(PushBatch)] == [True]
    harness.postpone(PushBatch, NotYetReason.UNKNOWN_BATCH)
    harness.declared()
    harness.wait(3 * RETRY_SOON_S)
    whole = harness.take(PushBatch)
    assert (whole.message, whole.payload) == (send.message, send.payload)
    harness.reply(whole, Staged)
    assert harness.machine._outbox.unstaged == 0


def test_a_pull_of_an_unknown_batch_is_retried() -> None:
    harness = batch_harness("a")
    harness.pull("a")
    harness.values(Pull, (0,), b"x")
    call = harness.pull("a")
    harness.declared()
    harness.postpone(PullBatch, NotYetReason.UNKNOWN_BATCH)
    harness.declared()
    harness.wait(RETRY_SOON_S)
    harness.values(PullBatch, (0,), b"x")
    assert harness.result(call) == [Versions(0, 0)]


def test_a_push_is_given_up_when_the_server_never_learns_its_batch() -> None:
    harness = batch_harness("a", "b")
    call = harness.push("a", "b", timeout_s=1e9)
    for _ in range(MAX_ATTEMPTS + 1):
        harness.postpone(PushBatch, NotYetReason.UNKNOWN_BATCH)
        harness.wait(1.0)
        if call in harness.done:
            break
    assert isinstance(harness.error(call), NotAllowed)
    assert not harness.waiting(PushBatch)
    again = harness.push("a", "b")  # what was sent may still arrive, so its clock is not given to another push
    assert isinstance(harness.error(again), NotAllowed)
    assert not harness.waiting(PushBatch)


def test_a_batch_that_stays_out_of_turn_times_out_and_is_still_retried() -> None:
    harness = batch_harness("a", "b")
    call = harness.push("a", "b", timeout_s=1.0)
    harness.postpone(PushBatch, NotYetReason.OUT_OF_TURN)
    harness.wait(1.0)
    error = harness.error(call)
    assert isinstance(error, RequestTimeout)
    assert (error.outcome, error.waiting_for) == ("unknown", ("server 0",))
    flush = harness.call(requests.Flush())
    harness.wait(1.0)
    settle(harness)
    assert harness.result(flush) is None


def test_a_batch_ends_with_the_incarnation_of_its_server() -> None:
    harness = batch_harness("a", "b")
    call = harness.push("a", "b")
    harness.restart_server()
    assert isinstance(harness.error(call), NodeLost)
    assert isinstance(harness.error(harness.push("a", "b")), NodeLost)
    assert len(harness.machine._outbox) == 0  # nothing more is sent to the server that is gone


def test_plans_are_made_again_after_a_key_was_placed() -> None:
    harness = batch_harness("a", "b")
    harness.push("a", "b")
    settle(harness)
    harness.know("c")
    harness.push("a", "b")
    assert len(harness.waiting(DeclareBatch)) == 2
    assert harness.waiting(PushBatch)[0].batch == 2


# ── answers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("versions", [(3, 3, 3), (3, 3)])
def test_an_answer_has_one_version_or_one_for_each_slice(versions: tuple[int, ...]) -> None:
    harness = batch_harness("a", "b")
    call = harness.push("a", "b", pull=True)
    effects = harness.values(PushBatch, versions, b"x", b"y")
    if len(versions) == 2:
        assert harness.result(call) == [Versions(3, 3)] * 2
    else:
        assert of(Copy, effects) == []
        assert isinstance(harness.error(call), ProtocolError)


def test_a_pull_by_batch_reports_the_oldest_and_newest_version_of_a_key() -> None:
    harness = Harness(batches=True)
    spec = uint8(2 * SLICE)
    harness.know("v", "w", spec=spec)
    harness.pull("v", "w", spec=spec)
    for _ in range(4):
        harness.values(Pull, (0,), bytes(SLICE))
    call = harness.pull("v", "w", spec=spec)
    answers = iter((5, 7, 7, 7))
    while harness.waiting(PullBatch):
        harness.values(PullBatch, (next(answers),), bytes(SLICE))
    assert next(answers, None) is None
    assert harness.result(call) == [Versions(5, 7), Versions(7, 7)]


def test_an_absent_push_by_batch_has_no_payload() -> None:
    harness = batch_harness("a", "b")
    harness.push("a", "b", how=ABSENT, pull=True)
    assert harness.take(PushBatch).payload == ()


def test_a_late_answer_to_a_batch_is_not_copied() -> None:
    harness = batch_harness("a", "b")
    call = harness.push("a", "b", pull=True, timeout_s=1.0)
    harness.wait(1.0)
    assert isinstance(harness.error(call), RequestTimeout)
    assert of(Copy, harness.values(PushBatch, (1,), b"x", b"y")) == []
    assert harness.result(harness.call(requests.Flush())) is None


# ── pushes that fail ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_batch_that_no_server_took_gives_its_clocks_back() -> None:
    harness = batch_harness("a", "b")
    call = harness.push("a", "b")
    harness.refuse(PushBatch, ErrorCode.NOT_ALLOWED)
    assert isinstance(harness.error(call), NotAllowed)
    harness.push("a", "b")
    assert harness.waiting(PushBatch)[0].clock == 1


@pytest.mark.parametrize("batches", [False, True])
def test_after_a_message_that_was_taken_in_part_pushes_fail_until_rewind(batches: bool) -> None:
    """If the clock were used again, the slices that took the first push would take the second for a copy of it."""
    harness = ready("a", "b", batches=batches)
    kind = PushBatch if batches else Push
    call = harness.push("a", "b")
    harness.refuse(kind, ErrorCode.NOT_ALLOWED, taken=Taken.PART)
    assert isinstance(harness.error(call), NotAllowed)
    error = harness.error(harness.push("b"))
    assert isinstance(error, NotAllowed)
    assert "rewind" in str(error)
    harness.result(harness.call(requests.Rewind(0)))
    harness.push("a", "b")
    assert harness.machine.explain(0.0)["clocks"] == {"a": 1, "b": 1}


def test_a_push_refused_in_part_holds_back_later_pushes_until_it_is_settled() -> None:
    harness = Harness(servers=2, batches=True)
    spec = uint8(2 * SLICE)
    harness.know("w", spec=spec)
    first = harness.push("w", spec=spec)
    harness.refuse(Push, ErrorCode.NOT_ALLOWED)
    assert isinstance(harness.error(first), NotAllowed)
    second = harness.push("w", spec=spec)
    assert [clock for _, _, clock in harness.clocks()] == [1]  # the clock of the first may come back
    assert second not in harness.done
    harness.refuse(Push, ErrorCode.NOT_ALLOWED)
    assert [clock for _, _, clock in harness.clocks()] + [m.clock for m in harness.waiting(PushBatch)] == [1, 1]


def test_a_queued_push_fails_when_the_one_before_it_was_taken_in_part() -> None:
    harness = Harness(servers=2, batches=True)
    spec = uint8(2 * SLICE)
    harness.know("w", spec=spec)
    harness.push("w", spec=spec)
    harness.refuse(Push, ErrorCode.NOT_ALLOWED)
    second = harness.push("w", spec=spec)
    harness.settle()
    assert "in part" in str(harness.error(second))
    assert not harness.waiting(PushBatch)
