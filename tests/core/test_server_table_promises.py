"""Pushes to tables on a server: what was acknowledged is in exactly one round, and what was refused is in none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvd.core.machine import ForgetState, ReadRows, ResetState, TableVersion
from kvd.core.server.memory_use import rows_need
from kvd.errors import NotAllowed
from kvd.optimizer import LAMB, SGD, Adagrad, to_wire
from kvd.protocol.messages import (
    Activate,
    Delete,
    Done,
    ErrorCode,
    KeyId,
    Part,
    Push,
    Refused,
    SetOptimizer,
    Taken,
    Uncounted,
    UpdateOptimizer,
    Values,
)
from kvd.protocol.specs import KeySpec
from tests.core.fake_tables import ROW, pushed, table
from tests.core.fakes import init_of, member, of, one, said, worker_id
from tests.core.server_harness import Harness, kinds, refusal, values
from tests.core.tables_harness import pull_rows, push_rows, row_ids, with_table
from tests.core.test_server_late import GRACE_S, after

BAD = NotAllowed("table 't' has no row 1000: it has 1000", key="t")


def rounds(harness: Harness, index: int = 0) -> list[list[tuple[int, int, list[int]]]]:
    """Of each round of a part that was applied: rank, clock and row ids of each contribution."""
    return [row_ids(job) for job in harness.applied if job.layout[0].slice_index == index]


def answers(effects: Any, rank: int) -> list[Any]:
    return [message for message in said(effects, worker_id(rank)) if isinstance(message, Done | Refused | Uncounted)]


def test_rounds_have_their_rows_in_the_order_of_the_ranks() -> None:
    harness = with_table(workers=3)
    for rank in (2, 0, 1):
        push_rows(harness, rank, 1, [10 + rank, 20])
    assert rounds(harness) == [[(0, 1, [10, 20]), (1, 1, [11, 20]), (2, 1, [12, 20])]]


# ── one part takes its rows, another refuses them ──


def test_a_part_that_refuses_its_rows_holds_up_its_own_round_only() -> None:
    """As with the slices of other keys that lie on two servers: the worker makes the step again."""
    harness = with_table(table(2))
    assert kinds(push_rows(harness, 0, 1, [1], index=0, request=50)) == ["Staged"]
    assert refusal(harness.push(0, 1, b"no rows", key="t", index=1)).error is ErrorCode.PROTOCOL_ERROR
    for index in range(2):
        push_rows(harness, 1, 1, [2 + index], index=index)
    assert rounds(harness, 0) == [[(0, 1, [1]), (1, 1, [2])]]
    assert rounds(harness, 1) == []
    assert pull_rows(harness, 1, 1, [3], index=1, request=70) == []  # of step 1 there is nothing to read yet
    assert answers(push_rows(harness, 0, 1, [7], index=0), 0) == [Done(harness._request)]  # it is known, and stays
    effects = push_rows(harness, 0, 1, [4], index=1)
    assert rounds(harness, 0) == [[(0, 1, [1]), (1, 1, [2])]]
    assert rounds(harness, 1) == [[(0, 1, [4]), (1, 1, [3])]]
    assert [message.request for message in said(effects, worker_id(1)) if isinstance(message, Values)] == [70]


def test_without_memory_in_one_part_no_round_is_closed_without_it() -> None:
    harness = with_table(table(2), memory=rows_need(table(2), 4 * (8 + ROW), None))
    harness.hold = True
    assert kinds(push_rows(harness, 0, 1, [1, 2, 3], index=0)) == ["Staged"]
    told = refusal(push_rows(harness, 0, 1, [4, 5], index=1))
    assert "no memory for these rows" in told.text
    assert told.taken is Taken.NOTHING
    for index in range(2):
        push_rows(harness, 1, 1, [], index=index)
    assert [(job.layout[0].slice_index, row_ids(job)) for job in harness.jobs] == [(0, [(0, 1, [1, 2, 3]), (1, 1, [])])]


# ── an update that fails ──


def test_an_update_that_fails_is_refused_by_name_and_the_next_round_goes_on() -> None:
    harness = with_table()
    push_rows(harness, 0, 1, [5], request=50)
    harness.error = BAD
    effects = push_rows(harness, 1, 1, [1000], request=60)
    for rank, request in ((0, 50), (1, 60)):
        told = one([message for message in answers(effects, rank) if isinstance(message, Refused)])
        assert (told.request, told.error, told.key, told.taken) == (request, ErrorCode.NOT_ALLOWED, "t", Taken.NOTHING)
        assert told.text == f"the update of 't' failed: {BAD}"
    harness.error = None
    assert values(pull_rows(harness, 0, 0, [5])) == ((0,), [bytes(ROW)])
    assert refusal(push_rows(harness, 0, 1, [5], request=50)).text == f"the update of 't' failed: {BAD}"
    push_rows(harness, 0, 1, [6])
    assert set(kinds(push_rows(harness, 1, 1, [7]))) == {"Done"}
    assert rounds(harness)[-1] == [(0, 1, [6]), (1, 1, [7])]
    assert values(pull_rows(harness, 1, 1, [7])) == ((1,), [bytes([1]) * ROW])


def test_what_was_staged_behind_a_failed_round_is_refused_too() -> None:
    harness = with_table()
    harness.hold = True
    push_rows(harness, 0, 1, [1], request=50)
    push_rows(harness, 1, 1, [2], request=60)
    push_rows(harness, 0, 2, [3], request=51)
    pull_rows(harness, 0, 2, [3], request=52)
    harness.error = BAD
    effects = harness.finish(harness.jobs[0])
    assert sorted(message.request for message in answers(effects, 0)) == [50, 51, 52]
    assert [message.request for message in answers(effects, 1)] == [60]
    assert not harness.jobs
    assert harness.explain()["bytes_staged"] == 0


def test_one_part_that_cannot_be_updated_leaves_the_other_as_it_is() -> None:
    harness = with_table(table(2))
    for rank in range(2):
        push_rows(harness, rank, 1, [rank], index=0)
    harness.error = BAD
    for rank in range(2):
        effects = push_rows(harness, rank, 1, [1000 + rank], index=1)
    assert set(kinds(effects)) == {"Refused"}
    harness.error = None
    for rank in range(2):  # the step is made again
        assert answers(push_rows(harness, rank, 1, [rank], index=0), rank) == [Done(harness._request)]
        push_rows(harness, rank, 1, [2 + rank], index=1)
    assert len(rounds(harness, 0)) == 1
    assert rounds(harness, 1)[-1] == [(0, 1, [2]), (1, 1, [3])]


def test_asynchronously_a_bad_push_fails_its_own_worker_only() -> None:
    harness = with_table(mode="async")
    harness.error = BAD
    assert kinds(push_rows(harness, 1, 1, [1000])) == ["Refused"]
    harness.error = None
    assert kinds(push_rows(harness, 0, 1, [5])) == ["Done"]
    assert kinds(push_rows(harness, 1, 1, [6])) == ["Done"]
    assert rounds(harness)[1:] == [[(0, 1, [5])], [(1, 1, [6])]]


# ── deletion ──


def delete(harness: Harness, rank: int) -> Any:
    return harness.say(rank, Delete(harness.request(), (KeyId("t", 0),)))


def make_again(harness: Harness, spec: KeySpec, value: bytes = b"") -> None:
    harness.say(0, replace(init_of(harness.request(), "t", spec, 0), creation=1), value)


def test_a_deletion_waits_for_the_update_that_is_under_way() -> None:
    harness = with_table()
    harness.hold = True
    push_rows(harness, 0, 1, [5], request=50)
    push_rows(harness, 1, 1, [6], request=60)
    for rank in range(2):
        assert not of(ForgetState, delete(harness, rank))
    effects = harness.finish(harness.jobs[0])
    assert Done(50) in said(effects, worker_id(0))
    assert of(ForgetState, effects) == [ForgetState((("t", 0),))]


def test_rows_that_wait_for_a_round_go_with_the_table() -> None:
    harness = with_table()
    push_rows(harness, 0, 1, [5], request=50)
    pull_rows(harness, 1, 1, [5], request=60)
    delete(harness, 0)
    effects = delete(harness, 1)
    for rank, request in ((0, 50), (1, 60)):
        told = one([message for message in answers(effects, rank) if isinstance(message, Refused)])
        assert (told.request, told.error, told.key) == (request, ErrorCode.KEY_NOT_FOUND, "t")
    assert not harness.applied
    assert harness.explain()["bytes_led"] == 0


def test_rows_that_are_being_read_when_the_table_is_deleted_are_answered() -> None:
    """The job was started before: jobs of a part keep their order."""
    harness = with_table()
    harness.hold = True
    pull_rows(harness, 0, 0, [5], request=50)
    (reading,) = harness.jobs
    delete(harness, 0)
    effects = delete(harness, 1)
    assert of(ForgetState, effects) == [ForgetState((("t", 0),))]
    assert isinstance(reading, ReadRows)
    assert [message.request for message in said(harness.finish(reading)) if isinstance(message, Values)] == [50]


@pytest.mark.parametrize("spec", [table(), KeySpec("uint8", (16,), 4096)])
def test_what_was_sent_to_a_deleted_table_does_not_count_in_its_successor(spec: KeySpec) -> None:
    harness = with_table()
    for rank in range(2):
        delete(harness, rank)
    make_again(harness, spec, bytes(spec.slice_nbytes(0)))
    told = refusal(push_rows(harness, 0, 1, [5]))
    assert (told.error, told.key) == (ErrorCode.KEY_NOT_FOUND, "t")
    assert refusal(pull_rows(harness, 0, 0, [5])).error is ErrorCode.KEY_NOT_FOUND
    part = Part("t", 0, 1, 1)
    assert kinds(harness.say(0, Push(harness.request(), (part,), 0, 1, pull=False), pushed([5]))) == ["Staged"]


# ── the optimizer ──


def set_by_all(harness: Harness, optimizer: Any) -> list[Any]:
    wire = None if optimizer is None else to_wire(optimizer)
    return [effect for rank in range(2) for effect in harness.say(rank, SetOptimizer(harness.request(), wire))]


def test_an_optimizer_that_is_set_between_two_rounds_begins_with_the_next() -> None:
    harness = with_table()
    harness.hold = True
    for rank in range(2):
        push_rows(harness, rank, 1, [5])
        push_rows(harness, rank, 2, [6])
    assert of(ResetState, set_by_all(harness, Adagrad(0.5))) == [ResetState((("t", 0),))]
    harness.finish(harness.jobs[0])
    assert [job.optimizer for job in harness.applied] == [None, Adagrad(0.5)]
    harness.finish(harness.jobs[0])
    harness.say(0, UpdateOptimizer(harness.request(), {"learning_rate": 0.25}))
    harness.hold = False
    for clock in (3, 4):
        for rank in range(2):
            push_rows(harness, rank, clock, [7])
    assert [job.optimizer for job in harness.applied[2:]] == [Adagrad(0.25)] * 2
    assert len(of(ResetState, set_by_all(harness, SGD(0.5)))) == 1


def test_an_optimizer_that_updates_no_single_rows_is_refused_and_changes_nothing() -> None:
    harness = with_table()
    set_by_all(harness, SGD(0.5))
    push_rows(harness, 0, 1, [5])
    told = refusal(harness.say(0, SetOptimizer(harness.request(), to_wire(LAMB(0.5)))))
    assert (told.error, told.key) == (ErrorCode.NOT_ALLOWED, "t")
    assert "LAMB cannot update single rows of table 't'" in told.text
    push_rows(harness, 1, 1, [6])
    assert harness.applied[-1].optimizer == SGD(0.5)


# ── who is not in a round ──


def with_quorum(**more: Any) -> Harness:
    return with_table(workers=3, quorum=2, quorum_grace_s=GRACE_S, **more)


def test_a_late_workers_rows_count_in_no_round_and_it_is_told() -> None:
    harness = with_quorum(merge="mean")
    push_rows(harness, 0, 1, [5])
    push_rows(harness, 1, 1, [6])
    assert after(harness, GRACE_S) == [(2,)]
    harness.look(member("worker", 2, "back"))
    assert rounds(harness) == [[(0, 1, [5]), (1, 1, [6])]]  # whose number is the divisor
    assert answers(push_rows(harness, 2, 1, [7], request=70), 2) == [Uncounted(70)]
    assert answers(push_rows(harness, 2, 1, [7], request=70), 2) == [Uncounted(70)]
    push_rows(harness, 0, 2, [8])
    push_rows(harness, 1, 2, [])
    assert rounds(harness)[1:] == [[(0, 2, [8]), (1, 2, [])]]


def test_what_a_late_worker_had_staged_is_given_up() -> None:
    harness = with_quorum()
    push_rows(harness, 2, 1, [1, 2, 3])
    push_rows(harness, 0, 1, [5])
    effects = harness.look(member("worker", 2, "back"))
    assert isinstance(one(answers(effects, 2)), Uncounted)
    push_rows(harness, 1, 1, [6])
    assert rounds(harness) == [[(0, 1, [5]), (1, 1, [6])]]
    assert harness.explain()["bytes_staged"] == 0


def test_a_worker_that_comes_back_is_in_the_rounds_after_the_one_it_names() -> None:
    harness = with_quorum()
    harness.look(member("worker", 2, "back"))
    for clock in (1, 2):
        push_rows(harness, 0, clock, [clock])
        push_rows(harness, 1, clock, [])
    harness.look(member("worker", 2, "returning"))
    assert said(harness.say(2, Activate(50, "t", 2))) == [Done(50)]
    push_rows(harness, 0, 3, [3])
    push_rows(harness, 1, 3, [])
    assert len(rounds(harness)) == 2
    assert kinds(push_rows(harness, 2, 3, [30]), worker_id(2)) == ["Done"]
    assert rounds(harness)[2] == [(0, 3, [3]), (1, 3, []), (2, 3, [30])]


def test_rounds_of_nobody_change_no_row() -> None:
    """Worker 1 comes into round 2, and those who owed round 1 a push have left."""
    harness = with_table()
    harness.say(1, Activate(50, "t", 2))
    harness.look(member("worker", 0, "left"))
    assert not harness.applied
    assert harness.machine.table.slices["t", 0].log.version == 2
    assert harness.machine.table.slices["t", 0].log.current == TableVersion(0, 0, 0)
    assert values(pull_rows(harness, 1, 2, [5])) == ((2,), [bytes(ROW)])
    assert kinds(push_rows(harness, 1, 3, [5])) == ["Done"]
    assert values(pull_rows(harness, 1, 3, [5])) == ((3,), [bytes([1]) * ROW])


# ── a worker that dies ──


def test_rows_of_a_replaced_worker_are_given_up_and_its_successor_pushes_them_again() -> None:
    harness = with_table()
    push_rows(harness, 0, 1, [5])
    harness.look(member("worker", 0, "dead"))
    harness.look(member("worker", 0, life=1))
    harness.attach(0, life=1)
    push_rows(harness, 1, 1, [6])
    assert not harness.applied
    push_rows(harness, 0, 1, [7], life=1)
    assert rounds(harness) == [[(0, 1, [7]), (1, 1, [6])]]


def test_rows_that_wait_for_a_dead_worker_are_kept() -> None:
    harness = with_table()
    push_rows(harness, 0, 1, [5], request=50)
    told = one(answers(harness.look(member("worker", 1, "dead")), 0))
    assert (told.request, told.error, told.key) == (50, ErrorCode.NODE_LOST, "t")
    harness.look(member("worker", 1, life=1))
    harness.attach(1, life=1)
    push_rows(harness, 1, 1, [6], life=1)
    assert rounds(harness) == [[(0, 1, [5]), (1, 1, [6])]]
    assert answers(push_rows(harness, 0, 1, [5], request=50), 0) == [Done(50)]
