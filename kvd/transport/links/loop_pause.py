"""Hides the links from the loop while threads read them.

All links are in one epoll object. The loop watches a second one, which contains the first. To pause the loop, one
system call masks the first in the second. To resume it, another unmasks it; the kernel then looks at it again, so that
the loop misses nothing: both are level-triggered.

A thread that makes the same call again and again would do both each time. So the loop may stay paused between two such
calls, as long as nothing is asked for by a message: then nobody waits for what may arrive by a link. The next message
that leaves resumes the loop (`HostTransport.send`). So does a timer of the loop, soon after the last call, for what
nobody has asked for.
"""

from __future__ import annotations

import select
import threading
from collections.abc import Callable


class LoopPause:
    """Any thread may call it.

    Args:
        links: the epoll object of the links.

    Attributes:
        may_stay: whether the loop stays paused when the last thread stops reading. Who sets it makes sure that no
            message leaves meanwhile.
        stays: called when the loop has stayed paused, until `end_if_unused` has said that it need not be called again.
    """

    def __init__(self, links: select.epoll) -> None:
        self.may_stay = False
        self.stays: Callable[[], None] = lambda: None
        self._links = links.fileno()
        self._loop = select.epoll()
        self._loop.register(self._links, select.EPOLLIN)
        self._lock = threading.Lock()
        self._threads = 0
        self._begun = 0  # how often a thread has begun to read
        self._seen = 0  # how often it had when `end_if_unused` looked
        self._is_masked = False
        self._is_watched = False  # whether `end_if_unused` will be called

    def fileno(self) -> int:
        """The descriptor that the loop should watch."""
        return self._loop.fileno()

    def begin(self) -> None:
        """A thread reads, and the loop does not, until `end`. Calls may nest, and come from several threads."""
        with self._lock:
            self._threads += 1
            self._begun += 1
            self.may_stay = False
            if not self._is_masked:
                self._mask(True)

    def end(self) -> None:
        """The thread stops reading."""
        with self._lock:
            self._threads -= 1
            if self._threads:
                return
            if not self.may_stay:
                self._mask(False)
                return
            is_news, self._is_watched = not self._is_watched, True
        if is_news:
            self.stays()

    def end_stay(self) -> None:
        """The loop stays paused no longer, unless a thread reads."""
        with self._lock:
            self.may_stay = False
            if self._is_masked and not self._threads:
                self._mask(False)

    def end_if_unused(self) -> bool:
        """Ends the stay if no thread has begun to read since this was called last. False: it has, so that this has to
        be called again."""
        with self._lock:
            is_used = self._is_masked and (self._threads > 0 or self._begun != self._seen)
            self._seen = self._begun
            self._is_watched = is_used
        if not is_used:
            self.end_stay()
        return not is_used

    def _mask(self, is_masked: bool) -> None:
        self._is_masked = is_masked
        if not self._loop.closed:
            self._loop.modify(self._links, 0 if is_masked else select.EPOLLIN)

    def close(self) -> None:
        with self._lock:
            self._loop.close()
