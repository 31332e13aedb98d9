"""Campaigns: a workload, a cluster and a set of mishaps; each seed is another run of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple, Protocol

from tests.simulator.mishaps import Mishaps, live_through
from tests.simulator.network import CALM, LATE_COPIES, NASTY, ROUGH, Faults
from tests.simulator.process import Coroutine
from tests.simulator.settings import ClusterSettings, ShellSettings, Timeouts
from tests.simulator.simulator import Me, World
from tests.simulator.workloads.captured import captured_rounds, captured_tables
from tests.simulator.workloads.coded_rounds import CodedRounds
from tests.simulator.workloads.delays import Delays
from tests.simulator.workloads.deletions import Generations
from tests.simulator.workloads.elastic import ElasticLedger
from tests.simulator.workloads.forms import VALUES, Forms
from tests.simulator.workloads.healed import HealedTraining
from tests.simulator.workloads.in_flight import rounds_in_flight
from tests.simulator.workloads.ledger import Ledger, list_ledger
from tests.simulator.workloads.lives import LifeLedger, ListLives
from tests.simulator.workloads.losses import LossLedger
from tests.simulator.workloads.meetings import Meetings
from tests.simulator.workloads.readings import uneven_rounds, watched_rounds
from tests.simulator.workloads.refusals import RefusalLedger
from tests.simulator.workloads.rounds import Rounds, merged_rounds, mixed_rounds
from tests.simulator.workloads.shared import SharedLedger
from tests.simulator.workloads.stepped import SteppedLedger, SteppedTraining
from tests.simulator.workloads.steps import mostly_together, one_by_one
from tests.simulator.workloads.tables import table_rounds
from tests.simulator.workloads.tangles import tangled
from tests.simulator.workloads.training import Training, list_training
from tests.simulator.workloads.uneven import PER_EPOCH, UnevenLedger
from tests.simulator.workloads.uneven_losses import uneven_losses

WORKERS = 3
MOST_WORKERS = 5  # of an elastic job
STEPS = 8
EPOCHS = 3  # of workers with uneven data
LONG = 40  # steps of a workload in which workers come back after they were given up
HARD = Mishaps(within_s=10.0, crashes=2, pauses=2, cuts=2, ghosts=2, scheduler_restarts=1)
LASTING = replace(HARD, within_s=25.0)  # runs in a nasty network take this long; joining is a good part of it
BUMPY = Mishaps(within_s=12.0, pauses=3, cuts=2, scheduler_restarts=1)  # nobody dies
NO_DEATHS = replace(HARD, crashes=0, ghosts=0)  # of workers
LONG_PAUSES = Mishaps(within_s=12.0, crashes=1, pauses=3, cuts=1, scheduler_restarts=1, longest_pause_s=18.0)
SERVERS_DIE = replace(HARD, crashes=1, ghosts=1, server_crashes=3)
SERVERS_DIE_LONG = replace(SERVERS_DIE, within_s=25.0, server_crashes=5)
PAUSED_LEADERS = replace(LONG_PAUSES, server_crashes=2)
JUMPS = replace(HARD, clock_jumps=4, one_way_cuts=4, longest_pause_s=14.0)  # further than any timeout
SERVERS_DIE_ONE_WAY = replace(SERVERS_DIE, within_s=20.0, one_way_cuts=6, clock_jumps=2, longest_pause_s=14.0)
TORN = replace(SERVERS_DIE, within_s=20.0, scheduler_restarts=5)
OLD_RECORD = replace(HARD, scheduler_restarts=0, old_records=1)
OLD_RECORD_SERVERS_DIE = replace(SERVERS_DIE, scheduler_restarts=0, old_records=1)
SLOW_DISK = ShellSettings(persist_s=(0.05, 1.0))
LOSING = replace(HARD, within_s=40.0, crashes=4, pauses=9, cuts=6, longest_pause_s=7.0, restart_after_s=(0.5, 8.0))
LATE = replace(LASTING, crashes=3, restart_after_s=(8.0, 16.0))  # most of the dead are declared dead first


class Patience(NamedTuple):
    """How long programs wait.

    Attributes:
        timeout_s: of the pushes of a ledger; None: the cluster's.
        notice_s: when workers begin to look what their calls wait for.
    """

    timeout_s: float | None = None
    notice_s: float = 10.0


PATIENT = Patience()
IMPATIENT = Patience(timeout_s=0.4)
CURIOUS = Patience(notice_s=0.3)


class Workload(Protocol):
    """A program for every worker, and what must hold when all have run it."""

    def program(self, me: Me) -> Coroutine: ...

    def check(self, world: World) -> None:
        """Raises Violation if a promise was broken."""


@dataclass(frozen=True, slots=True)
class Campaign:
    """What `run` does with a seed.

    Attributes:
        workload: a name in WORKLOADS.
        forms: which keys of a ledger are tables, or compressed.
    """

    workload: str
    mode: str = "sync"
    staleness: int = -1
    mishaps: Mishaps = HARD
    faults: Faults = ROUGH
    rounds_ahead: int = 2
    patience: Patience = PATIENT
    servers: int = 2
    replicas: int = 1
    merge: str = "sum"
    on_worker_loss: str = "fail"
    quorum: int = 0
    worker_timeout_s: float = 10.0
    forms: Forms = VALUES
    shell: ShellSettings = field(default_factory=ShellSettings)

    def run(self, seed: int) -> World:
        """The world at the end of a run. Raises Violation if a promise was broken."""
        cluster = ClusterSettings(
            servers=self.servers,
            replicas=self.replicas,
            workers=WORKERS,
            mode=self.mode,
            merge=self.merge,
            on_worker_loss=self.on_worker_loss,
            max_workers=MOST_WORKERS if self.workload == "elastic" else 0,
            staleness=self.staleness,
            rounds_ahead=self.rounds_ahead,
            timeouts=Timeouts(
                notice_s=self.patience.notice_s,
                worker_timeout_s=self.worker_timeout_s,
                heartbeat_interval_s=min(1.0, self.worker_timeout_s / 5),
                quorum=self.quorum,
            ),
            shell=self.shell,
        )
        world = World(seed, cluster, self.faults)
        workload = WORKLOADS[self.workload](self, seed)
        live_through(world, workload.program, self.mishaps, reader=getattr(workload, "reader", None))
        workload.check(world)
        return world


@cache
def undisturbed_weights(workload: str) -> bytes:
    """The weights at the end of a training that nothing happens to, and whose keys are pushed one by one."""
    world = World(0, ClusterSettings(workers=WORKERS), CALM)
    training = Training(STEPS) if workload == "training" else list_training(STEPS, one_by_one)
    live_through(world, training.program, Mishaps())
    return training.weights(world)


WORKLOADS: dict[str, Callable[[Campaign, int], Workload]] = {
    "ledger": lambda campaign, seed: Ledger(
        WORKERS, STEPS, timeout_s=campaign.patience.timeout_s, forms=campaign.forms
    ),
    "lives": lambda campaign, seed: LifeLedger(WORKERS, STEPS, forms=campaign.forms),
    "lists": lambda campaign, seed: list_ledger(WORKERS, STEPS, seed, campaign.patience.timeout_s),
    "list lives": lambda campaign, seed: ListLives(
        WORKERS, STEPS, grouping=mostly_together(seed), forms=campaign.forms
    ),
    "deletions": lambda campaign, seed: Generations(WORKERS, sync=campaign.mode == "sync", forms=campaign.forms),
    "meetings": lambda campaign, seed: Meetings(WORKERS, STEPS),
    "refusals": lambda campaign, seed: RefusalLedger(WORKERS, STEPS, timeout_s=campaign.patience.timeout_s),
    "rounds": lambda campaign, seed: Rounds(WORKERS, STEPS, pushpull=seed % 2 == 0),
    "singles": lambda campaign, seed: Rounds(WORKERS, LONG, grouping=one_by_one, pace_s=0.1, size=101),
    "mixed": lambda campaign, seed: mixed_rounds(WORKERS, STEPS, seed, pushpull=seed % 2 == 0),
    "in flight": lambda campaign, seed: rounds_in_flight(WORKERS, 2 * STEPS, seed),
    "merges": lambda campaign, seed: merged_rounds(WORKERS, STEPS, seed),
    "casts": lambda campaign, seed: mixed_rounds(WORKERS, STEPS, seed, pushpull=seed % 2 == 0, casts=True),
    "coded": lambda campaign, seed: CodedRounds(WORKERS, STEPS, campaign.merge, pushpull=seed % 2 == 0),
    "tables": lambda campaign, seed: table_rounds(
        WORKERS,
        STEPS,
        seed,
        parts=campaign.servers,
        sync=campaign.mode == "sync",
        updates_fail=campaign.shell.failing_updates > 0,
        has_copies=campaign.replicas > 1,
    ),
    "delays": lambda campaign, seed: Delays(
        WORKERS, STEPS, seed, is_exact=campaign.mishaps == Mishaps() and campaign.faults == CALM
    ),
    "tangles": lambda campaign, seed: tangled(WORKERS, STEPS, seed, max(campaign.staleness, 0)),
    "training": lambda campaign, seed: Training(STEPS, expected=undisturbed_weights("training")),
    "watched": lambda campaign, seed: watched_rounds(WORKERS, STEPS, seed),
    "captured": lambda campaign, seed: captured_rounds(WORKERS, 2 * STEPS, seed),
    "captured tables": lambda campaign, seed: captured_tables(WORKERS, 2 * STEPS, seed, parts=campaign.servers),
    "watched, uneven": lambda campaign, seed: uneven_rounds(WORKERS, STEPS, seed),
    "stepped": lambda campaign, seed: SteppedTraining(STEPS, expected=undisturbed_weights("training")),
    "stepped ledger": lambda campaign, seed: SteppedLedger(WORKERS, STEPS, forms=campaign.forms),
    "losses": lambda campaign, seed: LossLedger(WORKERS, LONG, forms=campaign.forms),
    "uneven": lambda campaign, seed: UnevenLedger(
        WORKERS,
        EPOCHS * max(PER_EPOCH),
        epochs=EPOCHS,
        seed=seed,
        sync=campaign.mode == "sync",
        forms=campaign.forms,
    ),
    "uneven losses": lambda campaign, seed: uneven_losses(WORKERS, 2 * EPOCHS, seed, campaign.forms),
    "lateness": lambda campaign, seed: LossLedger(WORKERS, LONG, least=campaign.quorum, forms=campaign.forms),
    "elastic": lambda campaign, seed: ElasticLedger(MOST_WORKERS, LONG, first=WORKERS, forms=campaign.forms),
    "shared": lambda campaign, seed: SharedLedger(WORKERS * STEPS, forms=campaign.forms),
    "healed": lambda campaign, seed: HealedTraining(WORKERS, 3 * STEPS),
    "list training": lambda campaign, seed: list_training(
        STEPS, mostly_together(seed), undisturbed_weights("list training")
    ),
}


CAMPAIGNS: dict[str, Campaign] = {
    "ledger": Campaign("ledger"),
    "ledger, nasty": Campaign("ledger", mishaps=LASTING, faults=NASTY),
    "ledger, long pauses": Campaign("ledger", mishaps=LONG_PAUSES),
    "ledger, timeouts": Campaign("ledger", mishaps=LASTING, faults=NASTY, patience=IMPATIENT),
    "ledger, far ahead": Campaign("ledger", rounds_ahead=5, shell=ShellSettings(job_s=(0.0, 0.3))),
    "ledger, async": Campaign("ledger", mode="async"),
    "ledger, stale by 1": Campaign("ledger", mode="async", staleness=1),
    "ledger, stale by 0, nasty": Campaign("ledger", mode="async", staleness=0, mishaps=LASTING, faults=NASTY),
    "ledger, no record": Campaign("ledger", shell=ShellSettings(state_dir=False)),
    "lives": Campaign("lives"),
    "lives, no record": Campaign("lives", mishaps=LASTING, faults=NASTY, shell=ShellSettings(state_dir=False)),
    "lives, nasty": Campaign("lives", mishaps=LASTING, faults=NASTY),
    "lives, async, slow jobs": Campaign(
        "lives", mode="async", mishaps=LASTING, faults=NASTY, shell=ShellSettings(job_s=(0.0, 0.5))
    ),
    "rounds": Campaign("rounds"),
    "rounds, no record": Campaign("rounds", shell=ShellSettings(state_dir=False)),
    "rounds, nasty": Campaign("rounds", mishaps=LASTING, faults=NASTY, shell=ShellSettings(job_s=(0.0, 0.2))),
    "rounds, long pauses": Campaign("rounds", mishaps=LONG_PAUSES),
    "singles": Campaign("singles"),
    "singles, nasty": Campaign("singles", mishaps=LASTING, faults=NASTY, shell=ShellSettings(job_s=(0.0, 0.2))),
    "mixed": Campaign("mixed"),
    "mixed, nasty": Campaign("mixed", mishaps=LASTING, faults=NASTY, shell=ShellSettings(job_s=(0.0, 0.2))),
    "mixed, long pauses": Campaign("mixed", mishaps=LONG_PAUSES),
    "in flight": Campaign("in flight"),
    "in flight, nasty": Campaign("in flight", mishaps=LASTING, faults=NASTY, shell=ShellSettings(job_s=(0.0, 0.2))),
    "in flight, long pauses": Campaign("in flight", mishaps=LONG_PAUSES),
    "casts": Campaign("casts"),
    "casts, nasty": Campaign("casts", mishaps=LASTING, faults=NASTY, shell=ShellSettings(job_s=(0.0, 0.2))),
    "lists": Campaign("lists"),
    "lists, nasty": Campaign("lists", mishaps=LASTING, faults=NASTY, shell=ShellSettings(job_s=(0.0, 0.2))),
    "lists, far ahead": Campaign("lists", rounds_ahead=5, shell=ShellSettings(job_s=(0.0, 0.3))),
    "lists, async, slow jobs": Campaign(
        "lists", mode="async", mishaps=LASTING, faults=NASTY, shell=ShellSettings(job_s=(0.0, 0.5))
    ),
    "lists, stale by 1": Campaign("lists", mode="async", staleness=1),
    "list lives": Campaign("list lives", mishaps=LASTING, faults=NASTY),
    "list training": Campaign("list training"),
    "list training, nasty": Campaign(
        "list training", mishaps=LASTING, faults=NASTY, shell=ShellSettings(job_s=(0.0, 0.2))
    ),
    "deletions": Campaign("deletions"),
    "deletions, nasty": Campaign("deletions", mishaps=LASTING, faults=NASTY),
    "deletions, slow jobs": Campaign("deletions", mishaps=LASTING, shell=ShellSettings(job_s=(0.0, 0.5))),
    "deletions, no record": Campaign("deletions", shell=ShellSettings(state_dir=False)),
    "deletions, async, slow jobs": Campaign(
        "deletions", mode="async", mishaps=LASTING, faults=NASTY, shell=ShellSettings(job_s=(0.0, 0.5))
    ),
    "deletions, late copies": Campaign("deletions", mishaps=LASTING, faults=LATE_COPIES),
    "deletions, long pauses": Campaign("deletions", mishaps=LONG_PAUSES),
    "meetings": Campaign("meetings"),
    "meetings, nasty": Campaign("meetings", mishaps=LASTING, faults=NASTY),
    "meetings, long pauses": Campaign("meetings", mishaps=LONG_PAUSES),
    "meetings, late restarts": Campaign("meetings", mishaps=LATE, faults=NASTY),
    "refusals": Campaign("refusals", shell=ShellSettings(failing_updates=0.3)),
    "refusals, nasty": Campaign(
        "refusals", mishaps=LASTING, faults=NASTY, shell=ShellSettings(job_s=(0.0, 0.5), failing_updates=0.3)
    ),
    "refusals, async": Campaign(
        "refusals",
        mode="async",
        mishaps=LASTING,
        faults=NASTY,
        shell=ShellSettings(job_s=(0.0, 0.5), failing_updates=0.3),
    ),
    "refusals, timeouts": Campaign(
        "refusals",
        mishaps=LASTING,
        faults=NASTY,
        patience=IMPATIENT,
        shell=ShellSettings(job_s=(0.0, 0.5), failing_updates=0.2),
    ),
    "refusals, stale by 1": Campaign(
        "refusals", mode="async", staleness=1, shell=ShellSettings(job_s=(0.0, 0.5), failing_updates=0.3)
    ),
    "stepped": Campaign("stepped"),
    "stepped, far ahead": Campaign("stepped", rounds_ahead=5, shell=ShellSettings(job_s=(0.0, 0.3))),
    "stepped, no record": Campaign("stepped", shell=ShellSettings(state_dir=False)),
    "stepped, nasty": Campaign("stepped", mishaps=LASTING, faults=NASTY, shell=ShellSettings(job_s=(0.0, 0.2))),
    "stepped, long pauses": Campaign("stepped", mishaps=LONG_PAUSES),
    "stepped ledger": Campaign("stepped ledger", mode="async"),
    "stepped ledger, nasty": Campaign(
        "stepped ledger", mode="async", mishaps=LASTING, faults=NASTY, shell=ShellSettings(job_s=(0.0, 0.5))
    ),
    "stepped ledger, stale by 1": Campaign("stepped ledger", mode="async", staleness=1),
    "shared": Campaign("shared", mode="async"),
    "shared, no record": Campaign("shared", mode="async", shell=ShellSettings(state_dir=False)),
    "shared, nasty": Campaign(
        "shared", mode="async", mishaps=LASTING, faults=NASTY, shell=ShellSettings(job_s=(0.0, 0.5))
    ),
    "shared, long pauses": Campaign("shared", mode="async", mishaps=LONG_PAUSES),
    "shared, stale by 0, nasty": Campaign("shared", mode="async", staleness=0, mishaps=LASTING, faults=NASTY),
    "shared, stale by 1": Campaign("shared", mode="async", staleness=1),
    "shared, stale by 3": Campaign("shared", mode="async", staleness=3),
    "tables": Campaign("tables"),
    "tables, nasty": Campaign("tables", mishaps=LASTING, faults=NASTY, shell=ShellSettings(job_s=(0.0, 0.5))),
    "tables, far ahead": Campaign("tables", rounds_ahead=5, shell=ShellSettings(job_s=(0.0, 0.3))),
    "tables, refusals": Campaign("tables", shell=ShellSettings(job_s=(0.0, 0.2), failing_updates=0.2)),
    "tables, async, nasty": Campaign(
        "tables", mode="async", mishaps=LASTING, faults=NASTY, shell=ShellSettings(job_s=(0.0, 0.5))
    ),
    "tangles": Campaign("tangles", mishaps=Mishaps()),
    "tangles, bumpy": Campaign("tangles", mishaps=BUMPY, patience=CURIOUS),
    "tangles, nasty": Campaign(
        "tangles", mishaps=BUMPY, faults=NASTY, patience=CURIOUS, shell=ShellSettings(job_s=(0.0, 0.5))
    ),
    "tangles, stale by 0": Campaign("tangles", mode="async", staleness=0, mishaps=BUMPY, patience=CURIOUS),
    "tangles, stale by 1": Campaign(
        "tangles", mode="async", staleness=1, mishaps=BUMPY, faults=NASTY, patience=CURIOUS
    ),
    "watched": Campaign("watched"),
    "watched, nasty": Campaign("watched", mishaps=LASTING, faults=NASTY, shell=ShellSettings(job_s=(0.0, 0.2))),
    "captured, nasty": Campaign("captured", mishaps=LASTING, faults=NASTY, shell=ShellSettings(job_s=(0.0, 0.2))),
    "watched, uneven": Campaign("watched, uneven", mishaps=NO_DEATHS),
    "watched, uneven, nasty": Campaign(
        "watched, uneven",
        mishaps=replace(NO_DEATHS, within_s=25.0),
        faults=NASTY,
        rounds_ahead=3,
        shell=ShellSettings(job_s=(0.0, 0.5)),
    ),
    "lives, clocks jump": Campaign("lives", mishaps=JUMPS),
    "meetings, torn records": Campaign("meetings", mishaps=replace(LASTING, scheduler_restarts=5), shell=SLOW_DISK),
    "training": Campaign("training"),
    "training, no record": Campaign("training", shell=ShellSettings(state_dir=False)),
    "ledger, old record": Campaign("ledger", mishaps=OLD_RECORD),
    "lives, old record": Campaign("lives", mishaps=OLD_RECORD),
    "training, old record": Campaign("training", mishaps=OLD_RECORD),
    "training, nasty": Campaign("training", mishaps=LASTING, faults=NASTY),
    "training, long pauses": Campaign("training", mishaps=LONG_PAUSES),
}

# Servers die as well, each while another one holds what it leads.
FAILOVERS: dict[str, Campaign] = {
    "ledger, servers die": Campaign("ledger", mishaps=SERVERS_DIE, replicas=2),
    "ledger, async, nasty, servers die": Campaign(
        "ledger", mode="async", mishaps=SERVERS_DIE_LONG, faults=NASTY, servers=3, replicas=2
    ),
    "ledger, stale by 1, servers die": Campaign(
        "ledger", mode="async", staleness=1, mishaps=SERVERS_DIE, servers=3, replicas=2
    ),
    "ledger, long pauses, servers die": Campaign("ledger", mishaps=PAUSED_LEADERS, replicas=2),
    "ledger, one way, servers die": Campaign("ledger", mishaps=SERVERS_DIE_ONE_WAY, replicas=2),
    "ledger, torn records, servers die": Campaign("ledger", mishaps=TORN, shell=SLOW_DISK, replicas=2),
    "ledger, old record, servers die": Campaign("ledger", mishaps=OLD_RECORD_SERVERS_DIE, replicas=2),
    "lives, old record, servers die": Campaign("lives", mishaps=OLD_RECORD_SERVERS_DIE, replicas=2),
    "lives, servers die": Campaign("lives", mishaps=SERVERS_DIE, replicas=2),
    "list lives, nasty, servers die": Campaign(
        "list lives", mishaps=SERVERS_DIE_LONG, faults=NASTY, servers=3, replicas=2
    ),
    "lists, servers die": Campaign(
        "lists", mishaps=SERVERS_DIE, servers=3, shell=ShellSettings(job_s=(0.0, 0.2)), replicas=2
    ),
    "rounds, no record, servers die": Campaign(
        "rounds", mishaps=SERVERS_DIE, shell=ShellSettings(state_dir=False), replicas=2
    ),
    "singles, servers die": Campaign("singles", mishaps=SERVERS_DIE, replicas=2),
    "mixed, late copies, servers die": Campaign(
        "mixed", mishaps=SERVERS_DIE_LONG, faults=LATE_COPIES, servers=3, replicas=2
    ),
    "list training, servers die": Campaign("list training", mishaps=SERVERS_DIE, replicas=2),
    "stepped, servers die": Campaign("stepped", mishaps=SERVERS_DIE, servers=3, replicas=2),
    "shared, nasty, servers die": Campaign("shared", mode="async", mishaps=SERVERS_DIE_LONG, faults=NASTY, replicas=2),
    "deletions, late copies, servers die": Campaign(
        "deletions", mishaps=SERVERS_DIE_LONG, faults=LATE_COPIES, servers=3, replicas=2
    ),
    "refusals, servers die": Campaign(
        "refusals", mishaps=SERVERS_DIE, shell=ShellSettings(failing_updates=0.3), replicas=2
    ),
    "meetings, servers die": Campaign("meetings", mishaps=SERVERS_DIE, replicas=2),
    "watched, servers die": Campaign("watched", mishaps=SERVERS_DIE, servers=3, replicas=2),
    "captured, servers die": Campaign("captured", mishaps=SERVERS_DIE, servers=3, replicas=2),
    "tables, servers die": Campaign("tables", mishaps=SERVERS_DIE, replicas=2),
    "tables, async, refusals, servers die": Campaign(
        "tables",
        mode="async",
        mishaps=SERVERS_DIE,
        replicas=2,
        shell=ShellSettings(job_s=(0.0, 0.2), failing_updates=0.2),
    ),
    "tangles, servers die": Campaign("tangles", mishaps=replace(BUMPY, server_crashes=2), patience=CURIOUS, replicas=2),
}
