"""The future result of a call: `concurrent.futures.Future` without the parts that this package does not use.

That one takes longer to create and to set than a small push takes on the wire.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

from kvd.client.calls.duties import Duty, least
from kvd.client.calls.held_signals import signals, uninterrupted


class Waiting(Protocol):
    """The threads that wait for promises."""

    def waiting(self, promise: Promise) -> AbstractContextManager[None]:
        """A context in which this thread waits for the end, without a timeout."""

    def duty(self) -> Duty | None:
        """What this thread does meanwhile."""


class Promise:
    """Set once, on any thread. Any number of threads and event loops may wait for it. It cannot be cancelled: a waiter
    may give up, but the call goes on and can be waited for again."""

    __slots__ = ("_done", "_error", "_lock", "_result", "_told", "_told_of_errors", "_waiters", "_waiting")

    def __init__(self, waiting: Waiting | None = None) -> None:
        self._waiting = waiting
        self._lock = threading.Lock()
        self._done = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._waiters: list[SimpleQueue[None]] = []
        self._told: list[Callable[[Promise], None]] = []
        self._told_of_errors: list[Callable[[Promise], None]] = []

    def done(self) -> bool:
        """Whether it has ended, with a result or an error."""
        return self._done

    def set_result(self, result: Any) -> None:
        self._result = result
        self._end()

    def set_exception(self, error: BaseException) -> None:
        self._error = error
        self._end()

    def _end(self) -> None:
        with self._lock:
            self._done = True
            told, told_of_errors = self._told, self._told_of_errors
            for waiter in self._waiters:
                waiter.put(None)
        if told_of_errors:
            if self._error is not None:
                told[:0] = told_of_errors
            told_of_errors.clear()  # they may refer to this promise: such a cycle would keep the arrays of the call
        if told:
            for tell in told:
                tell(self)
            told.clear()  # the same

    def on_end(self, tell: Callable[[Promise], None]) -> None:
        """Calls `tell` on the thread that ends it, or at once if it has ended."""
        with self._lock:
            if not self._done:
                self._told.append(tell)
                return
        tell(self)

    def on_error(self, tell: Callable[[Promise], None]) -> None:
        """The same if it ends with an error, and before those of `on_end` are called."""
        with self._lock:
            if not self._done:
                self._told_of_errors.append(tell)
                return
        if self._error is not None:
            tell(self)

    def has_result(self) -> bool:
        """Whether it has ended well."""
        return self._done and self._error is None

    def result(self, timeout: float | None = None) -> Any:
        """Waits up to `timeout` seconds and returns the result. Raises the error that the call ended with, or
        TimeoutError if it has not ended."""
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits up to `timeout` seconds and returns the error that the call ended with, None if it succeeded. Raises
        TimeoutError if it has not ended."""
        if not self._done and not self._wait(timeout):
            raise TimeoutError
        return self._error

    def _wait(self, timeout: float | None) -> bool:
        with self._lock:
            if self._done:
                return True
            waiter: SimpleQueue[None] = SimpleQueue()
            self._waiters.append(waiter)
        duty = None if self._waiting is None else self._waiting.duty()
        try:
            if duty is None:
                return self._wait_for(waiter, timeout)
            duty.begin_wait(partial(waiter.put, None))
            try:
                return self._wait_on_duty(waiter, timeout, duty)
            finally:
                duty.end_wait()
        finally:
            with self._lock:
                self._waiters.remove(waiter)

    def _wait_for(self, waiter: SimpleQueue[None], timeout: float | None) -> bool:
        if timeout is not None or self._waiting is None:
            return self._wait_with(waiter, timeout)
        with self._waiting.waiting(self):
            return self._wait_with(waiter, None)

    def _wait_with(self, waiter: SimpleQueue[None], timeout: float | None) -> bool:
        until = None if timeout is None else time.monotonic() + timeout
        while not self._done:
            left_s = None if until is None else until - time.monotonic()
            if left_s is not None and left_s <= 0:
                break
            signals.pause(waiter, left_s)
        return self._done

    def _wait_on_duty(self, waiter: SimpleQueue[None], timeout: float | None, duty: Duty) -> bool:
        """The same for a thread that has something to do meanwhile. That may take longer than the timeout."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self._done:
            left_s = None if until is None else until - time.monotonic()
            if left_s is not None and left_s <= 0:
                break
            if duty.is_due():
                duty.run()
            elif self._waiting is None or timeout is not None:
                signals.pause(waiter, least(left_s, duty.next_s()))
            else:
                with self._waiting.waiting(self):
                    signals.pause(waiter, duty.next_s())
        return self._done

    def __await__(self) -> Generator[Any, None, Any]:
        loop = asyncio.get_running_loop()
        here: asyncio.Future[None] = loop.create_future()

        @uninterrupted  # a loop discards what a callback raises, and `here` would never be done
        def wake() -> None:
            if not here.done():
                here.set_result(None)

        def ended(_: Promise) -> None:
            with suppress(RuntimeError):  # the loop is closed, so nothing waits there
                loop.call_soon_threadsafe(wake)

        self.on_end(ended)
        yield from here
        return self.result(0)


async def ends_within(promise: Promise, seconds: float) -> bool:
    """Waits for the end, for `seconds` at most. Returns whether it has come; an error is for those who ask for it."""

    async def wait() -> None:
        await promise

    task = asyncio.ensure_future(wait())
    await asyncio.wait({task}, timeout=seconds)
    if not task.done():
        task.cancel()
        return False
    task.exception()  # it reaches those who wait for the promise
    return True
