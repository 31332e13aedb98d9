"""No call outlives its deadline by more than a second, whatever it consists of."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvd.errors import KvdError, RequestTimeout
from kvd.testing.cluster import LocalCluster
from tests.faults.stopping import stopped

TIMEOUT_S = 2.0
SLACK_S = 1.5  # a second, and what a busy machine needs
PATIENT: dict[str, Any] = {"server_timeout_s": 40.0, "worker_timeout_s": 40.0}  # nobody is declared dead
HURRIED: dict[str, Any] = {
    "server_timeout_s": 1.0,
    "worker_timeout_s": 1.0,
    "request_timeout_s": TIMEOUT_S,
    "round_timeout_s": TIMEOUT_S,
}


def with_a_key(cluster: LocalCluster) -> Any:
    kv = cluster.store(**HURRIED)
    kv.init("w", np.zeros(1 << 20, np.float32))
    return kv


@pytest.mark.parametrize("who", ["server", "scheduler", "both"])
def test_close_ends_at_its_deadline_when_nodes_are_stopped(who: str) -> None:
    with LocalCluster(processes=True, **PATIENT) as cluster:
        kv = with_a_key(cluster)
        nodes = {
            "server": [cluster.servers[0]],
            "scheduler": [cluster.scheduler],
            "both": [cluster.servers[0], cluster.scheduler],
        }[who]
        with stopped(*nodes):
            kv.push("w", np.ones(1 << 20, np.float32))
            begun = time.monotonic()
            with pytest.raises(KvdError):
                kv.close()
            assert time.monotonic() - begun < TIMEOUT_S + SLACK_S


@pytest.mark.parametrize("who", ["server", "scheduler"])
def test_a_node_that_does_not_answer_is_named_long_before_workers_would_be(who: str) -> None:
    with LocalCluster(1, 2, processes=True, **PATIENT) as cluster:
        kv = cluster.store(**{**HURRIED, "round_timeout_s": 600.0})
        kv.init("w", np.zeros(1 << 21, np.float32))  # several slices: some on each server
        node: Any = cluster.servers[1] if who == "server" else cluster.scheduler
        call = kv.barrier if who == "scheduler" else partial(kv.pushpull, "w", np.ones(1 << 21, np.float32))
        with stopped(node):
            begun = time.monotonic()
            with pytest.raises(RequestTimeout) as caught:
                call()
            assert time.monotonic() - begun < TIMEOUT_S + SLACK_S
    name, text = ("server 1" if who == "server" else "scheduler"), str(caught.value)
    assert caught.value.waiting_for == (name,)
    assert node.address in text
    if who == "server":
        assert "server 1 (node server-1, host " in text
        assert f", pid {node.process.pid}, " in text
        assert "no answer for" in text


def test_close_has_one_deadline_for_all_its_parts() -> None:
    """Most of the time passes in the flush, so little is left for the barrier that the other worker never comes to."""
    late_s = 0.9 * TIMEOUT_S
    with LocalCluster(2, 1, processes=True, **PATIENT) as cluster:
        threads = [threading.Thread(target=cluster.store, args=("dist_async",), kwargs=HURRIED) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        kv = next(store for store in cluster.stores if store.rank == 0)
        kv.init("w", np.zeros(4, np.float32))
        server: Any = cluster.servers[0]
        with stopped(server):
            kv.push("w", np.ones(4, np.float32))
            goes_on = threading.Timer(late_s, os.kill, (server.process.pid, signal.SIGCONT))
            goes_on.start()
            begun = time.monotonic()
            with pytest.raises(RequestTimeout):
                kv.close()
            assert time.monotonic() - begun < TIMEOUT_S + SLACK_S
            goes_on.join()


def test_the_status_asks_all_servers_at_once() -> None:
    cluster = LocalCluster(1, 4, processes=True, **PATIENT)
    with cluster, cluster.observer(**HURRIED) as observer, stopped(*cluster.servers[1:]):
        begun = time.monotonic()
        servers = observer.status()["servers"]
        assert time.monotonic() - begun < TIMEOUT_S + SLACK_S
    assert [server["rank"] for server in servers] == [0, 1, 2, 3]
    assert ["error" in server for server in servers] == [False, True, True, True]
    for server in servers[1:]:
        assert f"server {server['rank']}" in server["error"]
