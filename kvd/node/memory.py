"""What the allocator of the C library is told.

Servers and workers allocate and free buffers of the size of a slice all the time. By default glibc gets each of them
from the kernel and gives it back, and every page of it is faulted in again: a good part of the time of a round. Keeping
freed memory in the process removes that.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
MMAP_THRESHOLD_BYTES = 32 << 20  # the largest that glibc takes
TRIM_THRESHOLD_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Asks glibc to keep freed buffers for the next ones. False where there is no glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES) and mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES))
