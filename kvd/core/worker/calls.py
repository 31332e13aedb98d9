"""The book of the program's calls: it accepts them, keeps their deadlines, and completes each exactly once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from heapq import heapify, heappop, heappush
from typing import Any

from kvd.core import requests
from kvd.core.machine import SCHEDULER, Complete, Effect, LocalCall
from kvd.core.membership import name_of
from kvd.core.session import SchedulerSession
from kvd.core.worker.keys import WorkerKey
from kvd.core.worker.outbox import QUEUED, Entry, Outbox
from kvd.errors import KvdError, RequestTimeout


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
    keys: Sequence[WorkerKey] = ()
    state: CallState = WAITING
    entries: set[Entry] = field(default_factory=set)
    withdraw: Callable[[Call], None] | None = None  # see `hold`

    def start(self) -> None:
        if self.state is not WAITING:
            raise RuntimeError(f"call {self.number} cannot start when it is {self.state.name}: this is a bug in kvd")
        self.state = STARTED

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
        deadlines: a heap of deadlines and numbers of calls, some of them completed. The machine looks whether
            `expire` has anything to do.
    """

    def __init__(self, session: SchedulerSession, outbox: Outbox, emit: Callable[[Effect], None]) -> None:
        self._session = session
        self._outbox = outbox
        self._emit = emit
        self._open: dict[int, Call] = {}
        self.deadlines: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._open)

    def open_calls(self) -> list[Call]:
        return list(self._open.values())

    def accept(self, event: LocalCall) -> Call:
        """Enters a call. It is completed at once if this node has failed."""
        request = event.request
        if isinstance(request, requests.Transfer):
            call = Call(event.call, request, event.deadline, request.push, request.place)
        else:
            call = Call(event.call, request, event.deadline, False)
        self._open[call.number] = call
        heappush(self.deadlines, (call.deadline, call.number))
        if self._session.failure is not None:
            self.complete(call, error=self._session.failure)
        return call

    def complete(self, call: Call, result: Any = None, error: KvdError | None = None) -> None:
        """Answers the caller. Nothing happens if it was answered before."""
        if call.state is COMPLETED:
            return
        call.state = COMPLETED
        self._open.pop(call.number, None)
        if len(self.deadlines) > 2 * len(self._open) + 100:
            self.deadlines = [(open_.deadline, open_.number) for open_ in self._open.values()]
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

    def abandon_all(self, error: KvdError) -> None:
        for call in self.open_calls():
            self.abandon(call, error)

    def abandon_requests_to(self, server: int, error: KvdError) -> None:
        """Ends the waiting for a dead server. Its pushes stay in the outbox, should it come back."""
        for call in self.open_calls():
            if any(entry.send.peer == server for entry in call.entries):
                self.abandon(call, error)

    def time_out(self, call: Call) -> None:
        self.abandon(call, timeout_error(call, self._session))

    def expire(self, now: float) -> None:
        """Abandons the calls whose deadline has passed."""
        while self.deadlines and self.deadlines[0][0] <= now:
            call = self._open.get(heappop(self.deadlines)[1])
            if call is not None:
                self.time_out(call)

    def next_deadline(self) -> float | None:
        """The earliest deadline; perhaps of a call that is completed by now."""
        return self.deadlines[0][0] if self.deadlines else None

    def validate(self) -> None:
        """Raises AssertionError if a call that is open is completed, would miss its deadline, or has lost requests."""
        deadlines = set(self.deadlines)
        for number, call in self._open.items():
            assert call.state is not COMPLETED, f"call {number} is completed, but still open"
            assert (call.deadline, number) in deadlines, f"nothing ends call {number} at its deadline"
            for entry in call.entries:
                assert self._outbox.find(entry.request) is entry, f"request {entry.request} of call {number} is gone"


# ── what a caller is told ──


def timeout_error(call: Call, session: SchedulerSession) -> RequestTimeout:
    """What the call is told at its deadline: whether anything of it was sent, and whom it waits for."""
    sent = any(entry.state is not QUEUED for entry in call.entries)
    sent = sent or (call.state is STARTED and (call.is_push or not call.entries))  # a queued push still goes out
    waiting_for = _waited_for(call, session)
    what = type(call.request).__name__.lower()
    names = [key.name for key in call.keys[:3]]
    about = f" of {', '.join(map(repr, names))}{' …' if len(call.keys) > 3 else ''}" if names else ""
    whom = ", ".join(waiting_for) if waiting_for else "nobody in particular"
    hint = "its pushes are still on their way" if call.is_push and sent else "kvd status shows who is there"
    text = f"{what}{about} did not finish before its deadline; it waits for {whom}; {hint}"
    return RequestTimeout(text, outcome="unknown" if sent else "not_sent", waiting_for=waiting_for)


def _waited_for(call: Call, session: SchedulerSession) -> tuple[str, ...]:
    """Who may be behind it: nodes that never came, are dead or are quiet, then the nodes that were asked."""
    if not session.joined:
        return ("scheduler",)
    view = session.view
    ranks: dict[Any, int] = {server.incarnation: server.rank for server in view.servers()}
    names = [name_of("server", rank) for rank in view.missing_servers()]
    names += [name_of("worker", rank) for rank in view.required_ranks() if view.worker(rank) is None]
    names += [name_of("worker", rank) for rank in view.dead_workers()]
    names += [name_of(quiet.role, quiet.rank) for quiet in session.quiet]
    for entry in sorted(call.entries, key=lambda entry: entry.request):
        peer = entry.send.peer
        names.append("scheduler" if peer == SCHEDULER else name_of("server", ranks.get(peer, 0)))
    return tuple(dict.fromkeys(names))
