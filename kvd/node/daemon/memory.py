"""How the allocator of the C library is set up.

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
