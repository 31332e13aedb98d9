"""Measures what steps cost on this machine: the processor time of real clusters, divided among what they did.

What they did is counted in virtual time, on clusters of the same shape.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks import limits, many
from benchmarks.compare import say
from benchmarks.systems import KVD_WAYS, Effort, System
from benchmarks.virtual.cluster import Plan, Prediction, foretell
from benchmarks.virtual.costs import Costs, SchedulerCosts, ServerCosts, WorkerCosts
from benchmarks.virtual.fitting import Sample, fit
from kvd_cli.bench_work import sizes_of

BY_REFERENCE: Final = "auto"
"""The way in which values pass by reference within a host; in all others they go through sockets."""


@dataclass(frozen=True, slots=True)
class Case:
    """A cluster that is measured. `slice_bytes` is 0 for what kvd chooses."""

    work: str
    workers: int
    slice_bytes: int = 0


SMALLEST: Final = Case("1KiB", 1)
LIST: Final = Case("1KiBx1000", 1)
KINDS: Final = (("1KiB", 0), ("1KiBx1000", 0), ("4MiB", 64 << 10), ("64MiB", 0))
CASES: Final = (
    *[Case(work, workers, slice_bytes) for workers in (1, 2) for work, slice_bytes in KINDS],
    Case("1KiB", 8),
    Case("1KiBx1000", 8),
)
"""Small values, many keys, many messages, many bytes; and how much more each costs where many share a core."""

FIRST_GUESS: Final = Costs(
    WorkerCosts(80e-6, 5e-6, 40e-6, 0.1e-9),
    ServerCosts(30e-6, 0.1e-6, 0.1e-6, 0.3e-9, 50e-6, 0.1e-9, 0.06e-9),
    SchedulerCosts(30e-6, 0.05e-6),
    20e-6,
    20e9,
)
"""With which the first clusters are counted: how often processes change places depends on it a little."""

COUNTED_STEPS: Final = 20
SCHEDULED_WORKERS: Final = (50, 100, 200, 400)


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians of real starts, in seconds: a step, and the processor time in it of a worker and of all servers."""

    step_s: float
    worker_s: float
    servers_s: float


class Calibration:
    """Measures the costs of ways in which values travel.

    Args:
        seconds: of a repetition of a step.
        rounds: how often each cluster is started.
    """

    def __init__(self, seconds: float, rounds: int) -> None:
        self._seconds = seconds
        self._rounds = rounds
        self._scheduler = scheduler_costs()
        say("measuring the limits of this machine")
        found = limits.measure(1)
        self._memory_bytes_per_s = found["all_copy_gb_s"] * 1e9
        self._by_reference: Costs | None = None

    def costs(self, way: str) -> Costs:
        """The costs of this way, one of `KVD_WAYS`. What a server does with its values is measured once for all."""
        if way != BY_REFERENCE and self._by_reference is None:
            self._by_reference = self.costs(BY_REFERENCE)
        found = [(case, measured(way, case, self._seconds, self._rounds)) for case in CASES]
        costs = dataclasses.replace(FIRST_GUESS, scheduler=self._scheduler, memory_bytes_per_s=self._memory_bytes_per_s)
        for _ in range(2):
            costs = self._fitted(way, found, costs)
        if way == BY_REFERENCE:
            self._by_reference = costs
        return costs

    def _fitted(self, way: str, found: Sequence[tuple[Case, Measured]], guess: Costs) -> Costs:
        workers, servers = [], []
        for case, result in found:
            prediction = foretell(plan_of(way, case), guess)
            workers.append(Sample(prediction.workers.counts, result.worker_s))
            servers.append(Sample(prediction.servers.counts, result.servers_s))
        names = [field.name for field in dataclasses.fields(WorkerCosts) if field.name != "late_key_s"]
        worker = WorkerCosts(**fit(workers, names))
        known = {}
        if way != BY_REFERENCE:
            assert self._by_reference is not None
            known = dataclasses.asdict(self._by_reference.server)
            del known["message_s"], known["byte_s"], known["switch_s"]
        names = [field.name for field in dataclasses.fields(ServerCosts) if field.name not in known]
        if way == BY_REFERENCE:
            names.remove("byte_s")
        server = ServerCosts(**{"byte_s": 0.0, **known, **fit(servers, names, known)})
        results = dict(found)
        smallest, list_ = results[SMALLEST], results[LIST]
        wake_s = max(0.0, (smallest.step_s - smallest.worker_s - smallest.servers_s) / 2)
        side_by_side_s = list_.worker_s + list_.servers_s + 2 * wake_s - list_.step_s
        late_key_s = min(max(0.0, side_by_side_s / len(sizes_of(LIST.work))), worker.key_s / 2)
        worker = dataclasses.replace(worker, late_key_s=late_key_s)
        return dataclasses.replace(guess, worker=worker, server=server, wake_s=wake_s)


def measured(way: str, case: Case, seconds: float, rounds: int, repetitions: int = 3) -> Measured:
    """Start real clusters.

    Raises:
        RuntimeError: one of them failed.
    """
    name, flags = KVD_WAYS[way]
    command = (sys.executable, "-m", "kvd_cli.main", "bench", "-o", "json", *flags)
    if case.slice_bytes:
        command += ("--slice-bytes", str(case.slice_bytes))
    system = System(name, ("none",), None, command)
    rows = []
    for number in range(rounds):
        say(f"{name}: {case.work}, workers: {case.workers}")
        outcome = system.start(Effort((case.work,), case.workers, 1, seconds, repetitions, 300.0), "none", number)
        if outcome.failure:
            raise RuntimeError(f"{outcome.failure}\n{outcome.complaints}")
        rows += outcome.rows
    return Measured(
        statistics.median([row.p50_us for row in rows]) / 1e6,
        statistics.median([row.cpu_s / row.iterations for row in rows if row.cpu_s is not None]),
        statistics.median([row.servers_cpu_s / row.iterations for row in rows if row.servers_cpu_s is not None]),
    )


def plan_of(way: str, case: Case, steps: int = COUNTED_STEPS) -> Plan:
    """The same cluster in virtual time, on one host like this one."""
    cores = len(os.sched_getaffinity(0))
    sizes = tuple(sizes_of(case.work))
    return Plan(case.workers, 1, sizes, steps, cores, slice_bytes=case.slice_bytes, shares_memory=way == BY_REFERENCE)


def foretold(way: str, case: Case, costs: Costs, steps: int) -> Prediction:
    """What the same cluster does in virtual time."""
    return foretell(plan_of(way, case, steps), costs)


def scheduler_costs() -> SchedulerCosts:
    """From a real scheduler without sockets: heartbeats have next to no bytes, joins have many, and the more the more
    workers there are."""
    samples = []
    for workers in SCHEDULED_WORKERS:
        say(f"measuring the scheduler with {workers} workers")
        found = asyncio.run(many.measure(workers))
        samples += [
            Sample({"message_s": cost.taken + cost.frames, "byte_s": cost.nbytes}, cost.cpu_s)
            for cost in (found.join, found.barrier, found.heartbeats)
        ]
    return SchedulerCosts(**fit(samples, [field.name for field in dataclasses.fields(SchedulerCosts)]))
