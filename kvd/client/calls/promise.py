"""What a call will end with. As a future of the standard library, without what this package does not use of it: that
one takes longer to make and to set than a small push takes on the wire."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any


class Promise:
    """Set once, by any thread; asked by any number of threads and event loops. It cannot be cancelled: whoever waits
    may give up, the call goes on and can be asked again."""

    __slots__ = ("_done", "_error", "_event", "_lock", "_result", "_told")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._event: threading.Event | None = None  # made by the first who waits
        self._told: list[Callable[[Promise], None]] = []

    def done(self) -> bool:
        """Whether it has ended, well or not."""
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
            event, told = self._event, self._told
        if event is not None:
            event.set()
        for tell in told:
            tell(self)

    def on_end(self, tell: Callable[[Promise], None]) -> None:
        """Calls `tell` when it has ended, in whatever thread that happens; at once if it has."""
        with self._lock:
            if not self._done:
                self._told.append(tell)
                return
        tell(self)

    def result(self, timeout: float | None = None) -> Any:
        """The result; its error is raised. TimeoutError: not within so many seconds."""
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error that it ended with, None if it ended well. TimeoutError: not within so many seconds."""
        if not self._done and not self._wait(timeout):
            raise TimeoutError
        return self._error

    def _wait(self, timeout: float | None) -> bool:
        with self._lock:
            if self._done:
                return True
            if self._event is None:
                self._event = threading.Event()
            event = self._event
        return event.wait(timeout)

    def __await__(self) -> Generator[Any, None, Any]:
        loop = asyncio.get_running_loop()
        here: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not here.done():
                here.set_result(None)

        def ended(_: Promise) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits there
                loop.call_soon_threadsafe(wake)

        self.on_end(ended)
        yield from here
        return self.result(0)
