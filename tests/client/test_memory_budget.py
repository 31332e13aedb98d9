"""The memory budget by itself: which push gets room, when, and which waiting push is woken."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest

from kvd.client.calls.memory_budget import MemoryBudget, Reservation
from kvd.client.calls.values import Source
from kvd.errors import RequestTimeout
from kvd.protocol.specs import KeySpec
from kvd.testing.cluster import wait_until

LIMIT = 3
TIMEOUT_S = 10.0
QUICK_S = 5.0  # less than the timeout, so that a thread that nobody wakes is noticed


def copy_of(nbytes: int) -> Source:
    """A private copy of this size; its memory is free when nobody refers to it."""
    return Source(np.empty(nbytes, np.uint8), KeySpec("uint8", (nbytes,), 1 << 20))


class Pusher:
    """A thread that takes room for a copy of this size, and keeps it until `finish`."""

    def __init__(self, budget: MemoryBudget, nbytes: int) -> None:
        self._budget = budget
        self._nbytes = nbytes
        self._finish = threading.Event()
        self.served = threading.Event()
        self.error: RequestTimeout | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        before = len(budget._queue)
        self._thread.start()
        wait_until(lambda: len(budget._queue) > before or self.served.is_set(), "it waits, or has its room")

    def _run(self) -> None:
        copy = copy_of(self._nbytes)
        try:
            self._budget.take([copy])
        except RequestTimeout as error:
            self.error = error
            return
        self.served.set()
        self._finish.wait(TIMEOUT_S)

    def finish(self) -> None:
        self._finish.set()
        self._thread.join(TIMEOUT_S)


def test_a_push_within_the_limit_does_not_wait() -> None:
    budget = MemoryBudget(LIMIT, 0.0)
    one, two = copy_of(1), copy_of(2)
    budget.take([one])
    budget.take([two])
    with pytest.raises(RequestTimeout, match="raise memory_limit_bytes") as caught:
        budget.take([copy_of(1)])
    assert caught.value.outcome == "not_sent"
    del one
    budget.take([copy_of(1)])


def test_a_push_larger_than_the_limit_gets_room_when_it_is_alone() -> None:
    budget = MemoryBudget(LIMIT, 0.0)
    held = copy_of(1)
    budget.take([held])
    large = [copy_of(LIMIT), copy_of(LIMIT)]
    with pytest.raises(RequestTimeout):
        budget.take(large)
    del held
    budget.take(large)


def test_a_waiting_push_is_woken_when_there_is_room() -> None:
    budget = MemoryBudget(LIMIT, TIMEOUT_S)
    held = [copy_of(LIMIT)]
    budget.take(held)
    pusher = Pusher(budget, 1)
    assert not pusher.served.wait(0.1)
    held.clear()
    assert pusher.served.wait(QUICK_S)
    pusher.finish()


def test_the_first_in_the_queue_is_woken_even_if_another_has_waited_longer() -> None:
    """The first looks after the first release and waits again: it then stands behind the second on the condition."""
    budget = MemoryBudget(LIMIT, TIMEOUT_S)
    small, medium = [copy_of(1)], [copy_of(2)]
    budget.take(small)
    budget.take(medium)
    first, second = Pusher(budget, LIMIT), Pusher(budget, 1)
    small.clear()
    assert not first.served.wait(0.2)
    assert not second.served.is_set()  # it fits, but comes after the first
    medium.clear()
    assert first.served.wait(QUICK_S)
    assert not second.served.is_set()
    first.finish()
    assert second.served.wait(QUICK_S)
    second.finish()


def test_one_release_wakes_every_push_that_fits() -> None:
    budget = MemoryBudget(LIMIT, TIMEOUT_S)
    held = [copy_of(LIMIT)]
    budget.take(held)
    pushers = [Pusher(budget, 1) for _ in range(LIMIT + 1)]
    held.clear()
    for pusher in pushers[:LIMIT]:
        assert pusher.served.wait(QUICK_S)
    assert not pushers[LIMIT].served.wait(0.1)
    pushers[0].finish()
    assert pushers[LIMIT].served.wait(QUICK_S)
    for pusher in pushers[1:]:
        pusher.finish()


def test_a_push_that_gives_up_lets_the_next_one_look() -> None:
    budget = MemoryBudget(LIMIT, 0.3)
    held = copy_of(2)
    budget.take([held])
    first = Pusher(budget, 2)
    budget._timeout_s = TIMEOUT_S
    second = Pusher(budget, 1)  # it fits, but comes after the first
    assert second.served.wait(QUICK_S)
    assert first.error is not None
    second.finish()


@pytest.mark.asyncio
async def test_a_coroutine_is_woken_when_there_is_room() -> None:
    budget = MemoryBudget(LIMIT, TIMEOUT_S)
    held = [copy_of(LIMIT)]
    budget.take(held)
    reservation = Reservation()
    wanted = [copy_of(2)]
    with pytest.raises(RequestTimeout):
        budget.take(wanted, reservation)
    assert (reservation.budget, reservation.nbytes) == (budget, 2)

    async def take() -> None:
        async with budget.granted(reservation):
            budget.take(wanted, reservation)

    waiting = asyncio.create_task(take())
    await asyncio.sleep(0)  # a turn of the loop: it waits
    assert not waiting.done()
    held.clear()
    await asyncio.wait_for(waiting, QUICK_S)


@pytest.mark.asyncio
async def test_threads_and_coroutines_wait_in_one_queue() -> None:
    budget = MemoryBudget(LIMIT, TIMEOUT_S)
    held = [copy_of(LIMIT)]
    budget.take(held)
    thread = await asyncio.to_thread(Pusher, budget, LIMIT)
    reservation = Reservation()
    wanted = [copy_of(1)]
    with pytest.raises(RequestTimeout):
        budget.take(wanted, reservation)

    async def take() -> None:
        async with budget.granted(reservation):
            budget.take(wanted, reservation)

    waiting = asyncio.create_task(take())
    await asyncio.sleep(0)  # a turn of the loop: it waits
    held.clear()
    assert await asyncio.to_thread(thread.served.wait, QUICK_S)
    assert not waiting.done()
    await asyncio.to_thread(thread.finish)
    await asyncio.wait_for(waiting, QUICK_S)


@pytest.mark.asyncio
async def test_a_coroutine_that_never_gets_room_raises_and_leaves_the_queue() -> None:
    budget = MemoryBudget(LIMIT, 0.1)
    held = [copy_of(LIMIT)]
    budget.take(held)
    reservation = Reservation()
    with pytest.raises(RequestTimeout):
        budget.take([copy_of(1)], reservation)
    begun = time.monotonic()
    with pytest.raises(RequestTimeout, match="memory_limit_bytes"):
        async with budget.granted(reservation):
            raise AssertionError("there is no room")
    assert time.monotonic() - begun < QUICK_S
    held.clear()
    budget.take([copy_of(1)])
