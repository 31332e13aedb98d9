"""Which optimizer the workers agree on, and what becomes of those who differ."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.core.machine import Effect, ResetState
from kvd.core.server.optimizer_agreement import MAX_GENERATIONS, OptimizerAgreement
from kvd.errors import NotAllowed
from kvd.optimizer import SGD, Adam, to_wire
from kvd.optimizer.schedule import Cosine
from kvd.protocol.messages import Done, ErrorCode, NotYet, Refused, SetOptimizer, Staged, Taken, UpdateOptimizer
from tests.core.fakes import cluster, member, of, one, said, worker_id
from tests.core.server_harness import Harness, refusal
from tests.core.test_server_control import ONE, SPEC, rates, rounds

A, B, C = SGD(1.0), SGD(2.0), Adam(1.0)


def changed(agreement: OptimizerAgreement, rank: int, optimizer: Any, life: int = 0) -> bool:
    result = agreement.set(rank, 100 * rank + life, optimizer)
    agreement.validate()
    return result


def differs(agreement: OptimizerAgreement, rank: int, optimizer: Any, life: int = 0) -> str:
    with pytest.raises(NotAllowed) as error:
        agreement.set(rank, 100 * rank + life, optimizer)
    agreement.validate()
    assert agreement.dispute
    return str(error.value)


# ── the agreement by itself ──


def test_the_same_by_all() -> None:
    agreement = OptimizerAgreement()
    assert changed(agreement, 0, A)
    assert not changed(agreement, 1, A)
    assert not changed(agreement, 0, SGD(1.0))
    assert (agreement.dispute, agreement.late(0), agreement.late(1), agreement.late(7)) == ("", "", "", "")


def test_another_one_names_ranks_and_fields() -> None:
    agreement = OptimizerAgreement()
    changed(agreement, 0, SGD(1.0, momentum=0.5, wd=0.1))
    changed(agreement, 2, SGD(1.0, momentum=0.5, wd=0.1))
    text = differs(agreement, 1, SGD(2.0, momentum=0.75, wd=0.1))
    assert text.startswith(
        "the workers' optimizers differ: worker 1 sets SGD(learning_rate=2.0, momentum=0.75), "
        "but worker 0 and worker 2 set SGD(learning_rate=1.0, momentum=0.5); call set_optimizer with"
    )
    assert agreement.dispute == text
    assert "worker 3 sets Adam, but worker 0 and worker 2 set SGD;" in differs(agreement, 3, C)
    assert "worker 3 sets no optimizer, but worker 0 and worker 2 set SGD;" in differs(agreement, 3, None)
    for rank in (1, 3):
        assert agreement.dispute != ""
        assert not changed(agreement, rank, SGD(1.0, momentum=0.5, wd=0.1))
    assert agreement.dispute == ""


def test_a_long_text_keeps_its_advice() -> None:
    agreement = OptimizerAgreement()
    for rank in range(200):
        changed(agreement, rank, SGD(Cosine(0.1, steps=10)))
    text = differs(agreement, 200, SGD(Cosine(0.2, steps=20)))
    assert len(text) <= 1000
    assert text.endswith("in all workers, between the same pushes")


def test_all_go_on_together() -> None:
    agreement = OptimizerAgreement()
    for optimizer in (A, B, A, None, C):
        assert changed(agreement, 0, optimizer)
        assert not changed(agreement, 1, optimizer)
    assert agreement.late(0) == agreement.late(1) == ""


def test_who_comes_later_catches_up_step_by_step_or_at_once() -> None:
    agreement = OptimizerAgreement()
    for optimizer in (A, B, C):
        changed(agreement, 0, optimizer)
    for optimizer in (A, B, C):
        assert not changed(agreement, 1, optimizer)
    assert not changed(agreement, 2, C)
    assert agreement.late(2) == ""


def test_who_stays_behind_is_late() -> None:
    agreement = OptimizerAgreement()
    for rank in (0, 1):
        changed(agreement, rank, A)
    changed(agreement, 0, B)
    assert agreement.late(1) == (
        "the workers' optimizers differ: worker 1 still has SGD(learning_rate=1.0), but worker 0 set "
        "SGD(learning_rate=2.0); call set_optimizer with the same optimizer in all workers, between the same pushes"
    )
    assert agreement.dispute == ""
    assert "worker 1 sets Adam, but worker 0 set SGD" in differs(agreement, 1, C)
    changed(agreement, 1, B)
    assert (agreement.late(1), agreement.dispute) == ("", "")


def test_ranks_that_set_nothing_are_never_late() -> None:
    agreement = OptimizerAgreement()
    assert changed(agreement, 0, A)
    assert changed(agreement, 0, B)
    assert agreement.late(1) == ""


def test_a_restarted_worker_repeats_what_its_predecessor_set() -> None:
    agreement = OptimizerAgreement()
    for optimizer in (A, B, A, C):
        for rank in (0, 1):
            changed(agreement, rank, optimizer)
    for optimizer in (A, B, A):
        assert not changed(agreement, 1, optimizer, life=1)
        assert agreement.late(1) == ""
    assert not changed(agreement, 1, A, life=2)  # its second life went on from a checkpoint: it never sets B and C
    assert agreement.late(1) == ""
    assert changed(agreement, 0, B)
    assert agreement.late(1) != ""


def test_the_only_one_may_set_another_after_its_restart() -> None:
    agreement = OptimizerAgreement()
    changed(agreement, 0, A)
    changed(agreement, 0, B)
    assert not changed(agreement, 0, A, life=1)
    assert changed(agreement, 0, C, life=1)


def test_a_successor_is_not_blamed_for_its_predecessor() -> None:
    agreement = OptimizerAgreement()
    changed(agreement, 0, A)
    differs(agreement, 1, B)
    agreement.drop_sender(100)
    assert agreement.dispute == ""
    assert not changed(agreement, 1, A, life=1)


def test_the_number_of_generations_is_bounded() -> None:
    agreement = OptimizerAgreement()
    for rank in (0, 1):
        changed(agreement, rank, SGD(0.5))
    for number in range(MAX_GENERATIONS + 5):
        assert changed(agreement, 0, SGD(1.0 + number))
    agreement.validate()
    assert not changed(agreement, 0, SGD(float(MAX_GENERATIONS + 5)))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.sampled_from([A, B, C, None])), max_size=40))
def test_the_invariants_hold_whatever_is_set(calls: list[tuple[int, int, Any]]) -> None:
    agreement = OptimizerAgreement()
    lives = [0, 0, 0]
    for rank, more, optimizer in calls:
        if more == 2:
            agreement.drop_sender(100 * rank + lives[rank])
            lives[rank] += 1
        with suppress(NotAllowed):
            agreement.set(rank, 100 * rank + lives[rank], optimizer)
        agreement.validate()


# ── on a server ──


def ready(*optimizers: Any) -> Harness:
    """Two workers, a float32 key, and what each of them has set."""
    harness = Harness()
    harness.init("w", ONE, SPEC)
    for rank, optimizer in enumerate(optimizers):
        assert said(set_(harness, rank, optimizer)) == [Done(1000)]
    return harness


def set_(harness: Harness, rank: int, optimizer: Any, request: int = 1000, **more: Any) -> list[Effect]:
    wire = None if optimizer is None else to_wire(optimizer)
    return harness.say(rank, SetOptimizer(request, wire), **more)


def test_no_round_closes_while_one_differs() -> None:
    harness = ready(A)
    refused = refusal(set_(harness, 1, B))
    assert refused.error is ErrorCode.NOT_ALLOWED
    assert "worker 1 sets SGD(learning_rate=2.0), but worker 0 set SGD(learning_rate=1.0)" in refused.text
    for rank in (0, 1):
        kept: Any = said(harness.push(rank, 1, ONE), worker_id(rank))[0]
        assert (kept.error, kept.text, kept.taken) == (ErrorCode.NOT_ALLOWED, refused.text, Taken.KEPT)
        answer: Any = one(said(harness.pull(rank, 1)))
        assert (answer.error, answer.text, answer.taken) == (ErrorCode.NOT_ALLOWED, refused.text, Taken.NOTHING)
    assert rates(harness) == []
    assert refusal(set_(harness, 1, B)) == refused  # a copy that comes late
    assert said(set_(harness, 1, A, 1001)) == [Done(1001)]
    assert rates(harness) == [1.0]
    rounds(harness, 2)
    assert rates(harness) == [1.0, 1.0]


def test_who_waits_already_is_told_and_its_push_counts_when_they_agree() -> None:
    harness = ready(A)
    assert said(harness.push(0, 1, ONE, request=5041)) == [Staged(5041)]
    assert said(harness.pull(0, 1, request=5042)) == []
    effects = set_(harness, 1, B)
    told: list[Any] = said(effects, worker_id(0))
    assert [(answer.request, answer.taken) for answer in told] == [(5041, Taken.KEPT), (5042, Taken.NOTHING)]
    assert {answer.text for answer in told} == {refusal(said_to(effects, 1)).text}
    again: Any = one(said(harness.push(0, 1, None, request=5041, probe=True), worker_id(0)))
    assert again.taken is Taken.KEPT
    set_(harness, 1, A, 1001)
    harness.push(1, 1, ONE)
    assert said(harness.push(0, 1, None, request=5041, probe=True)) == [Done(5041)]


def said_to(effects: list[Effect], rank: int) -> list[Effect]:
    return [effect for effect in effects if getattr(effect, "peer", None) == worker_id(rank)]


def test_a_push_of_one_who_stayed_behind() -> None:
    harness = ready(A, A)
    rounds(harness, 1)
    assert len(of(ResetState, set_(harness, 0, B, 1001))) == 1
    assert said(harness.push(0, 2, ONE, request=5041)) == [Staged(5041)]
    effects = harness.push(1, 2, ONE, request=5051)
    for rank, request in ((0, 5041), (1, 5051)):
        kept: Any = said(effects, worker_id(rank))[0]
        assert (kept.request, kept.taken) == (request, Taken.KEPT)
        assert "worker 1 still has SGD(learning_rate=1.0), but worker 0 set SGD" in kept.text
    assert said(set_(harness, 1, B, 1001)) == [Done(1001)]
    assert rates(harness) == [1.0, 2.0]


def test_a_push_that_was_made_ahead_of_the_change() -> None:
    harness = ready(A, A)
    rounds(harness, 1)
    harness.push(1, 2, ONE, request=5051)
    effects = set_(harness, 0, B, 1001)
    assert Done(1001) in said(effects, worker_id(0))
    kept: Any = one(said(effects, worker_id(1)))
    assert (kept.request, kept.taken) == (5051, Taken.KEPT)
    assert "worker 1 still has" in kept.text


def test_in_async_mode_nobody_is_late() -> None:
    harness = Harness(cluster(2, mode="async"))
    harness.init("w", ONE, SPEC)
    for rank in (0, 1):
        set_(harness, rank, A)
    set_(harness, 0, B, 1001)
    assert not of_refusals(harness.push(1, 1, ONE))
    assert rates(harness) == [2.0]


def of_refusals(effects: list[Effect]) -> list[Any]:
    return [message for message in said(effects) if isinstance(message, Refused)]


def test_a_file_speaks_for_all_and_keeps_the_agreement() -> None:
    harness = ready(A, A)
    loaded = SetOptimizer(1001, to_wire(SGD(4.0)), loaded=True)
    assert said(harness.say(0, loaded)) == [Done(1001)]
    rounds(harness, 1)
    assert of(ResetState, set_(harness, 1, A, 1002)) == []  # as a restarted worker does
    rounds(harness, 2)
    assert rates(harness) == [4.0, 4.0]


def test_the_optimizer_in_use_keeps_its_state_whoever_set_it() -> None:
    harness = Harness()
    harness.init("w", ONE, SPEC)
    harness.say(0, SetOptimizer(1, to_wire(A), loaded=True))
    assert of(ResetState, set_(harness, 0, A)) == []
    harness.say(0, UpdateOptimizer(1002, {"learning_rate": 2.0}))
    assert of(ResetState, set_(harness, 0, B, 1003)) == []


def test_who_is_no_worker_here_is_told_to_attach() -> None:
    harness = Harness(attach=False)
    answer = one(said(set_(harness, 0, A)))
    assert isinstance(answer, NotYet)
    harness.attach(0)
    assert said(set_(harness, 0, A)) == [Done(1000)]


def test_a_successor_ends_the_dispute() -> None:
    harness = ready(A)
    set_(harness, 1, B)
    harness.look(member("worker", 1, life=1))
    harness.attach(1, life=1)
    assert said(set_(harness, 1, A, life=1)) == [Done(1000)]
    harness.push(0, 1, ONE)
    harness.push(1, 1, ONE, life=1)
    assert rates(harness) == [1.0]
