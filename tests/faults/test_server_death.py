"""Servers die, hang and leave while a job with two copies of every value trains: it ends with the bits that it must."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

from kvd.errors import NodeLost
from kvd.testing.cluster import LocalCluster
from tests.faults import ledger
from tests.faults.replicated_job import Training
from tests.faults.stopping import stopped

STEPS = 10  # between two faults


def kill_and_restart(job: Training, *victims: tuple[str, int]) -> None:
    """All at once; without servers the job goes on meanwhile. Then it is ready for the next death."""
    job.crew.wait_for_steps(STEPS)
    for role, number in victims:
        job.kill(role, number)
    if all(role == "server" for role, _ in victims):
        job.crew.wait_for_steps(STEPS)
    for role, number in sorted(victims):  # the scheduler first: without it no server comes
        job.restart(role, number)
    job.wait_until_in_sync()


def leave_and_come_again(job: Training, rank: int) -> None:
    """SIGTERM, as for an update of a server."""
    job.crew.wait_for_steps(STEPS)
    node = job.server(rank)
    node.process.send_signal(signal.SIGTERM)
    assert node.process.wait(10) == 0
    job.crew.wait_for_steps(STEPS)
    job.restart("server", rank)
    job.wait_until_in_sync()


def hang_and_go_on(job: Training, rank: int) -> None:
    """So long that the other server leads everything; then this one is its backup, or leads what it is given again."""
    job.crew.wait_for_steps(STEPS)
    with stopped(job.server(rank)):
        job.crew.wait_for_steps(STEPS)
        job.crew.wait_until(lambda: job.leaders() == {f"server {1 - rank}"}, "the other server leads everything")
    job.wait_until_in_sync()
    job.crew.wait_for_steps(STEPS)


def test_a_job_outlives_each_of_its_servers(tmp_path: Path) -> None:
    with Training(tmp_path) as job:
        kill_and_restart(job, ("server", 0))
        job.wait_until_even()
        kill_and_restart(job, ("server", 1), ("worker", 1))
        job.wait_until_even()
        hang_and_go_on(job, 0)
        leave_and_come_again(job, 1)
        kill_and_restart(job, ("scheduler", 0), ("server", 0))
        job.wait_until_even()
        job.crew.wait_for_steps(STEPS)
        job.finish()


def test_no_copy_is_left_when_both_servers_die() -> None:
    with LocalCluster(1, 2, processes=True, replicas=2, request_timeout_s=30.0) as cluster:
        kv = cluster.store()
        kv.init("w", np.zeros(1 << 20, np.float32))
        kv.push("w", np.ones(1 << 20, np.float32))
        for rank in range(2):
            cluster.kill_server(rank)
        with pytest.raises(NodeLost, match=r"no in-sync replica of its part of the keys is left: start the job again"):
            kv.pull("w")


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 104))
def test_soak_of_the_ledger(tmp_path: Path, seed: int) -> None:
    counts = ledger.run(tmp_path, seed=seed, seconds=900.0)
    print(counts)
    assert not counts.wrong, counts.wrong


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(50))
def test_soak_of_single_deaths(tmp_path: Path, seed: int) -> None:
    """At 50 moments, any one process: the bits of the undisturbed run."""
    with Training(tmp_path) as job:
        kill_and_restart(job, *ledger.victims_of(seed))
        job.finish()
