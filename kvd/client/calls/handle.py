"""What a call returns that does not wait for its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from typing import Any, ClassVar

from kvd.client.calls.checks import patience
from kvd.client.calls.held_signals import uninterrupted
from kvd.client.calls.process_bound import ProcessBound
from kvd.client.calls.promise import Promise
from kvd.core.requests import UncountedVersions
from kvd.errors import RequestTimeout


class Handle(ProcessBound):
    """The promise of a call's result. Thread-safe, and awaitable in any event loop.

    The error of a push whose handle is never waited on is raised by the next call on its key, by `flush` or by `close`.

    Attributes:
        what: what errors call it, such as "push".
    """

    _NOT_COPYABLE: ClassVar[str] = (
        "a handle cannot be copied, pickled or saved, since its call is made by this process: wait for it here, and "
        "pass the result on"
    )

    def __init__(
        self,
        promise: Promise,
        finish: Callable[[Any], Any] | None = None,
        what: str = "the call",
        drive: Callable[[Promise, float | None], None] | None = None,
        reclaim: Callable[[], None] | None = None,
    ) -> None:
        """A handle of a call.

        Args:
            promise: the end of the call.
            finish: makes the caller's result of the promise's; called once, in the thread that asks first.
            what: what the text of an error calls it.
            drive: does something useful for up to that many seconds, and returns early when the promise is done.
            reclaim: called before an error reaches a caller that waits: it makes sure that the caller's memory is no
                longer read.
        """
        self._promise = promise
        self._reclaim = reclaim
        self._drive = drive
        self._finish = finish
        self.what = what
        self._lock = threading.Lock()
        self._finished: tuple[Any] | None = None
        self.claimed = False  # whether a caller has seen, or will see, how the call ended

    @classmethod
    def of(cls, result: Any) -> Handle:
        """A handle that is done."""
        promise = Promise()
        promise.set_result(result)
        return cls(promise)

    @classmethod
    def failed(cls, error: BaseException) -> Handle:
        """A handle of a call that has failed."""
        promise = Promise()
        promise.set_exception(error)
        return cls(promise)

    @uninterrupted
    def wait(self, timeout: float | None = None) -> Any:
        """Waits for the result.

        Args:
            timeout: how many seconds to wait; None: until the call ends, at its own deadline at the latest.

        Raises:
            RequestTimeout: not done within `timeout`; the call goes on, and its handle can be asked again.
            NotAllowed: `timeout` is not a number of seconds.
            KvdError: the call failed; see the call for its errors.
        """
        if timeout is None and self._promise.has_result():
            self.claimed = True
            return self._deliver(self._promise.result())
        return self._deliver(self._ask(self._promise.result, timeout))

    def result(self, timeout: float | None = None) -> Any:
        """The same as `wait`."""
        return self.wait(timeout)

    def done(self) -> bool:
        """Whether the call has ended, well or not."""
        return self._promise.done()

    @uninterrupted
    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error that the call ended with, None if it ended well. Waits like `wait`."""
        error: BaseException | None = self._ask(self._promise.exception, timeout)
        return error

    def _ask(self, ask: Callable[[float | None], Any], timeout: float | None) -> Any:
        """The answer of the promise. A caller that gives up, at the timeout or by a signal, has not seen the end."""
        if timeout is not None:
            timeout = patience(timeout)
        self.claimed = True
        try:
            return self._drive_and_ask(ask, timeout)
        except BaseException:
            if self._reclaim is not None:
                self.claimed = True  # reclaiming ends the call, and the caller knows
                self._reclaim()
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
            raise RequestTimeout(f"{self.what} is not done after {timeout} s; wait again", outcome="unknown") from None
        except BaseException:
            self.claimed = self._promise.done()
            raise

    @property
    def counted(self) -> bool:
        """False: what was pushed does not count, or not in all slices of a large value, since the rounds went on
        without this worker (`on_worker_loss = "shrink"`, or a `quorum`). True for any other call that ended well, for
        one that failed, and as long as the call has not ended."""
        if not self._promise.done() or self._promise.exception() is not None:
            return True
        return not isinstance(self._promise.result(), UncountedVersions)

    @uninterrupted
    def on_end(self, told: Callable[[Promise], None]) -> None:
        """Calls `told` when the call has ended, in the thread that ends it; at once if it has ended."""
        self._promise.on_end(told)

    def on_error(self, told: Callable[[Promise], None]) -> None:
        """The same if the call fails."""
        self._promise.on_error(told)

    def release_result(self) -> None:
        """The call has failed, so it has no result: lets go of the arrays that it would have filled."""
        self._finish = None

    @uninterrupted
    def __await__(self) -> Generator[Any, None, Any]:
        self.claimed = True
        try:
            result = yield from self._promise.__await__()
        except BaseException:
            self.claimed = self._promise.done()
            raise
        return self._deliver(result)

    def _deliver(self, result: Any) -> Any:
        """The result as the caller wants it; `finish` is called once, in the thread that asks first."""
        if self._finish is None:
            return result
        with self._lock:
            if self._finished is None:
                self._finished = (self._finish(result),)
            return self._finished[0]
