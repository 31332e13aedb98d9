"""The others go on without a worker that died or was paused: campaigns, and broken builds that they must catch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvd.compute import merge
from kvd.core.server.resume import Resumption
from kvd.core.server.rounds import SliceLog
from kvd.core.server.waiting import Waiters
from tests.simulation.mutants_harness import check_caught
from tests.simulator.absences import LOSSES
from tests.simulator.campaign import LONG, WORKERS, WORKLOADS, Campaign
from tests.simulator.workloads.losses import LossLedger

SEEDS = 1  # of each campaign in `make test`
SOAK_SEEDS = 1000


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A campaign in which nobody takes part again would prove little."""
    assert run_losses(name, range(SEEDS), monkeypatch) >= 1


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(SEEDS, SEEDS + SOAK_SEEDS, 100))
@pytest.mark.parametrize("name", LOSSES)
def test_losses_soak(name: str, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_losses(name, range(first, first + 100), monkeypatch) >= 20


def run_losses(name: str, seeds: Sequence[int], patch: pytest.MonkeyPatch) -> int:
    """Returns how many times a worker took part again."""
    ledgers: list[LossLedger] = []

    def ledger(campaign: Campaign, seed: int) -> LossLedger:
        ledgers.append(LossLedger(WORKERS, LONG))
        return ledgers[-1]

    patch.setitem(WORKLOADS, "losses", ledger)
    for seed in seeds:
        LOSSES[name].run(seed)
    return sum(ledger.returns for ledger in ledgers)


def counts_what_was_dropped(patch: pytest.MonkeyPatch) -> None:
    """A lost worker is told that its push does not count, but it stays in its round."""
    patch.setattr(SliceLog, "drop_unclosed", lambda log, rank: None)


def acknowledges_what_was_dropped(patch: pytest.MonkeyPatch) -> None:
    """A push that was dropped is answered when its round commits without it."""
    patch.setattr(Waiters, "leave_out", lambda waiters, group, rank: None)


def divides_by_all_workers(patch: pytest.MonkeyPatch) -> None:
    """The mean is that of all workers, also of those that gave nothing to the round."""
    divisor: Callable[..., Any] = merge._mean_divisor
    patch.setattr(merge, "_mean_divisor", lambda count, wide: divisor(WORKERS, wide))


def does_not_freeze(patch: pytest.MonkeyPatch) -> None:
    """Servers say where they are before their rounds wait for the worker."""
    patch.setattr(Resumption, "_waits_for", lambda resumption, rank, event, request: True)


def comes_in_at_the_newest_round(patch: pytest.MonkeyPatch) -> None:
    """A slice takes a worker in again where it is itself, whatever step that is."""
    patch.setattr(SliceLog, "clock_of_step", lambda log, first, step: log.closed)


@pytest.mark.parametrize(
    "mutate",
    [
        counts_what_was_dropped,
        acknowledges_what_was_dropped,
        divides_by_all_workers,
        pytest.param(does_not_freeze, marks=pytest.mark.soak),
        pytest.param(comes_in_at_the_newest_round, marks=pytest.mark.soak),
    ],
)
def test_broken_build_is_caught(mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    check_caught(mutate, LOSSES["losses"], "", monkeypatch)
