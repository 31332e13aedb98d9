"""Daemons whose descriptors are all taken by strangers: what was there goes on, and nothing has ended afterwards."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from kvd.testing.cluster import LocalCluster, ProcessNode, wait_until

LIMIT = 96
STRANGERS = 400
FEW = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({LIMIT}, {LIMIT}))\n"


def descriptors(node: ProcessNode) -> int:
    return len(os.listdir(f"/proc/{node.process.pid}/fd"))


@contextmanager
def strangers_at(node: ProcessNode) -> Iterator[None]:
    """More connections than the node can have; those that it cannot take wait."""
    address = urlsplit(node.address)
    strangers = [socket.socket() for _ in range(STRANGERS)]
    try:
        for stranger in strangers:
            stranger.setblocking(False)
            with suppress(BlockingIOError):
                stranger.connect((address.hostname, address.port))
        wait_until(lambda: descriptors(node) == LIMIT, "all its descriptors are in use")
        yield
    finally:
        for stranger in strangers:
            stranger.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    limited = {"server_prelude": FEW, "scheduler_prelude": FEW}
    with LocalCluster(1, 2, processes=True, path="tcp", state_dir=str(tmp_path), **limited) as cluster:
        yield cluster


def test_a_scheduler_without_descriptors_saves_its_record(cluster: LocalCluster, tmp_path: Path) -> None:
    scheduler = cluster.scheduler
    assert isinstance(scheduler, ProcessNode)
    record = tmp_path / "scheduler.json"

    def states() -> list[str]:
        return [seat[0][5] for seat in json.loads(record.read_text())["cluster"]["seats"]]

    wait_until(lambda: states() == ["active", "active"], "both servers have joined")
    with strangers_at(scheduler):
        cluster.kill_server(1)
        wait_until(lambda: sorted(states()) == ["active", "dead"], "the record says that the server is dead")
        wait_until(lambda: descriptors(scheduler) == LIMIT, "all its descriptors are in use again")
    cluster.restart_server(1)
    wait_until(lambda: states() == ["active", "active"], "the server is back")
    assert scheduler.process.poll() is None
    assert "cannot be saved" not in scheduler.log.read_text()


def test_a_server_without_descriptors_takes_pushes_and_answers_pulls(cluster: LocalCluster) -> None:
    server = cluster.servers[0]
    assert isinstance(server, ProcessNode)
    store = cluster.store()
    value = np.zeros(100_000, np.float32)
    store.init("w", value)
    idle = descriptors(server)
    with strangers_at(server):
        for step in range(1, 21):
            store.push("w", value + step)
            np.testing.assert_array_equal(store.pull("w"), value + step)
        wait_until(lambda: descriptors(server) == LIMIT, "all its descriptors are in use again")
    wait_until(lambda: descriptors(server) <= idle, "the strangers' descriptors are free again")
    assert server.process.poll() is None
