"""What processes have taken of the machine: peak memory and processor time, from /proc."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

INTERVAL_S = 0.1


class Usage(NamedTuple):
    """Of one process, since its start."""

    peak_bytes: int
    cpu_s: float


def usage_of(pid: int | str) -> Usage | None:
    """The usage of a process (or of ``"self"``); None if it is gone."""
    folder = Path("/proc") / str(pid)
    try:
        status, stat = (folder / "status").read_text(errors="replace"), (folder / "stat").read_text(errors="replace")
    except OSError:
        return None
    peaks = [int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")]
    # The name in parentheses may hold anything; utime and stime are the 12th and 13th field after it.
    fields = stat.rpartition(")")[2].split()
    if not peaks:  # a process that has ended and waits to be noticed has no memory
        return None
    return Usage(peaks[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))


class Watch:
    """Keeps the last known usage of processes that somebody else starts and ends.

    Args:
        names: of the processes.
        pid_of: the pid of one that runs now.
    """

    def __init__(self, names: Iterable[str], pid_of: Callable[[str], int | None]) -> None:
        self.last: dict[str, Usage] = {}
        self._names = list(names)
        self._pid_of = pid_of

    async def follow(self) -> None:
        """Look from time to time, until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(INTERVAL_S)

    def look(self) -> None:
        """Note the usage of those that run."""
        for name in self._names:
            pid = self._pid_of(name)
            usage = None if pid is None else usage_of(pid)
            if usage is not None:
                self.last[name] = usage
