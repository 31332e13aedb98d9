"""How the allocator of the C library is set up.

Servers and workers allocate and free buffers of the size of a slice all the time. By default, glibc gets each of them
from the kernel and gives it back, so that every page is faulted in again: a good part of the time of a round. We keep
freed memory in the process instead.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
MMAP_THRESHOLD_BYTES = 32 << 20  # the largest that glibc takes
TRIM_THRESHOLD_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Ask glibc to keep freed buffers for later ones. False where there is no glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES) and mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES))
