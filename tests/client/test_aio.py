"""The async façade: the same members, as coroutines, on a real cluster."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.errors import ConnectError, KeyExists, NotAllowed, RequestTimeout, ShapeMismatch, StoreClosed
from kvd.testing.cluster import LocalCluster, wait_until

QUICK: dict[str, Any] = {
    "server_timeout_s": 0.2,
    "worker_timeout_s": 0.2,
    "heartbeat_interval_s": 0.05,
    "request_timeout_s": 0.4,
}


def ones(count: int = 4) -> Any:
    return np.ones(count, np.float32)


def test_both_facades_have_the_same_members() -> None:
    blocking = {name for name in dir(kvd.KVStore) if not name.startswith("_")}
    asynchronous = {name for name in dir(kvd.aio.KVStore) if not name.startswith("_")}
    assert blocking == asynchronous
    for name in blocking:
        one, other = getattr(kvd.KVStore, name), getattr(kvd.aio.KVStore, name)
        if callable(one) and name != "is_capable":
            assert list(inspect.signature(one).parameters) == list(inspect.signature(other).parameters), name
            assert inspect.iscoroutinefunction(other) != name.endswith("_async"), name


@pytest.mark.parametrize("kind", ["local", "dist_sync", "dist_async"])
def test_every_member(kind: str, tmp_path: Path) -> None:
    async def program(address: str) -> None:
        async with await kvd.aio.create(kind, **({} if kind == "local" else {"scheduler": address})) as kv:
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
            await kv.flush()
            await kv.barrier("b", timeout=10)
            assert await kv.send_command_to_servers("ping", b"x") == [b"x"] * kv.num_servers
            await kv.set_optimizer(kvd.optimizer.SGD(1.0, momentum=0.5))
            await kv.update_optimizer(learning_rate=0.5)
            assert (await kv.pushpull("a", -ones())).tolist() == [1.5] * 4
            await kv.save_optimizer_states(tmp_path / "states", dump_optimizer=True)
            await kv.load_optimizer_states(tmp_path / "states")
            assert await kv.num_dead_node(7) == 0
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

    with LocalCluster(1, 2) as cluster:
        asyncio.run(program(cluster.address))


def test_many_calls_at_once_from_one_loop() -> None:
    async def program(address: str) -> None:
        async with await kvd.aio.create("dist_sync", scheduler=address) as kv:
            keys = [f"k{number}" for number in range(50)]
            await asyncio.gather(*[kv.init(key, np.zeros(300, np.float32)) for key in keys])
            for step in range(5):
                values = await asyncio.gather(*[kv.pushpull(key, np.full(300, step, np.float32)) for key in keys])
                assert all((value == step).all() for value in values)

    with LocalCluster(1, 2) as cluster:
        asyncio.run(program(cluster.address))


def test_a_call_that_is_cancelled_does_not_harm_the_store() -> None:
    async def program(address: str) -> None:
        one = await kvd.aio.create("dist_sync", scheduler=address)
        other = await kvd.aio.create("dist_sync", scheduler=address)
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

    with LocalCluster(2, 1) as cluster:
        asyncio.run(program(cluster.address))


def test_the_loop_goes_on_while_calls_wait() -> None:
    async def program(address: str) -> int:
        one = await kvd.aio.create("dist_sync", scheduler=address)
        other = await kvd.aio.create("dist_sync", scheduler=address)
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.01)

        ticking = asyncio.create_task(tick())
        with pytest.raises(RequestTimeout):
            await one.barrier("b", timeout=0.3)
        ticking.cancel()
        await asyncio.gather(one.close(), other.close())
        return ticks

    with LocalCluster(2, 1) as cluster:
        assert asyncio.run(program(cluster.address)) > 10


def test_a_creation_that_is_cancelled_takes_no_place() -> None:
    async def program(address: str) -> None:
        begun = time.monotonic()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(kvd.aio.create("dist_sync", scheduler="tcp://127.0.0.1:1", **QUICK), 0.2)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(kvd.aio.create("dist_sync", scheduler=address), 0.0001)
        assert time.monotonic() - begun < 2

    with LocalCluster(1, 1) as cluster:
        asyncio.run(program(cluster.address))
        wait_until(lambda: all(thread.name != "kvd-create" for thread in threading.enumerate()), "it gives up")
        cluster.store().init("w", ones())


def test_errors_of_creation() -> None:
    async def program() -> None:
        with pytest.raises(kvd.ConfigError):
            await kvd.aio.create("dist_magic")
        with pytest.raises(ConnectError):
            await kvd.aio.create(
                "dist_sync",
                scheduler="tcp://127.0.0.1:1",
                server_timeout_s=0.2,
                worker_timeout_s=0.2,
                heartbeat_interval_s=0.05,
                request_timeout_s=0.3,
            )

    asyncio.run(program())


def test_an_async_with_block_that_fails_leaves_at_once() -> None:
    async def program(address: str) -> None:
        begun = time.monotonic()
        with pytest.raises(ZeroDivisionError):
            async with await kvd.aio.create("dist_sync", scheduler=address) as kv:
                raise ZeroDivisionError
        assert time.monotonic() - begun < 2
        with pytest.raises(StoreClosed):
            await kv.barrier()

    with LocalCluster(2, 1) as cluster:
        asyncio.run(program(cluster.address))


# ── the memory limit ──

MEGABYTE = 1 << 20


PATIENT: dict[str, Any] = {
    "server_timeout_s": 1.0,
    "worker_timeout_s": 1.0,
    "heartbeat_interval_s": 0.1,
    "request_timeout_s": 5.0,
    "slice_bytes": "1MiB",
}


async def filled(cluster: LocalCluster, keys: list[str]) -> tuple[Any, Any, kvd.KVStore]:
    """The first worker, with room for one push; that push, which is not done before the other worker pushes; that."""
    limits = {"memory_limit_bytes": "1MiB", "credit_bytes": "1MiB"}
    kv = await kvd.aio.create("dist_sync", scheduler=cluster.address, **PATIENT, **limits)
    other = await asyncio.to_thread(cluster.store)
    zeros = np.zeros(MEGABYTE // 4, np.float32)
    theirs = asyncio.to_thread(other.init, keys, [zeros] * len(keys))
    await asyncio.gather(theirs, kv.init(keys, [zeros] * len(keys)))
    return kv, await kv.push(keys[0], np.full_like(zeros, 1)), other


@pytest.mark.parametrize("what", ["push", "pushpull", "broadcast"])
def test_an_awaited_push_waits_for_room_and_the_loop_goes_on(what: str) -> None:
    async def program(cluster: LocalCluster) -> None:
        kv, first, other = await filled(cluster, ["w", "v"])
        value = np.full(MEGABYTE // 4, 2, np.float32)
        try:
            waiting = asyncio.create_task(getattr(kv, what)("v", value))
            begun = time.monotonic()
            for _ in range(20):
                await asyncio.sleep(0.01)
            assert time.monotonic() - begun < 2
            assert not waiting.done()
            assert not first.done()
            await asyncio.to_thread(other.push, "w", np.zeros(MEGABYTE // 4, np.float32))  # now the first is done
            await first
            del first
            if what == "broadcast":
                await asyncio.to_thread(other.broadcast, "v", np.zeros_like(value))
            else:
                await asyncio.to_thread(other.push, "v", np.zeros_like(value))
            result = await asyncio.wait_for(waiting, 10)
            if what == "push":
                await result
            assert (await kv.pull("v"))[0] == 2
        finally:
            await kv.__aexit__(RuntimeError, None, None)

    with LocalCluster(2, 1, **PATIENT) as cluster:
        asyncio.run(program(cluster))


def test_the_async_forms_say_at_once_that_there_is_no_room() -> None:
    async def program(cluster: LocalCluster) -> None:
        kv, first, other = await filled(cluster, ["w", "v"])
        value = np.full(MEGABYTE // 4, 2, np.float32)
        try:
            for begin in (kv.push_async, kv.pushpull_async):
                begun = time.monotonic()
                with pytest.raises(RequestTimeout, match="memory_limit_bytes") as caught:
                    begin("v", value)
                assert caught.value.outcome == "not_sent"
                assert time.monotonic() - begun < 1
            await asyncio.to_thread(other.push, "w", np.zeros_like(value))
            await first
            del first
            await asyncio.sleep(0.2)
            kv.push_async("v", value)
        finally:
            await kv.__aexit__(RuntimeError, None, None)

    with LocalCluster(2, 1, **PATIENT) as cluster:
        asyncio.run(program(cluster))


def test_those_who_wait_for_room_come_in_their_order_and_can_give_up() -> None:
    async def program(cluster: LocalCluster) -> None:
        kv, first, other = await filled(cluster, ["w", "v"])
        zeros = np.zeros(MEGABYTE // 4, np.float32)
        try:
            tasks = [asyncio.create_task(kv.pushpull("v", np.full_like(zeros, number))) for number in range(1, 5)]
            await asyncio.sleep(0.1)
            with pytest.raises(RequestTimeout):
                kv.push_async("v", np.ones(1, np.float32))  # small enough, and yet not before the others
            tasks[1].cancel()
            await asyncio.to_thread(other.push, "w", zeros)
            await first
            del first
            given = [await asyncio.to_thread(other.pushpull, "v", zeros.copy()) for _ in range(3)]
            rounds = [float(value[0]) for value in given]
            assert rounds == [1, 3, 4]
            results: list[Any] = await asyncio.gather(*tasks, return_exceptions=True)
            assert isinstance(results.pop(1), asyncio.CancelledError)
            assert [float(result[0]) for result in results] == rounds
        finally:
            await kv.__aexit__(RuntimeError, None, None)

    with LocalCluster(2, 1, **PATIENT) as cluster:
        asyncio.run(program(cluster))


def test_there_may_never_be_room() -> None:
    async def program(cluster: LocalCluster) -> None:
        kv, first, _ = await filled(cluster, ["w", "v"])
        try:
            with pytest.raises(RequestTimeout, match="memory_limit_bytes") as caught:
                await kv.push("v", np.zeros(MEGABYTE // 4, np.float32))
            assert caught.value.outcome == "not_sent"
            del first
        finally:
            await kv.__aexit__(RuntimeError, None, None)

    with LocalCluster(2, 1, **PATIENT) as cluster:
        asyncio.run(program(cluster))
