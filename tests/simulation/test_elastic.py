"""Workers join when others train, and leave after a step: campaigns, and broken builds that they must catch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvd.core.scheduler.barriers.barriers import _Barrier
from kvd.core.scheduler.membership.roster import Roster
from kvd.core.server.rounds import SliceLog
from kvd.protocol.messages import MemberState
from tests.simulation.mutants_harness import check_caught
from tests.simulator.absences import ELASTIC
from tests.simulator.campaign import LONG, MOST_WORKERS, WORKERS, WORKLOADS, Campaign
from tests.simulator.workloads.elastic import ElasticLedger

SOAK_SEEDS = 500


def test_workers_come_and_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """A campaign in which nobody does would prove little."""
    came_in, left = run_elastic("elastic, nobody is lost", [1], monkeypatch)
    assert came_in >= 2
    assert left >= 1


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(0, SOAK_SEEDS, 100))
@pytest.mark.parametrize("name", ELASTIC)
def test_elastic_soak(name: str, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    came_in, left = run_elastic(name, range(first, first + 100), monkeypatch)
    assert came_in >= 200
    assert left >= 100


def run_elastic(name: str, seeds: Sequence[int], patch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Returns how many times a worker came in that came late, and how many times one left."""
    ledgers: list[ElasticLedger] = []

    def ledger(campaign: Campaign, seed: int) -> ElasticLedger:
        ledgers.append(ElasticLedger(MOST_WORKERS, LONG, first=WORKERS))
        return ledgers[-1]

    patch.setitem(WORKLOADS, "elastic", ledger)
    for seed in seeds:
        ELASTIC[name].run(seed)
    return sum(ledger.came_in for ledger in ledgers), sum(ledger.left for ledger in ledgers)


def awaits_newcomers_at_once(patch: pytest.MonkeyPatch) -> None:
    """The rounds wait for a worker as soon as it has joined."""
    take_seat: Callable[..., Any] = Roster.take_seat

    def mutant(roster: Roster, *arguments: Any) -> Any:
        seat, earlier = take_seat(roster, *arguments)
        if seat.told_predecessor is MemberState.BACK:
            seat.member = seat.member._replace(state=MemberState.ACTIVE)
        return seat, earlier

    patch.setattr(Roster, "take_seat", mutant)


def comes_in_at_the_newest_round(patch: pytest.MonkeyPatch) -> None:
    """A slice takes a worker in where it is itself, whatever step that is."""
    patch.setattr(SliceLog, "clock_of_step", lambda log, first, step: log.closed)


def awaits_newcomers_at_earlier_barriers(patch: pytest.MonkeyPatch) -> None:
    """The barrier of a step waits for workers that came in after it."""
    missing: Callable[..., list[int]] = _Barrier.missing
    patch.setattr(_Barrier, "missing", lambda barrier, required, came_in: missing(barrier, required, {}))


def forgets_rounds_that_closed_without_a_push(patch: pytest.MonkeyPatch) -> None:
    """Where all took part in later steps only, the next one to come in takes their rounds for earlier steps."""
    newest_place: Callable[[SliceLog], int] = SliceLog.newest_place

    def mutant(log: SliceLog) -> int:
        closed, log.closed = log.closed, min(log.closed, log.newest[1])
        try:
            return newest_place(log)
        finally:
            log.closed = closed

    patch.setattr(SliceLog, "newest_place", mutant)


@pytest.mark.parametrize(
    ("mutate", "campaign"),
    [
        (awaits_newcomers_at_once, "elastic, nobody is lost"),
        pytest.param(comes_in_at_the_newest_round, "elastic, nobody is lost", marks=pytest.mark.soak),
        pytest.param(awaits_newcomers_at_earlier_barriers, "elastic", marks=pytest.mark.soak),
        pytest.param(forgets_rounds_that_closed_without_a_push, "elastic", marks=pytest.mark.soak),
    ],
)
def test_broken_build_is_caught(
    mutate: Callable[[pytest.MonkeyPatch], None], campaign: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_caught(mutate, ELASTIC[campaign], "", monkeypatch)
