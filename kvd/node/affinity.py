"""Which cores the processes of a job on one machine run on, and how many servers that machine has room for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

MOST_AUTO_SERVERS: Final = 8
"""A few servers move bytes as fast as the memory of one machine does; each further one costs a core and messages."""


@dataclass(frozen=True, slots=True)
class CorePlan:
    """Which process runs on which cores.

    Attributes:
        servers: for each server, its own core.
        rest: the cores of all other processes.
    """

    servers: tuple[int, ...]
    rest: frozenset[int]

    def cores_of(self, server: int | None) -> Collection[int]:
        """The cores of the server with this number; None: of all other processes."""
        return self.rest if server is None else (self.servers[server],)


def usable_cores() -> frozenset[int]:
    """The cores that this process may run on, which a control group or `taskset` may have reduced."""
    return frozenset(os.sched_getaffinity(0))


def auto_servers(workers: int, cores: int) -> int:
    """The number of servers for ``auto``: one for each core that the workers leave, from 1 to `MOST_AUTO_SERVERS`."""
    return max(1, min(cores - workers, MOST_AUTO_SERVERS))


def plan_cores(workers: int, servers: int, cores: Collection[int]) -> CorePlan | None:
    """A core for each server, the last ones; None if that would leave fewer cores than workers.

    The scheduler has next to nothing to do, and shares the workers' cores.
    """
    if len(cores) < workers + servers:
        return None
    ordered = sorted(cores)
    return CorePlan(tuple(ordered[-servers:]), frozenset(ordered[:-servers]))


@contextlib.contextmanager
def running_on(cores: Collection[int] | None) -> Iterator[None]:
    """Processes that this thread starts inside run on these cores from their first instruction. None: anywhere.

    A process inherits the cores of the thread that starts it; setting them later would miss the threads that it has
    started already.
    """
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
