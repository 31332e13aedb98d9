"""Signals that end a job, while it runs and after it has its exit code, and the request that they make."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Final

from kvd.node.parent import without_ignored

ENDING_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def handlers_restored() -> Iterator[None]:
    """Put back the handlers that `signals_handled` replaces and leaves without effect. Other threads have none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def signals_handled(loop: asyncio.AbstractEventLoop, on_signal: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call `on_signal` on the loop for every signal that ends a job and is not ignored. Only in the main thread."""
    handled = without_ignored(ENDING_SIGNALS)
    for number in handled:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        # The job has its exit code: a signal that comes now has nothing to end, and must not end this process with
        # another code. Signals are held back meanwhile: between the two calls the default handler is in place.
        held_back = signal.pthread_sigmask(signal.SIG_BLOCK, handled)
        for number in handled:
            loop.remove_signal_handler(number)
            signal.signal(number, _do_nothing)
        signal.pthread_sigmask(signal.SIG_SETMASK, held_back)


def _do_nothing(*_: object) -> None:
    """The handler of a signal that comes too late."""


class Urgency(Enum):
    """How urgently a job was asked to end."""

    NOT_ASKED = "not asked"
    IN_ORDER = "in order"  # every process gets SIGTERM and its grace
    AT_ONCE = "at once"  # everything is killed


NEXT: Final = {
    Urgency.NOT_ASKED: Urgency.IN_ORDER,
    Urgency.IN_ORDER: Urgency.AT_ONCE,
    Urgency.AT_ONCE: Urgency.AT_ONCE,
}
"""The urgency after one more request."""


class StopRequest:
    """The request to end a job: made once, the job ends in good order; made again, it ends at once.

    Used on the loop of the job only.

    Attributes:
        urgency: how urgently.
        code: done at the first request, with the exit code of the job.
        at_once: done at the second request.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.urgency = Urgency.NOT_ASKED
        self.code: asyncio.Future[int] = loop.create_future()
        self.at_once: asyncio.Future[None] = loop.create_future()

    def make(self, code: int) -> None:
        """Ask once more. The first exit code counts."""
        before, self.urgency = self.urgency, NEXT[self.urgency]
        if before is Urgency.NOT_ASKED:
            self.code.set_result(code)
        elif before is Urgency.IN_ORDER:
            self.at_once.set_result(None)
