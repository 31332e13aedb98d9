"""A server that another one takes the place of: it answers nothing of what was not held, and begins anew."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core.machine import Apply
from kvd.optimizer import SGD, to_wire
from kvd.protocol.messages import (
    NO_RANK,
    Delete,
    Done,
    KeyId,
    Lookup,
    NotYet,
    Refused,
    SetOptimizer,
    StoreState,
)
from tests.core.replica_harness import A, B, Cluster, Wire
from tests.core.test_promotion import BACK, OTHERS, elsewhere, fail_over, ready
from tests.core.test_records import ALONE, CHANGES, HELD, ONE, answers, push


def asked(name: str) -> tuple[Cluster, list[Wire], type[Any], int]:
    """One of CHANGES was asked for, and the messages to the backup have not arrived: these, and the answer that it will
    have, among those after so many."""
    settings, ask, kind = CHANGES[name]
    settings = dict(settings)
    optimizer, publish = settings.pop("optimizer", None), settings.pop("publish", True)
    run = Cluster([HELD, *OTHERS], **settings)
    run.create("w", ONE, publish=publish)
    for rank in (0, 1) if optimizer is not None else ():
        run.say(rank, SetOptimizer(run.request(), to_wire(optimizer)))
    run.auto = False
    first = len(run.answers)
    ask(run)
    return run, run.to(B), kind, first


TOLD_TO_ALL = {"set optimizer"}  # servers: the one that leads now uses it for what it takes over


@pytest.mark.parametrize("name", [name for name in CHANGES if name not in TOLD_TO_ALL])
def test_a_server_that_does_not_lead_any_more_answers_nothing_of_what_was_not_held(name: str) -> None:
    """The backup has not held the record, and leads now: nobody may take it for done."""
    run, records, kind, first = asked(name)
    assert records
    run.look([BACK, *OTHERS], only=[B, A])
    assert answers(run, kind, first) == 0
    for record in records:
        run.arrive(record)
    for done in run.to(A):
        run.arrive(done)
    assert answers(run, kind, first) == 0
    assert run.nodes[A].table.slices == {}
    assert run.nodes[A].table.live == {}
    assert run.nodes[A].machine.explain(0.0)["records_waiting"] == 0
    run.settle()
    assert run.picture(A) == run.picture(B)
    assert run.nodes[B].told[-1:] or run.nodes[A].held() is not None


def test_a_job_that_ends_late_changes_nothing() -> None:
    run = ready(SGD(0.5))
    old = run.nodes[A]
    old.holds_jobs = True
    run.push(0, 1, ONE, request=501)
    run.push(1, 1, ONE, request=502)
    assert [type(job) for job in old.jobs] == [Apply]
    first = len(run.answers)
    run.look([BACK, *OTHERS])
    assert old.held() is None  # it cannot begin: the old update still runs
    old.holds_jobs = False
    run.finish(old)
    run.settle()
    assert answers(run, Done, first) == 0
    assert old.held() is not None
    assert run.picture(A) == run.picture(B)
    for rank, request in ((0, 501), (1, 502)):
        run.push(rank, 1, ONE, request=request, at=B)
    assert run.value(B).tolist() == [0, 0]
    assert run.picture(A) == run.picture(B)
    assert old.runner.slices == {("w", 0)}


def test_requests_that_wait_are_dropped_without_an_answer() -> None:
    run = ready()
    run.push(0, 1, ONE, request=501, pull=True)
    run.pull(1, 1)
    run.say(1, Lookup(70, ("new",), True))
    run.say(1, Delete(71, (KeyId("w", 0),)))
    first = len(run.answers)
    fail_over(run, dies=False)
    assert run.told_since(first) == []
    assert run.nodes[A].machine.explain(0.0)["requests_waiting"] == 0
    for said in (run.push(0, 1, ONE, request=501), run.say(1, Lookup(70, ("new",), True))):
        assert elsewhere(said)


def test_it_leads_again_with_what_the_other_one_did_meanwhile() -> None:
    run = ready(SGD(0.5))
    run.look([BACK, *OTHERS])
    for rank in (0, 1):
        run.push(rank, 1, ONE, at=B)
    run.settle()
    run.look([(B, A, NO_RANK), *OTHERS])
    for rank in (0, 1):
        run.push(rank, 2, ONE, at=B)
    before = run.picture(B)
    run.look([ALONE, *OTHERS])
    assert run.picture(A) == before
    for rank in (0, 1):
        run.push(rank, 3, ONE)
    assert run.value(A).tolist() == [-2, -4]  # [1, 2] - 3 * [1, 2]
    assert run.nodes[B].table.slices == {}


def test_a_record_of_the_server_that_led_before_is_not_held() -> None:
    run = ready()
    run.auto = False
    push(run)
    late = run.to(B)
    run.look([BACK, *OTHERS], only=[B])
    for wire in late:
        run.arrive(wire)
    said = [wire.message for wire in run.to(A) if not hasattr(wire.message, "images")]
    assert all(not isinstance(message, Done) for message in said)
    assert any(isinstance(message, NotYet | Refused) for message in said)
    assert run.value(B).tolist() == [1, 2]


def test_a_state_that_is_loaded_while_another_server_begins_to_lead_is_not_answered() -> None:
    run = ready(SGD(0.5))
    old = run.nodes[A]
    old.holds_jobs = True
    run.say(0, StoreState(70, "w", 0, 3, ()))
    first = len(run.answers)
    run.look([BACK, *OTHERS])
    old.holds_jobs = False
    run.finish(old)
    run.settle()
    assert run.told_since(first) == []
    assert run.picture(A) == run.picture(B)
