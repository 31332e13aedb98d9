"""``kvd status`` shows how the messages of each worker travel, and why not faster."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from click.testing import Result

import kvd as package
from kvd.testing.cluster import LocalCluster, ThreadNode, engine_of, wait_until
from kvd.transport.memory.segments import Arena

Kvd = Callable[..., Result]
SIZE = 10_000  # more than what goes through the socket in any case

OVER_ZMQ = "zmq: turned off; no link over TCP: the server can only be reached by its own host"


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(2, 2, path="shm") as cluster:
        yield cluster


@pytest.fixture
def stores(cluster: LocalCluster) -> list[package.KVStore]:
    """Worker 0 shares memory, worker 1 does not."""
    stores = cluster.open_stores(each=[{"node_id": "worker-0"}, {"node_id": "worker-1", "shared_memory": "off"}])
    for handle in [store.init_async("w", np.zeros(SIZE, np.float32)) for store in stores]:
        handle.wait()
    return stores


def push(stores: list[package.KVStore]) -> None:
    for handle in [store.push("w", np.ones(SIZE, np.float32)) for store in stores]:
        handle.wait()


def paths(kvd: Kvd, cluster: LocalCluster) -> list[list[str]]:
    """The last table of the status: worker, servers, path."""
    shown = kvd("status", "-S", cluster.address, "--timeout", "20s")
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("WORKER "))
    columns = [lines[start].index(title) for title in ("WORKER", "SERVER", "PATH")]
    return [
        [line[columns[0] : columns[1]].strip(), line[columns[1] : columns[2]].strip(), line[columns[2] :].strip()]
        for line in lines[start + 1 :]
    ]


@pytest.mark.keys  # links over TCP need them
def test_each_worker_has_its_path(kvd: Kvd, cluster: LocalCluster, stores: list[package.KVStore]) -> None:
    assert paths(kvd, cluster) == [["worker 0", "0, 1", "shared memory"], ["worker 1", "0, 1", OVER_ZMQ]]
    push(stores)
    assert paths(kvd, cluster) == [["worker 0", "0, 1", "shared memory"], ["worker 1", "0, 1", OVER_ZMQ]]
    report: Any = json.loads(kvd("status", "-S", cluster.address, "-o", "json").stdout)
    for server in report["servers"]:
        assert server["paths"] == {"worker 0": "shared memory", "worker 1": OVER_ZMQ}
        assert server["links"] == "shared memory"


@pytest.mark.keys  # links over TCP need them
def test_links_between_hosts_are_shown_and_are_no_matter_of_shared_memory(kvd: Kvd) -> None:
    with LocalCluster(2, 1, path="tcp", tcp_links="always") as cluster:
        stores = cluster.open_stores(each=[{"node_id": "worker-0"}, {"node_id": "worker-1", "tcp_links": "off"}])
        for handle in [store.init_async("w", np.zeros(SIZE, np.float32)) for store in stores]:
            handle.wait()
        push(stores)
        assert paths(kvd, cluster) == [
            ["worker 0", "0", "encrypted tcp"],
            ["worker 1", "0", "zmq: turned off"],
        ]
        report: Any = json.loads(kvd("status", "-S", cluster.address, "-o", "json").stdout)
        assert "links" not in report["servers"][0]


@pytest.mark.keys  # links over TCP need them
def test_a_link_that_breaks_is_not_shown_as_one(kvd: Kvd, cluster: LocalCluster, stores: list[package.KVStore]) -> None:
    engine = engine_of(stores[0])
    home = engine.machine.view.partition_of("w", 0)
    broken = engine.machine.view.servers()[home].incarnation
    for link in engine.transport.reader.links:
        if link.peer == broken:
            engine._loop.call_soon_threadsafe(link.end, "the cable was cut")
            wait_until(lambda link=link: link.has_ended, "the link has ended")  # type: ignore[misc]
    push(stores)
    assert sorted(paths(kvd, cluster)) == sorted(
        [
            ["worker 0", str(1 - home), "shared memory"],
            ["worker 0", str(home), "zmq: the link is gone"],
            ["worker 1", "0, 1", OVER_ZMQ],
        ]
    )


@pytest.mark.usefixtures("stores")
def test_servers_without_memory_to_lend_say_so(
    kvd: Kvd, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Arena, "usable", False)
    for server in cluster.servers:
        assert isinstance(server, ThreadNode)
        assert server._daemon is not None
        server._daemon.transport.arena.problem = "no shared memory: none is left"
    shown = kvd("status", "-S", cluster.address, "--timeout", "20s")
    notes = [line for line in shown.stdout.splitlines() if line.startswith("server ")]
    assert sum("answers by unix socket: no shared memory: none is left" in line for line in notes) == 2


def test_a_worker_that_left_has_no_path(kvd: Kvd, cluster: LocalCluster, stores: list[package.KVStore]) -> None:
    stores[1].set_barrier_before_exit(False)
    stores[1].close()
    assert paths(kvd, cluster) == [["worker 0", "0, 1", "shared memory"]]
