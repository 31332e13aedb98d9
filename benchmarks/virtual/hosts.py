"""Hosts in virtual time: cores that processes share, a memory and a network port that all of them share.

Work is a generator that yields what it needs next, as `Work`. A process keeps its core until it has nothing left to
do, or until its slice of time is over and another one waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tests.simulator.clock import VirtualClock

TIME_SLICE_S = 0.003
"""How long a process runs while another one waits for its core, as under Linux' fair scheduler on two cores."""


class Work(NamedTuple):
    """Seconds of a core, in which so many bytes of memory are read or written."""

    cpu_s: float
    traffic_nbytes: int = 0


class Running(Protocol):
    """A process, as a host sees it."""

    def work(self) -> Iterator[Work] | None:
        """The next piece of its work; None: it sleeps until `Cores.wake`."""

    def switched(self, others: float) -> float:
        """It is given a core that another one probably had since it ran (0 to 1): the seconds that this costs."""

    def has_used(self, cpu_s: float) -> None:
        """So much of a core was used for it."""


@dataclass(slots=True)
class Pipe:
    """Something that moves so many bytes in a second, in the order in which it is asked.

    Attributes:
        free_at: when all that was asked for has passed.
        nbytes: of all that.
    """

    bytes_per_s: float
    free_at: float = 0.0
    nbytes: int = 0

    def take(self, now: float, nbytes: int) -> float:
        """When these bytes have passed."""
        self.free_at = max(self.free_at, now) + nbytes / self.bytes_per_s
        self.nbytes += nbytes
        return self.free_at


@dataclass(slots=True)
class _Core:
    latest: Running | None = None


class Cores:
    """The cores of a host, and the processes that want one.

    Args:
        memory: what all of them read and write together.
        wake_s: from an event until a process that slept runs on an idle core.
    """

    def __init__(self, clock: VirtualClock, count: int, memory: Pipe, wake_s: float) -> None:
        self._clock = clock
        self._memory = memory
        self._wake_s = wake_s
        self._idle = [_Core() for _ in range(count)]
        self._waiting: deque[Running] = deque()
        self._awake: set[int] = set()  # ids of processes that wait, run, or will
        self._count = count
        self._turns = 0  # how often a core was given to another process
        self._latest_turn: dict[int, int] = {}  # of each process, by its id

    def wake(self, process: Running) -> None:
        """The process has something to do. It is not disturbed if it knows already."""
        if id(process) in self._awake:
            return
        self._awake.add(id(process))
        if self._idle:
            self._clock.after(self._wake_s, lambda: self._wants(process))
        else:
            self._wants(process)

    def _wants(self, process: Running) -> None:
        self._waiting.append(process)
        self._dispatch()

    def _dispatch(self) -> None:
        while self._idle and self._waiting:
            process = self._waiting.popleft()
            warm = [core for core in self._idle if core.latest is process]
            core = (warm or self._idle)[0]
            self._idle.remove(core)
            cost_s = 0.0 if warm else process.switched(self._others(process))
            core.latest = process
            process.has_used(cost_s)
            until = self._clock.now + TIME_SLICE_S
            self._clock.after(cost_s, lambda core=core, until=until: self._next(core, until))  # type: ignore[misc]

    def _others(self, process: Running) -> float:
        """How probable it is that another one has run on its core since it ran; all cores are alike."""
        self._turns += 1
        since = self._turns - self._latest_turn.get(id(process), self._turns) - 1
        self._latest_turn[id(process)] = self._turns
        return min(1.0, max(0, since) / self._count)

    def _next(self, core: _Core, until: float) -> None:
        """The core's process goes on with its next piece of work, or gives the core back."""
        process = core.latest
        assert process is not None
        if self._waiting and self._clock.now >= until:
            self._waiting.append(process)
            self._release(core)
            return
        work = process.work()
        if work is None:
            self._awake.discard(id(process))
            self._release(core)
        else:
            self._go_on(core, process, work, until)

    def _release(self, core: _Core) -> None:
        self._idle.append(core)
        self._dispatch()

    def _go_on(self, core: _Core, process: Running, work: Iterator[Work], until: float) -> None:
        needed = next(work, None)
        if needed is None:
            self._next(core, until)
            return
        now = self._clock.now
        end = now + needed.cpu_s
        if needed.traffic_nbytes:
            end = max(end, self._memory.take(now, needed.traffic_nbytes))
        process.has_used(end - now)
        self._clock.at(end, lambda: self._go_on(core, process, work, until))
