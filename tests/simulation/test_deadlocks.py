"""Tests of the simulator: builds that take workers for stuck that are not, or do not notice that they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvd.core.scheduler.barriers.deadlocks import Deadlocks
from kvd.core.server.wait_answers import WaitAnswers
from kvd.core.worker.looks import Looks, _Stamp
from kvd.protocol.messages import Absent
from tests.simulator.campaign import CAMPAIGNS, Campaign
from tests.simulator.workloads.tangles import Script, Step, stuck_ranks, tangled

SEEDS = 60


def caught(campaign: Campaign) -> str:
    """What the checkers say of the first seed that fails; "" if none does."""
    for seed in range(SEEDS):
        try:
            campaign.run(seed)
        except AssertionError as violation:
            return str(violation)
    return ""


def first_sight(patch: pytest.MonkeyPatch) -> None:
    """All have reported that they are blocked, at different times: the scheduler does not have them look again."""
    take = Deadlocks.take

    def hasty(deadlocks: Deadlocks, *arguments: Any) -> Any:
        sends = take(deadlocks, *arguments)
        proof = deadlocks._proof
        if proof is not None and not proof.lines:
            seats = [seat for seat in deadlocks._roster.seats() if seat.member.rank in proof.stamps]
            workers = [seat for seat in seats if seat.member.role == "worker"]
            deadlocks._proof = type(proof)(proof.number, proof.stamps, ("hasty",))
            sends += deadlocks._tell(workers)
        return sends

    patch.setattr(Deadlocks, "take", hasty)


def old_stamps(patch: pytest.MonkeyPatch) -> None:
    """The stamp does not change when something happens."""
    patch.setattr(_Stamp, "renewed", lambda stamp, *activity: 1)
    patch.setattr(_Stamp, "number", 1, raising=False)
    patch.setattr(_Stamp, "stands_at", lambda stamp, *activity: True)


def under_way_is_blocked(patch: pytest.MonkeyPatch) -> None:
    """A worker counts as blocked although something of it is under way."""
    patch.setattr(Looks, "_is_blocked", lambda looks, waiting, blockers: True)


def at_work_is_waiting(patch: pytest.MonkeyPatch) -> None:
    """A server takes requests that it works on for held."""
    patch.setattr(WaitAnswers, "_absent", lambda answers, group, rank: (Absent(1 - min(rank, 1), 0),))


def nobody_is_told(patch: pytest.MonkeyPatch) -> None:
    """The scheduler does not tell anybody what it has found."""
    patch.setattr(Deadlocks, "_tell", lambda deadlocks, seats: [])


@pytest.mark.parametrize(
    "mutate",
    [first_sight, old_stamps, under_way_is_blocked, at_work_is_waiting, nobody_is_told],
    ids=lambda mutate: mutate.__name__,
)
def test_broken_build_is_caught(mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    violation = caught(CAMPAIGNS["tangles, nasty"])
    assert "deadlock" in violation or "has not finished" in violation or "ended with" in violation, violation


def test_tangles_are_stuck_often_and_not_always() -> None:
    """A workload whose programs always end, or never, would prove little."""
    stuck = [len(stuck_ranks(tangled(3, 8, seed).scripts)) for seed in range(100)]
    assert 20 < sum(map(bool, stuck)) < 80
    assert 2 in stuck
    assert 3 in stuck


@pytest.mark.parametrize(
    ("steps", "stuck"),
    [
        (["pushpull a,pushpull b", "pushpull a,pushpull b"], []),
        (["pushpull a,pushpull b", "pushpull b,pushpull a"], [0, 1]),
        (["push a,pushpull b", "push b,pushpull a"], []),
        (["push a,flush,pushpull b", "push b,pushpull a"], []),
        (["push a,flush,push b", "push b,flush,push a"], [0, 1]),
        (["barrier x", "sleep"], []),
        (["barrier x,pushpull a", "pushpull a,barrier x"], [0, 1]),
        (["barrier x", "barrier y"], [0, 1]),
        (["pushpull a", "sleep", "pushpull a"], []),
        (["pushpull a,barrier x", "sleep", "barrier x,pushpull a"], [0, 2]),
    ],
)
def test_the_model_of_the_tangles(steps: list[str], stuck: list[int]) -> None:
    scripts = [Script(tuple(Step(*step.split()) for step in line.split(","))) for line in steps]
    assert stuck_ranks(scripts) == stuck
