"""Batches: lists of slices under a number that their sender chose, and how a server remembers them."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from kvd.core.server import batches, pending
from kvd.core.server.batches import BatchTable
from kvd.core.server.rounds import SliceLog
from kvd.optimizer import SGD, to_wire
from kvd.protocol.codec import MAX_HEADER_BYTES, decode, encode
from kvd.protocol.messages import (
    ANY_CLOCK,
    BIGGEST,
    MAX_PARTS,
    DeclareBatch,
    Delete,
    Epoch,
    ErrorCode,
    KeyId,
    NotYetReason,
    PullBatch,
    PushBatch,
    SetOptimizer,
    SliceId,
)
from tests.core.fakes import cluster, member, worker_id
from tests.core.server_harness import kinds, not_yet, packed, refusal, together, values

A, B = b"\1", b"\2"


def slice_ids(*keys: str) -> tuple[SliceId, ...]:
    return tuple(SliceId(key, 0) for key in keys)


# ── the table ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_senders_that_declare_the_same_slices_share_a_batch() -> None:
    table = BatchTable()
    table.declare(1, 7, slice_ids("a", "b"))
    table.declare(2, 3, slice_ids("a", "b"))
    table.declare(2, 4, slice_ids("b", "a"))
    assert table.find(1, 7) is table.find(2, 3) is not table.find(2, 4)
    assert table.find(1, 3) is None
    assert table.find(3, 7) is None


def test_a_batch_number_keeps_its_first_meaning() -> None:
    table = BatchTable()
    table.declare(1, 7, slice_ids("a", "b"))
    table.declare(1, 7, slice_ids("c"))
    batch = table.find(1, 7)
    assert batch is not None
    assert batch.slice_ids == slice_ids("a", "b")


def test_the_slices_remembered_of_a_sender_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MAX_SLICE_IDS", 5)
    table = BatchTable()
    table.declare(9, 1, slice_ids("a", "b"))
    for number in range(1, 4):
        table.declare(1, number, slice_ids(f"k{number}", "x"))
    assert [table.find(1, number) is None for number in range(1, 4)] == [True, False, False]
    assert table.find(9, 1) is not None
    table.declare(1, 4, slice_ids("m"))
    assert table.find(1, 2) is not None  # there were four slices, and this is the fifth
    table.declare(1, 5, slice_ids(*"abcdefgh"))
    assert [number for number in range(6) if table.find(1, number)] == [5]  # however large, the newest is kept
    table.declare(1, 6, slice_ids("a"))
    assert [number for number in range(7) if table.find(1, number)] == [6]
    table.declare(1, 1, slice_ids("k1", "x"))
    assert table.find(1, 1) is not None


def test_a_batch_that_no_sender_uses_any_more_is_forgotten() -> None:
    table = BatchTable()
    table.declare(1, 1, slice_ids("a"))
    table.declare(1, 2, slice_ids("a"))
    table.declare(2, 1, slice_ids("a"))
    first = table.find(1, 1)
    assert first is not None
    first.is_apart = True
    table.drop_sender(1)
    assert table.find(1, 1) is table.find(1, 2) is None
    assert table.find(2, 1) is first
    table.drop_sender(2)
    table.drop_sender(2)
    table.declare(2, 1, slice_ids("a"))
    again = table.find(2, 1)
    assert again is not None
    assert not again.is_apart


# ── on a server ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_batch_that_is_declared_twice_is_acknowledged_twice() -> None:
    harness = packed("a", "b", declare=False)
    for _ in range(2):
        assert kinds(harness.declare(0, 1, "a", "b")) == ["Done"]
    assert kinds(harness.push_batch(0, 1, A, B)) == ["Staged"]
    assert kinds(harness.declare(0, 1, "a", "b")) == ["Done"]
    assert kinds(harness.push_all(1, [("a", 0, 1), ("b", 0, 1)], [A, B])) == ["Done", "Done"]


def test_a_declared_batch_number_cannot_be_redefined() -> None:
    harness = packed("a", "b", "c")
    harness.declare(0, 1, "a", "c")
    harness.push_batch(0, 1, A, B, A)
    assert harness.groups == [["a", "b", "c"]]


def test_a_node_that_is_not_attached_has_no_batches() -> None:
    harness = packed("a", "b", attach=False, declare=False)
    for effects in (harness.declare(0, 1, "a"), harness.push_batch(0, 1, A), harness.pull_batch(0, ANY_CLOCK)):
        assert not_yet(effects).reason is NotYetReason.NOT_ATTACHED


@pytest.mark.parametrize("number", [0, 2])
def test_an_unknown_batch_is_answered_not_yet(number: int) -> None:
    harness = packed("a", "b")
    assert not_yet(harness.push_batch(0, 1, A, B, batch=number)).reason is NotYetReason.UNKNOWN_BATCH
    assert not_yet(harness.push_batch(0, 1, batch=number, probe=True)).reason is NotYetReason.UNKNOWN_BATCH
    assert not_yet(harness.pull_batch(0, 0, batch=number)).reason is NotYetReason.UNKNOWN_BATCH
    assert harness.explain()["requests_waiting"] == 0


def test_a_batch_with_missing_slices_is_refused_until_they_exist() -> None:
    harness = packed("a")
    assert kinds(harness.declare(0, 2, "a", "b")) == ["Done"]
    assert refusal(harness.push_batch(0, 1, A, B, batch=2)).error is ErrorCode.KEY_NOT_FOUND
    assert refusal(harness.pull_batch(0, 0, batch=2)).error is ErrorCode.KEY_NOT_FOUND
    harness.init("b", b"\0")
    assert kinds(harness.push_batch(0, 1, A, B, batch=2)) == ["Staged"]
    assert harness.groups == [["a", "b"]]


def test_a_batch_that_is_declared_again_finds_its_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = packed("a", "b", workers=1)
    harness.push_batch(0, 1, A, B)
    monkeypatch.setattr(batches, "MAX_SLICE_IDS", 2)
    harness.declare(0, 2, "b")
    assert not_yet(harness.push_batch(0, 2, A, B)).reason is NotYetReason.UNKNOWN_BATCH
    harness.declare(0, 1, "a", "b")
    assert kinds(harness.push_batch(0, 2, A, B)) == ["Done"]
    assert harness.groups == [["a", "b"]]


def test_a_push_by_a_batch_number_of_the_predecessor_is_not_taken() -> None:
    """A batch number belongs to an incarnation: the successor numbers its batches from 1 again."""
    harness = packed("a", "b", "c")
    harness.look(member("worker", 0, life=1))
    harness.attach(0, life=1)
    assert not_yet(harness.push_batch(0, 1, A, B, A, life=1)).reason is NotYetReason.UNKNOWN_BATCH
    harness.declare(0, 1, "c", "b", life=1)
    harness.push_batch(0, 1, b"\x10", b"\x20", life=1)
    harness.push_batch(1, 1, A, B, A)
    assert (harness.value("c"), harness.value("b"), harness.value("a")) == (b"\x11", b"\x22", b"\0")


def batches_of(harness: Any) -> Any:
    """The table of batches of the server."""
    return harness.machine._handlers[DeclareBatch].__self__._batches


def test_batches_of_a_replaced_worker_are_forgotten() -> None:
    harness = packed("a", "b")
    (batch,) = {batches_of(harness).find(worker_id(rank), 1) for rank in (0, 1)}
    assert batch is not None
    assert batch.declared == 2
    harness.look(member("worker", 0, life=1))
    assert batch.declared == 1
    assert batches_of(harness).find(worker_id(0), 1) is None


def test_batches_that_overlap() -> None:
    harness = packed("a", "b", "c", declare=False, workers=1)
    harness.declare(0, 1, "a", "b")
    harness.declare(0, 2, "b", "c")
    harness.push_batch(0, 1, A, A)
    assert harness.groups == [["c"], ["a", "b"]]
    answer = not_yet(harness.push_batch(0, 2, B, B, batch=2))
    assert (answer.key, answer.next_clock) == ("c", 1)
    assert harness.groups == [["c"], ["a"], ["b"]]
    harness.push(0, 1, A, key="c")
    harness.push_batch(0, 2, B, B, batch=2)
    assert harness.groups == [["a"], ["b", "c"]]
    harness.push(0, 2, B, key="a")
    harness.push_batch(0, 3, A, A)
    assert harness.groups == [["a"], ["b"], ["c"]]
    assert [harness.value(key) for key in "abc"] == [A, A, B]


def test_a_batch_of_one_slice_leaves_it_a_group_of_one() -> None:
    harness = packed("a", "b")
    for rank in (0, 1):
        harness.declare(rank, 2, "a")
        effects = harness.push_batch(rank, 1, A, batch=2, pull=True)
    assert values(effects, worker_id(0)) == ((1,), [B])
    assert harness.groups == [["a"], ["b"]]
    for rank in (0, 1):
        harness.push(rank, 1, B, key="b")
    for rank in (0, 1):
        harness.push_batch(rank, 2, A, B)
    assert harness.groups == [["a", "b"]]
    assert values(harness.pull_batch(0, 2, batch=2)) == ((2,), [B])
    harness.push_batch(0, 3, A, batch=2)  # alone: parts it from b
    assert harness.groups == [["a"], ["b"]]


def test_small_pushes_are_answered_by_staged_only_when_probed() -> None:
    harness = packed("a", "b", small=9)
    assert kinds(harness.push_batch(0, 1, A, B, request=50)) == []
    assert kinds(harness.push_batch(0, 1, request=50, probe=True)) == ["Staged"]
    assert kinds(harness.push_batch(0, 1, A, B, request=50)) == ["Staged"]  # sent again: its sender has not heard of it
    assert kinds(harness.push(0, 2, A, key="a", request=51)) == []
    assert kinds(harness.push(0, 2, None, key="a", request=52, probe=True)) == ["Staged"]
    harness.init("c", bytes(10))
    assert kinds(harness.push(0, 1, bytes(10), key="c")) == ["Staged"]
    harness.hold = True
    harness.push(1, 1, A, key="a", request=60)
    assert kinds(harness.push(1, 1, None, key="a", request=61, probe=True)) == []  # counted: the answer is on its way
    assert kinds(harness.finish(harness.jobs[0])) == ["Done", "Done"]


def test_requests_for_batches_count_towards_the_limit_of_waiting_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending, "MAX_PENDING", 1)
    harness = packed("a", "b")
    harness.push_batch(0, 1, A, B)
    assert refusal(harness.push_batch(1, 1, A, B)).error is ErrorCode.NOT_ALLOWED
    assert refusal(harness.pull_batch(1, 1)).error is ErrorCode.NOT_ALLOWED
    assert harness.explain()["bytes_staged"] == 9  # what was refused was not staged


def test_integers_in_a_batch_are_neither_weighted_nor_optimized() -> None:
    harness = packed("a", "b", settings=cluster(2, merge="weighted"))
    assert refusal(harness.push_batch(0, 1, A, B)).error is ErrorCode.NOT_ALLOWED
    harness = packed("a", "b")
    for rank in (0, 1):
        harness.push_batch(rank, 1, A, B)
    harness.say(0, SetOptimizer(1, to_wire(SGD(1.0))))
    assert refusal(harness.push_batch(0, 2, A, B)).error is ErrorCode.NOT_ALLOWED
    assert harness.explain()["bytes_staged"] == 0


# ── on the wire ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_batch_of_a_thousand_keys_fits_into_a_header() -> None:
    message = DeclareBatch(7, BIGGEST, tuple(SliceId(f"layer{number:06}", BIGGEST) for number in range(MAX_PARTS)))
    header = encode(message, 1, Epoch(1, 1))
    assert len(header) < MAX_HEADER_BYTES
    assert decode(header).message == message


@pytest.mark.parametrize("message", [PushBatch(1, 2, 3, 0, 1, True, True), PullBatch(1, 2, ANY_CLOCK)])
def test_batch_messages_survive_encoding(message: PushBatch | PullBatch) -> None:
    assert decode(encode(message, 1, Epoch(1, 1))).message == message


def test_no_batch_keeps_the_bytes_of_a_deleted_key() -> None:
    """Not even the batch under which the keys were pushed together: `memory_limit_bytes` counts them as free."""
    harness = together("a", "b")
    version = harness.machine.table.slices["a", 0].log.current
    assert [log for log in gc.get_referrers(version) if isinstance(log, SliceLog)] != []
    del harness.applied[:]
    for rank in range(2):
        harness.say(rank, Delete(harness.request(), (KeyId("a", 0), KeyId("b", 0))))
    assert harness.machine.table.slices == {}
    gc.collect()
    assert [log for log in gc.get_referrers(version) if isinstance(log, SliceLog)] == []
