"""The memory budget of the async façade: awaited pushes wait for room, and the event loop goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.errors import RequestTimeout
from kvd.testing.cluster import LocalCluster
from tests.client.harness import MEGABYTE, ONE_PUSH, PATIENT
from tests.waiting import eventually


@asynccontextmanager
async def filled() -> AsyncIterator[tuple[Any, Any, kvd.KVStore]]:
    """A worker with room for one push, and keys "w" and "v" of a megabyte; its push of "w", which waits for the other
    worker's; and that other worker."""
    zeros = np.zeros(MEGABYTE // 4, np.float32)
    with LocalCluster(2, 1, **PATIENT) as cluster:
        kv, other = await asyncio.gather(
            kvd.aio.create(
                "dist_sync", preferred_rank=0, **{**cluster.settings, **ONE_PUSH, "scheduler": cluster.address}
            ),
            asyncio.to_thread(cluster.store, preferred_rank=1),
        )
        theirs = asyncio.to_thread(other.init, ["w", "v"], [zeros] * 2)
        await asyncio.gather(theirs, kv.init(["w", "v"], [zeros] * 2))
        try:
            yield kv, await kv.push("w", np.full_like(zeros, 1)), other
        finally:
            await kv.__aexit__(RuntimeError, None, None)


@pytest.mark.parametrize("what", ["push", "pushpull", "broadcast"])
@pytest.mark.asyncio
async def test_an_awaited_push_waits_for_room_and_the_loop_goes_on(what: str) -> None:
    async with filled() as (kv, first, other):
        value = np.full(MEGABYTE // 4, 2, np.float32)
        waiting = asyncio.create_task(getattr(kv, what)("v", value))
        begun = time.monotonic()
        for _ in range(20):
            await asyncio.sleep(0.01)  # time itself: the loop goes on
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


def pushed(kv: Any, value: Any) -> bool:
    try:
        kv.push_async("v", value)
    except RequestTimeout:
        return False
    return True


@pytest.mark.asyncio
async def test_the_async_forms_say_at_once_that_there_is_no_room() -> None:
    async with filled() as (kv, first, other):
        value = np.full(MEGABYTE // 4, 2, np.float32)
        for begin in (kv.push_async, kv.pushpull_async):
            begun = time.monotonic()
            with pytest.raises(RequestTimeout, match="memory_limit_bytes") as caught:
                begin("v", value)
            assert caught.value.outcome == "not_sent"
            assert time.monotonic() - begun < 1
        await asyncio.to_thread(other.push, "w", np.zeros_like(value))
        await first
        del first
        await eventually(lambda: pushed(kv, value), 'the server gives the memory of "w" back')


@pytest.mark.asyncio
async def test_pushes_wait_for_room_in_order_and_can_give_up() -> None:
    async with filled() as (kv, first, other):
        zeros = np.zeros(MEGABYTE // 4, np.float32)
        tasks = [asyncio.create_task(kv.pushpull("v", np.full_like(zeros, number))) for number in range(1, 5)]
        await asyncio.sleep(0.1)  # time itself: they come to wait, and nobody says so
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


@pytest.mark.asyncio
async def test_there_may_never_be_room() -> None:
    async with filled() as (kv, first, _):
        with pytest.raises(RequestTimeout, match="memory_limit_bytes") as caught:
            await kv.push("v", np.zeros(MEGABYTE // 4, np.float32))
        assert caught.value.outcome == "not_sent"
        del first
