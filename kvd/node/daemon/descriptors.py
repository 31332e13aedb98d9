"""Open files and their limit: each connection takes a descriptor, and the usual limit is 1024."""

from __future__ import annotations

import errno
import os
import resource

MOST = 1 << 20
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)  # none is left, in this process or in the system: that may pass


def raise_descriptor_limit() -> None:
    """Take as many as the system grants this process. Not in programs of users: select() fails above 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    granted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < granted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (granted, hard))


def descriptors() -> tuple[int, int]:
    """Return how many descriptors this process has open, and how many it may have; 0: no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return len(os.listdir("/proc/self/fd")) - 1, 0 if soft == resource.RLIM_INFINITY else soft
