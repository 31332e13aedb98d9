"""The book of the program's calls: it accepts them, keeps their deadlines, and completes each exactly once."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any

from kvd.core import requests
from kvd.core.machine import Complete, Effect, LocalCall
from kvd.core.outbox import Entry, Outbox
from kvd.core.session import SchedulerSession
from kvd.core.worker.in_flight import COMPLETED, InFlight
from kvd.errors import KvdError

MOST_PAST = 100  # deadlines of completed calls, and one more for each open call


class CallBook:
    """The open calls of a worker.

    Args:
        emit: takes effects, in their order.

    Attributes:
        deadlines: a heap of times and numbers of calls, some of them completed or put off. The machine looks whether
            one has passed.
        activity: grows whenever a call is accepted or completed.
        open: the calls that are not completed, by number. Only the book changes it.
    """

    def __init__(self, session: SchedulerSession, outbox: Outbox, emit: Callable[[Effect], None]) -> None:
        self._session = session
        self._outbox = outbox
        self._emit = emit
        self.open: dict[int, InFlight] = {}
        self.deadlines: list[tuple[float, int]] = []
        self.activity = 0

    def __len__(self) -> int:
        return len(self.open)

    def open_calls(self) -> list[InFlight]:
        return list(self.open.values())

    def find(self, number: int) -> InFlight | None:
        """The open call with this number."""
        return self.open.get(number)

    def accept(self, event: LocalCall, now: float) -> InFlight:
        """Enters a call. It is completed at once if this node has failed."""
        number, request, deadline, answer_s = event
        is_push, place = False, 0
        transfer = request.transfer if isinstance(request, requests.ListTransfer) else request
        if isinstance(transfer, requests.Transfer):
            is_push, place = transfer.push, transfer.place
        ends_at = deadline if answer_s is None else min(deadline, now + answer_s)
        call = InFlight(number, request, deadline, is_push, place, now, answer_s, ends_at)
        self.enter(call)
        if self._session.failure is not None:
            self.complete(call, error=self._session.failure)
        return call

    def enter(self, call: InFlight) -> None:
        """Keep a call until it is completed, and its deadline."""
        self.activity += 1
        self.open[call.number] = call
        heappush(self.deadlines, (call.ends_at, call.number))

    def close(self, call: InFlight) -> None:
        """The caller is answered elsewhere, with the result that it has asked for."""
        call.state = COMPLETED
        self.activity += 1
        del self.open[call.number]
        deadlines = self.deadlines
        while deadlines and deadlines[0][1] not in self.open:
            heappop(deadlines)
        if len(deadlines) > 2 * len(self.open) + MOST_PAST:  # behind that of an earlier call
            self._forget_past()

    def complete(self, call: InFlight, result: Any = None, error: KvdError | None = None) -> None:
        """Answers the caller. Nothing happens if it was answered before."""
        if call.state is COMPLETED:
            return
        call.state = COMPLETED
        self.activity += 1
        self.open.pop(call.number, None)
        if len(self.deadlines) > 2 * len(self.open) + MOST_PAST:
            self._forget_past()
        self._emit(Complete(call.number, result, error))

    def _forget_past(self) -> None:
        """Keep the deadlines of open calls only."""
        self.deadlines = [(call.ends_at, call.number) for call in self.open.values()]
        heapify(self.deadlines)

    # ── calls that end early ──

    def abandon(self, call: InFlight, error: KvdError) -> None:
        """Ends the caller's waiting. Pushes that were started go on; all else of the call is given up."""
        for entry in list(call.entries):
            if not entry.pushes:
                self._outbox.settle(entry)
        if call.withdraw is not None:
            withdraw = call.withdraw
            call.let_go()
            withdraw(call)
        self.complete(call, error=error)

    def end(self, call: InFlight, result: Any) -> None:
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

    def take_due(self, now: float) -> list[InFlight]:
        """The calls that end now; each is completed or put off next."""
        due: dict[int, InFlight] = {}
        while self.deadlines and self.deadlines[0][0] <= now:
            number = heappop(self.deadlines)[1]
            call = self.open.get(number)
            if call is not None and call.ends_at <= now:
                due[number] = call
        return list(due.values())

    def put_off(self, call: InFlight, ends_at: float) -> None:
        """The call goes on until then, or until its deadline."""
        call.ends_at = min(call.deadline, ends_at)
        heappush(self.deadlines, (call.ends_at, call.number))

    def next_deadline(self) -> float | None:
        """When the next call ends; perhaps it is completed by now, or was put off."""
        return self.deadlines[0][0] if self.deadlines else None

    def validate(self) -> None:
        """Raises AssertionError if a call that is open is completed, would miss its deadline, or has lost requests."""
        deadlines = set(self.deadlines)
        for number, call in self.open.items():
            assert call.state is not COMPLETED, f"call {number} is completed, but still open"
            assert call.ends_at <= call.deadline, f"call {number} outlives its deadline: {call}"
            assert (call.ends_at, number) in deadlines, f"nothing ends call {number} at its deadline"
            for entry in call.entries:
                assert self._outbox.find(entry.request) is entry, f"request {entry.request} of call {number} is gone"
