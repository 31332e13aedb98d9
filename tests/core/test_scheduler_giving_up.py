"""The scheduler: a node gives up joining, and its place is as it found it."""

from __future__ import annotations

import pytest

from kvd.core.machine import Effect, Persisted, Tick, Unsaved
from kvd.protocol.messages import Departure, Done, ErrorCode, Leave, NotYet, NotYetReason, Refused, Welcome
from tests.core.fakes import of, one, said, worker_id
from tests.core.scheduler_harness import Harness, answer


def withdraw(harness: Harness, rank: int, life: int = 0) -> list[Effect]:
    return harness.say(worker_id(rank, life), Leave(9, Departure.WITHDRAWN))


def test_the_place_of_one_that_gave_up_is_free_again() -> None:
    harness = Harness()
    harness.worker(0)
    harness.hold = True
    effects = withdraw(harness, 0)
    assert said(effects) == []
    assert Done(9) in said(harness.step(Persisted(one(of(Unsaved, effects)).token)))
    harness.hold = False
    assert harness.states() == {}
    assert "worker 0" in harness.machine.explain(0.0)["missing"]  # type: ignore[operator]
    assert answer(harness.worker(0, life=1), Welcome) == Welcome(1, 0, None)


def test_what_arrives_late_of_one_that_gave_up_takes_no_place() -> None:
    harness = Harness()
    harness.worker(0)
    withdraw(harness, 0)
    for effects in (harness.worker(0), withdraw(harness, 0)):
        assert answer(effects, Refused).error is ErrorCode.REPLACED
    after = Harness(saved=harness.disk, generation=2)
    assert answer(after.worker(0), Refused).error is ErrorCode.REPLACED
    assert harness.states() == after.states() == {}


def test_one_that_gives_up_before_it_was_let_in_is_not_known() -> None:
    harness = Harness()
    assert answer(withdraw(harness, 0), NotYet).reason is NotYetReason.NOT_JOINED
    assert harness.states() == {}


@pytest.mark.parametrize(
    ("departures", "before", "after"),
    [
        ((Departure.LEFT,), "left", "left"),
        ((Departure.DONE,), "done", "gone"),
        ((), "active", "dead"),
    ],
)
def test_a_successor_that_gives_up_leaves_the_place_as_it_found_it(
    departures: tuple[Departure, ...], before: str, after: str
) -> None:
    harness = Harness()
    harness.worker(0)
    for departure in departures:
        harness.say(worker_id(0), Leave(8, departure))
    assert harness.states() == {"worker 0": before}
    harness.worker(0, life=1)
    assert harness.states() == {"worker 0": "active"}
    assert Done(9) in said(withdraw(harness, 0, life=1))
    for _ in range(25):
        harness.now += 1.0
        harness.step(Tick())
    assert harness.states() == {"worker 0": after}
