"""A worker that declares what it moves together again and again, and names it by a number from then on."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core import requests
from kvd.core.machine import Copy, Span
from kvd.core.requests import Versions
from kvd.core.worker import message_plans as message_plans_module
from kvd.core.worker.keys import WorkerKey
from kvd.core.worker.message_plans import plan_messages
from kvd.core.worker.not_yet import MAX_ATTEMPTS
from kvd.core.worker.outbox import RETRY_FIRST_S, RETRY_SOON_S
from kvd.errors import NodeLost, NotAllowed, ProtocolError, RequestTimeout
from kvd.protocol.codec import MAX_HEADER_BYTES, encode
from kvd.protocol.messages import (
    ABSENT,
    ANY_CLOCK,
    MAX_PARTS,
    Command,
    CommandResult,
    DeclareBatch,
    Done,
    Epoch,
    ErrorCode,
    NotYet,
    NotYetReason,
    Part,
    Pull,
    PullBatch,
    Push,
    PushBatch,
    SliceId,
    Staged,
    Taken,
)
from kvd.protocol.specs import MAX_KEY_CHARS, KeySpec
from tests.core.fakes import SLICE, copies, of, one, server_id, uint8
from tests.core.worker_harness import Harness, ready


def bench_of(*keys: str, **more: Any) -> Harness:
    return ready(*keys, batches=True, **more)


def kinds(harness: Harness) -> list[str]:
    return [type(send.message).__name__ for send in harness.sent]


def declared(harness: Harness) -> DeclareBatch:
    """The oldest DeclareBatch is answered."""
    send = harness.take(DeclareBatch)
    harness.reply(send, Done)
    assert isinstance(send.message, DeclareBatch)
    return send.message


def settle(harness: Harness, kind: Any = PushBatch) -> None:
    harness.reply(harness.take(kind), Done)


def test_a_push_of_many_slices_is_a_pack_at_once() -> None:
    harness = bench_of("a", "b")
    call = harness.push("a", "b", samples=5, how=0, pull=True)
    assert kinds(harness) == ["DeclareBatch", "PushBatch"]
    batch = declared(harness)
    assert batch.slice_ids == (SliceId("a", 0), SliceId("b", 0))
    send = harness.take(PushBatch)
    assert send.message == PushBatch(send.message.request, batch.batch, 1, 0, 5, True)  # type: ignore[union-attr]
    assert send.payload == (Span("source a", 0, 1), Span("source b", 0, 1))
    harness.sent.append(send)
    effects = harness.values(PushBatch, (1,), b"x", b"y")
    assert [(target, source.offset) for target, _, source in copies(effects)] == [("target a", 0), ("target b", 8)]
    assert harness.result(call) == [Versions(1, 1)] * 2


def test_what_is_pushed_alone_or_pulled_is_a_pack_at_its_second_use() -> None:
    harness = bench_of("a", "b")
    harness.push("a")
    harness.settle()
    harness.push("a")
    assert kinds(harness) == ["DeclareBatch", "PushBatch"]
    assert declared(harness).slice_ids == (SliceId("a", 0),)
    settle(harness)
    for kind in ("Pull", "PullBatch"):
        call = harness.pull("b", "a")
        assert kinds(harness)[-1] == "Pull"  # the clocks of a and b differ: no batch can say so
        harness.values(Pull, (0, 2), b"x", b"y")
        assert harness.result(call) == [Versions(0, 0), Versions(2, 2)], kind
    for expected in (["Pull"], ["DeclareBatch", "PullBatch"], ["PullBatch"]):
        call = harness.pull("b")
        assert kinds(harness) == expected
        if "DeclareBatch" in expected:
            declared(harness)
        harness.values(PullBatch if "PullBatch" in expected else Pull, (0,), b"x")
        assert harness.result(call) == [Versions(0, 0)]


def test_a_pack_is_declared_once_and_the_same_keys_in_another_order_are_another() -> None:
    harness = bench_of("a", "b")
    numbers = []
    for keys in (("a", "b"), ("a", "b"), ("b", "a"), ("a", "b"), ("b", "a")):
        harness.push(*keys)
        while harness.waiting(DeclareBatch):
            declared(harness)
        numbers.append(harness.waiting(PushBatch)[0].batch)
        settle(harness)
    assert numbers == [1, 1, 2, 1, 2]
    assert harness.machine.explain(0.0)["clocks"] == {"a": 5, "b": 5}


def test_keys_whose_clocks_differ_are_named_one_by_one() -> None:
    harness = bench_of("a", "b")
    harness.push("a")
    harness.settle()
    harness.push("a", "b")
    assert harness.clocks() == [("a", 0, 2), ("b", 0, 1)]
    assert kinds(harness) == ["Push"]


def test_any_version_by_pack() -> None:
    harness = bench_of("a", "b")
    for _ in range(2):
        harness.pull("a", "b", any_version=True)
    assert harness.waiting(PullBatch)[0].clock == ANY_CLOCK


def test_an_observer_declares_nothing() -> None:
    harness = bench_of("a", role="observer")
    for _ in range(3):
        harness.pull("a")
    assert kinds(harness) == ["Pull"] * 3


def test_a_pack_goes_to_each_server_with_its_own_slices() -> None:
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


# ── when the server does not know it ──────────────────────────────────────────────────────────────────────────────────


def test_a_pack_that_the_server_does_not_know_is_declared_again_under_its_number() -> None:
    harness = bench_of("a", "b")
    call = harness.push("a", "b")
    first = harness.take(DeclareBatch).message  # lost
    original = harness.waiting(PushBatch)[0]
    harness.postpone(PushBatch, NotYetReason.UNKNOWN_BATCH)
    again = declared(harness)
    assert (again.batch, again.slice_ids) == (first.batch, first.slice_ids)  # type: ignore[union-attr]
    harness.wait(RETRY_SOON_S)
    assert harness.waiting(PushBatch) == [original]
    settle(harness)
    assert harness.result(call) == [None, None]
    harness.wait(10 * RETRY_FIRST_S)
    assert set(kinds(harness)) <= {"DeclareBatch", "Heartbeat", "Join"}
    assert (
        len({message.batch for message in harness.waiting(DeclareBatch)}) == 1
    )  # the lost one is said until it is heard


def test_a_pack_is_declared_again_though_its_plan_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_plans_module, "MAX_PLANS", 1)
    harness = bench_of("a", "b", "c", "d")
    harness.push("a", "b")
    harness.push("c", "d")  # the plan of the first is forgotten
    first = harness.waiting(PushBatch)[0]
    declared(harness)
    harness.postpone(PushBatch, NotYetReason.UNKNOWN_BATCH)
    batches = {message.batch: message.slice_ids for message in harness.waiting(DeclareBatch)}
    assert batches[first.batch] == (SliceId("a", 0), SliceId("b", 0))
    settle(harness)
    harness.wait(RETRY_SOON_S)
    assert harness.waiting(PushBatch) == [first]
    settle(harness)
    harness.push("a", "b")
    assert harness.waiting(PushBatch)[0].batch not in batches  # a new plan has a new number


def test_a_staged_push_of_a_pack_that_was_forgotten_is_sent_whole() -> None:
    """The server forgot the batch, not the bytes; the worker cannot tell, and the clock tells the server."""
    harness = bench_of("a", "b")
    harness.push("a", "b")
    declared(harness)
    send = harness.take(PushBatch)
    harness.reply(send, Staged)
    harness.wait(RETRY_FIRST_S)
    assert [message.probe for message in harness.waiting(PushBatch)] == [True]
    harness.postpone(PushBatch, NotYetReason.UNKNOWN_BATCH)
    declared(harness)
    harness.wait(3 * RETRY_SOON_S)
    whole = harness.take(PushBatch)
    assert (whole.message, whole.payload) == (send.message, send.payload)
    harness.reply(whole, Staged)
    assert harness.machine._outbox.unstaged == 0


def test_a_pull_of_a_pack_that_is_not_known_is_asked_again() -> None:
    harness = bench_of("a")
    harness.pull("a")
    harness.values(Pull, (0,), b"x")
    call = harness.pull("a")
    declared(harness)
    harness.postpone(PullBatch, NotYetReason.UNKNOWN_BATCH)
    declared(harness)
    harness.wait(RETRY_SOON_S)
    harness.values(PullBatch, (0,), b"x")
    assert harness.result(call) == [Versions(0, 0)]


def test_a_server_that_never_knows_the_pack_is_given_up() -> None:
    harness = bench_of("a", "b")
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


def test_a_pack_that_never_gets_its_turn_times_out_and_goes_on() -> None:
    harness = bench_of("a", "b")
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


def test_a_pack_belongs_to_an_incarnation_of_its_server() -> None:
    harness = bench_of("a", "b")
    call = harness.push("a", "b")
    harness.restart_server()
    assert isinstance(harness.error(call), NodeLost)
    assert isinstance(harness.error(harness.push("a", "b")), NodeLost)
    assert len(harness.machine._outbox) == 0  # nothing is said any more to the one that is gone


def test_keys_that_are_placed_anew_are_cut_anew() -> None:
    harness = bench_of("a", "b")
    harness.push("a", "b")
    settle(harness)
    harness.know("c")
    harness.push("a", "b")
    assert len(harness.waiting(DeclareBatch)) == 2
    assert harness.waiting(PushBatch)[0].batch == 2


# ── answers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("versions", [(3, 3, 3), (3, 3)])
def test_an_answer_has_one_version_or_one_for_each_slice(versions: tuple[int, ...]) -> None:
    harness = bench_of("a", "b")
    call = harness.push("a", "b", pull=True)
    effects = harness.values(PushBatch, versions, b"x", b"y")
    if len(versions) == 2:
        assert harness.result(call) == [Versions(3, 3)] * 2
    else:
        assert of(Copy, effects) == []
        assert isinstance(harness.error(call), ProtocolError)


def test_slices_of_one_key_by_pack_report_the_oldest_and_the_newest() -> None:
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


def test_who_takes_no_part_brings_no_bytes_by_pack() -> None:
    harness = bench_of("a", "b")
    harness.push("a", "b", how=ABSENT, pull=True)
    assert harness.take(PushBatch).payload == ()


def test_a_late_answer_to_a_pack_is_not_copied() -> None:
    harness = bench_of("a", "b")
    call = harness.push("a", "b", pull=True, timeout_s=1.0)
    harness.wait(1.0)
    assert isinstance(harness.error(call), RequestTimeout)
    assert of(Copy, harness.values(PushBatch, (1,), b"x", b"y")) == []
    assert harness.result(harness.call(requests.Flush())) is None


# ── pushes that fail ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_pack_that_nobody_took_gives_its_clocks_back() -> None:
    harness = bench_of("a", "b")
    call = harness.push("a", "b")
    harness.refuse(PushBatch, ErrorCode.NOT_ALLOWED)
    assert isinstance(harness.error(call), NotAllowed)
    harness.push("a", "b")
    assert harness.waiting(PushBatch)[0].clock == 1


@pytest.mark.parametrize("batches", [False, True])
def test_a_message_that_was_carried_out_for_some_of_its_slices_breaks_its_keys(batches: bool) -> None:
    """To use the clock again would have the slices that took the first push take the second for the same one."""
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
    assert [clock for _, _, clock in harness.clocks()] == [1]  # the window is two, but whose clock is next is open
    assert second not in harness.done
    harness.refuse(Push, ErrorCode.NOT_ALLOWED)
    assert [clock for _, _, clock in harness.clocks()] + [m.clock for m in harness.waiting(PushBatch)] == [1, 1]


def test_later_pushes_fail_when_the_one_before_turns_out_to_be_taken_in_part() -> None:
    harness = Harness(servers=2, batches=True)
    spec = uint8(2 * SLICE)
    harness.know("w", spec=spec)
    harness.push("w", spec=spec)
    harness.refuse(Push, ErrorCode.NOT_ALLOWED)
    second = harness.push("w", spec=spec)
    harness.settle()
    assert "in part" in str(harness.error(second))
    assert not harness.waiting(PushBatch)


# ── small pushes ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_control_asks_for_small_pushes_and_waits_until_they_are_staged() -> None:
    harness = bench_of("a", "b", small=100)
    for _ in range(2):
        harness.push("a", "b")
    declared(harness)
    assert [message.probe for message in harness.waiting(PushBatch)] == [False, False]
    sent = [harness.take(PushBatch) for _ in range(2)]
    call = harness.call(requests.Control((Command(0, "x"),), staged_first=True))
    assert [message.probe for message in harness.waiting(PushBatch)] == [True, True]
    harness.push("a", "b")  # over the window: it was not there yet when control was called, and yet it is waited for
    probes = [harness.take(PushBatch) for _ in range(2)]
    assert [probe.payload for probe in probes] == [(), ()]
    harness.reply(probes[0], Staged)
    harness.reply(probes[1], Staged)
    assert not harness.waiting(Command)
    harness.reply(sent[0], Done)
    assert [message.probe for message in harness.waiting(PushBatch)] == [False, True]  # the third, and its probe
    harness.reply(harness.take(PushBatch), Staged)
    assert len(harness.waiting(Command)) == 1
    harness.say(server_id(0), CommandResult(one(harness.waiting(Command)).request))
    assert len(harness.result(call)) == 1
    harness.sent.clear()
    harness.reply(sent[1], Done)
    harness.push("a", "b")
    assert [message.probe for message in harness.waiting(PushBatch)] == [False]  # nobody asks any more


def test_nobody_asks_for_small_pushes_when_the_control_that_waited_is_over() -> None:
    harness = bench_of("a", "b", small=100)
    harness.push("a", "b")
    call = harness.call(requests.Control((Command(0, "x"),), staged_first=True), timeout_s=1.0)
    harness.wait(1.0)
    assert isinstance(harness.error(call), RequestTimeout)
    harness.sent.clear()
    harness.push("a", "b")
    assert [message.probe for message in harness.waiting(PushBatch)] == [False]


def test_a_small_push_that_was_not_taken_is_asked_for_again() -> None:
    """It was refused when it was asked for; sent again it is staged in silence, so it is asked for once more."""
    harness = bench_of("a", "b", small=100)
    harness.push("a", "b")
    declared(harness)
    push = harness.take(PushBatch)
    harness.call(requests.Control((Command(0, "x"),), staged_first=True))
    harness.take(PushBatch)
    harness.reply(push, lambda request: NotYet(request, NotYetReason.OUT_OF_TURN, "because"))
    harness.wait(RETRY_SOON_S)
    assert [message.probe for message in harness.waiting(PushBatch)] == [False, True]
    harness.reply(harness.take(PushBatch), Staged)
    assert len(harness.waiting(Command)) == 1


# ── how calls are cut ─────────────────────────────────────────────────────────────────────────────────────────────────


def keys_of(names: list[str], spec: KeySpec, servers: int = 1) -> list[WorkerKey]:
    return [WorkerKey(name, spec, servers=tuple(index % servers for index in range(spec.num_slices))) for name in names]


def test_no_pack_is_longer_than_a_header() -> None:
    """The longest names there are, of the longest characters, and many short ones."""
    for names in ([f"{number:04}" + "𝄞" * (MAX_KEY_CHARS - 4) for number in range(300)], [str(n) for n in range(3000)]):
        plans = plan_messages(keys_of(names, uint8(1)), 1 << 20)
        assert sum(len(plan.slice_ids) for plan in plans) == len(names)
        for plan in plans:
            assert len(plan.slice_ids) <= MAX_PARTS
            header = encode(DeclareBatch(1 << 61, 1 << 61, plan.slice_ids), 1 << 61, Epoch(1 << 61, 1 << 61))
            assert len(header) <= MAX_HEADER_BYTES
            parts = tuple(Part(key, index, 1 << 61) for key, index in plan.slice_ids)
            header = encode(Push(1 << 61, parts, 0, 1 << 61, True), 1 << 61, Epoch(1 << 61, 1 << 61))
            assert len(header) <= MAX_HEADER_BYTES


def test_packings_cover_every_byte_once_and_start_at_multiples_of_eight() -> None:
    sizes = [0, 1, 7, 8, SLICE, SLICE + 1, 3 * SLICE, 2, 0]
    keys = [
        WorkerKey(str(number), uint8(size), servers=tuple(number % 2 for _ in range(uint8(size).num_slices)))
        for number, size in enumerate(sizes)
    ]
    plans = plan_messages(keys, SLICE)
    covered: dict[int, int] = {}
    for plan in plans:
        assert plan.nbytes <= SLICE
        assert len({keys[item].servers[0] for item in plan.items}) == 1
        ends = 0
        for row, (start, nbytes), item in zip(plan.rows, plan.ranges, plan.items, strict=True):
            assert (row.start, row.nbytes) == (start, nbytes)
            assert row.offset % 8 == 0
            assert row.offset >= ends
            ends = row.offset + nbytes
            covered[item] = covered.get(item, 0) + nbytes
        assert ends == plan.nbytes
    assert [covered[item] for item in range(len(sizes))] == sizes
