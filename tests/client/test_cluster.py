"""The calls that concern the others: init, broadcast, barriers, join, commands, settings, who is dead."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.client.calls.values import Target
from kvd.client.cluster.broadcast import ClusterAssignments
from kvd.client.facades.blocking import backend_of
from kvd.errors import (
    BarrierBroken,
    ConfigError,
    ConnectError,
    DtypeMismatch,
    KeyExists,
    NotAllowed,
    RequestTimeout,
    ShapeMismatch,
)
from kvd.testing.cluster import LocalCluster, engine_of, wait_until

QUICK: dict[str, Any] = {"server_timeout_s": 1.0, "worker_timeout_s": 1.0, "heartbeat_interval_s": 0.1}


def ones(count: int = 4) -> Any:
    return np.ones(count, np.float32)


# ── init ──


def test_a_second_init_says_that_the_key_exists() -> None:
    def program(kv: kvd.KVStore) -> None:
        kv.init("w", ones())
        for value in (ones(), ones(5), ones().astype(np.float64)):
            with pytest.raises((KeyExists, ShapeMismatch, DtypeMismatch)):
                kv.init("w", value)
        assert kv.pull("w").tolist() == [1] * 4

    with LocalCluster(2, 2) as cluster:
        cluster.run(program)
    with kvd.create("local") as kv:
        program(kv)


@pytest.mark.parametrize(("value", "error"), [(ones(5), ShapeMismatch), (np.ones(4, np.float64), DtypeMismatch)])
def test_a_worker_that_disagrees_with_rank_0_is_told(value: Any, error: type[Exception]) -> None:
    def program(kv: kvd.KVStore) -> Any:
        if kv.rank == 0:
            kv.init(["w", "v"], [ones(), ones()])
        else:
            with pytest.raises(error, match="'w'"):
                kv.init(["v", "w"], [ones(), value])
            kv.init("fine", ones()) if kv.rank == 0 else None
        return kv.pull("w").tolist()

    with LocalCluster(2, 2) as cluster:
        assert cluster.run(program) == [[1] * 4] * 2


def test_an_init_of_nothing_and_of_a_bad_list_changes_nothing() -> None:
    with LocalCluster(1, 1) as cluster, kvd.create("local") as local:
        for kv in (cluster.store(), local):
            kv.init([], [])
            with pytest.raises(NotAllowed):
                kv.init(["a", "b"], [ones()])
            with pytest.raises((NotAllowed, DtypeMismatch)):
                kv.init(["a", "b"], [ones(), object()])
            kv.init(["a", "b"], [ones(), ones()])


# ── broadcast ──


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async", "local"])
def test_broadcast_gives_everyone_the_value_of_rank_0(kind: str) -> None:
    def program(kv: kvd.KVStore) -> None:
        value = np.full(3000, kv.rank + 7, np.float32)
        assert kv.broadcast("new", value) is value
        assert (value == 7).all()
        out = np.empty(3000, np.float32)
        for again in range(3):
            value = np.full(3000, 10 * again + kv.rank, np.float32)
            assert kv.broadcast("new", value, out=out) is out
            assert (value == 10 * again + kv.rank).all()
            assert (out == 10 * again).all()
            kv.barrier("read")
        kv.init("old", np.zeros(5, np.float32))
        kv.set_optimizer(kvd.optimizer.SGD(0.5, momentum=0.9))
        kv.push("old", np.ones(5, np.float32))
        kv.flush()
        kv.barrier("pushed")
        pair = [np.full(5, kv.rank + 1, np.float32), np.full(5, kv.rank + 2, np.float32)]
        outs: list[Any] = [[np.empty(5, np.float32), np.empty(5, np.float32)], np.empty(5, np.float32)]
        kv.broadcast(["old", "newer"], pair, out=outs)
        assert outs[0][0].tolist() == outs[0][1].tolist() == [1] * 5
        assert outs[1].tolist() == [2] * 5

    if kind == "local":
        with kvd.create("local") as kv:
            program(kv)
    else:
        with LocalCluster(3, 2) as cluster:
            cluster.run(program, kind)


def test_async_broadcasts_one_after_the_other_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    pull = ClusterAssignments._pull

    async def late(part: ClusterAssignments, names: list[str], targets: list[Target], priority: int) -> None:
        if part._rank == 1:
            await asyncio.sleep(0.2)
        await pull(part, names, targets, priority)

    def program(kv: kvd.KVStore) -> list[float]:
        out = np.empty(5, np.float32)
        seen = []
        for again in range(3):
            kv.broadcast("w", np.full(5, 10 * again + kv.rank, np.float32), out=out)
            seen.append(float(out[0]))
        return seen

    monkeypatch.setattr(ClusterAssignments, "_pull", late)
    with LocalCluster(2, 1) as cluster:
        assert cluster.run(program, "dist_async") == [[0, 10, 20]] * 2


def together(*calls: Callable[[], Any]) -> list[Any]:
    """The results of calls that wait for each other."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_a_restarted_worker_passes_old_broadcasts_and_takes_part_in_new_ones(kind: str) -> None:
    def begin(kv: kvd.KVStore) -> float:
        value = np.full(4, 1 if kv.rank == 0 else 9, np.float32)
        kv.broadcast("w", value)
        return float(value[0])

    def step(kv: kvd.KVStore) -> None:
        kv.push("w", ones())
        kv.flush()

    def again(kv: kvd.KVStore) -> float:
        value = np.full(4, 50 + kv.rank, np.float32)
        kv.broadcast("w", value)
        return float(value[0])

    with LocalCluster(2, 1, request_timeout_s=30.0) as cluster:
        stores = together(*(partial(cluster.store, kind, node_id=f"worker-{number}") for number in range(2)))
        zero, one = sorted(stores, key=lambda store: store.rank)
        node_id = f"worker-{stores.index(zero)}"
        assert together(partial(begin, zero), partial(begin, one)) == [1, 1]
        together(partial(step, zero), partial(step, one))
        zero.set_barrier_before_exit(False)
        zero.__exit__(RuntimeError, None, None)
        successor = cluster.store(kind, node_id=node_id)
        begin(successor)  # nobody else is there for it
        together(partial(step, successor), partial(step, one))
        assert together(partial(again, successor), partial(again, one)) == [50, 50]


def test_broadcast_and_push_in_one_round_are_refused() -> None:
    with LocalCluster(2, 1) as cluster:
        one, other = (cluster.store(node_id=f"worker-{number}") for number in range(2))
        handles = [store.init_async("w", ones()) for store in (one, other)]
        for handle in handles:
            handle.wait()
        push = other.push("w", ones())
        wait_until(lambda: engine_of(other).machine._outbox.unstaged == 0, "the push is staged")
        with pytest.raises(NotAllowed, match="broadcast and pushed in the same round"):
            one.broadcast("w", ones())
        assert not push.done()


# ── barriers, flush, join ──


def test_barriers_have_names_and_generations() -> None:
    passed: list[tuple[int, str]] = []

    def program(kv: kvd.KVStore) -> None:
        for step in range(3):
            kv.barrier("a")
            passed.append((step, "a"))
            kv.barrier()
            kv.barrier(name="x" * 500 + str(step % 2))
            passed.append((step, "x"))
            kv.barrier("end of step")

    with LocalCluster(3, 1) as cluster:
        cluster.run(program)
    assert passed == [(step, name) for step in range(3) for name in "ax" for _ in range(3)]


def test_a_barrier_times_out_and_can_be_entered_again() -> None:
    with LocalCluster(2, 1) as cluster:
        one, other = cluster.store(), cluster.store()
        begun = time.monotonic()
        for _ in range(2):
            with pytest.raises(RequestTimeout) as caught:
                one.barrier("b", timeout=0.2)
            assert caught.value.outcome == "unknown"
        assert time.monotonic() - begun < 3
        thread = threading.Thread(target=lambda: other.barrier("b", timeout=20))
        thread.start()
        one.barrier("b", timeout=20)
        thread.join(20)
        with pytest.raises(RequestTimeout):
            one.barrier("b", timeout=0.1)  # the next generation: nobody is there yet


def test_two_barriers_with_long_names_are_two() -> None:
    with LocalCluster(2, 1) as cluster:
        one, other = cluster.store(), cluster.store()
        handle = backend_of(one).rounds.barrier("n" * 300 + "1", 30)
        with pytest.raises(RequestTimeout):
            other.barrier("n" * 300 + "2", timeout=0.3)
        assert not handle.done()


def test_flush_times_out_and_the_push_goes_on() -> None:
    with LocalCluster(2, 1) as cluster:
        one, other = cluster.store(), cluster.store()
        handles = [store.init_async("w", np.zeros(4, np.float32)) for store in (one, other)]
        for handle in handles:
            handle.wait()
        one.push("w", ones())
        with pytest.raises(RequestTimeout):
            one.flush(timeout=0.2)
        other.push("w", ones())
        one.flush()
        assert one.pull("w").tolist() == [2] * 4


def test_a_worker_that_joins_out_of_the_rounds_is_not_waited_for() -> None:
    """Uneven data: rank 0 has five batches, rank 1 has three."""

    def program(kv: kvd.KVStore) -> Any:
        kv.init("w", np.zeros(2000, np.float32))
        values = [np.full(2000, kv.rank + 1 + 10 * step, np.float32) for step in range(5 if kv.rank == 0 else 3)]
        seen = [float(kv.pushpull("w", value)[0]) for value in values]
        if kv.rank == 1:
            kv.push("w", np.zeros(2000, np.float32)).wait()  # takes part in round 4 with zeros, then leaves
            kv.join()
            with pytest.raises(NotAllowed, match="left the rounds"):
                kv.pushpull("w", ones(2000))
        kv.barrier("after")
        seen.append(float(kv.pull("w")[0]))
        return seen

    with LocalCluster(2, 2) as cluster:
        one, other = cluster.run(program)
    assert one == [3, 23, 43, 31, 41, 41]
    assert other == [3, 23, 43, 41]


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
    monkeypatch.setattr("kvd.node.jobs.installed_controllers", lambda: controllers)
    with LocalCluster(1, 2) as cluster:
        kv = cluster.store()
        with pytest.raises(NotAllowed, match="LookupError: no luck here"):
            kv.send_command_to_servers("fail", b"luck")
        with pytest.raises(NotAllowed, match="SystemExit"):
            kv.send_command_to_servers("end", b"")
        with pytest.raises(NotAllowed, match="it must be bytes"):
            kv.send_command_to_servers("wrong", b"")
        assert kv.send_command_to_servers("ping", b"still here") == [b"still here"] * 2


# ── who is dead ──


def test_node_ids_and_masks() -> None:
    with LocalCluster(2, 1, **QUICK) as cluster, kvd.create("local") as local:
        kv = cluster.store(node_id="worker-0")
        gone = cluster.store(node_id="worker-1")
        assert [kv.num_dead_node(node_id) for node_id in (1, 2, 4, 7, 8, 9, 11)] == [0] * 7
        assert list(kv.dead_nodes()) == []
        engine_of(gone)._driver.stop(0)
        dead = 9 + 2 * gone.rank
        wait_until(lambda: kv.num_dead_node(4), "the worker is declared dead")
        assert [kv.num_dead_node(node_id) for node_id in (1, 2, 3, 4, 5, 6, 7)] == [0, 0, 0, 1, 1, 1, 1]
        assert [kv.num_dead_node(node_id) for node_id in (8, 10, dead, 20 - dead)] == [0, 0, 1, 0]
        (node,) = kv.dead_nodes()
        assert (node.role, node.rank, node.node_id) == ("worker", gone.rank, engine_of(gone).config.node_id)
        with pytest.raises(BarrierBroken) as broken:
            kv.barrier("b")
        assert broken.value.missing == (f"worker {gone.rank}",)
        for wrong in (0, -1, True, "worker"):
            with pytest.raises(NotAllowed, match="node id"):
                kv.num_dead_node(wrong)  # type: ignore[arg-type]
        assert local.num_dead_node(7) == 0
        assert list(local.dead_nodes()) == []


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
    ],
)
def test_a_worker_with_other_settings_is_refused(
    type_: str, settings: dict[str, Any], name: str, mine: str, theirs: str
) -> None:
    with LocalCluster(2, 1, slice_bytes=1 << 20) as cluster:
        first = cluster.store("dist_sync", merge="sum")
        with pytest.raises(ConfigError) as caught:
            kvd.create(type_, scheduler=cluster.address, **settings)
        assert caught.value.setting == name
        assert mine in str(caught.value)
        assert theirs in str(caught.value)
        second = cluster.store("dist_sync")
        assert {first.rank, second.rank} == {0, 1}


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(ConfigError, match="staleness"):
        kvd.create("dist_sync", staleness=2)
    with pytest.raises(ConfigError, match="no store has the type 'dist_magic'"):
        kvd.create("dist_magic")
    with pytest.raises(ConfigError):
        kvd.create("local", no_such_setting=1)


def test_a_full_cluster_takes_nobody() -> None:
    with LocalCluster(1, 1) as cluster:
        kv = cluster.store()
        with pytest.raises(NotAllowed, match="all 1 workers are there"):
            kvd.create("dist_sync", scheduler=cluster.address)
        kv.init("w", ones())


def test_nobody_answers_at_the_schedulers_address() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        free = f"tcp://127.0.0.1:{silent.getsockname()[1]}"  # accepts connections, and says nothing
        for address in (free, "tcp://127.0.0.1:1", "ipc:///tmp/kvd-nobody-is-here.sock"):
            begun = time.monotonic()
            with pytest.raises(ConnectError, match="kvd scheduler") as caught:
                kvd.create("dist_sync", scheduler=address, request_timeout_s=1.5, **QUICK)
            assert caught.value.address == address
            assert time.monotonic() - begun < 3


def test_servers_that_are_missing_are_named() -> None:
    with LocalCluster(1, 2, request_timeout_s=1.5, **QUICK) as cluster:
        cluster.servers.pop().stop()
        with pytest.raises(RequestTimeout, match="missing: server 1") as caught:
            cluster.store()
        assert caught.value.waiting_for == ("server 1",)
        assert caught.value.outcome == "not_sent"
        cluster.start("server", node_id="server-1")
        kv = cluster.store()
        kv.init("w", ones())


@pytest.mark.parametrize("staleness", [0, 2])
def test_the_staleness_bounds_how_far_a_worker_runs_ahead(staleness: int) -> None:
    with LocalCluster(2, 1, rounds_ahead=8) as cluster:
        fast = cluster.store("dist_async", staleness=staleness)
        slow = cluster.store("dist_async", staleness=staleness)
        made = [store.init_async("w", np.zeros(2, np.float32)) for store in (fast, slow)]
        for handle in made:
            handle.wait()
        handles = [fast.push("w", ones(2)) for _ in range(staleness + 2)]
        for handle in handles[:staleness]:
            handle.wait(10)
        time.sleep(0.2)
        assert [handle.done() for handle in handles] == [True] * staleness + [False] * 2
        slow.push("w", ones(2)).wait(10)
        handles[staleness].wait(10)
        assert not handles[staleness + 1].done()


def test_two_stores_in_one_process_do_not_mix() -> None:
    with LocalCluster(1, 1) as one, LocalCluster(1, 2) as two:
        a, b = one.store(), two.store()
        a.init("w", ones())
        b.init("w", np.full(7, 5, np.int64))
        assert a.pull("w").shape == (4,)
        assert b.pull("w").tolist() == [5] * 7
        assert (a.num_servers, b.num_servers) == (1, 2)
