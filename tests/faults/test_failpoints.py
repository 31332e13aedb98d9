"""Daemons die at named moments between what they were told, did, saved and said: the training keeps its bits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

import pytest

from kvd.testing.cluster import ProcessNode
from tests.faults.failpoints import Failpoints, Moment, point
from tests.faults.replicated_job import Training

ROUNDS: Final = 30  # messages of the training that come through before one is fatal, at most

IN_TRAINING: Final = [
    *[point(moment, kind) for kind in ("Hold", "PushBatch", "PullBatch") for moment in (Moment.TOLD, Moment.DECIDED)],
    *[point(moment, kind) for kind in ("Hold", "Done", "Values") for moment in (Moment.SENDS, Moment.SENT)],
]
"""Points to which both servers come while the workers train."""
AT_A_WORKERS_RETURN: Final = [
    *[point(moment, "ViewChange") for moment in (Moment.TOLD, Moment.DECIDED)],
    *[point(moment, "ViewChange") for moment in (Moment.SENDS, Moment.SENT)],
    *[point(moment, "record") for moment in (Moment.SAVES, Moment.SAVED)],
    *[point(moment, "Join") for moment in (Moment.TOLD, Moment.DECIDED)],
]
"""Of the servers, or of the scheduler."""
AT_A_SERVERS_RETURN: Final = [
    *[
        point(moment, kind)
        for kind in ("StartHolding", "Install", "HoldOptimizer")
        for moment in (Moment.TOLD, Moment.DECIDED)
    ],
    *[point(moment, "Synced") for moment in (Moment.TOLD, Moment.DECIDED)],
]
"""Of the server that returns, or of the scheduler. Nobody else may die then: it alone has the values."""


class Dying:
    """A training whose daemons die at points."""

    def __init__(self, folder: Path) -> None:
        self.points = Failpoints(folder)
        prelude = (
            "import pathlib; from tests.faults.failpoints import Failpoints\n"
            f"Failpoints(pathlib.Path({str(folder)!r})).install()\n"
        )
        self.job = Training(folder, server_prelude=prelude, scheduler_prelude=prelude)

    def die_at(self, name: str, skip: int, cause: str) -> None:
        """Somebody comes to this point when a process with this role returns, or just so (""), and dies."""
        self.job.crew.wait_for_steps(5)
        self.points.arm(name, skip)
        if cause == "worker":
            self.job.kill("worker", 1)
            self.job.restart("worker", 1)
        elif cause == "server":
            self.job.kill("server", 0)
            self.job.restart("server", 0)
        self.job.crew.wait_until(self.points.was_reached, f"somebody comes to {name!r}")
        self._restart_the_dead()
        self.job.wait_until_in_sync()

    def _restart_the_dead(self) -> None:
        cluster = self.job.cluster
        nodes = [("scheduler", 0, cluster.scheduler), *[("server", n, node) for n, node in enumerate(cluster.servers)]]

        def dead() -> list[tuple[str, int]]:
            return [
                (role, number)
                for role, number, node in nodes
                if isinstance(node, ProcessNode) and node.process.poll() is not None
            ]

        self.job.crew.wait_until(lambda: bool(dead()), "it is dead")
        for role, number in dead():
            self.job.restart(role, number)


def test_servers_and_the_scheduler_die_at_named_moments(tmp_path: Path) -> None:
    dying = Dying(tmp_path)
    with dying.job as job:
        dying.die_at(point(Moment.DECIDED, "Hold"), 3, "")
        dying.die_at(point(Moment.SAVED, "record"), 0, "worker")
        job.finish()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_soak_of_named_moments(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    deaths = [
        *[(name, rng.randrange(ROUNDS), "") for name in IN_TRAINING],
        *[(name, 0, "worker") for name in AT_A_WORKERS_RETURN],
        *[(name, 0, "server") for name in AT_A_SERVERS_RETURN],
    ]
    rng.shuffle(deaths)
    dying = Dying(tmp_path)
    with dying.job as job:
        for name, skip, cause in deaths:
            dying.die_at(name, skip, cause)
        job.finish()
