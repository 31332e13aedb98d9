"""A call of the program under way: what the book of calls, the open pushes and the parts that carry it out share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Protocol, TypeAlias

from kvd.core import requests
from kvd.core.outbox import Entry
from kvd.core.worker.keys import WorkerKey
from kvd.core.worker.message_plans import MessagePlan
from kvd.core.worker.push_window import PushWindow
from kvd.core.worker.transfer_plans import TransferPlan
from kvd.errors import KvdError


class CallState(Enum):
    """How far a call has come. It only goes forward, and may leave STARTED out."""

    WAITING = auto()  # nothing was done for it yet: it may wait for earlier calls
    STARTED = auto()  # its requests are made
    COMPLETED = auto()  # its caller was answered; its pushes may still be under way


WAITING, STARTED, COMPLETED = CallState  # the hot path compares: one look-up instead of two


Steps: TypeAlias = tuple[int, int]
"""What a push says of the steps of its worker: its own, and the newest one whose pushes are all settled."""

NO_STEPS: Steps = (0, 0)  # of a pull


class CallOwner(Protocol):
    """What a shell knows of a call whose bytes it sends and takes in itself."""

    def request(self) -> requests.Request:
        """The call as a request, with sources and targets: the same object each time."""


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

    # Most calls need few of these: what an instance does not set, the class has.
    step: int = 0  # of a push: see `kvd.core.worker.steps`
    keys: Sequence[WorkerKey] = ()
    state: CallState = WAITING
    withdraw: Callable[[InFlight], None] | None = None  # see `hold`
    is_kept: bool = False  # a push whose caller was told not to wait, and which counts later
    blocker: int = 0  # the place of the key that it was found to wait for last
    # Of a push or pull that has started:
    transfer: requests.Transfer | None = None  # how it is carried out: without a push while the rounds leave it out
    plan: TransferPlan | None = None  # of an earlier call on the same keys; None: what it does is found out for it
    listed: requests.Listed | None = None  # the values of a list, in place of items
    windows: Sequence[PushWindow] = ()  # of its keys, or of their group
    clock: int = 0  # of all its keys, if its messages name batches
    taken: list[tuple[MessagePlan, Sequence[int]]] | None = None  # what was pulled, with its versions
    remaining: int = 0  # messages that are not answered
    steps: Steps = NO_STEPS  # what the messages of a push say
    pulling: Sequence[int] = ()  # the clocks that hold rounds back, one per window; empty once they are released
    is_reading: bool = False  # it is counted in `reading` of the windows
    is_untaken: bool = True  # so far no server has taken any of it
    counts: bool = True  # so far it counts in every slice
    error: KvdError | None = None  # the first

    def __init__(
        self,
        number: int,
        asked: requests.Request | None,
        deadline: float,
        is_push: bool,
        place: int = 0,
        begun: float = 0.0,
        answer_s: float | None = None,
        ends_at: float = 0.0,
        owner: CallOwner | None = None,
    ) -> None:
        """A call that was accepted.

        Args:
            asked: what the program asks for; None: the owner makes it.
            place: of a push: where the program was when it made the call, see `kvd.core.places`.
            answer_s: see LocalCall.
            ends_at: no later than `deadline`; changed by CallBook only.
            owner: of a call whose bytes the shell sends and takes in.
        """
        self.number = number
        self.asked = asked
        self.deadline = deadline
        self.is_push = is_push
        self.place = place
        self.begun = begun
        self.answer_s = answer_s
        self.ends_at = ends_at
        self.owner = owner
        self.entries: set[Entry] = set()

    @property
    def request(self) -> requests.Request:
        """What the program asks for."""
        if self.asked is None:
            assert self.owner is not None
            self.asked = self.owner.request()
        return self.asked

    def items(self) -> Sequence[requests.Item]:
        """The items of a push or pull."""
        if self.listed is not None:
            return self.listed.items()
        request = self.request
        assert isinstance(request, requests.Transfer)
        return request.items

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
