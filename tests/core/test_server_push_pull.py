"""The server: pushes and pulls."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core.machine import Apply, CallerPeer, Effect, LogEntry, Received
from kvd.errors import NotAllowed
from kvd.protocol.messages import (
    Coding,
    Done,
    Epoch,
    ErrorCode,
    NotYet,
    NotYetReason,
    Part,
    Pull,
    Push,
    Refused,
    Taken,
    Values,
)
from tests.core.fakes import SLICE, cluster, of, one, padded_bytes, read, said, uint8, worker_id
from tests.core.server_harness import Harness, kinds, not_yet, ready, refusal, values

# ── pushes ──


def test_a_round_is_merged_in_rank_order_and_acknowledged_at_commit() -> None:
    harness = ready()
    harness.hold = True
    assert kinds(harness.push(1, 1, b"\2", request=21)) == ["Staged"]
    effects = harness.push(0, 1, b"\1", request=11)
    apply = one(of(Apply, effects))
    assert [(given.rank, given.clock, given.samples) for given in apply.contributions] == [(0, 1, 1), (1, 1, 1)]
    assert [read(given.span) for given in apply.contributions if given.span] == [b"\1", b"\2"]
    assert (apply.merge, apply.assign, apply.optimizer, apply.current) == ("sum", False, None, b"\0")
    assert Done(21) not in said(effects)
    effects = harness.finish(apply)
    assert said(effects, worker_id(0)) == [Done(11)]
    assert said(effects, worker_id(1)) == [Done(21)]
    assert values(harness.pull(0, 1)) == ((1,), [b"\3"])


def test_a_pushpull_is_answered_with_the_new_version() -> None:
    harness = ready()
    harness.push(0, 1, b"\5", pull=True)
    effects = harness.push(1, 1, b"\6", pull=True)
    for rank in (0, 1):
        assert values(effects, worker_id(rank)) == ((1,), [b"\x0b"])


def test_a_pull_waits_for_its_version_and_gets_exactly_it() -> None:
    harness = ready()
    harness.push(0, 1)
    assert said(harness.pull(0, 1)) == []
    assert values(harness.pull(1, 0)) == ((0,), [b"\0"])
    effects = harness.push(1, 1, b"\2")
    assert values(effects, worker_id(0)) == ((1,), [b"\3"])
    assert values(harness.pull(1, 0)) == ((0,), [b"\0"])  # the previous version is kept
    for rank in (0, 1):
        harness.push(rank, 2, b"\4")
    assert values(harness.pull(1, 1)) == ((1,), [b"\3"])
    refused = refusal(harness.pull(1, 0))
    assert (refused.error, refused.taken) == (ErrorCode.NOT_ALLOWED, Taken.NOTHING)
    assert values(harness.pull(1, -1)) == ((2,), [b"\x08"])


def test_a_node_that_is_no_worker_pulls_the_committed_value() -> None:
    harness = ready(b"a")
    anyone = Received(CallerPeer(b"cli"), 77, Epoch(0, 0), Pull(3, (Part("w", 0, -1),)))
    assert values(harness.step(anyone)) == ((0,), [b"a"])
    exact = Received(CallerPeer(b"cli"), 77, Epoch(0, 0), Pull(3, (Part("w", 0, 1),)))
    assert not_yet(harness.step(exact)).reason is NotYetReason.NOT_ATTACHED


def test_a_push_that_is_sent_again_is_counted_once() -> None:
    harness = ready()
    for _ in range(3):
        assert kinds(harness.push(0, 1, b"\1", request=11)) == ["Staged"]
    effects = harness.push(1, 1, b"\1", request=21)
    assert said(effects, worker_id(0)) == [Done(11)]
    for _ in range(2):
        assert said(harness.push(0, 1, b"\1", request=11)) == [Done(11)]
    assert len(harness.applied) == 1
    assert values(harness.pull(0, 1)) == ((1,), [b"\2"])


def test_the_answer_goes_to_the_first_and_the_last_sender() -> None:
    new, newer = CallerPeer(b"new"), CallerPeer(b"newer")
    harness = ready()
    harness.push(0, 1, request=11)
    assert kinds(harness.push(0, 1, request=11, peer=new), new) == ["Staged"]
    assert kinds(harness.pull(0, 1, request=12)) == []
    harness.pull(0, 1, request=12, peer=newer)
    effects = harness.push(1, 1)
    assert kinds(effects, new) == ["Done"]
    assert kinds(effects, newer) == ["Values"]
    assert kinds(effects, worker_id(0)) == ["Done", "Values"]


def test_a_probe_asks_without_bytes() -> None:
    harness = ready()
    answer = not_yet(harness.push(0, 1, None, probe=True))
    assert (answer.reason, answer.next_clock) == (NotYetReason.OUT_OF_TURN, 1)  # nothing is here: send it
    harness.push(0, 1, request=11)
    assert kinds(harness.push(0, 1, None, probe=True, request=11)) == ["Staged"]
    harness.push(1, 1)
    assert said(harness.push(0, 1, None, probe=True, request=11)) == [Done(11)]
    assert refusal(harness.push(0, 2, b"\1", probe=True)).error is ErrorCode.PROTOCOL_ERROR  # a probe with bytes


@pytest.mark.parametrize(("clock", "expected"), [(2, 1), (5, 1), (0, 1), (-1, 1)])
def test_a_push_out_of_turn_is_told_the_next_clock(clock: int, expected: int) -> None:
    answer = not_yet(ready().push(0, clock))
    assert (answer.reason, answer.next_clock, answer.key) == (NotYetReason.OUT_OF_TURN, expected, "w")


def test_the_window_is_rounds_ahead() -> None:
    harness = ready()
    for clock in (1, 2):
        assert kinds(harness.push(0, clock)) == ["Staged"]
    assert not_yet(harness.push(0, 3)).reason is NotYetReason.OUT_OF_TURN
    assert harness.explain()["bytes_staged"] == 2
    harness.push(1, 1)
    assert kinds(harness.push(0, 3)) == ["Staged"]


@pytest.mark.parametrize(
    ("parts", "payload", "why"),
    [
        ([("w", 0, 1), ("v", 0, 1)], [b"\1", b""], ErrorCode.PROTOCOL_ERROR),
        ([("w", 0, 1), ("v", 0, 1)], [b"\1", b"\1\1"], ErrorCode.PROTOCOL_ERROR),
        ([("w", 0, 1), ("v", 0, 2)], [b"\1", b"\1"], NotYetReason.OUT_OF_TURN),
        ([("w", 0, 1), ("x", 0, 1)], [b"\1", b"\1"], ErrorCode.KEY_NOT_FOUND),
        ([("w", 0, 1), ("w", 1, 1)], [b"\1", b"\1"], ErrorCode.KEY_NOT_FOUND),
    ],
)
def test_a_push_is_taken_as_a_whole_or_not_at_all(
    parts: Any, payload: list[bytes], why: ErrorCode | NotYetReason
) -> None:
    harness = ready()
    harness.init("v", b"\0")
    answer = one(said(harness.push_all(0, parts, payload)))
    assert (answer.reason if isinstance(answer, NotYet) else answer.error) is why
    assert harness.explain()["bytes_staged"] == 0
    assert harness.explain()["requests_waiting"] == 0


def test_a_message_of_many_parts_is_answered_when_the_last_is_committed() -> None:
    harness = Harness()
    spec = uint8(SLICE + 3)
    harness.init("w", bytes(SLICE + 3), spec)
    harness.init("v", b"\0")
    parts = [("v", 0, 1), ("w", 1, 1), ("w", 0, 1)]
    harness.push_all(0, parts, [b"\7", b"abc", b"\1" * SLICE], pull=True)
    harness.push_all(1, parts[1:], [b"\0\0\1", b"\2" * SLICE])
    effects = harness.push(1, 1, b"\1", key="v")
    versions, got = values(effects, worker_id(0))
    assert versions == (1, 1, 1)
    assert got == [b"\x08", b"abd", b"\3" * SLICE]


def test_a_round_of_assignment_takes_rank_0_s_value() -> None:
    harness = ready()
    harness.push(1, 1, None, how=2, pull=True)
    assert refusal(harness.push(0, 1, b"\1", how=0)).error is ErrorCode.NOT_ALLOWED  # the others broadcast
    effects = harness.push(0, 1, b"\7", how=1, pull=True)
    assert one(harness.applied).assign
    assert values(effects, worker_id(1)) == ((1,), [b"\7"])


def test_the_requests_that_wait_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.core.server.pending.MAX_PENDING", 1)
    harness = ready()
    harness.push(0, 1)
    assert refusal(harness.push(1, 1)).error is ErrorCode.NOT_ALLOWED
    assert refusal(harness.pull(1, 1)).error is ErrorCode.NOT_ALLOWED


def test_a_weighted_merge_of_integers_is_refused() -> None:
    harness = ready(settings=cluster(merge="weighted"))
    refused = refusal(harness.push(0, 1))
    assert refused.error is ErrorCode.NOT_ALLOWED
    assert "weighted merge takes float keys only" in refused.text


def test_an_update_that_fails_gives_the_pushes_back() -> None:
    harness = ready()
    harness.push(0, 1, request=11)
    harness.push(0, 2, request=12)
    harness.pull(0, 1, request=13)
    harness.error = NotAllowed("a bad optimizer")
    effects = harness.push(1, 1, request=21)
    told = {message.request: message for message in said(effects) if isinstance(message, Refused)}
    assert set(told) == {11, 12, 13, 21}
    assert "the update of 'w' failed: a bad optimizer" in told[11].text
    assert any(note.level == "error" for note in of(LogEntry, effects))
    harness.error = None
    harness.push(0, 1)
    effects = harness.push(1, 1)
    assert kinds(effects) == ["Done", "Done"]
    assert values(harness.pull(0, 1)) == ((1,), [b"\2"])


@pytest.mark.parametrize("sync", [True, False])
def test_a_refused_push_that_comes_again_does_not_take_the_clock_of_the_next(sync: bool) -> None:
    harness = ready(settings=cluster() if sync else cluster(mode="async"))

    def others(number: int, request: int) -> list[Effect]:
        return harness.push(1, number, b"\1", request=request) if sync else []

    harness.error = NotAllowed("a bad optimizer")
    effects = harness.push(0, 1, b"\7", request=11) + others(1, 21)
    assert 11 in {message.request for message in said(effects) if isinstance(message, Refused)}
    harness.error = None
    again = refusal(harness.push(0, 1, b"\7", request=11))  # the refusal was on its way when it was sent
    assert (again.request, again.error, again.taken) == (11, ErrorCode.NOT_ALLOWED, Taken.NOTHING)
    assert "the update of 'w' failed: a bad optimizer" in again.text
    assert refusal(harness.push(0, 1, None, request=11, probe=True)).error is ErrorCode.NOT_ALLOWED
    harness.push(0, 1, b"\5", request=12)
    others(1, 22)
    assert values(harness.pull(0, 1)) == ((1,), [b"\6" if sync else b"\5"])


def test_pushes_after_a_failed_one_are_also_refused_for_good() -> None:
    harness = ready()
    harness.push(0, 1, request=11)
    harness.push(0, 2, request=12)
    harness.error = NotAllowed("no")
    harness.push(1, 1, request=21)
    harness.error = None
    for request, clock in ((12, 2), (11, 1)):
        assert refusal(harness.push(0, clock, b"\7", request=request)).error is ErrorCode.NOT_ALLOWED
    assert kinds(harness.push(0, 1, b"\7", request=13)) == ["Staged"]
    assert (
        not_yet(harness.push(0, 3, request=14)).reason is NotYetReason.OUT_OF_TURN
    )  # a later request may be out of turn, and try again


def test_a_push_that_was_refused_before_it_was_staged_stays_refused() -> None:
    harness = ready()
    harness.push(1, 1, None, how=2)
    assert refusal(harness.push(0, 1, b"\1", how=0, request=11)).error is ErrorCode.NOT_ALLOWED  # the others broadcast
    harness.push(0, 1, b"\7", how=1, request=12)
    assert refusal(harness.push(0, 2, b"\1", how=0, request=11)).error is ErrorCode.NOT_ALLOWED


def test_a_push_refused_for_one_of_its_slices_says_so_again() -> None:
    harness = ready(settings=cluster(mode="async"))
    harness.init("v", b"\0")
    harness.hold = True
    push = Push(11, (Part("w", 0, 1), Part("v", 0, 1)), 0, 1, False)
    first, second = of(Apply, harness.say(0, push, padded_bytes([b"\1", b"\2"])))
    harness.error = NotAllowed("no")
    assert refusal(harness.finish(first)).taken is Taken.PART
    harness.error = None
    harness.finish(second)
    again = refusal(harness.say(0, push, padded_bytes([b"\1", b"\2"])))
    assert (again.error, again.taken) == (ErrorCode.NOT_ALLOWED, Taken.PART)


def test_a_counted_push_is_answered_even_at_the_limit_of_waiting_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = ready()
    harness.push(0, 1, request=11)
    harness.push(1, 1)
    harness.push(0, 2, request=12)
    monkeypatch.setattr("kvd.core.server.pending.MAX_PENDING", 1)
    assert said(harness.push(0, 1, request=11)) == [Done(11)]
    other = not_yet(harness.push(0, 2, request=13))  # it is staged, and can wait no more: to be asked again
    assert other.reason is NotYetReason.BUSY


def test_a_push_refused_because_too_many_wait_does_not_take_its_clock_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sender gives the clock to the next push."""
    harness = ready()
    with monkeypatch.context() as full:
        full.setattr("kvd.core.server.pending.MAX_PENDING", 0)
        assert refusal(harness.push(0, 1, b"\1", request=11)).taken is Taken.NOTHING
    assert refusal(harness.push(0, 1, b"\1", request=11)).error is ErrorCode.NOT_ALLOWED
    harness.push(0, 1, b"\7", request=12)
    harness.push(1, 1, b"\1")
    assert harness.value("w") == b"\x08"


def test_a_pushpull_whose_version_is_gone_was_taken() -> None:
    """If its sender gave the clock back, its next push would be taken for this one."""
    harness = ready()
    for clock in (1, 2, 3):
        harness.push(0, clock, request=10 + clock, pull=True)
        harness.push(1, clock)
    gone = refusal(harness.push(0, 1, request=11, pull=True))
    assert (gone.error, gone.taken) == (ErrorCode.NOT_ALLOWED, Taken.PART)
    assert "version 1 of 'w' is not kept" in gone.text
    assert refusal(harness.pull(0, 1)).taken is Taken.NOTHING


# ── async ──


def asynchronous(**more: Any) -> Harness:
    return ready(settings=cluster(mode="async", **more))


def test_async_pushes_are_applied_at_once_and_seen_by_the_pusher() -> None:
    harness = asynchronous()
    assert kinds(harness.push(0, 1, b"\5")) == ["Done"]
    assert values(harness.pull(0, 1)) == ((1,), [b"\5"])
    assert values(harness.pull(1, 0)) == ((1,), [b"\5"])
    harness.hold = True
    effects = harness.push(1, 1, b"\6")
    assert said(harness.pull(1, 1)) == []
    assert values(harness.pull(0, 1)) == ((1,), [b"\5"])
    assert values(harness.finish(one(of(Apply, effects))), worker_id(1)) == ((2,), [b"\6"])


def test_async_an_update_that_fails_does_not_hold_up_the_others() -> None:
    harness = asynchronous()
    harness.hold = True
    first = one(of(Apply, harness.push(0, 1, request=11)))
    harness.push(1, 1, b"\6", request=21)
    harness.error = NotAllowed("no")
    effects = harness.finish(first)
    assert refusal(effects).request == 11
    harness.error = None
    assert said(harness.finish(one(of(Apply, effects)))) == [Done(21)]
    assert values(harness.pull(1, 1)) == ((1,), [b"\6"])


@pytest.mark.parametrize("staleness", [0, 1])
def test_staleness_holds_fast_workers_back_until_slow_ones_catch_up(staleness: int) -> None:
    harness = asynchronous(staleness=staleness)
    for clock in range(1, staleness + 1):
        assert kinds(harness.push(0, clock)) == ["Done"]
    assert kinds(harness.push(0, staleness + 1)) == ["Staged"]
    assert harness.explain()["waiting_for"] == ["worker 1"]
    effects = harness.push(1, 1)
    assert [kinds(effects, worker_id(rank)).count("Done") for rank in (0, 1)] == [1, 1]
    assert harness.explain()["waiting_for"] == []


def test_a_pull_of_a_missing_slice_is_refused() -> None:
    assert refusal(ready().pull(0, 0, key="v")).error is ErrorCode.KEY_NOT_FOUND


def test_async_a_pull_waits_for_the_own_push_and_for_no_other_worker() -> None:
    harness = asynchronous()
    assert said(harness.pull(0, 1)) == []
    assert harness.explain()["waiting_for"] == []
    effects = harness.push(0, 1, b"\5")
    assert values(effects, worker_id(0)) == ((1,), [b"\5"])


def test_a_request_that_failed_in_one_slice_is_not_answered_from_another() -> None:
    harness = ready()
    harness.init("v", b"\0")
    for clock in (1, 2):
        for rank in (0, 1):
            harness.push(rank, clock)
    parts = (Part("v", 0, 1), Part("w", 0, 0))  # v waits for its first round, w has forgotten version 0
    assert refusal(harness.say(0, Pull(99, parts))).error is ErrorCode.NOT_ALLOWED
    for rank in (0, 1):
        effects = harness.push(rank, 1, key="v")
    assert [message.request for message in said(effects) if isinstance(message, Values)] == []


# ── values that were converted on arrival ──


@pytest.mark.parametrize("wanted", ["float32", "int8"])
def test_a_value_that_was_converted_to_another_dtype_than_the_keys_is_refused(wanted: str) -> None:
    harness = ready()
    refused = refusal(harness.push(0, 1, b"\1", coding=Coding("float16", wanted, 1)))
    assert (refused.error, refused.key) == (ErrorCode.PROTOCOL_ERROR, "w")
    assert refused.text == f"key 'w' has dtype uint8, and takes a value of {wanted} by itself only"
    assert kinds(harness.push(0, 1, b"\1")) == ["Staged"]


def test_one_peer_cannot_keep_the_others_from_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.core.server.pending.MAX_PENDING", 30)
    monkeypatch.setattr("kvd.core.server.pending.FEW", 1)
    harness = ready()
    opened = 0
    while kinds(harness.pull(1, 1)) == []:
        opened += 1
    assert opened == 20  # two thirds
    assert harness.explain()["requests_waiting"] == 20
    assert kinds(harness.push(0, 1, pull=True)) == ["Staged"]
    effects = harness.push(1, 1, request=900)
    assert refusal(effects).error is ErrorCode.NOT_ALLOWED  # its places are taken
