"""The book of the program's calls: it accepts them, keeps their deadlines, and completes each exactly once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from heapq import heapify, heappop, heappush
from typing import Any

from kvd.core import requests
from kvd.core.machine import Complete, Effect, LocalCall
from kvd.core.outbox import Entry, Outbox
from kvd.core.session import SchedulerSession
from kvd.core.worker.keys import WorkerKey
from kvd.errors import KvdError


class CallState(Enum):
    """How far a call has come. It only goes forward, and may leave STARTED out."""

    WAITING = auto()  # nothing was done for it yet: it may wait for earlier calls
    STARTED = auto()  # its requests are made
    COMPLETED = auto()  # its caller was answered; its pushes may still be under way


WAITING, STARTED, COMPLETED = CallState  # the hot path compares: one look-up instead of two


@dataclass(slots=True, eq=False)
class Call:
    """A call of the program.

    Invariants:
        `entries` holds its open requests: those in the outbox that are not settled.
        It is in the queues of its keys only while it is WAITING.
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
    withdraw: Callable[[Call], None] | None = None  # see `hold`
    is_kept: bool = False  # a push whose caller was told not to wait, and which counts later
    blocker: int = 0  # the place of the key that it was found to wait for last

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

    def hold(self, withdraw: Callable[[Call], None]) -> None:
        """A part of the machine holds the call. `withdraw` lets go of it there, if the caller stops waiting first."""
        self.withdraw = withdraw

    def let_go(self) -> None:
        """No part holds the call any more."""
        self.withdraw = None


class CallBook:
    """The open calls of a worker.

    Args:
        emit: takes effects, in their order.

    Attributes:
        deadlines: a heap of times and numbers of calls, some of them completed or put off. The machine looks whether
            one has passed.
        activity: grows whenever a call is accepted or completed.
    """

    def __init__(self, session: SchedulerSession, outbox: Outbox, emit: Callable[[Effect], None]) -> None:
        self._session = session
        self._outbox = outbox
        self._emit = emit
        self._open: dict[int, Call] = {}
        self.deadlines: list[tuple[float, int]] = []
        self.activity = 0

    def __len__(self) -> int:
        return len(self._open)

    def open_calls(self) -> list[Call]:
        return list(self._open.values())

    def find(self, number: int) -> Call | None:
        """The open call with this number."""
        return self._open.get(number)

    def accept(self, event: LocalCall, now: float) -> Call:
        """Enters a call. It is completed at once if this node has failed."""
        number, request, deadline, answer_s = event
        is_push, place = False, 0
        if isinstance(request, requests.ListTransfer):
            request = request.in_full()
        if isinstance(request, requests.Transfer):
            is_push, place = request.push, request.place
        ends_at = deadline if answer_s is None else min(deadline, now + answer_s)
        call = Call(number, request, deadline, is_push, place, now, answer_s, ends_at)
        self.activity += 1
        self._open[number] = call
        heappush(self.deadlines, (ends_at, number))
        if self._session.failure is not None:
            self.complete(call, error=self._session.failure)
        return call

    def complete(self, call: Call, result: Any = None, error: KvdError | None = None) -> None:
        """Answers the caller. Nothing happens if it was answered before."""
        if call.state is COMPLETED:
            return
        call.state = COMPLETED
        self.activity += 1
        self._open.pop(call.number, None)
        if len(self.deadlines) > 2 * len(self._open) + 100:
            self.deadlines = [(open_.ends_at, open_.number) for open_ in self._open.values()]
            heapify(self.deadlines)
        self._emit(Complete(call.number, result, error))

    # ── calls that end early ──

    def abandon(self, call: Call, error: KvdError) -> None:
        """Ends the caller's waiting. Pushes that were started go on; all else of the call is given up."""
        for entry in list(call.entries):
            if not entry.pushes:
                self._outbox.settle(entry)
        if call.withdraw is not None:
            withdraw = call.withdraw
            call.let_go()
            withdraw(call)
        self.complete(call, error=error)

    def end(self, call: Call, result: Any) -> None:
        """Completes a call that is no push before its requests are answered: they are given up."""
        for entry in list(call.entries):
            self._outbox.settle(entry)
        self.complete(call, result)

    def abandon_all(self, error: KvdError) -> None:
        for call in self.open_calls():
            self.abandon(call, error)

    def abandon_requests(self, are_lost: Callable[[Entry], bool], error: KvdError) -> None:
        """Ends the waiting for a dead server. The pushes to it stay in the outbox, should it come back."""
        for call in self.open_calls():
            if any(map(are_lost, call.entries)):
                self.abandon(call, error)

    # ── the end that time brings ──

    def take_due(self, now: float) -> list[Call]:
        """The calls that end now; each is completed or put off next."""
        due: dict[int, Call] = {}
        while self.deadlines and self.deadlines[0][0] <= now:
            number = heappop(self.deadlines)[1]
            call = self._open.get(number)
            if call is not None and call.ends_at <= now:
                due[number] = call
        return list(due.values())

    def put_off(self, call: Call, ends_at: float) -> None:
        """The call goes on until then, or until its deadline."""
        call.ends_at = min(call.deadline, ends_at)
        heappush(self.deadlines, (call.ends_at, call.number))

    def next_deadline(self) -> float | None:
        """When the next call ends; perhaps it is completed by now, or was put off."""
        return self.deadlines[0][0] if self.deadlines else None

    def validate(self) -> None:
        """Raises AssertionError if a call that is open is completed, would miss its deadline, or has lost requests."""
        deadlines = set(self.deadlines)
        for number, call in self._open.items():
            assert call.state is not COMPLETED, f"call {number} is completed, but still open"
            assert call.ends_at <= call.deadline, f"call {number} outlives its deadline: {call}"
            assert (call.ends_at, number) in deadlines, f"nothing ends call {number} at its deadline"
            for entry in call.entries:
                assert self._outbox.find(entry.request) is entry, f"request {entry.request} of call {number} is gone"
