"""A leader hands a partition to its backup, and becomes the backup itself: both have the same at every moment."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvd.core.machine import JobDone
from kvd.core.server.handover import AGAIN_S, WIND_DOWN_S
from kvd.errors import KvdError
from kvd.optimizer import SGD, to_wire
from kvd.protocol.messages import (
    NO_RANK,
    NO_STEP,
    Activate,
    Attach,
    ClockQuery,
    Delete,
    Done,
    FetchState,
    HandedOver,
    HoldReady,
    Init,
    Install,
    KeyId,
    Lookup,
    NewSlice,
    OutOfSync,
    Part,
    PullBatch,
    Push,
    ReadSlices,
    Refused,
    SetOptimizer,
    SliceId,
    Staged,
    StartHolding,
    StepIs,
    StepsLeft,
    TakeStep,
)
from tests.core.fakes import member, server_id
from tests.core.replica_harness import A, B, C, Cluster
from tests.core.test_deposed import asked
from tests.core.test_promotion import OTHERS, elsewhere, ready
from tests.core.test_records import CHANGES, HELD, ONE, SPEC, answers

TO_B = (A, B, NO_RANK, B)
BY_B = (B, A, NO_RANK)
TO_A = (B, A, NO_RANK, A)
BY_B_ALONE = (B, NO_RANK, NO_RANK)


def said(run: Cluster, rank: int = A) -> list[HandedOver]:
    """What a leader told the scheduler of partitions that it can hand over."""
    return [message for message in run.nodes[rank].told if isinstance(message, HandedOver)]


def wind_down(run: Cluster, *, by: int = A) -> None:
    run.look([TO_B if by == A else TO_A, *OTHERS])


def hand_over(run: Cluster) -> None:
    """All of it, from A to B."""
    wind_down(run)
    assert said(run)
    run.look([BY_B, *OTHERS])


def both_push(run: Cluster, clock: int, value: Any = ONE, *, at: int = A) -> None:
    for rank in (0, 1):
        run.push(rank, clock, value, at=at)


# ── at rest ──


@pytest.mark.parametrize("optimizer", [None, SGD(0.5, momentum=0.5)])
def test_the_two_change_places_without_a_copy(optimizer: Any) -> None:
    """By hand, with momentum: v1 = 4, w1 = 1 - 2 = -1; v2 = 0.5 * 4 + 4 = 6, w2 = -4; v3 = 7, w3 = -7.5."""
    run = ready(optimizer)
    both_push(run, 1, [np.float32(2), np.float32(2)])
    before = run.picture(A)
    copies = len([1 for node in run.nodes for message in node.log if "is sent partition" in message.text])
    wind_down(run)
    assert [(message.partition, message.incarnation) for message in said(run)] == [(0, server_id(B))]
    run.auto = False
    run.look([BY_B, *OTHERS])
    assert run.to(A, StartHolding, Install) == []
    run.auto = True
    run.settle()
    assert run.picture(B) == run.picture(A) == before
    assert run.nodes[A].machine.explain(0.0)["leads"] == []
    assert run.nodes[A].machine.explain(0.0)["holds"] == [0]
    both_push(run, 2, [np.float32(2), np.float32(2)], at=B)
    assert run.picture(A) == run.picture(B)
    assert run.value(A).tolist() == run.value(B).tolist() == ([4, 4] if optimizer is None else [-4, -3])
    assert copies == len([1 for node in run.nodes for message in node.log if "is sent partition" in message.text])
    run.kill(B)
    run.look([(A, NO_RANK, NO_RANK), *OTHERS[1:], OTHERS[1]])
    both_push(run, 3, [np.float32(2), np.float32(2)])
    version, value = run.pull(0, 3)
    assert version == 3
    assert value.tolist() == ([4, 4] if optimizer is None else [-7.5, -6.5])


def test_a_round_that_ends_with_the_view_of_the_handover_is_held_by_the_new_backup() -> None:
    """Worker 1 comes in after round 1, and worker 0, who owed it a push, is lost: the round has no contribution."""
    run = ready()
    run.say(1, Activate(run.request(), "w", 1))
    wind_down(run)
    run.workers[0] = member("worker", 0, "lost")
    run.look([BY_B, *OTHERS])
    logs = [table.slices["w", 0].log for table in (run.nodes[B].table, run.nodes[A].held().table)]
    assert [log.version for log in logs] == [1, 1]
    run.push(1, 2, ONE, at=B)
    assert [log.version for log in logs] == [2, 2]


def test_it_is_handed_back_and_forth() -> None:
    run = ready(SGD(0.5, momentum=0.5))
    for clock in (1, 3, 5):
        both_push(run, clock)
        hand_over(run)
        both_push(run, clock + 1, at=B)
        wind_down(run, by=B)
        assert said(run, B)
        run.look([HELD, *OTHERS])
        assert run.picture(A) == run.picture(B)
    assert run.nodes[A].table.slices["w", 0].log.version == 6


def test_steps_that_all_share_go_on() -> None:
    run = ready(mode="async")
    assert run.say(0, TakeStep(60, 0, 4, NO_STEP)) == [StepIs(60, StepsLeft.SOME, 0, ())]
    hand_over(run)
    assert run.say(1, TakeStep(60, 0, 4, NO_STEP), at=B) == [StepIs(60, StepsLeft.SOME, 1, ())]
    assert run.picture(A) == run.picture(B)


def test_nobody_is_told_before_the_successor_could_lead() -> None:
    run = ready()
    run.nodes[B].holds_jobs = True
    both_push(run, 1)
    run.auto = False
    wind_down(run)
    run.deliver()
    assert said(run) == [], "the successor applies a round"
    run.finish(run.nodes[B])
    run.auto = True
    run.settle()
    assert said(run)


def test_a_successor_that_could_not_apply_a_round_does_not_lead() -> None:
    run = ready(SGD(0.5))
    node = run.nodes[B]
    node.holds_jobs = True
    both_push(run, 1)
    (job,) = node.jobs
    node.jobs.clear()
    run.step(node, JobDone(job.job, error=KvdError("no memory")))
    wind_down(run)
    assert said(run) == []
    assert OutOfSync in {type(message) for message in run.nodes[A].told}


# ── something is under way ──


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_under_way_ends_first(name: str) -> None:
    run, records, kind, first = asked(name)
    wind_down(run)
    assert said(run) == []
    assert run.to(B, HoldReady) == []
    for record in records:
        run.arrive(record)
    run.auto = True
    run.settle()
    assert answers(run, kind, first) >= 1, "its record is held"
    assert said(run)
    run.look([BY_B, *OTHERS])
    assert run.picture(A) == run.picture(B)


def test_an_update_that_runs_ends_first_and_no_other_begins() -> None:
    run = ready()
    node = run.nodes[A]
    node.holds_jobs = True
    both_push(run, 1)
    both_push(run, 2)
    wind_down(run)
    assert said(run) == []
    run.finish(node)
    assert node.table.slices["w", 0].log.closed == 1, "the second round is complete, and does not close"
    assert said(run)
    run.look([BY_B, *OTHERS])
    assert run.picture(A) == run.picture(B)
    assert run.value(B).tolist() == [2, 4]
    node.holds_jobs = False
    both_push(run, 2, at=B)
    assert run.picture(A) == run.picture(B)


def test_what_is_staged_is_sent_again_and_counts_once() -> None:
    run = ready()
    assert run.push(0, 1, ONE, request=501) == [Staged(501)]
    hand_over(run)
    assert run.nodes[A].held().table.slices["w", 0].log.is_idle
    assert run.push(0, 1, ONE, request=501, at=B) == [Staged(501)]
    assert run.push(1, 1, ONE, request=502, at=B) == [Done(501), Done(502)]
    assert run.value(A).tolist() == run.value(B).tolist() == [2, 4]
    assert run.push(0, 1, ONE, request=501, at=B) == [Done(501)]
    assert run.picture(A) == run.picture(B)


QUESTIONS: list[Any] = [
    Push(60, (Part("w", 0, 1),), 0, 1, False),
    PullBatch(60, 1, 0),
    Init(60, (SPEC,), (NewSlice("v", 0, 0),)),
    Lookup(60, ("w",), True),
    Delete(60, (KeyId("w", 0),)),
    ClockQuery(60, "w"),
    Attach(60, 0),
    TakeStep(60, 0, 4, NO_STEP),
    SetOptimizer(60, to_wire(SGD(0.25))),
    FetchState(60, "w", 0),
    ReadSlices(60, 1, 0, False, (SliceId("w", 0),)),
]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: type(question).__name__)
def test_who_asks_meanwhile_asks_again(question: Any) -> None:
    run = ready()
    run.declare(0, "w")
    before = run.picture(A)
    wind_down(run)
    assert elsewhere(run.say(0, question, ONE.tobytes()))
    assert run.picture(A) == run.picture(B) == before
    run.look([BY_B, *OTHERS])
    if not isinstance(question, Attach | SetOptimizer | TakeStep):
        assert elsewhere(run.say(0, question, ONE.tobytes(), late=1))
        assert run.picture(A) == run.picture(B) == before


def test_a_sender_that_has_yet_to_learn_who_leads_does_not_hear_that_there_is_no_key() -> None:
    run = ready()
    for at in (A, C):  # one has led it, the other one has not
        hand_over(run) if at == A else None
        for question in (ClockQuery(60, "w"), Activate(61, "w", 1)):
            assert elsewhere(run.say(0, question, at=at, late=1))
    (answer,) = run.say(0, ClockQuery(60, "w"), at=C)
    assert isinstance(answer, Refused)


# ── another way ──


def test_without_a_successor_the_leader_goes_on() -> None:
    run = ready()
    run.push(0, 1, ONE, request=501)
    first = len(run.answers)
    wind_down(run)
    assert elsewhere(run.push(1, 1, ONE, request=502))
    run.look([HELD, *OTHERS])
    assert run.push(1, 1, ONE, request=502) == [Done(501), Done(502)]
    assert answers(run, Done, first) == 2
    assert run.picture(A) == run.picture(B)


def test_if_nobody_says_that_it_is_done_the_leader_goes_on_for_a_while() -> None:
    run = ready()
    both_push(run, 1)
    run.push(0, 2, ONE)
    wind_down(run)
    run.tick(WIND_DOWN_S + 0.1)
    assert run.push(1, 2, ONE)[-1:] == [Done(run._request)]
    assert run.nodes[A].machine.explain(0.0)["hands_over"] == {"0": "server 1"}
    number = len(said(run))
    run.tick(AGAIN_S + 0.1)
    run.settle()
    assert len(said(run)) > number
    assert elsewhere(run.push(0, 3, ONE))
    run.look([BY_B, *OTHERS])
    assert run.picture(A) == run.picture(B)


@pytest.mark.parametrize("first", [A, B])
def test_a_leader_that_went_on_begins_anew_when_the_view_comes_late(first: int) -> None:
    """It has closed a round that nobody else holds; what it has is forgotten, and it says so."""
    run = ready()
    both_push(run, 1)
    wind_down(run)
    run.tick(WIND_DOWN_S + 0.1)
    if first == B:
        run.look([BY_B, *OTHERS], only=[B])
    run.auto = False
    count = len(run.answers)
    both_push(run, 2)
    records = run.to(B)
    assert records
    run.look([BY_B, *OTHERS], only=[A] if first == B else [A, B])
    for record in records:
        run.arrive(record)
    assert answers(run, Done, count) == 0
    assert run.nodes[A].held() is None
    assert [message.incarnation for message in run.nodes[A].told if isinstance(message, OutOfSync)] == [server_id(A)]
    run.auto = True
    both_push(run, 2, at=B)
    assert answers(run, Done, count) == 0, "nobody else holds it yet"
    run.look([(B, NO_RANK, A), *OTHERS])
    run.look([BY_B, *OTHERS])
    assert answers(run, Done, count) == 2
    assert run.picture(A) == run.picture(B)


def test_a_leader_does_not_go_on_when_its_successor_leads_already() -> None:
    """The view that says so is late, and the successor dies before it comes: this leader is the only copy."""
    run = ready()
    both_push(run, 1)
    run.push(0, 2, ONE, request=501)
    wind_down(run)
    run.look([BY_B, *OTHERS], only=[B])
    late = run.view()
    run.tick(WIND_DOWN_S + 0.1)
    assert elsewhere(run.push(1, 2, ONE, request=502))
    run.kill(B)
    run.tick(WIND_DOWN_S + 0.1)
    assert elsewhere(run.push(1, 2, ONE, request=502))
    run.show(A, late)
    assert run.nodes[A].held() is not None
    assert OutOfSync not in {type(message) for message in run.nodes[A].told}
    run.look([(A, NO_RANK, NO_RANK), (C, NO_RANK, NO_RANK), OTHERS[1]])
    assert run.push(0, 2, ONE, request=501) == [Staged(501)]
    assert run.push(1, 2, ONE, request=502) == [Done(501), Done(502)]


def test_nothing_is_committed_before_the_old_leader_knows() -> None:
    run = ready()
    both_push(run, 1)
    wind_down(run)
    run.look([BY_B, *OTHERS], only=[B])
    first = len(run.answers)
    both_push(run, 2, at=B)
    assert answers(run, Done, first) == 0
    assert run.picture(A)["slices"]["w", 0]["log"][0] == 1
    run.show(A)
    run.settle()
    assert answers(run, Done, first) == 2
    assert run.picture(A) == run.picture(B)


def test_the_successor_dies_before_the_old_leader_knows_that_it_led() -> None:
    run = ready()
    run.push(0, 1, ONE, request=501)
    wind_down(run)
    run.look([BY_B, *OTHERS], only=[B])
    run.kill(B)
    run.look([(A, NO_RANK, NO_RANK), (C, NO_RANK, NO_RANK), OTHERS[1]])
    assert run.push(1, 1, ONE, request=502) == [Done(501), Done(502)]
    assert run.value(A).tolist() == [2, 4]


def test_a_record_of_an_earlier_time_changes_nothing() -> None:
    """Server 0 has led, was the backup, leads, and is the backup again: what it was sent then comes once more."""
    run = ready(SGD(0.5))
    hand_over(run)
    run.auto = False
    for rank in (0, 1):
        run.say(rank, SetOptimizer(run.request(), to_wire(SGD(0.25))), at=B)
        run.say(rank, SetOptimizer(run.request(), to_wire(SGD(0.25))), at=A)
    old = [wire for wire in run.wires if wire.target == A]
    assert old
    run.auto = True
    run.settle()
    wind_down(run, by=B)
    run.look([HELD, *OTHERS])
    both_push(run, 1)
    hand_over(run)
    before = run.picture(A)
    for wire in old:
        run.arrive(wire)
    assert run.picture(A) == before


def test_what_a_worker_waits_for_is_known_at_the_new_leader() -> None:
    """A pull of a version that is being made when the partition is handed over."""
    run = ready()
    run.push(0, 1, ONE)
    hand_over(run)
    assert elsewhere(run.pull(0, 1, at=A))
    run.push(0, 1, ONE, at=B)
    run.push(1, 1, ONE, at=B)
    version, value = run.pull(0, 1, at=B)
    assert (version, value.tolist()) == (1, [2, 4])
