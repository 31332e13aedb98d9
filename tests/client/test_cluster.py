"""Servers, dead nodes and settings, and a cluster that is not as it should be."""

from __future__ import annotations

import socket
import time
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.errors import (
    BarrierBroken,
    ConfigError,
    ConnectError,
    NotAllowed,
    RequestTimeout,
)
from kvd.testing.cluster import LocalCluster, engine_of, wait_until
from tests.client.harness import ones

QUICK: dict[str, Any] = {"server_timeout_s": 1.0, "worker_timeout_s": 1.0, "heartbeat_interval_s": 0.1}


# ── servers ──


def test_commands() -> None:
    with LocalCluster(1, 3) as cluster:
        kv = cluster.store()
        assert kv.send_command_to_servers("ping", b"hello") == [b"hello"] * 3
        assert kv.send_command_to_servers("ping", "γειά") == ["γειά".encode()] * 3
        assert kv.send_command_to_servers("ping", b"") == [b""] * 3
        assert kv.send_command_to_servers("ping", bytes(300_000)) == [bytes(300_000)] * 3
        for head in ("nothing of the kind", 7):
            with pytest.raises(NotAllowed, match="no controller is registered") as caught:
                kv.send_command_to_servers(head, b"")
            assert caught.value.node.startswith("server ")
        for body in (5, None, ["a"]):
            with pytest.raises(NotAllowed, match="body"):
                kv.send_command_to_servers("ping", body)  # type: ignore[arg-type]
        with pytest.raises(NotAllowed, match="at most 64 MiB"):
            kv.send_command_to_servers("ping", bytes((64 << 20) + 1))
        with pytest.raises(NotAllowed):
            kv.send_command_to_servers("", b"")


def test_a_controller_that_fails_is_an_error_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(body: bytes) -> bytes:
        raise LookupError(f"no {body.decode()} here")

    def end(body: bytes) -> bytes:
        raise SystemExit(3)

    controllers = {"fail": fail, "end": end, "wrong": lambda body: 7, "ping": lambda body: body}
    monkeypatch.setattr("kvd.node.jobs.runner.installed_controllers", lambda: controllers)
    with LocalCluster(1, 2) as cluster:
        kv = cluster.store()
        with pytest.raises(NotAllowed, match="LookupError: no luck here"):
            kv.send_command_to_servers("fail", b"luck")
        with pytest.raises(NotAllowed, match="SystemExit"):
            kv.send_command_to_servers("end", b"")
        with pytest.raises(NotAllowed, match="it must be bytes"):
            kv.send_command_to_servers("wrong", b"")
        assert kv.send_command_to_servers("ping", b"still here") == [b"still here"] * 2


# ── dead nodes ──


def test_node_ids_and_masks() -> None:
    with LocalCluster(2, 1, **QUICK) as cluster, kvd.create("local") as local:
        kv, gone = cluster.open_stores(each=[{"node_id": "worker-0"}, {"node_id": "worker-1"}])
        assert [kv.num_dead_node(node_id) for node_id in (1, 2, 4, 7, 8, 9, 11)] == [0] * 7
        assert list(kv.dead_nodes()) == []
        engine_of(gone)._driver.stop(0)
        dead = 9 + 2 * gone.rank
        wait_until(lambda: kv.num_dead_node(4), "the worker is declared dead")
        assert [kv.num_dead_node(node_id) for node_id in (1, 2, 3, 4, 5, 6, 7)] == [0, 0, 0, 1, 1, 1, 1]
        assert [kv.num_dead_node(node_id) for node_id in (8, dead, 20 - dead)] == [0, 1, 0]
        (node,) = kv.dead_nodes()
        assert (node.role, node.rank, node.node_id) == ("worker", gone.rank, engine_of(gone).config.node_id)
        with pytest.raises(BarrierBroken) as broken:
            kv.barrier("b")
        assert broken.value.missing == (f"worker {gone.rank}",)
        for wrong in (0, -1, True, "worker"):
            with pytest.raises(NotAllowed, match="node id"):
                kv.num_dead_node(wrong)  # type: ignore[arg-type]
        assert local.num_dead_node(7) == local.num_dead_node(9) == 0
        assert list(local.dead_nodes()) == []


def test_a_node_id_that_the_job_does_not_have_is_refused() -> None:
    with LocalCluster(2, 1) as cluster, kvd.create("local") as local:
        kv, _ = cluster.open_stores()
        for node_id, name in ((10, "server 1"), (13, "worker 2"), (1 << 40, r"server \d+")):
            with pytest.raises(NotAllowed, match=f"no node {node_id}, which would be {name}: this job has") as raised:
                kv.num_dead_node(node_id)
        assert "server 0 as node 8 and workers 0 to 1 as nodes 9, 11; 1 is the scheduler" in str(raised.value)
        for node_id in (8, 11):
            with pytest.raises(NotAllowed, match="no servers and worker 0 as node 9"):
                local.num_dead_node(node_id)


def test_every_worker_of_an_elastic_job_has_a_node_id_before_it_joins() -> None:
    with LocalCluster(1, 2, max_workers=9) as cluster:
        kv = cluster.store()
        assert [kv.num_dead_node(node_id) for node_id in (8, 9, 10, 11, 25)] == [0] * 5
        with pytest.raises(NotAllowed, match=r"nodes 8, 10 and workers 0 to 8 as nodes 9, 11, 13, … 25;"):
            kv.num_dead_node(27)


def test_the_scheduler_is_dead_when_it_is_silent() -> None:
    with LocalCluster(1, 1, **QUICK) as cluster:
        kv = cluster.store()
        assert kv.num_dead_node(1, timeout=0) == 0
        cluster.scheduler.stop()
        wait_until(lambda: kv.num_dead_node(1, timeout=1) == 1, "the scheduler is silent")
        assert kv.num_dead_node(7, timeout=1) == 1
        assert kv.num_dead_node(6, timeout=1) == 0
        kv.init("w", ones())  # nobody needs it for this
        assert kv.pull("w").tolist() == [1] * 4


# ── settings and a cluster that is not as it should be ──


@pytest.mark.parametrize(
    ("type_", "settings", "name", "mine", "theirs"),
    [
        ("dist_sync", {"num_workers": 3}, "num_workers", "3", "2"),
        ("dist_sync", {"num_servers": 5}, "num_servers", "5", "1"),
        ("dist_sync", {"merge": "mean"}, "merge", "'mean'", "'sum'"),
        ("dist_async", {}, "mode", "'async'", "'sync'"),
        ("dist_sync", {"slice_bytes": 8192}, "slice_bytes", "8192", str(1 << 20)),
        ("dist_sync", {"replicas": 2}, "replicas", "2", "1"),
    ],
)
def test_a_worker_with_other_settings_is_refused(
    type_: str, settings: dict[str, Any], name: str, mine: str, theirs: str
) -> None:
    with LocalCluster(2, 1, slice_bytes=1 << 20) as cluster:
        first = cluster.lone_store("dist_sync", merge="sum")
        with pytest.raises(ConfigError) as caught:
            kvd.create(type_, scheduler=cluster.address, run=cluster.settings["run"], **settings)
        assert caught.value.setting == name
        assert mine in str(caught.value)
        assert theirs in str(caught.value)
        second = cluster.store("dist_sync")
        assert {first.rank, second.rank} == {0, 1}


def test_a_worker_that_does_not_say_takes_the_replicas_of_its_cluster() -> None:
    with LocalCluster(1, 2, replicas=2) as cluster:
        with pytest.raises(ConfigError, match="this node wants replicas=1, the cluster has 2"):
            cluster.lone_store(replicas=1)
        del cluster.settings["replicas"]
        assert cluster.store().num_servers == 2
        with cluster.observer() as observer:
            assert observer.status()["settings"]["replicas"] == 2


def test_more_replicas_than_servers_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="replicas = 2 needs at least 2 servers") as caught:
        LocalCluster(1, 1, replicas=2)
    assert caught.value.setting == "replicas"


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="staleness"):
        kvd.create("dist_sync", staleness=2)
    with pytest.raises(ConfigError, match="no store has the type 'dist_magic'") as caught:
        kvd.create("dist_magic")
    assert caught.value.__context__ is None  # a traceback has it once
    with pytest.raises(ConfigError):
        kvd.create("local", no_such_setting=1)


def test_a_full_cluster_refuses_another_worker() -> None:
    with LocalCluster(1, 1) as cluster:
        kv = cluster.store()
        with pytest.raises(NotAllowed, match="all 1 workers are there"):
            kvd.create("dist_sync", scheduler=cluster.address, run=cluster.settings["run"])
        kv.init("w", ones())


def test_nobody_answers_at_the_schedulers_address() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        free = f"tcp://127.0.0.1:{silent.getsockname()[1]}"  # accepts connections, and says nothing
        for address in (free, "tcp://127.0.0.1:1", "ipc:///tmp/kvd-nobody-is-here.sock"):
            begun = time.monotonic()
            with pytest.raises(ConnectError, match="kvd scheduler") as caught:
                kvd.create("dist_sync", scheduler=address, join_timeout_s=1.5)
            assert caught.value.address == address
            assert time.monotonic() - begun < 3


def test_servers_that_are_missing_are_named() -> None:
    with LocalCluster(1, 2, join_timeout_s=1.5, **QUICK) as cluster:
        cluster.servers.pop().stop()
        with pytest.raises(RequestTimeout, match="waiting for server 1") as caught:
            cluster.store()
        assert caught.value.waiting_for == ("server 1",)
        assert caught.value.outcome == "not_sent"
        cluster.start("server", node_id="server-1")
        kv = cluster.store()
        kv.init("w", ones())


def test_two_stores_in_one_process_do_not_mix() -> None:
    with LocalCluster(1, 1) as one, LocalCluster(1, 2) as two:
        a, b = one.store(), two.store()
        a.init("w", ones())
        b.init("w", np.full(7, 5, np.int64))
        assert a.pull("w").shape == (4,)
        assert b.pull("w").tolist() == [5] * 7
        assert (a.num_servers, b.num_servers) == (1, 2)
