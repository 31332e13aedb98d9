"""The memory that private copies of pushed values may take: a push that finds no room waits for it."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from queue import SimpleQueue

from kvd.client.calls.held_signals import signals, uninterrupted
from kvd.client.calls.values import Array, Source
from kvd.errors import RequestTimeout


class _Copy(weakref.ref[Array]):
    """A private copy that counts, until it is freed."""

    __slots__ = ("nbytes",)
    nbytes: int


class Reservation:
    """For a call that must not block its thread: if the budget refuses it, it can queue with this.

    Attributes:
        budget: the budget that refused the call; None: none did.
        nbytes: how much the call asked for.
    """

    __slots__ = ("_loop", "_woken", "budget", "nbytes")

    def __init__(self) -> None:
        self.budget: MemoryBudget | None = None
        self.nbytes = 0
        self._woken = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def wake(self) -> None:
        """Tells the coroutine that waits to look again. From any thread."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: no coroutine waits there
                self._loop.call_soon_threadsafe(uninterrupted(self._woken.set))

    def listen(self) -> None:
        """Forgets earlier wake-ups; `wait_for_wake` waits for one that comes after this."""
        self._loop = asyncio.get_running_loop()
        self._woken.clear()

    async def wait_for_wake(self) -> None:
        await self._woken.wait()


class _Waiter:
    """A thread in the queue."""

    def __init__(self) -> None:
        self._woken: SimpleQueue[None] = SimpleQueue()

    def wake(self) -> None:
        self._woken.put(None)

    def wait_for_wake(self, seconds: float) -> None:
        signals.pause(self._woken, seconds)


class MemoryBudget:
    """First come, first served: threads and coroutines wait in one queue.

    Args:
        limit_bytes: the budget. A call that wants more than that gets it when no other call holds anything.
        timeout_s: how long a call waits.
    """

    def __init__(self, limit_bytes: int, timeout_s: float) -> None:
        self._limit_bytes = limit_bytes
        self._timeout_s = timeout_s
        self._held_bytes = 0
        self._copies: dict[int, _Copy] = {}  # by their identity: a reference to an array has no hash
        self._queue: deque[_Waiter | Reservation] = deque()
        self._lock = threading.RLock()

    def take(self, sources: Sequence[Source], reservation: Reservation | None = None) -> None:
        """Counts the memory of private copies until it is freed. All copies of one call come in one `take`, so that a
        call never waits for itself. Without a reservation it waits for room, in this thread.

        Raises:
            RequestTimeout: there is no room; with a reservation, at once.
        """
        nbytes = sum([data.nbytes for data, _ in sources])
        with self._lock:
            has_room = not self._queue and self._fits(nbytes)
            if not has_room and reservation is not None:
                has_room = self._is_turn_of(reservation, nbytes)
                if not has_room:
                    reservation.budget, reservation.nbytes = self, nbytes
                    raise self._exceeded()
            if has_room:
                self._held_bytes += nbytes
        if not has_room:
            self._wait_in_queue(nbytes)
        for data, _ in sources:
            counted = _Copy(data, self._freed)
            counted.nbytes = data.nbytes
            self._copies[id(counted)] = counted

    def _fits(self, nbytes: int) -> bool:
        return self._held_bytes == 0 or self._held_bytes + nbytes <= self._limit_bytes

    def _is_turn_of(self, waiter: _Waiter | Reservation, nbytes: int) -> bool:
        return bool(self._queue) and self._queue[0] is waiter and self._fits(nbytes)

    def _wait_in_queue(self, nbytes: int) -> None:
        waiter, until = _Waiter(), time.monotonic() + self._timeout_s
        with self._lock:
            self._queue.append(waiter)
        try:
            while True:
                with self._lock:
                    if self._is_turn_of(waiter, nbytes):
                        self._held_bytes += nbytes
                        return
                    left_s = until - time.monotonic()
                    if left_s <= 0:
                        raise self._exceeded()
                waiter.wait_for_wake(left_s)
        finally:
            with self._lock:
                self._queue.remove(waiter)
                self._wake_next()

    @asynccontextmanager
    async def granted(self, reservation: Reservation) -> AsyncIterator[None]:
        """Waits in the queue without blocking the event loop. Within the block there is room for the call with this
        reservation.

        Raises:
            RequestTimeout: no room came free in time.
        """
        with self._lock:
            self._queue.append(reservation)
        try:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._wait_for_turn(reservation)
            except TimeoutError:
                raise self._exceeded() from None
            yield
        finally:
            with self._lock:
                self._queue.remove(reservation)
                self._wake_next()

    async def _wait_for_turn(self, reservation: Reservation) -> None:
        while True:
            reservation.listen()
            with self._lock:
                if self._is_turn_of(reservation, reservation.nbytes):
                    return
            await reservation.wait_for_wake()

    def _freed(self, counted: weakref.ref[Array]) -> None:
        copy = self._copies.pop(id(counted))
        with self._lock:
            self._held_bytes -= copy.nbytes
            if self._queue:
                self._wake_next()

    def _wake_next(self) -> None:
        """Has the first in the queue look again."""
        if self._queue:
            self._queue[0].wake()

    def _exceeded(self) -> RequestTimeout:
        return RequestTimeout(
            f"{self._held_bytes >> 20} MiB of pushes are under way, the limit is {self._limit_bytes >> 20} "
            f"MiB: wait for their handles, or raise memory_limit_bytes",
            outcome="not_sent",
        )
