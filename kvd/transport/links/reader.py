"""Reads the links, for the loop or for a thread that waits for an answer.

All links are in one epoll object, which the loop watches unless it is paused (`kvd.transport.links.loop_pause`).
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable

from kvd.transport.base import DRAIN_LIMIT
from kvd.transport.links.frames import ExpectedFrame
from kvd.transport.links.link import Link
from kvd.transport.links.loop_pause import LoopPause

TURNS_AT_A_TIME = 4
BUSY_WAIT_S = 0.001  # before a thread that found another one reading tries again
BRIEFLY_S = 0.05
LONGEST_WAIT_S = 3600.0  # callers may ask for more than poll() accepts


class LinkReader:
    """All links of one transport. Any thread may call it; one at a time reads.

    Args:
        notice: called after a link was read, if it is no longer up, or if it has unreleased payloads and
            `watches_payloads` is not set.

    Attributes:
        epoll: where the links are registered.
        pause: of the loop, while threads read.
        watches_payloads: whether the transport looks for payloads to release anyway.
    """

    def __init__(self, notice: Callable[[Link], None]) -> None:
        self.epoll = select.epoll()
        self.watches_payloads = False
        self._notice = notice
        self.pause = LoopPause(self.epoll)
        self._links: dict[int, Link] = {}
        self._only: Link | None = None  # the only link, if there is exactly one
        self._poll_of_only: tuple[int, select.poll] | None = None  # with what wakes it up
        self._unfinished: dict[int, Link] = {}  # links whose buffers contain undelivered messages
        self._nudge = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # readable while there are unfinished links
        self._closing = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.epoll.register(self._nudge, select.EPOLLIN)
        self.epoll.register(self._closing, select.EPOLLIN)
        self._reading = threading.Lock()
        self._lock = threading.Lock()  # held to change what follows
        self._waiting = 0  # threads in `wait` and `wait_for`
        self._local = threading.local()
        self._closed = False

    def fileno(self) -> int:
        """The descriptor that a loop should watch."""
        return self.pause.fileno()

    @property
    def is_closed(self) -> bool:
        return self._closed

    def add(self, link: Link) -> None:
        self._links[link.descriptor] = link
        self._find_only()

    def remove(self, link: Link) -> None:
        """Removes a link that has ended."""
        if self._links.get(link.descriptor) is link:
            del self._links[link.descriptor]
            self._find_only()

    @property
    def links(self) -> list[Link]:
        return list(self._links.values())

    def _find_only(self) -> None:
        self._only = next(iter(self._links.values())) if len(self._links) == 1 else None
        self._poll_of_only = None

    # ── reading ──

    def read(self) -> bool:
        """Delivers what has arrived. False: another thread is reading."""
        if not self._reading.acquire(blocking=False):
            return False
        try:
            if self._closed:
                return True
            only = self._only
            if only is not None and not self._unfinished:
                self._serve(only)
            else:
                # Looking again for what arrived meanwhile is cheaper than another turn of the loop.
                for _ in range(TURNS_AT_A_TIME):
                    if self._closed or not self._read_ready() or self._unfinished:
                        break
        finally:
            self._reading.release()
        return True

    def _read_ready(self) -> bool:
        """Reads each link once that has something to read. False: none has."""
        ready = self.epoll.poll(0)
        if self._unfinished:
            seen = {descriptor for descriptor, _ in ready}
            ready += [(descriptor, 0) for descriptor in self._unfinished if descriptor not in seen]
        links, is_any = self._links, False
        for descriptor, _ in ready:
            link = links.get(descriptor)
            if link is not None:
                self._serve(link)
                is_any = True
        return is_any

    def _serve(self, link: Link) -> None:
        """Reads a link once. The rest of its messages wait for the next turn."""
        more = True  # this holds if a delivery raises
        try:
            more = link.receive(DRAIN_LIMIT)
        finally:
            if more or self._unfinished:
                self._mark(link, more and not link.has_ended)
        if not link.is_up or (not self.watches_payloads and link.has_unreleased):
            self._notice(link)

    def _mark(self, link: Link, unfinished: bool) -> None:
        """Makes the nudge readable while there are unfinished links: no poll announces what a buffer contains."""
        before = bool(self._unfinished)
        if unfinished:
            self._unfinished[link.descriptor] = link
        else:
            self._unfinished.pop(link.descriptor, None)
        with self._lock:
            if not self._closed and before != bool(self._unfinished):
                os.eventfd_read(self._nudge) if before else os.eventfd_write(self._nudge, 1)

    # ── waiting ──

    def wait(self, timeout_s: float, wake_fd: int) -> bool:
        """Waits for the links and delivers what has arrived. False: the time is up, `wake_fd` is readable, or the
        reader is closed."""
        if not self._enter():
            return False
        try:
            poll = self._poll_of_thread(wake_fd)
            ready = poll.poll(min(max(0.0, timeout_s), LONGEST_WAIT_S) * 1000)
            if not ready or self._closed or (len(ready) == 1 and ready[0][0] == wake_fd):
                return False
            if not self.read():
                _wait_for_reader(min(timeout_s, BUSY_WAIT_S), wake_fd)
            return True
        finally:
            self._leave()

    def _enter(self) -> bool:
        """A thread is about to wait. False: the reader is closed."""
        with self._lock:
            if not self._closed:
                self._waiting += 1
            return not self._closed

    def _leave(self) -> None:
        with self._lock:
            self._waiting -= 1
            if self._closed:
                self._close_if_done()

    def _poll_of_thread(self, wake_fd: int) -> select.poll:
        """The poll object of this thread, kept while `wake_fd` stays the same."""
        kept: tuple[int, select.poll] | None = getattr(self._local, "kept", None)
        if kept is None or kept[0] != wake_fd:
            kept = self._local.kept = (wake_fd, _poll_of(self.epoll.fileno(), wake_fd))
        return kept[1]

    def wait_briefly(self, link: Link, expected: ExpectedFrame, wake_fd: int) -> bool:
        """Waits up to `BRIEFLY_S` for a frame, by one thread at a time, while the loop is paused. It looks at nothing
        but this link and `wake_fd`, and only if there is no other link. True: the expected frame came, and was taken.
        False: what came, if anything did, was delivered."""
        if link is not self._only or self._unfinished:
            return False
        kept = self._poll_of_only
        if kept is None or kept[0] != wake_fd:
            kept = self._poll_of_only = wake_fd, _poll_of(link.descriptor, wake_fd)
        ready = kept[1].poll(BRIEFLY_S * 1000)
        if not ready or ready[0][0] == wake_fd or not self._reading.acquire(blocking=False):
            return False
        try:
            return self._take_expected(link, expected)
        finally:
            self._reading.release()

    def wait_for(self, link: Link, expected: ExpectedFrame, timeout_s: float, wake_fd: int) -> bool:
        """Waits like `wait`, for the expected frame: whether it is the next one of the link, and was taken. Otherwise
        what `wait` does was done, or the time is up."""
        if not self._enter():
            return False
        try:
            ready = self._poll_of_thread(wake_fd).poll(min(timeout_s, LONGEST_WAIT_S) * 1000)
            if not ready or self._closed or (len(ready) == 1 and ready[0][0] == wake_fd):
                return False
            is_taken = False
            if self._reading.acquire(blocking=False):
                try:
                    is_taken = not self._unfinished and self._take_expected(link, expected)
                finally:
                    self._reading.release()
            if not is_taken and not self.read():
                _wait_for_reader(min(timeout_s, BUSY_WAIT_S), wake_fd)
            return is_taken
        finally:
            self._leave()

    def _take_expected(self, link: Link, expected: ExpectedFrame) -> bool:
        is_taken = link.receive_expected(expected)
        if not is_taken or link.has_more:
            self._serve(link)  # no poll announces what was read, and nobody else notices an end
        return is_taken

    # ── the end ──

    def flush(self, until: float) -> None:
        """Waits until the sockets have taken all queued frames, or until this time of the monotonic clock."""
        while (left := until - time.monotonic()) > 0:
            queued = [link for link in self.links if link.has_queued]
            if not queued:
                return
            poll = select.poll()
            for link in queued:
                poll.register(link.descriptor, select.POLLOUT)
            poll.poll(left * 1000)
            for link in queued:
                link.flush()

    def close(self, reason: str) -> None:
        """Ends all links and wakes the waiting threads."""
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
        """Closes the descriptors once no thread waits on them."""
        if self._closed and not self._waiting and not self.epoll.closed:
            for descriptor in (self._nudge, self._closing):
                os.close(descriptor)
            self.pause.close()
            self.epoll.close()


def _wait_for_reader(timeout_s: float, wake_fd: int) -> None:
    """Waits briefly while another thread delivers: its messages may be what the caller of this one waits for."""
    _poll_of(wake_fd).poll(max(0.0, timeout_s) * 1000)


def _poll_of(*descriptors: int) -> select.poll:
    """In this order: the result begins with the first that is ready."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return poll
