"""Tables with copies: a backup holds their rounds, a new one is sent their rows, and either may lead from then on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvd.core.machine import ReadPart, Received
from kvd.core.server import copied_rows, row_records
from kvd.optimizer import SGD, Adam, RowWiseAdagrad, to_wire
from kvd.protocol.messages import (
    NO_RANK,
    Delete,
    Done,
    Hold,
    HoldDropped,
    HoldRows,
    Init,
    Install,
    InstallRows,
    KeyId,
    NewKey,
    NewSlice,
    Part,
    Publish,
    PullRows,
    Push,
    Refused,
    SetOptimizer,
    SliceId,
    StartHolding,
    Synced,
    Values,
)
from kvd.protocol.specs import Initial, KeySpec, TableSpec
from tests.core.fakes import NodePeer
from tests.core.replica_harness import A, B, Cluster
from tests.core.test_promotion import OTHERS
from tests.core.test_records import ALONE, HELD

SYNCING = (A, NO_RANK, B)
WIDTH = 2
TABLE = KeySpec("float32", (WIDTH,), 4096, table=TableSpec(1000, Initial("Constant", (0.5,)), 1))
MORE = KeySpec("float32", (WIDTH,), 4096, table=TableSpec(1000, Initial("Zeros"), 1))


def with_table(rows: Any = HELD, optimizer: Any = None, **more: Any) -> Cluster:
    run = Cluster([rows, *OTHERS], **more)
    for rank in (0, 1) if optimizer is not None else ():
        run.say(rank, SetOptimizer(run.request(), to_wire(optimizer)))
    make(run)
    return run


def make(run: Cluster, key: str = "t", spec: KeySpec = TABLE, at: int = A) -> None:
    run.say(0, Init(run.request(), (spec,), (NewSlice(key, 0, 0),)), b"", at=at)
    said = run.say(0, Publish(run.request(), (spec,), (NewKey(key, 0),)), at=at)
    assert isinstance(said[-1], Done), said


def drawn(rank: int, clock: int, most: int = 20) -> tuple[Any, Any]:
    """Ids, ascending, and gradients; none from worker 1 in every third round."""
    random = np.random.default_rng((rank, clock))
    count = 0 if rank and clock % 3 == 0 else random.integers(1, most)
    ids = np.sort(random.choice(1000, count, replace=False)).astype(np.int64)
    return ids, random.standard_normal((count, WIDTH)).astype(np.float32)


def push(run: Cluster, rank: int, clock: int, at: int = A, key: str = "t", most: int = 20) -> list[Any]:
    ids, rows = drawn(rank, clock, most)
    message = Push(run.request(), (Part(key, 0, clock),), how=0, samples=1, pull=False)
    return run.say(rank, message, ids.tobytes() + rows.tobytes(), at=at)


def both_push(run: Cluster, clock: int, at: int = A, **more: Any) -> None:
    for rank in (0, 1):
        push(run, rank, clock, at, **more)


def read(run: Cluster, clock: int, at: int = A, key: str = "t") -> Any:
    """All rows of the table at a version."""
    first = len(run.answers)
    run.say(0, PullRows(run.request(), Part(key, 0, clock)), np.arange(1000).tobytes(), at=at)
    _, message, payload = run.answers[first]
    assert isinstance(message, Values), message
    assert message.versions == (clock,)
    return np.frombuffer(payload, np.float32).reshape(1000, WIDTH)


def merged(clock: int) -> Any:
    """What both push in a round, added up in their order."""
    total = np.zeros((1000, WIDTH), np.float32)
    for rank in (0, 1):
        ids, rows = drawn(rank, clock)
        total[ids] += rows
    return total


def after(rounds: int) -> Any:
    """The table after so many rounds of SGD(0.5), by hand."""
    table = np.full((1000, WIDTH), 0.5, np.float32)
    for clock in range(1, rounds + 1):
        table -= np.float32(0.5) * merged(clock)
    return table


@pytest.mark.parametrize(
    "optimizer", [None, SGD(0.5), SGD(0.5, momentum=0.5), Adam(0.1), RowWiseAdagrad(0.1)], ids=repr
)
def test_a_backup_holds_each_round_and_leads_from_then_on(optimizer: Any) -> None:
    run = with_table(HELD, optimizer)
    for clock in (1, 2, 3, 4):
        both_push(run, clock)
        assert run.picture(A) == run.picture(B)
    before, newest = read(run, 3), read(run, 4)
    if optimizer == SGD(0.5):
        np.testing.assert_array_equal(newest, after(4))
        np.testing.assert_array_equal(before, after(3))
    run.kill(A)
    run.look([(B, NO_RANK, NO_RANK), *OTHERS])
    np.testing.assert_array_equal(read(run, 4, at=B), newest)
    np.testing.assert_array_equal(read(run, 3, at=B), before)
    both_push(run, 5, at=B)
    both_push(run, 6, at=B)
    if optimizer == SGD(0.5):
        np.testing.assert_array_equal(read(run, 6, at=B), after(6))


def test_a_round_counts_when_the_backup_has_it() -> None:
    run = with_table(HELD, SGD(0.5))
    run.auto = False
    push(run, 0, 1)
    assert push(run, 1, 1) == []
    (wire,) = run.to(B)
    assert isinstance(wire.message, Hold)
    assert wire.message.is_gradient
    run.arrive(wire)
    run.arrive(wire)  # a copy changes nothing
    assert not run.told_since(0) or not isinstance(run.answers[-1][1], Refused)
    run.settle()
    assert run.picture(A) == run.picture(B)
    np.testing.assert_array_equal(read(run, 1), after(1))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("optimizer", [None, SGD(0.5)], ids=repr)
def test_a_record_with_many_rows_comes_in_pieces(optimizer: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order, and each of them twice; the round counts when all are there."""
    monkeypatch.setattr(row_records, "PIECE_NBYTES", 100)
    run = with_table(HELD, optimizer)
    random = np.random.default_rng(seed)
    for clock in (1, 2):
        run.auto = False
        both_push(run, clock)
        wires = run.to(B)
        kinds = [type(wire.message) for wire in wires]
        assert kinds.count(HoldRows) > 1
        assert kinds.count(Hold) == 1
        for number in random.permutation(len(wires)):
            first = len(run.answers)
            run.arrive(wires[number])
            run.arrive(wires[number])
            assert not run.told_since(first)
        run.auto = True
        run.settle()
        assert run.picture(A) == run.picture(B)
        assert run.nodes[B].held().row_records.nbytes == 0
    newest = read(run, 2)
    if optimizer is not None:
        np.testing.assert_array_equal(newest, after(2))
    run.kill(A)
    run.look([(B, NO_RANK, NO_RANK), *OTHERS])
    np.testing.assert_array_equal(read(run, 2, at=B), newest)


def test_rows_whose_record_never_comes_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their table is deleted, or the round has others; and none come before their round can be the next."""
    monkeypatch.setattr(row_records, "PIECE_NBYTES", 100)
    run = with_table()
    run.auto = False
    both_push(run, 1)
    *rows, last = run.to(B)
    kept = run.nodes[B].held().row_records
    early = rows[0]._replace(event=rows[0].event._replace(message=replace(rows[0].message, request=901, version=2)))
    run.arrive(early)
    assert [type(wire.message) for wire in run.to(A)] == [Refused]
    assert not kept.nbytes
    run.arrive(rows[0])
    assert kept.nbytes
    run.arrive(last._replace(event=last.event._replace(message=replace(last.message, rows_before=0))))
    assert not kept.nbytes
    run.arrive(rows[0])
    assert not kept.nbytes

    other = with_table()
    other.auto = False
    both_push(other, 1)
    piece = other.to(B)[0]
    other.arrive(piece)
    dropped = HoldDropped(902, piece.message.partition, (KeyId("t", 0),))
    assert other.nodes[B].held().row_records.nbytes
    other.arrive(piece._replace(event=piece.event._replace(message=dropped, payload=None, nbytes=0)))
    assert not other.nodes[B].held().row_records.nbytes


@pytest.mark.parametrize("optimizer", [None, SGD(0.5), Adam(0.1)], ids=repr)
@pytest.mark.parametrize("rounds", [0, 1, 5])
def test_a_new_backup_is_sent_the_rows_in_pieces(optimizer: Any, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copied_rows, "PIECE_NBYTES", 100)
    run = with_table(ALONE, optimizer)
    make(run, "u", MORE)
    run.create("w", np.zeros(3, np.float32))
    for clock in range(1, rounds + 1):
        both_push(run, clock)
        if clock > 3:
            both_push(run, clock - 3, key="u")
    run.look([SYNCING, *OTHERS])
    run.settle()
    assert [m.incarnation for m in run.nodes[A].told if isinstance(m, Synced)][:1] == [run.nodes[B].who]
    assert run.picture(A) == run.picture(B)
    both_push(run, rounds + 1)
    run.look([HELD, *OTHERS])
    both_push(run, rounds + 2)
    assert run.picture(A) == run.picture(B)
    newest, before = read(run, rounds + 2), read(run, rounds + 1)
    run.kill(A)
    run.look([(B, NO_RANK, NO_RANK), *OTHERS])
    np.testing.assert_array_equal(read(run, rounds + 2, at=B), newest)
    np.testing.assert_array_equal(read(run, rounds + 1, at=B), before)
    if optimizer == SGD(0.5):
        np.testing.assert_array_equal(newest, after(rounds + 2))


def test_pushes_wait_while_the_rows_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every message of the synchronization comes late, and twice; meanwhile both workers push."""
    monkeypatch.setattr(copied_rows, "PIECE_NBYTES", 100)
    run = with_table(ALONE, SGD(0.5), auto=False)
    run.settle()
    for clock in (1, 2, 3):
        both_push(run, clock)
    run.settle()
    run.look([SYNCING, *OTHERS])
    both_push(run, 4)
    seen = []
    for _ in range(1000):
        if not run.wires:
            break
        wire = run.wires.popleft()
        seen.append(type(wire.message))
        run.arrive(wire)
        run.arrive(wire)
    assert seen.count(InstallRows) > 5
    assert seen.count(Install) == 1
    assert Hold in seen  # round 4, when the rows were there
    run.settle()
    assert run.picture(A) == run.picture(B)
    np.testing.assert_array_equal(read(run, 4), after(4))


def test_a_server_that_fell_out_while_it_was_sent_rows_starts_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copied_rows, "PIECE_NBYTES", 100)
    run = with_table(ALONE, SGD(0.5), auto=False)
    run.settle()
    for clock in (1, 2, 3):
        both_push(run, clock)
    run.settle()
    run.look([SYNCING, *OTHERS])
    for _ in range(6):
        run.arrive(run.wires.popleft())
    assert run.nodes[B].held().rows
    run.look([ALONE, *OTHERS])
    run.settle()
    both_push(run, 4)
    run.settle()
    assert run.nodes[B].runner.slices == set()
    run.look([SYNCING, *OTHERS])
    run.settle()
    assert run.picture(A) == run.picture(B)
    assert run.nodes[B].held().rows == {}
    both_push(run, 5)
    run.settle()
    np.testing.assert_array_equal(read(run, 5), after(5))
    assert run.picture(A) == run.picture(B)


def test_rows_that_cannot_be_read_or_taken_end_the_synchronization() -> None:
    run = with_table(ALONE, SGD(0.5))
    both_push(run, 1)
    run.nodes[A].holds_jobs = True
    run.look([SYNCING, *OTHERS])
    (job,) = run.nodes[A].jobs
    assert isinstance(job, ReadPart)
    run.nodes[A].runner.forget([("t", 0)])  # as if it had been lost
    run.finish(run.nodes[A])
    (text,) = run.nodes[A].errors()
    assert "cannot become the backup of partition 0" in text
    assert "rows of table 't' cannot be read" in text


def test_a_server_without_memory_for_the_rows_says_so() -> None:
    run = with_table(ALONE, None, memory=(1 << 30, 1 << 13, 1 << 30))
    for clock in range(1, 30):
        both_push(run, clock, most=900)
    run.look([SYNCING, *OTHERS])
    (text,) = run.nodes[A].errors()
    assert "has no memory to hold key 't': raise memory_limit_bytes" in text
    both_push(run, 30)
    assert read(run, 30).shape == (1000, WIDTH)


@pytest.mark.parametrize(
    ("part", "spec", "payload", "text"),
    [
        (SliceId("t", 1), TABLE, b"", "slice 1 of 't' is not in 0"),
        (SliceId("t", 0), KeySpec("float32", (2,), 4096), b"", "is no table whose rows are to come"),
        (SliceId("t", 0), TABLE, b"garbage", "what came as a piece of table 't' is none"),
        (SliceId("t", 0), KeySpec("float32", (2,), 4096, table=TableSpec(5, Initial("Nothing"), 1)), b"", "Nothing"),
    ],
)
def test_rows_that_make_no_sense(part: SliceId, spec: KeySpec, payload: bytes, text: str) -> None:
    run = Cluster([ALONE, *OTHERS])
    run.look([SYNCING, *OTHERS])
    run.settle()
    answer = told(run, InstallRows(1 << 40, 0, part, spec), payload)
    assert isinstance(answer, Refused)
    assert text in answer.text
    assert isinstance(told(run, StartHolding((1 << 40) + 1, 0, 0), b""), Done)


def told(run: Cluster, message: Any, payload: bytes) -> Any:
    """What the backup answers to a message of the leader."""
    node, run.auto = run.nodes[B], False
    leader = run.nodes[A].who
    peer: Any = NodePeer(leader)
    run.step(node, Received(peer, leader, node.machine.epoch, message, payload, len(payload)))
    return run.wires.popleft().message


def test_a_difference_between_copies_of_a_table_is_found() -> None:
    run = with_table(HELD, SGD(0.5))
    for clock in (1, 2):
        both_push(run, clock)
    node = run.nodes[B]
    part = node.runner._tables._parts["t", 0]
    for _ in range(3):
        run.tick(30.0)
    compared = run.nodes[A].machine._timed.replication._checks
    assert compared.compared > 0
    assert compared.differences == 0
    ids = part.table.ids_by_place()[:1]
    part.table.assign(ids, part.table.rows_at(slice(0, 1))[0] + 1)
    for _ in range(3):
        run.tick(30.0)
    assert compared.differences > 0
    assert "has other bytes than the leader's" in run.nodes[A].errors()[0]


def test_a_table_that_is_deleted_while_its_rows_are_sent_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copied_rows, "PIECE_NBYTES", 100)
    run = with_table(ALONE, SGD(0.5), auto=False)
    run.settle()
    for clock in (1, 2, 3):
        both_push(run, clock)
    run.settle()
    run.look([SYNCING, *OTHERS])
    for _ in range(4):
        run.arrive(run.wires.popleft())
    for rank in (0, 1):
        run.say(rank, Delete(run.request(), (KeyId("t", 0),)))
    run.settle()
    for rank in (0, 1):
        run.say(rank, Delete(run.request(), (KeyId("t", 0),)))
    run.settle()
    assert run.nodes[A].runner.slices == set()
    assert run.nodes[B].runner.slices == set()
    assert run.nodes[B].held().rows == {}
    assert run.nodes[B].runner._tables._writers == {}
