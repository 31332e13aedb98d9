"""Jobs that share simulated daemons: what one of them does never shows in another."""

from __future__ import annotations

import numpy as np
import pytest

from kvd.core.requests import Barrier, Depart, Flush, Transfer
from kvd.core.scheduler.router import SchedulerRouter
from kvd.core.session import RunKey
from kvd.protocol.messages import EXIT_BARRIER, Departure
from tests.simulator.checkers import check_everything_ended
from tests.simulator.mishaps import Mishaps, plan
from tests.simulator.network import CALM, NASTY, ROUGH, Faults
from tests.simulator.process import Coroutine
from tests.simulator.settings import ClusterSettings
from tests.simulator.simulator import Me, World
from tests.simulator.workloads.steps import enter, insist, item, pushpull

WORKERS, STEPS, SIZE = 2, 6, 600
MISHAPS = Mishaps(within_s=5.0, pauses=2, cuts=2, scheduler_restarts=1)


class Jobs:
    """Programs of two workers; those of each push a value of their own, and leave in good order."""

    def __init__(self) -> None:
        self.pulled: dict[str, list[list[float]]] = {}  # by worker: what it found in each of its runs

    def program(self, me: Me) -> Coroutine:
        name = me.process.name
        value = np.full(SIZE, 1 + me.number // WORKERS * 10, np.float32)
        found = []
        yield from enter(me, ["w"], np.zeros(SIZE, np.float32), None)
        for step in range(STEPS):
            target = np.zeros(SIZE, np.float32)
            transfer = Transfer((item("w", value.copy(), target),), push=True, pull=True)
            yield from pushpull(transfer, step)
            assert (target == target[0]).all()
            found.append(float(target[0]))
        yield from insist(Flush())
        yield from insist(Depart(Departure.DONE))
        yield from insist(Barrier(EXIT_BARRIER))
        yield from insist(Depart(Departure.LEFT))
        self.pulled.setdefault(name, []).append(found)


def router(world: World) -> SchedulerRouter:
    machine = world.processes["scheduler"].machine
    assert isinstance(machine, SchedulerRouter)
    return machine


@pytest.mark.parametrize("faults", [CALM, ROUGH, NASTY], ids=["calm", "rough", "nasty"])
@pytest.mark.parametrize("seed", range(6))
def test_jobs_side_by_side_and_one_after_the_other(seed: int, faults: Faults) -> None:
    world = World(seed, ClusterSettings(workers=WORKERS), faults)
    jobs = Jobs()
    world.start_scheduler()
    for rank in range(world.cluster.servers):
        world.start_server(rank)
    plan(world, MISHAPS)
    for turn in ("first", "second"):
        for number in range(2 * WORKERS):
            name = f"worker {number}"
            world.run_keys[name] = RunKey(f"job-{number // WORKERS}", turn)
            world.start_worker(number, jobs.program)
        world.run(400, lambda: len(jobs.pulled) == 2 * WORKERS and world.workers_finished())
        world.network.faults = CALM
        world.run(5)
        check_everything_ended(world)
    for number in range(2 * WORKERS):
        each = 2.0 * (1 + number // WORKERS * 10)
        assert jobs.pulled[f"worker {number}"] == [[each] * STEPS] * 2
    entries = [(entry.job, entry.token, str(entry.phase)) for entry in router(world).runs.entries()]
    assert sorted(entries) == [(f"job-{job}", turn, "ended") for job in (0, 1) for turn in ("first", "second")]
