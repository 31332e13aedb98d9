"""Records: nobody is told that something has happened before the backup holds it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvd.core.machine import SCHEDULER, Apply, JobDone, ServerPeer
from kvd.errors import NotAllowed
from kvd.optimizer import SGD, to_wire
from kvd.protocol.messages import (
    NO_RANK,
    NO_STEP,
    Activate,
    ComeTo,
    Compare,
    Delete,
    Done,
    Drop,
    ErrorCode,
    Init,
    KeyId,
    NewKey,
    NewSlice,
    NotYet,
    NotYetReason,
    OutOfSync,
    Publish,
    Refused,
    SetOptimizer,
    StartHolding,
    StepIs,
    StoreState,
    TakeStep,
    UpdateOptimizer,
    Values,
)
from kvd.protocol.specs import KeySpec
from tests.core.replica_harness import A, B, C, Cluster, Wire

SPEC = KeySpec("float32", (2,), 4096)
ONE = np.array([1, 2], np.float32)
HELD = (A, B, NO_RANK)
ALONE = (A, NO_RANK, NO_RANK)


def ready(*, optimizer: Any = None, publish: bool = True, **more: Any) -> Cluster:
    """Key "w" is [1, 2]; server 1 holds what server 0 leads. From now on their messages wait."""
    run = Cluster([HELD, (B, NO_RANK, NO_RANK), (C, NO_RANK, NO_RANK)], **more)
    run.create("w", ONE, publish=publish)
    if optimizer is not None:
        for rank in range(run.settings.num_workers):
            run.say(rank, SetOptimizer(run.request(), to_wire(optimizer)))
    run.auto = False
    return run


def push(run: Cluster) -> None:
    run.push(0, 1, ONE)
    run.push(1, 1, ONE)


def push_pull(run: Cluster) -> None:
    run.push(0, 1, ONE)
    run.push(1, 1, ONE, pull=True)


def delete(run: Cluster) -> None:
    for rank in (0, 1):
        run.say(rank, Delete(run.request(), (KeyId("w", 0),)))


def one(message: Any, payload: bytes | None = None) -> Any:
    return lambda run: run.say(0, message, payload)


CHANGES: dict[str, tuple[dict[str, Any], Any, Any]] = {  # how the run begins, what is asked, the answer
    "push": ({}, push, Done),
    "push and pull": ({}, push_pull, Values),
    "push of an optimizer": ({"optimizer": SGD(0.5)}, push, Done),
    "init": ({}, one(Init(60, (SPEC,), (NewSlice("v", 0, 0),)), ONE.tobytes()), Done),
    "publish": ({"publish": False}, one(Publish(60, (SPEC,), (NewKey("w", 0),))), Done),
    "delete": ({}, delete, Done),
    "drop": ({}, one(Drop(60, (KeyId("w", 0),))), Done),
    "store state": ({"optimizer": SGD(0.5)}, one(StoreState(60, "w", 0, 3, ())), Done),
    "set optimizer": ({}, one(SetOptimizer(60, to_wire(SGD(0.5)))), Done),
    "update optimizer": ({"optimizer": SGD(0.5)}, one(UpdateOptimizer(60, {"learning_rate": 0.25})), Done),
    "come to": ({}, one(ComeTo(60, 1)), Done),
    "activate": ({}, one(Activate(60, "w", 1)), Done),
    "take a step": ({"mode": "async"}, one(TakeStep(60, 0, 4, NO_STEP)), StepIs),
}


def answers(run: Cluster, kind: type[Any], first: int) -> int:
    return sum(isinstance(message, kind) for message in run.told_since(first))


@pytest.mark.parametrize("name", CHANGES)
def test_nothing_is_answered_before_the_backup_holds_it(name: str) -> None:
    settings, ask, kind = CHANGES[name]
    run = ready(**settings)
    first = len(run.answers)
    ask(run)
    assert answers(run, kind, first) == 0
    records = run.to(B)
    assert records
    for record in records:
        run.arrive(record)
    assert answers(run, kind, first) == 0
    done = run.to(A)
    assert {type(wire.message) for wire in done} == {Done}
    for wire in done:
        assert answers(run, kind, first) == 0
        run.arrive(wire)
    run.auto = True
    run.deliver()
    assert answers(run, kind, first) >= 1
    assert run.picture(A) == run.picture(B)


@pytest.mark.parametrize("name", CHANGES)
def test_all_is_answered_when_the_view_names_no_backup_any_more(name: str) -> None:
    settings, ask, kind = CHANGES[name]
    run = ready(**settings)
    first = len(run.answers)
    ask(run)
    assert answers(run, kind, first) == 0
    run.look([ALONE, *run.rows[1:]])
    assert answers(run, kind, first) >= 1
    assert run.nodes[A].connected == {SCHEDULER}


@pytest.mark.parametrize("name", CHANGES)
def test_late_and_doubled_copies_change_nothing(name: str) -> None:
    settings, ask, kind = CHANGES[name]
    run = ready(**settings)
    first = len(run.answers)
    ask(run)
    copies = []
    while run.wires:
        wire = run.wires.popleft()
        copies.append(wire)
        run.arrive(wire)
        run.arrive(wire)
    number, pictures = answers(run, kind, first), (run.picture(A), run.picture(B))
    assert number >= 1
    assert pictures[0] == pictures[1]
    for wire in [*copies, *reversed(copies)]:
        run.arrive(wire)
    assert answers(run, kind, first) == number
    assert (run.picture(A), run.picture(B)) == pictures


@pytest.mark.parametrize("name", ["push", "init", "delete", "set optimizer"])
def test_a_record_that_is_lost_is_sent_again_as_it_was(name: str) -> None:
    settings, ask, kind = CHANGES[name]
    run = ready(**settings)
    first = len(run.answers)
    ask(run)
    lost = run.to(B)
    run.tick()
    again = [wire for wire in run.to(B) if not isinstance(wire.message, Compare)]
    assert [(wire.message, wire.event.payload) for wire in again] == [
        (wire.message, wire.event.payload) for wire in lost
    ]
    for wire in again:
        run.arrive(wire)
    run.to(A)  # the answers are lost, too
    run.auto = True
    run.tick(30.0)
    assert answers(run, kind, first) >= 1
    assert run.picture(A) == run.picture(B)


@pytest.mark.parametrize("name", CHANGES)
def test_a_worker_that_asks_again_is_not_answered_earlier(name: str) -> None:
    settings, ask, kind = CHANGES[name]
    run = ready(**settings)
    first, request = len(run.answers), run._request
    ask(run)
    records = run.to(B)
    run._request = request
    ask(run)
    assert answers(run, kind, first) == 0
    for record in records:
        run.arrive(record)
    run.settle()
    assert answers(run, kind, first) >= 1
    assert run.picture(A) == run.picture(B)


def test_a_value_is_the_sum_of_the_round_at_both() -> None:
    run = ready()
    run.auto = True
    run.push(0, 1, np.array([0.5, 3], np.float32))
    run.push(1, 1, np.array([0.25, 4], np.float32))
    for rank in (A, B):
        assert run.value(rank).tolist() == [0.75, 7]
    version, value = run.pull(0, 1)
    assert (version, value.tolist()) == (1, [0.75, 7])


def test_nobody_sees_a_version_that_the_backup_does_not_hold() -> None:
    run = ready()
    push(run)
    version, value = run.pull(1, -1)
    assert (version, value.tolist()) == (0, [1, 2])
    run.auto = True
    run.deliver()
    version, value = run.pull(1, -1)
    assert (version, value.tolist()) == (1, [2, 4])


@pytest.mark.parametrize("optimizer", [None, SGD(0.5)])
def test_the_next_round_waits_until_the_one_before_is_held(optimizer: Any) -> None:
    run = ready(optimizer=optimizer)
    applied = len(run.nodes[A].applied)
    for clock in (1, 2):
        for rank in (0, 1):
            run.push(rank, clock, ONE)
    assert len(run.nodes[A].applied) == applied + 1
    run.auto = True
    run.deliver()
    assert len(run.nodes[A].applied) == applied + 2
    assert run.picture(A) == run.picture(B)


# ── refusals ──


def test_a_record_that_is_refused_never_counts_and_the_scheduler_is_told() -> None:
    run = ready()
    push(run)
    first = len(run.answers)
    (record,) = run.to(B)
    refusal = Refused(record.message.request, ErrorCode.KEY_NOT_FOUND, "no such slice")
    answer = record.event._replace(peer=record.event.peer, message=refusal)
    run.arrive(_from_backup(run, answer))
    assert answers(run, Done, first) == 0
    assert run.pull(0, -1)[0] == 0
    assert any("server 1 cannot hold partition 0: no such slice" in text for text in run.nodes[A].errors())
    for _ in range(3):  # until the view says so
        run.tick(2.0)
    told = [message for message in run.nodes[A].told if isinstance(message, OutOfSync)]
    assert {(message.partition, message.incarnation) for message in told} == {(0, run.nodes[B].who)}
    assert len(told) >= 3
    run.look([ALONE, *run.rows[1:]])
    assert answers(run, Done, first) == 2
    run.tick(2.0)
    assert [message for message in run.nodes[A].told if isinstance(message, OutOfSync)] == told
    assert run.value(A).tolist() == [2, 4]


def _from_backup(run: Cluster, event: Any) -> Any:
    backup = run.nodes[B]
    said = event._replace(peer=ServerPeer(backup.who), sender=backup.who, payload=None, nbytes=0)
    return Wire(B, A, said)


def test_an_answer_of_another_server_than_the_backup_settles_nothing() -> None:
    run = ready()
    push(run)
    first = len(run.answers)
    (record,) = run.to(B)
    done = _from_backup(run, record.event._replace(message=Done(record.message.request)))
    for who in (run.nodes[C].who, run.nodes[B].who + 100):
        forged = done.event._replace(peer=type(done.event.peer)(who), sender=who)
        run.arrive(done._replace(event=forged))
    assert answers(run, Done, first) == 0
    run.arrive(done)
    assert answers(run, Done, first) == 2


def test_a_backup_that_cannot_make_an_update_says_so_and_its_leader_loses_nothing() -> None:
    run = ready(optimizer=SGD(0.5))
    backup = run.nodes[B]
    backup.holds_jobs = True
    push(run)
    run.deliver()
    (apply,) = backup.jobs
    assert isinstance(apply, Apply)
    backup.jobs.clear()
    run.step(backup, JobDone(apply.job, None, NotAllowed("no memory")))
    run.tick(2.0)
    assert OutOfSync(3, 0, backup.who) in backup.told
    assert any("could not be updated as its leader has updated it" in text for text in backup.errors())
    assert run.value(A).tolist() == [0, 0]  # [1, 2] - 0.5 * ([1, 2] + [1, 2])


# ── two who hold ──


def test_a_record_waits_for_the_backup_and_for_the_server_that_is_synced() -> None:
    run = ready()
    run.auto = True
    run.look([(A, B, C), *run.rows[1:]])
    run.auto = False
    assert run.nodes[A].connected == {SCHEDULER, run.nodes[B].who, run.nodes[C].who}
    first = len(run.answers)
    push(run)
    for wire in run.to(B) + run.to(A):
        run.arrive(wire)
    for wire in run.to(A):
        run.arrive(wire)
    assert answers(run, Done, first) == 0
    for wire in run.to(C):
        run.arrive(wire)
    for wire in run.to(A):
        run.arrive(wire)
    assert answers(run, Done, first) == 2


def test_the_first_thing_that_a_holder_is_told_is_to_forget_what_it_had() -> None:
    run = Cluster([ALONE, (B, NO_RANK, NO_RANK), (C, NO_RANK, NO_RANK)])
    run.create("w", ONE)
    run.auto = False
    run.look([HELD, *run.rows[1:]])
    (start,) = run.to(B)
    assert isinstance(start.message, StartHolding)


def test_what_is_held_in_several_partitions_is_answered_when_it_is_in_all() -> None:
    run = Cluster([HELD, HELD, (C, NO_RANK, NO_RANK)], auto=False)
    run.settle()
    first = len(run.answers)
    run.say(0, SetOptimizer(60, to_wire(SGD(0.5))))
    records = run.to(B)
    assert sorted(wire.message.partition for wire in records) == [0, 1]
    for wire in records:
        assert run.told_since(first) == []
        run.arrive(wire)
        for done in run.to(A):
            run.arrive(done)
    assert run.told_since(first) == [Done(60)]


# ── slow and early ──


def test_a_record_that_comes_before_the_view_is_asked_for_again() -> None:
    """The backup does not know yet that server 0 leads the partition."""
    run = Cluster([(B, NO_RANK, NO_RANK)] + [(rank, NO_RANK, NO_RANK) for rank in (B, C)], auto=False)
    run.look([HELD, *run.rows[1:]], only=[A])
    for wire in run.to(B):
        run.arrive(wire)
    (early,) = run.to(A)
    assert isinstance(early.message, NotYet)
    assert early.message.reason is NotYetReason.ELSEWHERE
    run.arrive(early)
    run.show(B)
    run.auto = True
    run.tick(1.0)
    assert run.nodes[B].held() is not None
    assert run.create("w", ONE)[-1:] == [Done(run.request() - 1)]
