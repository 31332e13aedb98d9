"""What must hold of memory that another process offers, before it is mapped here.

All of its pages are allocated, and stay so: reading a hole would allocate it, in this process and while its loop waits.
The size cannot change. All that is mapped has a limit: the tables of a map take a 512th of its size.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections import deque

from kvd.transport.links.frames import InvalidFrameError
from kvd.transport.memory.segments import SEALS

BLOCK_BYTES = 512  # the unit of st_blocks


class MapBudget:
    """How many bytes of others' memory a process may have mapped. Any thread may call it.

    Args:
        limit_bytes: None: as much as the machine has, more than which nobody can honestly offer.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        whole_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.limit_bytes = whole_bytes if limit_bytes is None else limit_bytes
        self._taken_bytes = 0
        self._returned: deque[int] = deque()
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> bool:
        """Takes this many bytes, or none."""
        with self._lock:
            while self._returned:
                self._taken_bytes -= self._returned.popleft()
            if self._taken_bytes + nbytes > self.limit_bytes:
                return False
            self._taken_bytes += nbytes
        return True

    def give_back(self, nbytes: int) -> None:
        """Takes no lock: finalizers run on any thread, at any time."""
        self._returned.append(nbytes)


def check_offer(number: int, descriptor: int, nbytes: int) -> None:
    """Raises InvalidFrameError if the descriptor is not memory of this size that is allocated for good.

    The seals come first: no file outside memory has them, and a question to such a file may wait for whoever serves it.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        raise InvalidFrameError(f"segment {number} is no memory that can be sealed") from None
    if seals & SEALS != SEALS:
        raise InvalidFrameError(f"segment {number} is not sealed against shrinking, growing and holes")
    status = os.fstat(descriptor)
    if nbytes <= 0 or status.st_size != nbytes:
        raise InvalidFrameError(f"segment {number} does not have the {nbytes} bytes that its frame announces")
    allocated_bytes = status.st_blocks * BLOCK_BYTES
    if allocated_bytes < nbytes:
        raise InvalidFrameError(f"only {allocated_bytes} of {nbytes} bytes of segment {number} are allocated")


def close_refused(descriptor: int) -> None:
    """Closes a descriptor that may be anything. The kernel may wait with that for a server of files or a slow peer."""
    try:
        threading.Thread(target=os.close, args=(descriptor,), name="kvd-closes", daemon=True).start()
    except RuntimeError:  # no thread can be started
        os.close(descriptor)
