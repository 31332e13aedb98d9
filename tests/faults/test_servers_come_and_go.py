"""Servers leave a job for good, and others take their places: the training ends with the bits that it must."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.faults.replicated_job import NODES, Training

TIMES = 2  # that each server moves


def move(job: Training, rank: int, node_id: str) -> None:
    """SIGTERM, and another server, under a name of its own, which is given no rank."""
    job.crew.wait_for_steps(5)
    node = job.server(rank)
    node.process.send_signal(signal.SIGTERM)
    assert node.process.wait(20) == 0
    job.crew.wait_for_steps(5)
    assert job.leaders() == {f"server {1 - rank}"}
    job.cluster.servers[rank] = job.cluster.start("server", node_id=node_id)
    job.wait_until_even()


@pytest.mark.soak
def test_servers_move_while_a_job_trains(tmp_path: Path) -> None:
    with Training(tmp_path) as job:
        for time in range(TIMES):
            for rank in range(NODES):
                move(job, rank, f"moved-{time}-{rank}")
        with job.cluster.observer() as observer:
            servers = {member["node_id"] for member in observer.status()["members"] if member["role"] == "server"}
        assert servers == {f"moved-{TIMES - 1}-{rank}" for rank in range(NODES)}
        job.finish()
