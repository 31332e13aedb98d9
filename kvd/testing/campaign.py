"""Campaigns: a workload, a cluster and a set of mishaps, of which every seed is another run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from kvd.testing.mishaps import Mishaps, live_through
from kvd.testing.network import CALM, NASTY, ROUGH, Faults
from kvd.testing.settings import Cluster
from kvd.testing.simulator import World
from kvd.testing.workloads import Ledger, LifeLedger, MixedRounds, Rounds, Training

WORKERS = 3
STEPS = 8
HARD = Mishaps(crashes=2, pauses=2, cuts=2, ghosts=2, scheduler_restarts=1)
NO_CRASHES = Mishaps(pauses=2, cuts=2, scheduler_restarts=2)
LONG_PAUSES = Mishaps(crashes=1, pauses=3, cuts=1, scheduler_restarts=1, longest_pause_s=18.0)


@dataclass(frozen=True, slots=True)
class Campaign:
    """What `run` does with a seed; Violation if a promise is broken."""

    workload: str  # "ledger" | "lives" | "rounds" | "mixed" | "training"
    mode: str = "sync"
    staleness: int = -1
    mishaps: Mishaps = HARD
    faults: Faults = ROUGH
    rounds_ahead: int = 2
    job_s: tuple[float, float] = (0.0, 0.01)
    timeout_s: float | None = None  # of the ledger's pushes
    state_dir: bool = True  # the scheduler has a record to start from

    def run(self, seed: int) -> World:
        cluster = Cluster(
            workers=WORKERS,
            mode=self.mode,
            staleness=self.staleness,
            rounds_ahead=self.rounds_ahead,
            job_s=self.job_s,
            state_dir=self.state_dir,
        )
        world = World(seed, cluster, self.faults)
        if self.workload == "training":
            training = Training(STEPS)
            live_through(world, training.program, self.mishaps)
            if training.bits(world) != undisturbed_bits():
                world.fail("the weights differ from those of an undisturbed run")
            return world
        workload = self._workload(seed)
        live_through(world, workload.program, self.mishaps)
        workload.check(world)
        return world

    def _workload(self, seed: int) -> Ledger | Rounds:
        if self.workload == "rounds":
            return Rounds(WORKERS, STEPS, pushpull=seed % 2 == 0)
        if self.workload == "mixed":
            return MixedRounds(WORKERS, STEPS, pushpull=seed % 2 == 0)
        if self.workload == "lives":
            return LifeLedger(WORKERS, STEPS)
        return Ledger(WORKERS, STEPS, timeout_s=self.timeout_s)


@cache
def undisturbed_bits() -> bytes:
    """The weights at the end of a training that nothing happens to."""
    world = World(0, Cluster(workers=WORKERS), CALM)
    training = Training(STEPS)
    live_through(world, training.program, Mishaps())
    return training.bits(world)


CAMPAIGNS: dict[str, Campaign] = {
    "ledger": Campaign("ledger"),
    "ledger, nasty": Campaign("ledger", faults=NASTY),
    "ledger, long pauses": Campaign("ledger", mishaps=LONG_PAUSES),
    "ledger, timeouts": Campaign("ledger", faults=NASTY, timeout_s=0.4),
    "ledger, far ahead": Campaign("ledger", rounds_ahead=5, job_s=(0.0, 0.3)),
    "ledger, async": Campaign("ledger", mode="async"),
    "ledger, stale by 1": Campaign("ledger", mode="async", staleness=1),
    "ledger, stale by 0, nasty": Campaign("ledger", mode="async", staleness=0, faults=NASTY),
    "ledger, no record": Campaign("ledger", mishaps=NO_CRASHES, state_dir=False),
    "lives": Campaign("lives"),
    "lives, nasty": Campaign("lives", faults=NASTY),
    "lives, async, slow jobs": Campaign("lives", mode="async", job_s=(0.0, 0.5), faults=NASTY),
    "rounds": Campaign("rounds"),
    "rounds, no record": Campaign("rounds", mishaps=NO_CRASHES, state_dir=False),
    "rounds, nasty": Campaign("rounds", faults=NASTY, job_s=(0.0, 0.2)),
    "rounds, long pauses": Campaign("rounds", mishaps=LONG_PAUSES),
    "mixed": Campaign("mixed"),
    "mixed, nasty": Campaign("mixed", faults=NASTY, job_s=(0.0, 0.2)),
    "mixed, long pauses": Campaign("mixed", mishaps=LONG_PAUSES),
    "training": Campaign("training"),
    "training, nasty": Campaign("training", faults=NASTY),
    "training, long pauses": Campaign("training", mishaps=LONG_PAUSES),
}
