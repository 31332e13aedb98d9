"""The memory budget of the async façade: awaited pushes wait for room, and the event loop goes on."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.errors import RequestTimeout
from kvd.testing.cluster import LocalCluster
from tests.client.harness import MEGABYTE, ONE_PUSH, PATIENT


async def filled(cluster: LocalCluster, keys: list[str]) -> tuple[Any, Any, kvd.KVStore]:
    """The first worker, with room for one push; that push, which is not done before the other worker pushes; that."""
    kv = await kvd.aio.create("dist_sync", scheduler=cluster.address, **PATIENT, **ONE_PUSH)
    other = await asyncio.to_thread(cluster.store)
    zeros = np.zeros(MEGABYTE // 4, np.float32)
    theirs = asyncio.to_thread(other.init, keys, [zeros] * len(keys))
    await asyncio.gather(theirs, kv.init(keys, [zeros] * len(keys)))
    return kv, await kv.push(keys[0], np.full_like(zeros, 1)), other


@pytest.mark.parametrize("what", ["push", "pushpull", "broadcast"])
@pytest.mark.asyncio
async def test_an_awaited_push_waits_for_room_and_the_loop_goes_on(what: str) -> None:
    with LocalCluster(2, 1, **PATIENT) as cluster:
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


@pytest.mark.asyncio
async def test_the_async_forms_say_at_once_that_there_is_no_room() -> None:
    with LocalCluster(2, 1, **PATIENT) as cluster:
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


@pytest.mark.asyncio
async def test_those_who_wait_for_room_come_in_their_order_and_can_give_up() -> None:
    with LocalCluster(2, 1, **PATIENT) as cluster:
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


@pytest.mark.asyncio
async def test_there_may_never_be_room() -> None:
    with LocalCluster(2, 1, **PATIENT) as cluster:
        kv, first, _ = await filled(cluster, ["w", "v"])
        try:
            with pytest.raises(RequestTimeout, match="memory_limit_bytes") as caught:
                await kv.push("v", np.zeros(MEGABYTE // 4, np.float32))
            assert caught.value.outcome == "not_sent"
            del first
        finally:
            await kv.__aexit__(RuntimeError, None, None)
