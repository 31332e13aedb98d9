"""A call of the program under way: what the book of calls, the open pushes and the parts that carry it out share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from kvd.core import requests
from kvd.core.outbox import Entry
from kvd.core.worker.keys import WorkerKey
from kvd.core.worker.push_window import PushWindow
from kvd.errors import KvdError


class CallState(Enum):
    """How far a call has come. It only goes forward, and may leave STARTED out."""

    WAITING = auto()  # nothing was done for it yet: it may wait for earlier calls
    STARTED = auto()  # its requests are made
    COMPLETED = auto()  # its caller was answered; its pushes may still be under way


WAITING, STARTED, COMPLETED = CallState  # the hot path compares: one look-up instead of two


class Steps(NamedTuple):
    """What a push says of the steps of its worker: its own, and the newest one whose pushes are all settled."""

    step: int
    settled: int


NO_STEPS = Steps(0, 0)  # of a pull


@dataclass(slots=True, eq=False)
class InFlight:
    """A call of the program, from its acceptance until its caller is answered and all its messages are.

    A push or pull outlives the deadline of its caller: what was sent may still be committed.

    Invariants:
        `entries` holds its open requests: those in the outbox that are not settled.
        It is in the queues of its keys only while it is WAITING.
        While remaining > 0, each window has an open push for it if it pushes.
        While pulling is not empty, each window has its clock in `pulling`.
        error is set once a message of a push or pull was refused.
    """

    number: int
    request: requests.Request
    deadline: float
    is_push: bool
    place: int = 0  # of a push: where the program was when it made the call, see `kvd.core.places`
    begun: float = 0.0
    answer_s: float | None = None  # see LocalCall
    ends_at: float = 0.0  # no later than `deadline`; changed by CallBook only
    step: int = 0  # of a push: see `kvd.core.worker.steps`
    keys: Sequence[WorkerKey] = ()
    state: CallState = WAITING
    entries: set[Entry] = field(default_factory=set)
    withdraw: Callable[[InFlight], None] | None = None  # see `hold`
    is_kept: bool = False  # a push whose caller was told not to wait, and which counts later
    blocker: int = 0  # the place of the key that it was found to wait for last
    # Of a push or pull that has started:
    transfer: requests.Transfer | None = None  # what is carried out: without a push while the rounds leave it out
    windows: Sequence[PushWindow] = ()  # of its keys
    versions: list[requests.Versions | None] = field(default_factory=list)  # pulled so far, one per item
    remaining: int = 0  # messages that are not answered
    steps: Steps = NO_STEPS  # what the messages of a push say
    pulling: Sequence[int] = ()  # the clocks that hold rounds back, one per window; empty once they are released
    is_reading: bool = False  # it is counted in `reading` of the windows
    is_untaken: bool = True  # so far no server has taken any of it
    counts: bool = True  # so far it counts in every slice
    error: KvdError | None = None  # the first

    def start(self) -> None:
        if self.state is not WAITING:
            raise RuntimeError(f"call {self.number} cannot start when it is {self.state.name}: this is a bug in kvd")
        self.state = STARTED

    @property
    def may_have_happened(self) -> bool:
        """Whether any part of it has left this node, or will."""
        if any(entry.was_sent for entry in self.entries):
            return True
        return self.state is STARTED and (self.is_push or not self.entries)  # a queued push still goes out

    def set_keys(self, keys: Sequence[WorkerKey]) -> None:
        """The keys that the call names, in its order."""
        self.keys = keys

    def hold(self, withdraw: Callable[[InFlight], None]) -> None:
        """A part of the machine holds the call. `withdraw` lets go of it there, if the caller stops waiting first."""
        self.withdraw = withdraw

    def let_go(self) -> None:
        """No part holds the call any more."""
        self.withdraw = None
