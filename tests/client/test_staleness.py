"""How stale the pushes of asynchronous workers are, as programs and operators see it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import kvd
from kvd import Staleness
from kvd.client.calls.staleness import put_together
from kvd.optimizer import SGD
from kvd.testing.cluster import LocalCluster
from kvd_cli.cluster import _staleness_rows

SLICES = 4


def test_each_worker_sees_how_stale_the_pushes_of_all_are() -> None:
    def program(kv: kvd.KVStore) -> Any:
        value = np.ones(SLICES * 1024, np.float32)
        kv.init("w", value)
        kv.set_optimizer(SGD(0.1))
        kv.pull("w")
        kv.barrier("both have pulled")
        if kv.rank == 1:
            for _ in range(3):
                kv.pushpull("w", value.copy())
        kv.barrier("worker 1 has pushed")
        if kv.rank == 0:
            kv.push("w", value).wait()
        kv.barrier("worker 0 has pushed")
        return kv.push_staleness()

    with LocalCluster(2, 2, slice_bytes=4096) as cluster:
        results = cluster.run(program, "dist_async")
        with cluster.observer() as observer:
            status = observer.status()
    worker_0 = Staleness(SLICES, 3.0, 3, {"2-3": SLICES})
    worker_1 = Staleness(3 * SLICES, 0.0, 0, {"0": 3 * SLICES})
    assert results == [{"worker 0": worker_0, "worker 1": worker_1}] * 2
    assert put_together(status["servers"]) == results[0]
    assert _staleness_rows(status) == [["worker 0", 4, "3.00", 3], ["worker 1", 12, "0.00", 0]]


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_other_types_have_none(kind: str) -> None:
    def program(kv: kvd.KVStore) -> Any:
        kv.init("w", np.ones(2))
        kv.pushpull("w", np.ones(2))
        return kv.push_staleness()

    if kind.startswith("dist"):
        with LocalCluster(1, 1) as cluster:
            assert cluster.run(program, kind) == [{}]
    else:
        with kvd.create(kind) as kv:
            assert program(kv) == {}


def test_a_coroutine_asks_too() -> None:
    async def main() -> Any:
        async with await kvd.aio.create("local") as kv:
            return await kv.push_staleness()

    assert asyncio.run(main()) == {}


def test_the_figures_of_several_servers_are_put_together() -> None:
    one = {"pushes": 3, "mean": 1.0, "max": 3, "histogram": {"0": 2, "2-3": 1}}
    two = {"pushes": 1, "mean": 16384.0, "max": 16384, "histogram": {"16384+": 1}}
    found = put_together([{"staleness": {"worker 10": one}}, {"staleness": {"worker 10": two, "worker 9": one}}, {}])
    assert list(found) == ["worker 9", "worker 10"]
    assert found["worker 10"] == Staleness(4, (3 + 16384) / 4, 16384, {"0": 2, "2-3": 1, "16384+": 1})
    assert list(found["worker 10"].histogram) == ["0", "2-3", "16384+"]
