"""Counts of one work in `kvd bench -v`. Workers count together, because the servers' counts belong to all of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvd_cli.bench_counting import Calls, CountFailed, SystemCalls, calls_of, switches_of
from kvd_cli.bench_work import Row

COUNTED_STEPS: Final = 200
"""Steps that are slow because they are counted: so many at most."""


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Other processes that take part in a step.

    Attributes:
        rank: of this worker.
        servers: their process ids; none on all ranks but 0.
        folder: that all processes share.
        barrier: returns when all workers have called it.
    """

    rank: int
    servers: list[int]
    folder: Path
    barrier: Callable[[], object]


class Counts:
    """Counts of a step for this worker, and on rank 0 for all servers together.

    Args:
        iterate: makes the given number of steps.
        count: the steps of a repetition.
    """

    def __init__(self, neighbours: Neighbours, iterate: Callable[[int], object], count: int) -> None:
        self._neighbours = neighbours
        self._iterate = iterate
        self._count = count

    def take(self) -> list[Row]:
        """Return the counts of this worker and of the servers. A missing count is None, and `note` has the reason.


        Raises:
            CountFailed: a server does not count.
        """
        own: Row = {"process": "worker", "rank": self._neighbours.rank}
        servers: Row = {"process": "servers"}
        for name, counted in (("switches", self._switches), ("functions", self._functions)):
            own[name], servers[name] = counted()
        self._system_calls(own, servers)
        return [own, servers] if self._neighbours.servers else [own]

    def _switches(self) -> tuple[float, float | None]:
        pids = self._neighbours.servers
        with self._together():
            own, theirs = switches_of(["self"]) or 0, switches_of(pids)
            self._iterate(self._count)
            own_end, theirs_end = switches_of(["self"]) or 0, switches_of(pids)
        own_each = (own_end - own) / self._count
        if theirs is None or theirs_end is None:
            return own_each, None
        return own_each, (theirs_end - theirs) / self._count

    def _functions(self) -> tuple[float, float]:
        steps, calls, theirs = min(self._count, COUNTED_STEPS), Calls(), [0]
        with calls_of(self._neighbours.servers, self._neighbours.folder, theirs), self._together():
            calls.begin()
            try:
                self._iterate(steps)
            finally:
                own = calls.end()
        return own / steps, theirs[-1] / steps

    def _system_calls(self, own: Row, servers: Row) -> None:
        """Run strace once for this process and once for the servers."""
        steps, neighbours = min(self._count, COUNTED_STEPS), self._neighbours
        traces = []
        if neighbours.servers:
            traces.append(_Trace(servers, neighbours.servers, neighbours.folder / "strace-servers"))
        # The last to begin and the first to end: it would count what this process does for the other one.
        traces.append(_Trace(own, [os.getpid()], neighbours.folder / f"strace-{neighbours.rank}"))
        with self._together():
            self._iterate(steps)
        for trace in reversed(traces):
            trace.end(steps)

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Start all workers together, and wait until all have finished."""
        self._neighbours.barrier()
        yield
        self._neighbours.barrier()


class _Trace:
    """Count of system calls in a row. Others wait at a barrier, so a failure only leaves a note."""

    def __init__(self, row: Row, pids: list[int], file: Path) -> None:
        row["system_calls"], row["note"] = None, ""
        self._row = row
        self._calls: SystemCalls | None = None
        try:
            self._calls = SystemCalls(pids, file)
        except CountFailed as failure:
            row["note"] = str(failure)

    def end(self, steps: int) -> None:
        if self._calls is not None:
            try:
                self._row["system_calls"] = self._calls.end() / steps
            except CountFailed as failure:
                self._row["note"] = str(failure)
