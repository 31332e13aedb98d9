"""Init and broadcast: values that one worker has and all take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.client.calls.deadline import Deadline
from kvd.client.calls.unobserved_errors import UnobservedErrors
from kvd.client.calls.values import Target, source_of, target_of
from kvd.client.cluster.broadcast import ClusterAssignments, Here
from kvd.core import requests
from kvd.core.worker.step_loops import Replay
from kvd.errors import (
    DtypeMismatch,
    KeyExists,
    NotAllowed,
    ShapeMismatch,
)
from kvd.protocol.messages import MemberState
from kvd.testing.cluster import LocalCluster, engine_of, wait_until
from tests.client.harness import init_all, ones

QUICK: dict[str, Any] = {"server_timeout_s": 1.0, "worker_timeout_s": 1.0, "heartbeat_interval_s": 0.1}


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
def test_a_worker_that_disagrees_with_rank_0_gets_an_error(value: Any, error: type[Exception]) -> None:
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

    async def late(
        part: ClusterAssignments, names: list[str], targets: list[Target], priority: int, deadline: Deadline
    ) -> None:
        if part._rank == 1:
            await asyncio.sleep(0.2)  # time itself: this worker is late
        await pull(part, names, targets, priority, deadline)

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
        stores = cluster.open_stores(kind, [{"node_id": f"worker-{number}"} for number in range(2)])
        zero, one = sorted(stores, key=lambda store: store.rank)
        node_id = f"worker-{stores.index(zero)}"
        assert together(partial(begin, zero), partial(begin, one)) == [1, 1]
        together(partial(step, zero), partial(step, one))
        zero.set_barrier_before_exit(False)
        zero.__exit__(RuntimeError, None, None)
        successor = cluster.store(kind, node_id=node_id)
        begin(successor)  # nobody else is there for it
        successor.resume()
        together(partial(step, successor), partial(step, one))
        assert together(partial(again, successor), partial(again, one)) == [50, 50]


class RecordingEngine:
    """Answers as a cluster does in which a dead predecessor of this worker has counted `counted` pushes of each key."""

    def __init__(self, counted: int) -> None:
        self.session = SimpleNamespace(predecessor=MemberState.DEAD)
        self.machine = SimpleNamespace(has_pushed=lambda name: False, inherited=lambda name: None)
        self.asked: list[Any] = []
        self._counted = counted

    async def call(self, request: Any, *, within: Deadline) -> Any:
        self.asked.append(request)
        return self._counted if isinstance(request, requests.ClockOf) else None


@pytest.mark.parametrize(
    ("rank", "counted", "assigns", "passed"),
    [
        (0, 0, True, False),
        (0, 1, False, False),  # the predecessor assigned, and may have died before any other worker read it
        (0, 2, False, True),
        (1, 0, False, False),
        (1, 1, False, True),
    ],
)
def test_a_restarted_async_worker_meets_the_others_unless_its_predecessor_has(
    rank: int, counted: int, assigns: bool, passed: bool
) -> None:
    engine: Any = RecordingEngine(counted)
    here = Here(Replay.PERHAPS, 0, "kvd:broadcast", "kvd:broadcast read", Deadline(60.0))
    nothing: Any = None
    part = ClusterAssignments(engine, nothing, UnobservedErrors(), nothing, rank, False, False, nothing)
    sources = [source_of(ones(), 1 << 20, copy=True)] if rank == 0 else None
    asyncio.run(part._broadcast(["w"], sources, [target_of(ones(), 1 << 20)], 0, here))
    transfers = [request for request in engine.asked if isinstance(request, requests.Transfer)]
    assert [(transfer.push, transfer.pull) for transfer in transfers] == [(True, False)] * assigns + [(False, True)]
    assert [request.passed for request in engine.asked if isinstance(request, requests.Barrier)] == [passed] * 2


def test_broadcast_and_push_in_one_round_are_refused() -> None:
    with LocalCluster(2, 1) as cluster:
        one, other = cluster.open_stores()
        init_all([one, other], "w", ones())
        push = other.push("w", ones())
        wait_until(lambda: engine_of(other).machine._outbox.unstaged == 0, "the push is staged")
        with pytest.raises(NotAllowed, match="broadcast and pushed in the same round"):
            one.broadcast("w", ones())
        assert not push.done()
