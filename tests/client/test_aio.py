"""The async façade: the same members, as coroutines, on a real cluster."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import kvd
from kvd.errors import ConnectError, KeyExists, NotAllowed, RequestTimeout, ShapeMismatch, StoreClosed
from kvd.testing.cluster import LocalCluster, wait_until
from tests.client.harness import UNREACHABLE, ones


def test_both_facades_have_the_same_members() -> None:
    registry = {"register", "OPTIMIZER"}  # of KVStoreBase: they are for other stores, which block
    blocking = {name for name in dir(kvd.KVStore) if not name.startswith("_")} - registry
    asynchronous = {name for name in dir(kvd.aio.KVStore) if not name.startswith("_")}
    assert blocking == asynchronous
    for name in blocking:
        one, other = getattr(kvd.KVStore, name), getattr(kvd.aio.KVStore, name)
        if name == "steps":  # an iterator in both, of the other kind
            assert list(inspect.signature(one).parameters) == list(inspect.signature(other).parameters)
        elif callable(one) and name != "is_capable":
            assert list(inspect.signature(one).parameters) == list(inspect.signature(other).parameters), name
            # Calls that end with _async give their handle at once; a snapshot's is there when the state has been read.
            gives_a_handle = name.endswith("_async") and name != "snapshot_async"
            assert inspect.iscoroutinefunction(other) != gives_a_handle, name


@pytest.mark.parametrize("kind", ["local", "dist_sync", "dist_async"])
@pytest.mark.asyncio
async def test_every_member(kind: str, tmp_path: Path) -> None:
    with LocalCluster(1, 2) as cluster:
        async with await kvd.aio.create(kind, **({} if kind == "local" else {"scheduler": cluster.address})) as kv:
            assert (kv.type, kv.rank, kv.num_workers, kv.local_rank) == (kind, 0, 1, 0)
            assert kv.num_servers == (0 if kind == "local" else 2)
            assert kv.is_capable("optimizer")
            with pytest.raises(ValueError, match="no capability"):
                kv.is_capable("magic")
            await kv.init("w", np.zeros(4, np.float32))
            with pytest.raises(KeyExists):
                await kv.init("w", np.zeros(4, np.float32))
            handle = await kv.push("w", ones())
            await handle
            await kv.push_async("w", ones() * 2)
            assert (await kv.pull("w")).tolist() == [2] * 4
            out = ones()
            assert await kv.pull_async("w", out=out) is out
            assert out.tolist() == [2] * 4
            assert (await kv.pushpull("w", ones() * 3)).tolist() == [3] * 4
            assert (await kv.pushpull_async("w", ones() * 4, out=out)).tolist() == [4] * 4
            assert (await kv.broadcast("w", ones() * 5)).tolist() == [5] * 4
            assert (await kv.broadcast_async("v", ones() * 6, out=out)).tolist() == [6] * 4
            assert await kv.clock("w") == await kv.version("w") == 5
            await kv.init_async(["a", "b"], [ones(), ones()])
            made, pushed = kv.init_async("c", ones()), kv.push_async("c", ones() * 2)
            assert (await kv.pull("c")).tolist() == [2] * 4
            await asyncio.gather(made, pushed)
            await kv.flush()
            await kv.barrier("b", timeout=10)
            assert await kv.send_command_to_servers("ping", b"x") == [b"x"] * kv.num_servers
            await kv.set_optimizer(kvd.optimizer.SGD(1.0, momentum=0.5))
            await kv.update_optimizer(learning_rate=0.5)
            assert (await kv.pushpull("a", -ones())).tolist() == [1.5] * 4
            await kv.save_optimizer_states(tmp_path / "states", dump_optimizer=True)
            await kv.load_optimizer_states(tmp_path / "states")
            assert await kv.num_dead_node(7) == 0
            with pytest.raises(NotAllowed, match="there is no node 101"):
                await kv.num_dead_node(101)
            assert list(await kv.dead_nodes()) == []
            with pytest.raises(ShapeMismatch):
                await kv.pull("w", out=ones(5))
            if kind == "local":
                await kv.set_updater(None)
            else:
                with pytest.raises(NotAllowed):
                    await kv.set_updater(None)
                await kv.rewind(await kv.clock("a"))
            await kv.join()
            await kv.set_barrier_before_exit(False)
        with pytest.raises(StoreClosed):
            await kv.pull("w")
        await kv.close()


@pytest.mark.asyncio
async def test_many_calls_at_once_from_one_loop() -> None:
    with LocalCluster(1, 2) as cluster:
        async with await kvd.aio.create("dist_sync", scheduler=cluster.address, run=cluster.settings["run"]) as kv:
            keys = [f"k{number}" for number in range(50)]
            await asyncio.gather(*[kv.init(key, np.zeros(300, np.float32)) for key in keys])
            for step in range(5):
                values = await asyncio.gather(*[kv.pushpull(key, np.full(300, step, np.float32)) for key in keys])
                assert all((value == step).all() for value in values)


async def both(cluster: LocalCluster) -> list[kvd.aio.KVStore]:
    """The stores of both workers."""
    return await asyncio.gather(
        *[kvd.aio.create("dist_sync", scheduler=cluster.address, preferred_rank=rank) for rank in range(2)]
    )


@pytest.mark.asyncio
async def test_a_call_that_is_cancelled_does_not_harm_the_store() -> None:
    with LocalCluster(2, 1) as cluster:
        one, other = await both(cluster)
        await asyncio.gather(*[store.init("w", np.zeros(4, np.float32)) for store in (one, other)])
        for call in (one.pushpull("w", ones()), one.barrier("b"), one.flush(), one.pull("w"), one.join()):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(call, 0.1)
        await other.pushpull("w", ones())
        assert (await one.pull("w")).tolist() == [2] * 4
        with pytest.raises(RequestTimeout):
            await other.barrier("c", timeout=0.1)
        for store in (one, other):
            await store.set_barrier_before_exit(False)
            await store.close()


@pytest.mark.asyncio
async def test_the_loop_goes_on_while_calls_wait() -> None:
    with LocalCluster(2, 1) as cluster:
        one, other = await both(cluster)
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.01)  # time itself: a tick

        ticking = asyncio.create_task(tick())
        with pytest.raises(RequestTimeout):
            await one.barrier("b", timeout=0.3)
        ticking.cancel()
        await asyncio.gather(one.close(), other.close())
        assert ticks > 2, "the loop stood still"


@pytest.mark.asyncio
async def test_a_creation_that_is_cancelled_takes_no_place() -> None:
    with LocalCluster(1, 1) as cluster:
        begun = time.monotonic()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(kvd.aio.create("dist_sync", **UNREACHABLE), 0.2)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(
                kvd.aio.create("dist_sync", scheduler=cluster.address, run=cluster.settings["run"]), 0.0001
            )
        assert time.monotonic() - begun < 2

        def gives_up() -> bool:
            return all(thread.name != "kvd-create" for thread in threading.enumerate())

        await asyncio.to_thread(wait_until, gives_up, "it gives up")
        store = await asyncio.to_thread(cluster.store)
        await asyncio.to_thread(store.init, "w", ones())


@pytest.mark.asyncio
async def test_errors_of_creation() -> None:
    with pytest.raises(kvd.ConfigError):
        await kvd.aio.create("dist_magic")
    with pytest.raises(ConnectError):
        await kvd.aio.create("dist_sync", **UNREACHABLE)


@pytest.mark.asyncio
async def test_an_async_with_block_that_fails_leaves_at_once() -> None:
    with LocalCluster(2, 1) as cluster:
        kv, other = await both(cluster)
        begun = time.monotonic()
        with pytest.raises(ZeroDivisionError):
            async with kv:
                raise ZeroDivisionError
        assert time.monotonic() - begun < 2
        with pytest.raises(StoreClosed):
            await kv.barrier()
        await other.set_barrier_before_exit(False)
        await other.close()
