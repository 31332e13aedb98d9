"""Campaigns: a workload, a cluster and a set of mishaps, of which every seed is another run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from kvd.testing.mishaps import Mishaps, live_through
from kvd.testing.network import CALM, NASTY, ROUGH, Faults
from kvd.testing.refusals import RefusalLedger
from kvd.testing.settings import Cluster
from kvd.testing.simulator import World
from kvd.testing.workloads import (
    Ledger,
    LifeLedger,
    ListLedger,
    ListLives,
    ListTraining,
    MixedRounds,
    Rounds,
    Training,
)

WORKERS = 3
STEPS = 8
HARD = Mishaps(within_s=6.0, crashes=2, pauses=2, cuts=2, ghosts=2, scheduler_restarts=1)
LASTING = replace(HARD, within_s=25.0)  # so long takes a run in a nasty network, of which joining is a good part
LONG_PAUSES = Mishaps(within_s=6.0, crashes=1, pauses=3, cuts=1, scheduler_restarts=1, longest_pause_s=18.0)


@dataclass(frozen=True, slots=True)
class Campaign:
    """What `run` does with a seed; Violation if a promise is broken."""

    workload: (
        str  # "ledger" | "lives" | "rounds" | "training"; "lists", "list lives", "mixed", "list training", "refusals"
    )
    mode: str = "sync"
    staleness: int = -1
    mishaps: Mishaps = HARD
    faults: Faults = ROUGH
    rounds_ahead: int = 2
    job_s: tuple[float, float] = (0.0, 0.01)
    timeout_s: float | None = None  # of the pushes of a ledger
    state_dir: bool = True  # the scheduler has a record to start from
    failing_updates: float = 0.0  # so many of 1; for "refusals"

    def run(self, seed: int) -> World:
        cluster = Cluster(
            workers=WORKERS,
            mode=self.mode,
            staleness=self.staleness,
            rounds_ahead=self.rounds_ahead,
            job_s=self.job_s,
            state_dir=self.state_dir,
            failing_updates=self.failing_updates,
        )
        world = World(seed, cluster, self.faults)
        if self.workload in ("training", "list training"):
            training = Training(STEPS) if self.workload == "training" else ListTraining(STEPS, seed=seed)
            live_through(world, training.program, self.mishaps)
            if training.bits(world) != undisturbed_bits(self.workload):
                world.fail("the weights differ from those of an undisturbed run")
            return world
        workload = self._workload(seed)
        live_through(world, workload.program, self.mishaps)
        workload.check(world)
        return world

    def _workload(self, seed: int) -> Ledger | Rounds | RefusalLedger:
        if self.workload == "refusals":
            return RefusalLedger(WORKERS, STEPS, timeout_s=self.timeout_s)
        if self.workload == "rounds":
            return Rounds(WORKERS, STEPS, pushpull=seed % 2 == 0)
        if self.workload == "mixed":
            return MixedRounds(WORKERS, STEPS, pushpull=seed % 2 == 0, seed=seed)
        if self.workload == "lives":
            return LifeLedger(WORKERS, STEPS)
        if self.workload == "list lives":
            return ListLives(WORKERS, STEPS, seed=seed)
        if self.workload == "lists":
            return ListLedger(WORKERS, STEPS, timeout_s=self.timeout_s, seed=seed)
        return Ledger(WORKERS, STEPS, timeout_s=self.timeout_s)


@cache
def undisturbed_bits(workload: str = "training") -> bytes:
    """The weights at the end of a training that nothing happens to, and whose keys are pushed one by one."""
    world = World(0, Cluster(workers=WORKERS), CALM)
    training = Training(STEPS) if workload == "training" else ListTraining(STEPS, apart=True)
    live_through(world, training.program, Mishaps())
    return training.bits(world)


CAMPAIGNS: dict[str, Campaign] = {
    "ledger": Campaign("ledger"),
    "ledger, nasty": Campaign("ledger", mishaps=LASTING, faults=NASTY),
    "ledger, long pauses": Campaign("ledger", mishaps=LONG_PAUSES),
    "ledger, timeouts": Campaign("ledger", mishaps=LASTING, faults=NASTY, timeout_s=0.4),
    "ledger, far ahead": Campaign("ledger", rounds_ahead=5, job_s=(0.0, 0.3)),
    "ledger, async": Campaign("ledger", mode="async"),
    "ledger, stale by 1": Campaign("ledger", mode="async", staleness=1),
    "ledger, stale by 0, nasty": Campaign("ledger", mode="async", staleness=0, mishaps=LASTING, faults=NASTY),
    "ledger, no record": Campaign("ledger", state_dir=False),
    "lives": Campaign("lives"),
    "lives, no record": Campaign("lives", mishaps=LASTING, faults=NASTY, state_dir=False),
    "lives, nasty": Campaign("lives", mishaps=LASTING, faults=NASTY),
    "lives, async, slow jobs": Campaign("lives", mode="async", job_s=(0.0, 0.5), mishaps=LASTING, faults=NASTY),
    "rounds": Campaign("rounds"),
    "rounds, no record": Campaign("rounds", state_dir=False),
    "rounds, nasty": Campaign("rounds", mishaps=LASTING, faults=NASTY, job_s=(0.0, 0.2)),
    "rounds, long pauses": Campaign("rounds", mishaps=LONG_PAUSES),
    "mixed": Campaign("mixed"),
    "mixed, nasty": Campaign("mixed", mishaps=LASTING, faults=NASTY, job_s=(0.0, 0.2)),
    "mixed, long pauses": Campaign("mixed", mishaps=LONG_PAUSES),
    "lists": Campaign("lists"),
    "lists, nasty": Campaign("lists", mishaps=LASTING, faults=NASTY, job_s=(0.0, 0.2)),
    "lists, far ahead": Campaign("lists", rounds_ahead=5, job_s=(0.0, 0.3)),
    "lists, async, slow jobs": Campaign("lists", mode="async", mishaps=LASTING, faults=NASTY, job_s=(0.0, 0.5)),
    "lists, stale by 1": Campaign("lists", mode="async", staleness=1),
    "list lives": Campaign("list lives", mishaps=LASTING, faults=NASTY),
    "list training": Campaign("list training"),
    "list training, nasty": Campaign("list training", mishaps=LASTING, faults=NASTY, job_s=(0.0, 0.2)),
    "refusals": Campaign("refusals", failing_updates=0.3),
    "refusals, nasty": Campaign("refusals", mishaps=LASTING, faults=NASTY, job_s=(0.0, 0.5), failing_updates=0.3),
    "refusals, async": Campaign(
        "refusals", mode="async", mishaps=LASTING, faults=NASTY, job_s=(0.0, 0.5), failing_updates=0.3
    ),
    "refusals, timeouts": Campaign(
        "refusals", mishaps=LASTING, faults=NASTY, job_s=(0.0, 0.5), failing_updates=0.2, timeout_s=0.4
    ),
    "refusals, stale by 1": Campaign("refusals", mode="async", staleness=1, job_s=(0.0, 0.5), failing_updates=0.3),
    "training": Campaign("training"),
    "training, no record": Campaign("training", state_dir=False),
    "training, nasty": Campaign("training", mishaps=LASTING, faults=NASTY),
    "training, long pauses": Campaign("training", mishaps=LONG_PAUSES),
}
