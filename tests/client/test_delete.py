"""`delete`: a key is gone for all workers once all have deleted it, and a key of its name can be made again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.client.calls.optimizer_state_file import OptimizerStateFile
from kvd.errors import KeyNotFound, NodeLost, NotAllowed, RequestTimeout
from kvd.testing.cluster import LocalCluster, engine_of, wait_until

TYPES = ["local", "device"]


def full(shape: Any, value: float) -> np.ndarray[Any, Any]:
    return np.full(shape, value, np.float32)


# ── without a cluster ──


@pytest.mark.parametrize("name", TYPES)
def test_a_local_key_is_gone_and_can_be_made_again(name: str) -> None:
    with kvd.create(name) as store:
        store.set_optimizer(kvd.optimizer.SGD(learning_rate=1.0, momentum=0.5))
        store.init(["a", "b"], [full(2, 0), full(2, 5)])
        store.push("a", full(2, 1))
        store.delete("a")
        with pytest.raises(KeyNotFound):
            store.pull("a")
        store.init("a", full(3, 0))
        store.push("a", full(3, 1)).wait()
        assert store.pull("a").tolist() == [-1, -1, -1]  # without the momentum of the first one
        assert store.version("a") == 1
        store.delete(["a", "b"])
        store.delete([])


@pytest.mark.parametrize("name", TYPES)
def test_a_local_list_is_deleted_as_a_whole_or_not_at_all(name: str) -> None:
    with kvd.create(name) as store:
        store.init("a", full(2, 1))
        with pytest.raises(KeyNotFound) as caught:
            store.delete(["a", "nothing"])
        assert caught.value.key == "nothing"
        assert store.pull("a").tolist() == [1, 1]


def test_the_error_of_a_deletion_that_nobody_waits_for_is_raised_by_the_next_call() -> None:
    store = kvd.create()
    store.delete_async("nothing")
    with pytest.raises(KeyNotFound):
        store.flush()
    store.close()


# ── in a cluster ──


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("mode", ["dist_sync", "dist_async"])
def test_keys_are_deleted_and_made_again_with_other_shapes(mode: str, servers: int) -> None:
    names = ["a", "b", "large"]

    def program(store: kvd.KVStore) -> bool:
        if store.rank == 0:
            store.set_optimizer(kvd.optimizer.SGD(learning_rate=1.0, momentum=0.9))
        store.barrier()
        for generation in range(4):
            shapes = [(generation + 1,), (2, generation + 1), (3000 * (generation + 1),)]
            store.init(names, [full(shape, generation) for shape in shapes])
            for shape, name in zip(shapes, names, strict=True):
                store.push(name, full(shape, 1))
            store.flush()
            store.barrier()
            if mode == "dist_sync":
                assert all((store.pull(name) == generation - 2).all() for name in names)
                assert [store.clock(name) for name in names] == [1, 1, 1]
            store.barrier()
            store.delete(names)
            for name in names:
                if generation == 3:
                    with pytest.raises(KeyNotFound):
                        store.pull(name)
        return True

    with LocalCluster(2, servers, slice_bytes=4096) as cluster:
        assert cluster.run(program, mode) == [True, True]
        with cluster.observer() as observer:
            assert observer.keys() == []
            assert [server["bytes_led"] for server in observer.status()["servers"]] == [0] * servers


def test_a_deletion_waits_for_the_other_workers() -> None:
    def program(store: kvd.KVStore) -> bool:
        store.init("w", full(2, 1))
        if store.rank == 0:
            handle = store.delete_async("w")
            later = store.pull_async("w")
            store.barrier()
            assert not handle.done()
            store.barrier()
            handle.wait()
            with pytest.raises(KeyNotFound):
                later.wait()
        else:
            store.barrier()
            assert store.pull("w").tolist() == [1, 1]
            store.barrier()
            store.delete("w")
        return True

    with LocalCluster(2, 1) as cluster:
        assert cluster.run(program) == [True, True]


def test_a_deletion_that_timed_out_goes_on() -> None:
    def program(store: kvd.KVStore) -> bool:
        store.init("w", full(2, 1))
        if store.rank == 0:
            with pytest.raises(RequestTimeout):
                store.delete_async("w").wait(0.2)
        store.barrier()
        store.delete("w")
        store.init("w", full(3, 2))
        return bool((store.pull("w") == full(3, 2)).all())

    with LocalCluster(2, 2) as cluster:
        assert cluster.run(program) == [True, True]


def test_bound_arrays_and_broadcasts_of_a_deleted_key_are_forgotten() -> None:
    def program(store: kvd.KVStore) -> bool:
        for size in (2, 5):
            value = full(size, 10 + size + store.rank)
            store.broadcast("w", value)
            assert value.tolist() == [10 + size] * size
            gradient, weight = store.bind("w")
            assert weight.tolist() == [10 + size] * size
            gradient[:] = 1
            store.pushpull("w", gradient, weight)
            assert weight.tolist() == [2] * size
            store.delete("w")
        return True

    with LocalCluster(2, 1) as cluster:
        assert cluster.run(program) == [True, True]


def test_the_optimizer_state_of_a_deleted_key_is_gone(tmp_path: Path) -> None:
    with LocalCluster(1, 2) as cluster:
        store = cluster.store()
        store.set_optimizer(kvd.optimizer.SGD(learning_rate=1.0, momentum=0.5))
        store.init(["a", "b"], [full(2, 0), full(2, 0)])
        store.pushpull(["a", "b"], [full(2, 1), full(2, 1)])
        store.delete("a")
        store.save_optimizer_states(tmp_path / "one")
        assert sorted(OptimizerStateFile.read(tmp_path / "one").steps) == ["b"]
        store.init("a", full(2, 0))
        assert store.pushpull("a", full(2, 1)).tolist() == [-1, -1]
        store.save_optimizer_states(tmp_path / "two")
        assert OptimizerStateFile.read(tmp_path / "two").steps == {"a": 1, "b": 1}
        store.load_optimizer_states(tmp_path / "two")


def test_the_memory_of_a_deleted_key_is_free_for_another() -> None:
    with LocalCluster(1, 1, memory_limit_bytes="64MiB") as cluster:
        store = cluster.store()
        large = full(2 << 20, 1)  # 8 MiB, of which a server keeps 5 times
        store.init("a", large)
        with pytest.raises(NotAllowed, match="memory_limit_bytes"):
            store.init("b", large)
        store.delete("a")
        store.init("b", large)


def test_an_observer_meets_a_deletion_once() -> None:
    with LocalCluster(1, 1) as cluster:
        store = cluster.store()
        store.init("w", full(2, 1))
        with cluster.observer() as observer:
            assert observer.pull("w").tolist() == [1, 1]
            store.delete("w")
            store.init("w", full(3, 2))
            with pytest.raises(KeyNotFound, match="was deleted, and made again"):
                observer.pull("w")
            assert observer.pull("w").tolist() == [2, 2, 2]


def test_a_deletion_that_waits_for_a_dead_worker_is_made_again_when_that_is_back() -> None:
    with LocalCluster(2, 1, worker_timeout_s=1.5, heartbeat_interval_s=0.1) as cluster:
        stores: list[kvd.KVStore] = asyncio.run(_both(cluster))
        first, second = sorted(stores, key=lambda store: store.rank)
        handles = [store.init_async("w", full(2, 1)) for store in (first, second)]
        for handle in handles:
            handle.wait()
        second.__exit__(RuntimeError, None, None)  # its program fails
        with pytest.raises(NodeLost) as caught:
            first.delete("w")
        assert caught.value.node == "worker 1"
        assert first.pull("w").tolist() == [1, 1]
        back = cluster.store(node_id=engine_of(second).session.identity.node_id)
        assert back.rank == 1
        wait_until(lambda: engine_of(first).machine.view.dead_workers() == {}, "worker 1 is back")
        handle = back.delete_async("w")
        first.delete("w")
        handle.wait()


async def _both(cluster: LocalCluster) -> list[kvd.KVStore]:
    return list(
        await asyncio.gather(*[asyncio.to_thread(cluster.store, node_id=f"worker-{number}") for number in (0, 1)])
    )


@pytest.mark.asyncio
async def test_the_async_store_deletes() -> None:
    store = await kvd.aio.create("local")
    await store.init("w", full(2, 1))
    await store.delete("w")
    await store.init("w", full(3, 1))
    await store.delete_async("w")
    with pytest.raises(KeyNotFound):
        await store.pull("w")
    await store.close()
