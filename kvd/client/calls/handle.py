"""What an asynchronous call returns."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from typing import Any

from kvd.client.calls.checks import patience
from kvd.client.calls.promise import Promise
from kvd.errors import RequestTimeout


class Handle:
    """The promise of a call's result. Thread-safe, and awaitable in any event loop.

    The errors of a push whose handle nobody asks are raised by the next call on its key, by `flush` or by `close`.
    """

    def __init__(
        self,
        promise: Promise,
        finish: Callable[[Any], Any] | None = None,
        what: str = "the call",
        drive: Callable[[Promise, float | None], None] | None = None,
        given_up: Callable[[], None] | None = None,
    ) -> None:
        self._promise = promise
        self._given_up = given_up  # to be called before whoever waits hears of an error
        self._drive = drive  # does something useful until it is done, or the time is up
        self._finish = finish
        self._what = what
        self._lock = threading.Lock()
        self._finished: tuple[Any] | None = None
        self.claimed = False  # somebody has seen, or will see, how it ended

    @classmethod
    def of(cls, result: Any) -> Handle:
        """A handle that is done."""
        promise = Promise()
        promise.set_result(result)
        return cls(promise)

    def wait(self, timeout: float | None = None) -> Any:
        """The result, as soon as there is one.

        Args:
            timeout: seconds to wait here; None: until the call's own deadline ends it.

        Raises:
            RequestTimeout: not done within `timeout`; the call itself goes on, and can be waited for again.
            NotAllowed: `timeout` is no number of seconds.
            KvdError: whatever the call ended with.
        """
        return self._deliver(self._ask(self._promise.result, timeout))

    def result(self, timeout: float | None = None) -> Any:
        """The same as `wait`."""
        return self.wait(timeout)

    def done(self) -> bool:
        """Whether the call has ended, well or not."""
        return self._promise.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error that the call ended with, None if it ended well. Waits like `wait`."""
        error: BaseException | None = self._ask(self._promise.exception, timeout)
        return error

    def _ask(self, ask: Callable[[float | None], Any], timeout: float | None) -> Any:
        """The answer of the future. Who gives up waiting, at the timeout or by Ctrl-C, has not seen how it ended."""
        if timeout is not None:
            timeout = patience(timeout)
        self.claimed = True
        try:
            return self._drive_and_ask(ask, timeout)
        except BaseException:
            if self._given_up is not None:
                self.claimed = True  # whoever gave up knows how it ended
                self._given_up()
            raise

    def _drive_and_ask(self, ask: Callable[[float | None], Any], timeout: float | None) -> Any:
        try:
            if self._drive is None or self._promise.done():
                return ask(timeout)
            begun = time.monotonic()
            self._drive(self._promise, timeout)
            return ask(None if timeout is None else max(0.0, begun + timeout - time.monotonic()))
        except TimeoutError:
            if self._promise.done():  # its own error, or it ended at the last moment
                return ask(None)
            self.claimed = False
            raise RequestTimeout(f"{self._what} is not done after {timeout} s; wait again", outcome="unknown") from None
        except BaseException:
            self.claimed = self._promise.done()
            raise

    def on_end(self, told: Callable[[Promise], None]) -> None:
        """Calls `told` when the call has ended, in whatever thread that happens."""
        self._promise.on_end(told)

    def __await__(self) -> Generator[Any, None, Any]:
        self.claimed = True
        try:
            result = yield from self._promise.__await__()
        except BaseException:
            self.claimed = self._promise.done()
            raise
        return self._deliver(result)

    def _deliver(self, result: Any) -> Any:
        """The result as the caller wants it; what is left to do for that is done once, in the thread that asks."""
        if self._finish is None:
            return result
        with self._lock:
            if self._finished is None:
                self._finished = (self._finish(result),)
            return self._finished[0]
