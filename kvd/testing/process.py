"""What the simulator runs: a process is one incarnation of a node, with its program if it is a worker."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from kvd.core.machine import Event, Machine, Peer
from kvd.core.requests import Request
from kvd.errors import KvdError
from kvd.node.jobs import JobRunner


class Sleep(NamedTuple):
    """A program does nothing for a while."""

    seconds: float


class Start(NamedTuple):
    """A program starts a call and goes on; it is given the Ticket."""

    request: Request
    timeout_s: float | None = None


@dataclass(slots=True, eq=False)
class Ticket:
    """A call that was started. A program that yields it waits for its end, and gets its result or its error."""

    call: int
    request: Request
    deadline: float
    done: bool = False
    result: Any = None
    error: KvdError | None = None
    waiter: Callable[[], None] | None = None


Step: TypeAlias = "Request | Start | Ticket | Sleep"
Coroutine: TypeAlias = Generator[Any, Any, None]


@dataclass(slots=True, eq=False)
class Process:
    """One incarnation of a node.

    Attributes:
        name: "scheduler", "server 0", "worker 1": the same for all incarnations of the node.
        life: how many incarnations of the node there were before.
        paused: stopped by a signal; what happens to it meanwhile waits in `backlog`.
        doom: how many more effects it carries out before it dies; None: it is well.
        tick_at: when the next Tick is due; it is out of date if `timer` has moved on.
        finished: the program has ended.
        cut_off_from: connections on which nothing comes or goes for a while.
    """

    name: str
    life: int
    machine: Machine
    address: str = ""
    jobs: JobRunner | None = None
    alive: bool = True
    paused: bool = False
    backlog: list[Event] = field(default_factory=list)
    doom: int | None = None
    tick_at: float | None = None
    timer: int = 0
    connections: dict[Peer, Any] = field(default_factory=dict)
    tickets: dict[int, Ticket] = field(default_factory=dict)
    targets: dict[int, int] = field(default_factory=dict)  # id of a target buffer → calls under way that write there
    cut_off_from: set[Peer] = field(default_factory=set)
    last_call: int = 0
    last_persist_at: float = 0.0
    woke_at: float = 0.0
    program: Coroutine | None = None
    finished: bool = False
    error: BaseException | None = None  # what ended the program
    halted: KvdError | None = None
