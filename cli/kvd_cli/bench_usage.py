"""Peak memory and processor time of processes, from /proc."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

INTERVAL_S = 0.1


class Usage(NamedTuple):
    """Usage of one process since its start."""

    peak_bytes: int
    cpu_s: float


def usage_of(pid: int | str) -> Usage | None:
    """Return the usage of a process (or of ``"self"``); None if it is gone."""
    folder = Path("/proc") / str(pid)
    try:
        status, stat = (folder / "status").read_text(errors="replace"), (folder / "stat").read_text(errors="replace")
    except OSError:
        return None
    peaks = [int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")]
    if not peaks:  # a process that has ended but was not waited for has no memory
        return None
    return Usage(peaks[0], _cpu_s(stat))


def share_bytes_of(pid: int | str) -> int | None:
    """Return the proportional set size of a process (or of ``"self"``) in bytes; None if it cannot be read.

    Reading takes milliseconds, in which the process may have to wait.
    """
    try:
        rollup = (Path("/proc") / str(pid) / "smaps_rollup").read_text(errors="replace")
    except OSError:
        return None
    shares = [int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:")]
    return shares[0] if shares else None


def cpu_s_of(pids: Iterable[int | str]) -> float | None:
    """Return the processor time of all these processes since their start; None if one is gone."""
    try:
        return sum(_cpu_s((Path("/proc") / str(pid) / "stat").read_text(errors="replace")) for pid in pids)
    except OSError:
        return None


def _cpu_s(stat: str) -> float:
    """Return the processor time from the text of /proc/PID/stat."""
    # The name in parentheses may hold anything; utime and stime are the 12th and 13th field after it.
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Watch:
    """Last known usage of processes that others start and end.

    Args:
        names: of the processes.
        pid_of: the pid of one that runs now.
        on_all: called once, when all of them run, with their pids by name.
    """

    def __init__(
        self,
        names: Iterable[str],
        pid_of: Callable[[str], int | None],
        on_all: Callable[[dict[str, int]], None] | None = None,
    ) -> None:
        self.last: dict[str, Usage] = {}
        self._names = list(names)
        self._pid_of = pid_of
        self._on_all = on_all

    async def follow(self) -> None:
        """Poll until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(INTERVAL_S)

    def look(self) -> None:
        """Record the usage of the running processes."""
        pids = {name: pid for name in self._names if (pid := self._pid_of(name)) is not None}
        for name, pid in pids.items():
            usage = usage_of(pid)
            if usage is not None:
                self.last[name] = usage
        if self._on_all is not None and len(pids) == len(self._names):
            tell, self._on_all = self._on_all, None
            tell(pids)
