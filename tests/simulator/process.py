"""A simulated process: one incarnation of a node, with its open calls and, if it is a worker, its program."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from kvd.core.machine import CensusTaken, Event, Machine, Peer
from kvd.core.requests import Read, Request, Transfer
from kvd.errors import KvdError
from kvd.node.jobs.runner import JobRunner
from tests.simulator.lists import Lists


class Sleep(NamedTuple):
    """A program does nothing for a while."""

    seconds: float


class Start(NamedTuple):
    """A program starts a call and goes on; it receives the PendingCall."""

    request: Request
    timeout_s: float | None = None


@dataclass(slots=True, eq=False)
class PendingCall:
    """A call that was started. A program that yields it waits for its end, and gets its result or its error."""

    number: int
    request: Request
    deadline: float
    done: bool = False
    result: Any = None
    error: KvdError | None = None
    waiter: Callable[[], None] | None = None


Step: TypeAlias = "Request | Start | PendingCall | Sleep"
Coroutine: TypeAlias = Generator[Any, Any, None]


@dataclass(slots=True, eq=False)
class Waiting:
    """What the only thread of a program does: it waits for a call without a timeout of its own, or something else.

    Attributes:
        entered: how often it has begun to wait.
    """

    call: PendingCall | None = None
    entered: int = 0

    def enter(self, call: PendingCall) -> None:
        self.call = call
        self.entered += 1

    def leave(self) -> None:
        self.call = None

    def census(self) -> CensusTaken:
        """What a Census of this process finds."""
        if self.call is None or self.call.done:
            return CensusTaken(False, self.entered, ())
        return CensusTaken(True, self.entered, (self.call.number,))


class OpenCalls:
    """The calls of a process that have not ended, and the memory that they may write to.

    Attributes:
        waiting: whether the program waits, and for which of them.
        lists: those that the program has named.
    """

    def __init__(self) -> None:
        self.lists = Lists()
        self.waiting = Waiting()
        self._pending: dict[int, PendingCall] = {}
        self._writers: dict[int, int] = {}  # id of a target buffer → open calls that write there
        self._last_number = 0

    def open(self, request: Request, deadline: float) -> PendingCall:
        """Registers a new call."""
        self._last_number += 1
        call = self._pending[self._last_number] = PendingCall(self._last_number, request, deadline)
        self._count_writers(request, 1)
        return call

    def close(self, number: int) -> PendingCall | None:
        """Removes a call that has ended; None if it is not open."""
        call = self._pending.pop(number, None)
        if call is not None:
            self._count_writers(call.request, -1)
        return call

    def may_write(self, target: Any) -> bool:
        """Whether an open call named this memory as a target."""
        return self._writers.get(id(target), 0) > 0

    def requests(self) -> list[str]:
        """The names of the open requests."""
        return [type(call.request).__name__ for call in self._pending.values()]

    def _count_writers(self, request: Request, change: int) -> None:
        if isinstance(request, Transfer | Read):
            for item in request.items:
                if item.target is not None:
                    self._writers[id(item.target)] = self._writers.get(id(item.target), 0) + change


@dataclass(slots=True, eq=False)
class Suspension:
    """What SIGSTOP does to a process.

    Attributes:
        active: the process is stopped; the events that reach it wait in `backlog`.
        ended_at: when it last woke up.
    """

    active: bool = False
    backlog: list[Event] = field(default_factory=list)
    ended_at: float = 0.0


@dataclass(slots=True, eq=False)
class Timer:
    """The next Tick of a process: due at `tick_at`, and out of date once `number` has moved on.

    Attributes:
        ahead_s: by how much the clock of the process is ahead of the others.
    """

    tick_at: float | None = None
    number: int = 0
    ahead_s: float = 0.0


@dataclass(slots=True, eq=False)
class RunningProgram:
    """A worker's program. `error` is what ended it, if it did not end well."""

    coroutine: Coroutine
    finished: bool = False
    error: BaseException | None = None


@dataclass(slots=True, eq=False)
class Doom:
    """A process dies between two effects.

    Attributes:
        effects_left: how many more effects it carries out before.
        is_spared: asked when it is about to die: whether it lives on after all.
    """

    effects_left: int
    is_spared: Callable[[], bool] = lambda: False


@dataclass(slots=True, eq=False)
class Process:
    """One incarnation of a node.

    Attributes:
        name: "scheduler", "server 0", "worker 1": the same for all incarnations of the node.
        life: the number of earlier incarnations of the node.
        address: where it listens; "" if it does not.
        doom: how it dies; None: it is well.
        connections: those that it opened, by the name of the peer.
        cut_off_from: peers that it does not reach, and that do not reach it, for a while.
        last_persist_at: when its latest write to disk ends.
        halted: why its machine told it to stop.
    """

    name: str
    life: int
    machine: Machine
    address: str = ""
    runners: dict[int, JobRunner] = field(default_factory=dict)  # by run
    alive: bool = True
    doom: Doom | None = None
    suspension: Suspension = field(default_factory=Suspension)
    timer: Timer = field(default_factory=Timer)
    connections: dict[Peer, Any] = field(default_factory=dict)
    cut_off_from: set[Peer] = field(default_factory=set)
    calls: OpenCalls = field(default_factory=OpenCalls)
    last_persist_at: float = 0.0
    program: RunningProgram | None = None
    halted: KvdError | None = None

    @property
    def finished(self) -> bool:
        """Its program has ended."""
        return self.program is not None and self.program.finished

    @property
    def error(self) -> BaseException | None:
        """What ended its program, if it did not end well."""
        return None if self.program is None else self.program.error
