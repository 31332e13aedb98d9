"""Parting fused groups: each push counts once, and for the right slice."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core.machine import Apply, Export, Load
from kvd.core.server.progress import PushRequest, Refusal
from kvd.optimizer import SGD, to_wire
from kvd.protocol.messages import (
    ABSENT,
    ASSIGN,
    Activate,
    ClockQuery,
    ErrorCode,
    FetchState,
    NodeName,
    NotYetReason,
    SetOptimizer,
    StoreState,
    Taken,
    UpdateOptimizer,
)
from kvd.protocol.specs import KeySpec
from tests.core.fakes import cluster, member, of, one, said, worker_id
from tests.core.server_harness import Harness, kinds, not_yet, packed, refusal, together, values

A, B, C = b"\1", b"\2", b"\3"
REFUSAL = Refusal(PushRequest(7, 7), ErrorCode.NOT_ALLOWED, "no")


def test_a_push_of_one_alone_parts_them_for_good() -> None:
    harness = together("a", "b")
    harness.push(0, 2, A, key="a")
    assert harness.groups == [["a"], ["b"]]
    harness.push(0, 2, B, key="b")
    effects = harness.push_batch(1, 2, A, B)
    assert kinds(effects, worker_id(0)) == ["Done", "Done"]
    for rank in (0, 1):
        harness.push_batch(rank, 3, A, B)
    assert harness.groups == [["a"], ["b"]]
    assert (harness.value("a"), harness.value("b")) == (b"\2", b"\4")


def test_parting_with_two_rounds_staged_and_everyone_waiting() -> None:
    """Rank 0 has staged two rounds and waits, rank 1 comes with one slice only."""
    harness = together("a", "b")
    first = harness.push_batch(0, 2, b"\x10", b"\x20", request=50, pull=True)
    second = harness.push_batch(0, 3, b"\x30", b"\x40", request=51)
    assert kinds(first + second) == ["Staged", "Staged"]
    harness.pull(1, 2, key="b", request=52)
    assert kinds(harness.push(1, 2, A, key="a")) == ["Done"]  # only its own: of the batch, b is still missing
    assert harness.groups == [["a"], ["b"]]
    effects = harness.push(1, 2, B, key="b")
    assert values(effects, worker_id(0)) == ((2, 2), [b"\x11", b"\x22"])
    assert kinds(effects, worker_id(1)) == ["Values", "Done"]
    harness.push(1, 3, A, key="a")
    effects = harness.push(1, 3, B, key="b")
    assert [message.request for message in said(effects, worker_id(0))] == [51]
    assert (harness.value("a"), harness.value("b")) == (b"\x31", b"\x42")
    assert harness.value("a", back=1) == b"\x11"
    assert harness.explain()["requests_waiting"] == 0


def test_a_push_of_a_batch_that_is_sent_again_after_parting_counts_once() -> None:
    harness = together("a", "b")
    harness.push_batch(0, 2, b"\x10", b"\x20", request=50)
    harness.push(1, 2, A, key="a")
    assert kinds(harness.push_batch(0, 2, b"\x10", b"\x20", request=50)) == ["Staged"]  # still open
    assert kinds(harness.push_batch(0, 2, request=50, probe=True)) == ["Staged"]
    harness.push(1, 2, B, key="b")
    assert kinds(harness.push_batch(0, 2, b"\x10", b"\x20", request=50)) == ["Done"]  # answered long ago
    assert kinds(harness.push_batch(0, 2, request=53, probe=True)) == ["Done"]
    assert (harness.value("a"), harness.value("b")) == (b"\x11", b"\x22")
    assert len(harness.applied) == 3


def test_a_late_copy_of_a_single_push_parts_but_counts_nothing() -> None:
    harness = packed("a", "b")
    for rank in (0, 1):
        harness.push(rank, 1, A, key="a", request=60 + rank)
        harness.push(rank, 1, B, key="b")
    for rank in (0, 1):
        harness.push_batch(rank, 2, A, B)
    assert harness.groups == [["a", "b"]]
    assert kinds(harness.push(0, 1, A, key="a", request=60)) == ["Done"]
    assert [entry.log.version for entry in harness.machine.table.slices.values()] == [2, 2]
    for rank in (0, 1):
        effects = harness.push_batch(rank, 3, A, B)
    assert kinds(effects) == ["Done", "Done"]


def test_no_group_is_parted_during_an_update() -> None:
    harness = together("a", "b")
    harness.hold = True
    for rank in (0, 1):
        harness.push_batch(rank, 2, A, B)
    answer = not_yet(harness.push(0, 3, A, key="a"))
    assert (answer.reason, answer.key) == (NotYetReason.UPDATING, "a")  # the worker tries again soon
    assert harness.groups == [["a", "b"]]
    assert kinds(harness.finish(harness.jobs[0])) == ["Done", "Done"]
    harness.push(0, 3, A, key="a")
    assert harness.groups == [["a"], ["b"]]


@pytest.mark.parametrize("message", [FetchState(9, "b", 0), StoreState(9, "b", 0, 1, ())])
def test_no_group_is_parted_while_a_state_is_fetched_or_stored(message: Any) -> None:
    harness = together("a", "b")
    harness.hold = True
    harness.say(1, message, b"" if isinstance(message, StoreState) else None)
    assert not_yet(harness.push(0, 2, A, key="a")).reason is NotYetReason.UPDATING
    job = one(harness.jobs)
    assert isinstance(job, Export | Load)
    for rank in (0, 1):
        harness.push_batch(rank, 2, A, B)
    assert harness.jobs == [job]  # the round waits for it
    harness.finish(job)
    assert len(of(Apply, harness.jobs)) == 1


def test_a_successor_finds_its_predecessor_s_part_of_a_batch_dropped() -> None:
    """Staged by the predecessor for all slices, redone one by one by the successor: other bytes, counted once."""
    harness = together("a", "b")
    harness.push_batch(1, 2, b"\x63", b"\x63")
    harness.push_batch(1, 3, b"\x63", b"\x63")
    harness.look(member("worker", 1, life=1))
    harness.attach(1, life=1)
    assert not_yet(harness.push_batch(1, 2, b"\x63", b"\x63")).reason is NotYetReason.NOT_ATTACHED
    assert (
        not_yet(harness.push_batch(1, 2, b"\x63", b"\x63", life=1)).reason is NotYetReason.UNKNOWN_BATCH
    )  # its own batches, not those before
    harness.push(1, 2, A, key="a", life=1)
    harness.push(1, 2, B, key="b", life=1)
    harness.push_batch(0, 2, b"\x10", b"\x20")
    assert (harness.value("a"), harness.value("b")) == (b"\x11", b"\x22")
    assert harness.explain()["bytes_staged"] == 0


def test_a_step_is_redone_from_the_previous_version_of_a_group() -> None:
    harness = together("a", "b")
    for rank in (0, 1):
        harness.push_batch(rank, 2, b"\x10", b"\x20")
    harness.look(member("worker", 1, life=1))
    harness.attach(1, life=1)
    harness.declare(1, 1, "a", "b", life=1)
    versions, (whole,) = values(harness.pull_batch(1, 1, life=1))
    assert (versions, whole[0], whole[8]) == ((1,), 2, 4)
    assert kinds(harness.push_batch(1, 2, b"\x10", b"\x20", life=1)) == ["Done"]
    refused = refusal(harness.pull_batch(1, 0, life=1))
    assert (refused.error, refused.taken) == (ErrorCode.NOT_ALLOWED, Taken.NOTHING)
    assert values(harness.pull(1, 1, key="b", life=1)) == ((1,), [b"\4"])
    harness.push(1, 3, A, key="a", life=1)  # parts them: both keep both versions
    assert harness.groups == [["a"], ["b"]]
    assert values(harness.pull_batch(1, 1, life=1)) == ((1, 1), [b"\2", b"\4"])
    assert values(harness.pull_batch(1, 2, life=1)) == ((2, 2), [b"\x20", b"\x40"])


def test_a_rank_that_comes_back_for_one_key_parts_that_key_from_the_others() -> None:
    harness = together("a", "b")
    harness.look(member("worker", 1, "left"))
    harness.push_batch(0, 2, A, B)
    harness.push_batch(0, 3, A, B)
    harness.look(member("worker", 1, life=1))
    harness.attach(1, life=1)
    harness.push_batch(0, 4, A, B)
    assert kinds(harness.say(1, Activate(9, "a", 3), life=1)) == ["Done"]
    assert harness.groups == [["a"], ["b"]]
    assert not_yet(harness.push(1, 3 + 2, A, key="a", life=1)).next_clock == 4
    assert kinds(harness.push(1, 4, b"\x10", key="a", life=1)) == ["Done"]
    assert (harness.value("a"), harness.value("b")) == (b"\x11", B)  # the rounds of b wait
    assert kinds(harness.say(1, Activate(9, "b", 3), life=1)) == ["Done"]
    assert kinds(harness.push(1, 4, b"\x20", key="b", life=1), worker_id(0)) == ["Done"]
    assert harness.value("b") == b"\x22"


def test_a_push_that_waits_for_the_dead_is_told_once_and_stays_staged_when_its_group_parts() -> None:
    harness = together("a", "b")
    harness.push_batch(0, 2, b"\x10", b"\x20", request=50)
    effects = harness.look(member("worker", 1, "dead", last_seen_s=3.0))
    assert [(m.request, m.error, m.nodes) for m in said(effects)] == [
        (50, ErrorCode.NODE_LOST, (NodeName("worker", 1),))
    ]
    harness.look(member("worker", 1, life=1))
    harness.attach(1, life=1)
    harness.push(1, 2, A, key="a", life=1)
    harness.push(1, 2, B, key="b", life=1)
    assert kinds(harness.push_batch(0, 2, request=50, probe=True)) == ["Done"]
    assert (harness.value("a"), harness.value("b")) == (b"\x11", b"\x22")


def test_a_round_of_assignment_by_batch_and_by_name() -> None:
    harness = together("a", "b")
    harness.push_batch(1, 2, how=ABSENT)
    harness.push_batch(0, 2, b"\x10", b"\x20", how=ASSIGN)
    assert (harness.value("a"), harness.value("b")) == (b"\x10", b"\x20")
    harness.push_batch(0, 3, b"\x30", b"\x40", how=ASSIGN)
    assert refusal(harness.push_batch(1, 3, A, B)).error is ErrorCode.NOT_ALLOWED
    harness.push(1, 3, None, key="b", how=ABSENT)
    harness.push(1, 3, None, key="a", how=ABSENT)
    assert harness.groups == [["a"], ["b"]]
    assert (harness.value("a"), harness.value("b")) == (b"\x30", b"\x40")


def test_a_group_with_an_absent_contribution_is_parted() -> None:
    """Worker 1 takes part in a broadcast of both keys with no bytes; worker 0 assigns them one by one."""
    harness = together("a", "b")
    assert kinds(harness.push_batch(1, 2, how=ABSENT)) == ["Staged"]
    for key, value in (("a", A), ("b", B)):
        harness.push(0, 2, value, key=key, how=ASSIGN)
    assert harness.groups == [["a"], ["b"]]
    assert [harness.value(key) for key in "ab"] == [A, B]


def test_parted_slices_do_not_share_what_was_refused() -> None:
    harness = together("a", "b")
    harness.push(0, 2, A, key="a")
    assert harness.groups == [["a"], ["b"]]
    refused = refusal(harness.push(1, 2, A, key="a", how=ASSIGN, request=70))  # worker 0 does not broadcast
    assert refused.error is ErrorCode.NOT_ALLOWED
    first, second = (harness.machine.table.slices[key, 0].log for key in "ab")
    assert first.progress_of(1).last_refusal is not None
    assert second.progress_of(1).last_refusal is None
    assert kinds(harness.push(1, 2, B, key="b", request=70)) == ["Staged"]


def test_pending_changes_keep_slices_apart_and_go_along_when_they_part() -> None:
    harness = Harness()
    spec = KeySpec("float32", (1,), 4096)
    harness.say(0, SetOptimizer(1, to_wire(SGD(1.0))))
    for key in ("a", "b"):
        harness.init(key, bytes(4), spec)
    for rank in (0, 1):
        harness.declare(rank, 1, "a", "b")
        harness.push_batch(rank, 1, bytes(4), bytes(4))
    harness.push_batch(0, 2, bytes(4), bytes(4))
    harness.say(0, UpdateOptimizer(2, {"learning_rate": 0.5}))
    harness.push(1, 2, bytes(4), key="a")
    harness.push(1, 2, bytes(4), key="b")
    assert [apply.optimizer.learning_rate for apply in harness.applied] == [1.0, 1.0, 1.0]  # type: ignore[attr-defined]
    harness.declare(0, 3, "b", "a")
    harness.declare(1, 3, "b", "a")
    for rank in (0, 1):
        harness.push_batch(rank, 3, bytes(4), bytes(4), batch=3)
    assert harness.groups == [["a"], ["b"]]  # at the time of the push the change was still to come
    assert [apply.optimizer.learning_rate for apply in harness.applied[3:]] == [0.5, 0.5]  # type: ignore[attr-defined]
    for rank in (0, 1):
        harness.push_batch(rank, 4, bytes(4), bytes(4), batch=3)
    assert harness.groups == [["b", "a"]]
    assert harness.applied[-1].optimizer.learning_rate == 0.5  # type: ignore[attr-defined]


def test_a_change_for_a_group_takes_effect_for_all_of_it() -> None:
    harness = together("a", "b")
    harness.say(0, SetOptimizer(1, to_wire(SGD(1.0))))
    harness.say(0, UpdateOptimizer(2, {"learning_rate": 0.5}))
    group = one(list(harness.machine.table.groups.values()))
    assert [change.from_round for change in group.changes] == [2]


def test_async_a_group_takes_pushes_in_the_order_of_arrival() -> None:
    harness = packed("a", "b", settings=cluster(2, mode="async"))
    assert kinds(harness.push_batch(0, 1, A, B)) == ["Done"]
    assert harness.groups == [["a", "b"]]
    harness.hold = True
    harness.push_batch(0, 2, b"\x10", b"\x20")
    harness.push_batch(1, 1, b"\x30", b"\x40")
    assert harness.explain()["bytes_staged"] == 9
    first = harness.jobs[0]
    harness.finish(first)
    harness.finish(harness.jobs[0])
    assert [[c.rank for c in apply.contributions] for apply in harness.applied] == [[0], [0], [1]]
    assert (harness.value("a"), harness.value("b")) == (b"\x30", b"\x40")


@pytest.mark.parametrize("staleness", [0, 1])
def test_staleness_is_kept_when_a_group_parts(staleness: int) -> None:
    harness = packed("a", "b", settings=cluster(2, mode="async", staleness=staleness, rounds_ahead=3))
    for clock in range(1, staleness + 2):
        harness.push_batch(0, clock, bytes([clock]), bytes([clock]))
    ahead = staleness + 1
    assert harness.explain()["requests_waiting"] == 1
    assert harness.explain()["waiting_for"] == ["worker 1"]
    effects = harness.push(1, 1, b"\x63", key="a")
    assert harness.groups == [["a"], ["b"]]
    assert kinds(effects) == ["Staged", "Done"]  # its own: of worker 0's batch, b still waits
    assert harness.value("b") == bytes([staleness])
    effects = harness.push(1, 1, b"\x63", key="b")
    assert sorted(kinds(effects)) == ["Done", "Done", "Staged"]
    logs = [entry.log for entry in harness.machine.table.slices.values()]
    assert [(log.committed_clock(0), log.committed_clock(1)) for log in logs] == [(ahead, 1)] * 2


def test_async_a_successor_s_clocks_are_those_of_the_group() -> None:
    harness = packed("a", "b", settings=cluster(2, mode="async"))
    harness.push_batch(1, 1, A, B)
    harness.hold = True
    harness.push_batch(1, 2, A, B)
    harness.push_batch(1, 3, A, B)
    harness.look(member("worker", 1, life=1))
    harness.attach(1, life=1)
    answer = not_yet(harness.say(1, ClockQuery(8, "a"), life=1))
    assert answer.reason is NotYetReason.UPDATING  # not before the second is applied
    harness.finish(harness.jobs[0])
    for key in ("a", "b"):
        (clocks,) = said(harness.say(1, ClockQuery(9, key), life=1))
        assert (clocks.lowest, clocks.highest) == (2, 2)  # the third was not counted and is dropped
    assert harness.jobs == []
