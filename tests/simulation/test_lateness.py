"""Two workers go on without a third that is late: campaigns, broken builds that they must catch, and what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from kvd.core.scheduler.membership.roster import Roster
from kvd.core.server.late import LateWorkers
from kvd.core.server.rounds import SliceLog
from tests.simulation.mutants_harness import check_caught
from tests.simulator.absences import LATENESS
from tests.simulator.campaign import WORKERS
from tests.simulator.mishaps import Mishaps, live_through
from tests.simulator.process import Coroutine
from tests.simulator.settings import ClusterSettings, Timeouts
from tests.simulator.simulator import Me, World
from tests.simulator.workloads.losses import LossLedger

SOAK_SEEDS = 1000
GRACE_S = 1.0


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "late" else pytest.mark.soak) for name in LATENESS]
)
def test_lateness(name: str) -> None:
    LATENESS[name].run(0)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(1, 1 + SOAK_SEEDS, 100))
@pytest.mark.parametrize("name", LATENESS)
def test_lateness_soak(name: str, first: int) -> None:
    for seed in range(first, first + 100):
        LATENESS[name].run(seed)


# ── broken builds ──


def a_server_decides_by_itself(patch: pytest.MonkeyPatch) -> None:
    """It does not tell the scheduler who is late, and goes on without them."""

    def look(late: LateWorkers) -> None:
        ranks = {rank for group, clock, _ in late._open.values() for rank in late._missing(group, clock)}
        late._participants.apart |= ranks
        late._participants.awaited = [rank for rank in late._participants.awaited if rank not in ranks]

    patch.setattr(LateWorkers, "_look", look)


def one_is_taken_for_a_quorum(patch: pytest.MonkeyPatch) -> None:
    """A round waits for nobody for more than the time of grace."""
    patch.setattr(Roster, "has_quorum_without", lambda roster, ranks: True)
    patch.setattr(SliceLog, "has_quorum", lambda log, clock, quorum, required: bool(log._staging.rounds.get(clock)))


@pytest.mark.parametrize(
    ("mutate", "complaint"),
    [(a_server_decides_by_itself, "rounds wait for"), (one_is_taken_for_a_quorum, "the pushes of step")],
)
def test_broken_build_is_caught(
    mutate: Callable[[pytest.MonkeyPatch], None], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_caught(mutate, LATENESS["late"], complaint, monkeypatch)


# ── what a worker costs that is slow for good ──


@dataclass
class OneIsSlow(LossLedger):
    """The last worker takes three times as long for a step as the others, who take a second.

    Attributes:
        began: when worker 0 came to each of its steps.
    """

    began: list[float] = field(default_factory=list)

    def computes_s(self, rank: int, step: int) -> float:
        return 3.0 if rank == self.workers - 1 else 1.0

    def push_all(self, me: Me, loops: object, step: int) -> Coroutine:
        if me.rank == 0:
            self.began.append(me.world.clock.now)
        yield from super().push_all(me, loops, step)  # type: ignore[arg-type]


def test_a_worker_that_is_slow_for_good_hardly_slows_the_others() -> None:
    """They would take 3 s for a step without a quorum, and 1.4 s if it came back after each step of its own."""
    timeouts = Timeouts(quorum=2, quorum_grace_s=GRACE_S)
    world = World(1, ClusterSettings(merge="mean", on_worker_loss="wait", timeouts=timeouts))
    ledger = OneIsSlow(WORKERS, 60, least=2)
    live_through(world, ledger.program, Mishaps())
    ledger.check(world)
    steps = [later - earlier for earlier, later in zip(ledger.began, ledger.began[1:], strict=False)]
    assert len(steps) == 59
    assert sum(steps) / len(steps) < 1.2
    assert ledger.returns > 5
