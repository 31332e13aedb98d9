"""Workers with uneven data wait for each other at points: campaigns, and broken builds that they must catch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvd.core.machine import Received
from kvd.core.scheduler.machine import SchedulerMachine
from kvd.core.scheduler.membership.roster import MemberEvent, Roster, Seat
from kvd.core.server.resume import Resumption
from kvd.core.worker.clocks import WorkerClocks
from kvd.protocol.messages import MemberState
from tests.simulation.mutants_harness import check_caught
from tests.simulation.test_losses import counts_what_was_dropped, divides_by_all_workers
from tests.simulator.absences import UNEVEN

SEEDS = 1  # of these campaigns in `make test`
ALWAYS = ("uneven", "uneven, nasty", "uneven, servers die", "uneven, async, stale by 1", "uneven, losses")
SOAK_SEEDS = 1000


@pytest.mark.parametrize("name", ALWAYS)
def test_uneven(name: str) -> None:
    run_uneven(name, range(SEEDS))


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("uneven, losses", 84),  # the successor of one that came in behind its loop took the point for passed
        ("uneven, late, servers die", 134),  # a round ended in the view of a handover, without the new backup
        ("uneven, late, servers die", 498),  # one that skipped rounds in a step died, and its successor pushed to these
    ],
)
def test_found(name: str, seed: int) -> None:
    UNEVEN[name].run(seed)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(0, SOAK_SEEDS, 100))
@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_soak(name: str, first: int) -> None:
    run_uneven(name, range(first, first + 100))


def run_uneven(name: str, seeds: Sequence[int]) -> None:
    for seed in seeds:
        UNEVEN[name].run(seed)


def lets_go_one_after_the_other(patch: pytest.MonkeyPatch) -> None:
    """When all have come, each takes part again as soon as it is heard."""
    heard, transition = SchedulerMachine._heard, Roster.transition
    let_go: set[int] = set()

    def release_later(roster: Roster, seat: Seat, event: MemberEvent, *args: Any) -> bool:
        if event is MemberEvent.RELEASED and seat.member.incarnation not in let_go:
            let_go.add(seat.member.incarnation)
            return False
        return transition(roster, seat, event, *args)

    def release_when_heard(machine: SchedulerMachine, seat: Seat, event: Received, now: float) -> None:
        heard(machine, seat, event, now)
        if seat.member.incarnation in let_go:
            if seat.member.state is MemberState.IDLE:
                machine._roster.transition(seat, MemberEvent.RELEASED)
                machine._publish()
            let_go.discard(seat.member.incarnation)

    patch.setattr(Roster, "transition", release_later)
    patch.setattr(SchedulerMachine, "_heard", release_when_heard)


def pushes_before_the_servers_know(patch: pytest.MonkeyPatch) -> None:
    """Servers do not compare views before they let a worker go on."""
    patch.setattr(Resumption, "_waits_for", lambda resumption, rank, event, request: True)


def keeps_its_own_clocks(patch: pytest.MonkeyPatch) -> None:
    """A worker goes on with the clock that it had when it came to the point."""
    patch.setattr(WorkerClocks, "take_again", lambda clocks, key, then: then(None))


@pytest.mark.parametrize(
    ("mutate", "campaign"),
    [
        (lets_go_one_after_the_other, "uneven"),
        pytest.param(keeps_its_own_clocks, "uneven", marks=pytest.mark.soak),
        pytest.param(pushes_before_the_servers_know, "uneven, one way", marks=pytest.mark.soak),
        pytest.param(counts_what_was_dropped, "uneven, losses", marks=pytest.mark.soak),
        pytest.param(divides_by_all_workers, "uneven, losses", marks=pytest.mark.soak),
    ],
)
def test_broken_build_is_caught(
    mutate: Callable[[pytest.MonkeyPatch], None], campaign: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_caught(mutate, UNEVEN[campaign], "", monkeypatch)
