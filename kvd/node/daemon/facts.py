"""Facts of a daemon's process in its status report: version, uptime, clock, files, memory and settings."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

from kvd.node.daemon.process_limits import descriptors
from kvd.transport.limits.process_memory import ProcessMemory
from kvd.version import __version__


def wall_clock_s() -> float:
    """Return the time of day, in seconds since 1970. It may jump: only people read it."""
    return time.time()


class ProcessFacts:
    """Facts of this process.

    Args:
        clock: monotonic, in seconds; the uptime counts from now on.
        settings: those that nodes of a cluster usually share, as text by name.
    """

    def __init__(self, clock: Callable[[], float], settings: Mapping[str, str]) -> None:
        self._clock = clock
        self._begun_at = clock()
        self._settings = dict(settings)
        self._memory = ProcessMemory()

    def report(self) -> dict[str, object]:
        """Return the facts as plain data. `memory_resident_bytes` and `files_limit` are 0 if unknown or unlimited."""
        files_open, files_limit = descriptors()
        import numpy as np  # commands read the clock here, and most need no arrays

        self._memory.open()
        resident_bytes = self._memory.resident_bytes()
        self._memory.close()
        return {
            "version": __version__,
            "numpy": np.__version__,
            "pid": os.getpid(),
            "uptime_s": round(self._clock() - self._begun_at, 3),
            "files_open": files_open,
            "files_limit": files_limit,
            "memory_resident_bytes": resident_bytes,
            "process_settings": self._settings,
        }
