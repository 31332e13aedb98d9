"""Who reads the links: the loop, or a thread that waits for an answer and saves two hand-overs by reading itself.

All links are in one epoll object. The loop does not watch that one but another, the gate, which has the first in it.
The gate is closed by one system call, and the loop sees nothing; when it is opened, the kernel looks again, so that
nothing is overlooked: all of it is level-triggered.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable

from kvd.transport.base import DRAIN_LIMIT
from kvd.transport.link import Link

TURNS_AT_A_TIME = 4
BUSY_WAIT_S = 0.001  # until the one who reads at the moment is looked for again
LONGEST_WAIT_S = 3600.0  # more than a poll of the system takes may be asked for


class Gate:
    """The links of one transport, and those who wait for them.

    Args:
        notice: told of a link after it was read, if it is not up any more, or if payloads of it are out and
            `watches_payloads` is not set.
    """

    def __init__(self, notice: Callable[[Link], None]) -> None:
        self.epoll = select.epoll()
        self.watches_payloads = False
        self._notice = notice
        self._gate = select.epoll()
        self._gate.register(self.epoll.fileno(), select.EPOLLIN)
        self._links: dict[int, Link] = {}
        self._only: Link | None = None  # the link, if there is just one
        self._unfinished: dict[int, Link] = {}  # their buffers have messages that were not delivered yet
        self._nudge = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # readable as long as there are such
        self._closing = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.epoll.register(self._nudge, select.EPOLLIN)
        self.epoll.register(self._closing, select.EPOLLIN)
        self._reading = threading.Lock()
        self._lock = threading.Lock()  # around what follows
        self._paused = 0
        self._waiting = 0  # threads in `wait`
        self._local = threading.local()
        self._closed = False

    def fileno(self) -> int:
        """What a loop watches."""
        return self._gate.fileno()

    @property
    def is_closed(self) -> bool:
        return self._closed

    def add(self, link: Link) -> None:
        self._links[link.descriptor] = link
        self._count()

    def remove(self, link: Link) -> None:
        """For a link that has ended."""
        if self._links.get(link.descriptor) is link:
            del self._links[link.descriptor]
            self._count()

    @property
    def links(self) -> list[Link]:
        return list(self._links.values())

    def _count(self) -> None:
        self._only = next(iter(self._links.values())) if len(self._links) == 1 else None

    # ── reading ──

    def read(self) -> bool:
        """Delivers what is there. False: another thread is at it."""
        if not self._reading.acquire(blocking=False):
            return False
        try:
            if self._closed:
                return True
            only = self._only
            if only is not None and not self._unfinished:
                self._serve(only)
            else:
                # What comes while this is at work is taken along: a turn of the loop costs more than a look.
                for _ in range(TURNS_AT_A_TIME):
                    if self._closed or not self._read_ready() or self._unfinished:
                        break
        finally:
            self._reading.release()
        return True

    def _read_ready(self) -> bool:
        """Reads each link once that has something. False: none has."""
        ready = {descriptor for descriptor, _ in self.epoll.poll(0)}
        ready.update(self._unfinished)
        links = [link for link in map(self._links.get, ready) if link is not None]
        for link in links:
            self._serve(link)
        return bool(links)

    def _serve(self, link: Link) -> None:
        """Reads a link once. What it has besides is for the next turn."""
        more = True  # so it is when a delivery raises
        try:
            if link.has_waiting:
                link.flush()
            more = link.receive(DRAIN_LIMIT)
        finally:
            if more or self._unfinished:
                self._mark(link, more and not link.has_ended)
        if not link.is_up or (link.holds and not self.watches_payloads):
            self._notice(link)

    def _mark(self, link: Link, unfinished: bool) -> None:
        """No poll announces what is in a buffer already, so the nudge does."""
        before = bool(self._unfinished)
        if unfinished:
            self._unfinished[link.descriptor] = link
        else:
            self._unfinished.pop(link.descriptor, None)
        with self._lock:
            if not self._closed and before != bool(self._unfinished):
                os.eventfd_read(self._nudge) if before else os.eventfd_write(self._nudge, 1)

    # ── waiting ──

    def pause(self) -> None:
        """The loop sees nothing of the links until `resume`. Calls may be nested, and come from several threads."""
        with self._lock:
            self._paused += 1
            if self._paused == 1 and not self._closed:
                self._gate.modify(self.epoll.fileno(), 0)

    def resume(self) -> None:
        with self._lock:
            self._paused -= 1
            if self._paused == 0 and not self._closed:
                self._gate.modify(self.epoll.fileno(), select.EPOLLIN)

    def wait(self, timeout_s: float, wake_fd: int) -> bool:
        """Waits for the links and delivers what has come. False: time is up, `wake_fd` is readable, or it is closed."""
        with self._lock:
            if self._closed:
                return False
            self._waiting += 1
        try:
            poll = self._poll_of_thread(wake_fd)
            ready = poll.poll(min(max(0.0, timeout_s), LONGEST_WAIT_S) * 1000)
            if not ready or self._closed or (len(ready) == 1 and ready[0][0] == wake_fd):
                return False
            if not self.read():
                _wait_for_reader(min(timeout_s, BUSY_WAIT_S), wake_fd)
            return True
        finally:
            with self._lock:
                self._waiting -= 1
                self._close_if_done()

    def _poll_of_thread(self, wake_fd: int) -> select.poll:
        """What this thread waits with: made once, as long as the descriptor is the same."""
        kept: tuple[int, select.poll] | None = getattr(self._local, "kept", None)
        if kept is None or kept[0] != wake_fd:
            poll = select.poll()
            poll.register(self.epoll.fileno(), select.POLLIN)
            poll.register(wake_fd, select.POLLIN)
            kept = self._local.kept = (wake_fd, poll)
        return kept[1]

    # ── the end ──

    def flush(self, until: float) -> None:
        """Waits, until this time of the monotonic clock at most, for the sockets to take what is queued."""
        while (left := until - time.monotonic()) > 0:
            waiting = [link for link in self.links if link.has_waiting]
            if not waiting:
                return
            poll = select.poll()
            for link in waiting:
                poll.register(link.descriptor, select.POLLOUT)
            poll.poll(left * 1000)
            for link in waiting:
                link.flush()

    def close(self, reason: str) -> None:
        """Ends all links, and wakes the threads that wait."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.eventfd_write(self._closing, 1)
        for link in self.links:
            link.end(reason)
        self._links, self._only, self._unfinished = {}, None, {}
        with self._lock:
            self._close_if_done()

    def _close_if_done(self) -> None:
        """The last one who waits closes what it waited at."""
        if self._closed and not self._waiting and not self.epoll.closed:
            for descriptor in (self._nudge, self._closing):
                os.close(descriptor)
            self._gate.close()
            self.epoll.close()


def _wait_for_reader(timeout_s: float, wake_fd: int) -> None:
    """Another thread delivers at the moment: what it delivers may be what our caller waits for."""
    poll = select.poll()
    poll.register(wake_fd, select.POLLIN)
    poll.poll(max(0.0, timeout_s) * 1000)
