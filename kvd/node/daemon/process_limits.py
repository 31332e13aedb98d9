"""Limits of a process that kvd sets: open files, core dumps, and the memory that its allocator keeps.

Each connection takes a descriptor, and the usual limit is 1024. Daemons write no core dumps: their memory holds keys,
and values of everybody's jobs.

Servers and workers allocate and free buffers of the size of a slice all the time. By default, glibc gets each of them
from the kernel and gives it back, so that every page is faulted in again: a good part of the time of a round. We keep
freed memory in the process instead. What nothing has used for a while is given back all the same
(`kvd.transport.limits.process_memory`).

By default, glibc also takes memory from up to eight pools for each core, one for each thread. It cannot give back the
end of any but the first one, so libzmq's thread would keep up to 64 MiB of what peers once made it take. A daemon has
one pool for all threads.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource

MOST = 1 << 20
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)  # none is left, in this process or in the system: that may pass


def raise_descriptor_limit() -> None:
    """Take as many descriptors as the system grants. Not in programs of users: select() fails above 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    granted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < granted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (granted, hard))


def descriptors() -> tuple[int, int]:
    """Return how many descriptors this process has open, and how many it may have; 0: no limit.

    If there is none left to count them with, all are open.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 0 if soft == resource.RLIM_INFINITY else soft
    try:
        return len(os.listdir("/proc/self/fd")) - 1, limit
    except OSError as error:
        if error.errno not in NO_DESCRIPTOR:
            raise
        return limit, limit


NOT_EVEN_TO_A_PROGRAM = 1  # byte. With 0, Linux writes no file, but gives the memory to a program in core_pattern


def forbid_core_dumps() -> None:
    """Forbid core dumps of this process. Not in programs of users, which may want theirs.

    The hard limit stays, so that whoever looks for a fault can allow them again with prlimit(1). Tracing stays allowed,
    too (a daemon is not made undumpable): the same user could read the key file as well.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    soft = NOT_EVEN_TO_A_PROGRAM if hard == resource.RLIM_INFINITY else min(NOT_EVEN_TO_A_PROGRAM, hard)
    resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
MMAP_THRESHOLD_BYTES = 32 << 20  # the largest that glibc takes
TRIM_THRESHOLD_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Ask glibc to keep freed buffers for later ones. False where there is no glibc."""
    return _set(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES) and _set(M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)


def share_one_pool() -> bool:
    """Ask glibc for one pool of memory for all threads that do not have one yet. False where there is no glibc."""
    return _set(M_ARENA_MAX, 1)


def _set(parameter: int, value: int) -> bool:
    try:
        return bool(ctypes.CDLL(None).mallopt(parameter, value))
    except (OSError, AttributeError):
        return False
