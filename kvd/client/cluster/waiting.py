"""The thread that waits for a call reads the answers itself, if they come over links of this host.

That saves two hand-overs between threads for every call: the loop need not wake up to read, nor wake the program.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress

from kvd.client.calls.promise import Promise
from kvd.client.cluster.interrupts import Uninterrupted
from kvd.transport.host import HostTransport

LONGEST_POLL_S = 60.0


class Waiter:
    """One thread at a time reads; others, and those without links, wait as one waits for a promise."""

    def __init__(self, transport: HostTransport) -> None:
        self._transport = transport
        self._turn = threading.Lock()
        self._reader = 0  # the thread that reads, or is about to
        self._wake = -1

    def wait(self, promise: Promise, timeout_s: float | None) -> None:
        """Returns when it is done, or the time is up, or it is better to wait for the promise itself."""
        if promise.done() or not self._transport.has_links:
            return
        with Uninterrupted(self._nudge) as ctrl_c:
            if not self._turn.acquire(blocking=False):
                return
            if self._wake < 0:
                self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._reader = threading.get_ident()
            self._transport.pause_loop()
            try:
                self._read_until(promise, timeout_s, ctrl_c)
            finally:
                self._reader = 0
                self._transport.resume_loop()
                self._turn.release()

    def _read_until(self, promise: Promise, timeout_s: float | None, ctrl_c: Uninterrupted) -> None:
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not (promise.done() or ctrl_c.came) and self._transport.has_links:
            left_s = LONGEST_POLL_S if until is None else until - time.monotonic()
            if left_s <= 0:
                return
            if not self._transport.poll_links(min(left_s, LONGEST_POLL_S), self._wake):
                self._drain()

    def wake(self) -> None:
        """A promise is kept: if another thread than the reader has done it, the reader must look."""
        reader = self._reader
        if reader and reader != threading.get_ident():
            self._nudge()

    def _nudge(self) -> None:
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def _drain(self) -> None:
        with suppress(BlockingIOError):  # the time was up
            os.eventfd_read(self._wake)

    def close(self) -> None:
        """After the last call has ended."""
        with self._turn:
            if self._wake >= 0:
                os.close(self._wake)
                self._wake = -1
