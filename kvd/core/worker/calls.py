"""The book of a worker's calls: its requests out, their answers in, deadlines, and the errors that end the waiting."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Any

from kvd.core import requests
from kvd.core.machine import SCHEDULER, Complete, Effect, LocalCall, Received, ServerPeer, Span
from kvd.core.membership import name_of
from kvd.core.refusals import error_of
from kvd.core.session import FIRST_REQUEST, SchedulerSession
from kvd.core.worker.keys import WorkerKey
from kvd.core.worker.outbox import QUEUED, Entry, Outbox
from kvd.errors import KvdError, NodeLost, RequestTimeout
from kvd.protocol.messages import SMALL_PUSH_BYTES, Member, Refused


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a worker is told besides what the view says."""

    credit_bytes: int
    small_push_bytes: int = SMALL_PUSH_BYTES  # pushes of up to so many bytes take no credit
    batches: bool = True  # what is moved together again and again is declared, and named by a number from then on


@dataclass(slots=True, eq=False)
class Call:
    """A local call under way."""

    number: int
    request: requests.Request
    deadline: float
    pushes: bool
    keys: list[WorkerKey] = field(default_factory=list)
    started: bool = False
    completed: bool = False
    remaining: int = 0  # answers that are still to come
    result: Any = None
    error: KvdError | None = None
    entries: set[Entry] = field(default_factory=set)
    unsettled: int = 0  # push messages without a final answer; outlives the call's deadline
    messages: int = 0  # that a transfer was cut into
    refused: int = 0  # of those
    is_taken_in_part: bool = False  # one of those was refused for some of its slices only
    pulls: list[tuple[WorkerKey, int]] = field(default_factory=list)  # versions that it holds the rounds back for
    flushers: list[Call] = field(default_factory=list)


class CallBook(ABC):
    """What all kinds of calls have in common."""

    def __init__(self, settings: WorkerSettings, session: SchedulerSession) -> None:
        self.incarnation = session.incarnation
        self.session = session
        self.view = session.view
        self._observer = session.identity.role == "observer"
        self._batches = settings.batches and not self._observer
        self._outbox = Outbox(settings.credit_bytes, settings.small_push_bytes)
        self._calls: dict[int, Call] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._servers: dict[int, ServerPeer] = {}  # rank → the incarnation that we are connected to
        self._gone_servers: list[Member] = []  # in the view, and dead or left
        self._joining: list[Call] = []
        self._waiting_staged: list[Call] = []
        self._left_rounds = False
        self._last_request = FIRST_REQUEST
        self._now = 0.0
        self._out: list[Effect] = []

    # ── requests and answers ──

    def _number(self) -> int:
        """The number of the next request."""
        self._last_request += 1
        return self._last_request

    def _ask(
        self,
        call: Call | None,
        peer: Any,
        message: Any,
        answered: Callable[[Entry, Received], None],
        payload: tuple[Span, ...] = (),
    ) -> None:
        """Puts a request, whose number is filled in here, into the outbox."""
        nbytes = sum(span.nbytes for span in payload)
        self._post(call, Entry(peer, replace(message, request=self._number()), answered, payload, nbytes))

    def _post(self, call: Call | None, entry: Entry) -> None:
        if call is not None:
            call.entries.add(entry)
        self._outbox.add(entry)

    def _settled(self, call: Call | None, entry: Entry) -> None:
        self._outbox.settled(entry)
        if call is not None:
            call.entries.discard(entry)

    def _gather(self, call: Call, requests: Sequence[tuple[Any, Any, tuple[Span, ...]]]) -> None:
        """Asks them all; the call is answered with the answers in order, or with the first error."""
        call.started = True
        gone = next((error for peer, _, _ in requests if (error := self._gone_error(peer)) is not None), None)
        if gone is not None:
            self._complete(call, error=gone)
            return
        call.remaining = len(requests)
        answers: list[Any] = [None] * len(requests)

        def answered(position: int, entry: Entry, event: Received) -> None:
            self._settled(call, entry)
            call.error = call.error or self._error_of(event)
            answers[position] = (event.message, event.payload, event.nbytes)
            call.remaining -= 1
            if call.remaining == 0:
                self._complete(call, answers, call.error)

        for position, (peer, message, payload) in enumerate(requests):
            self._ask(call, peer, message, partial(answered, position), payload)
        if not requests:
            self._complete(call, answers)

    # ── the life of a call ──

    def _accept(self, event: LocalCall) -> None:
        request = event.request
        call = Call(event.call, request, event.deadline, isinstance(request, requests.Transfer) and request.push)
        self._calls[call.number] = call
        heappush(self._deadlines, (call.deadline, call.number))
        if self.session.failure is not None:
            self._complete(call, error=self.session.failure)
            return
        self._begin(call, request)

    @abstractmethod
    def _begin(self, call: Call, request: Any) -> None:
        """Sets the call going; the machine knows how, by its kind."""

    def _complete(self, call: Call, result: Any = None, error: KvdError | None = None) -> None:
        if call.completed:
            return
        call.completed = True
        self._calls.pop(call.number, None)
        if len(self._deadlines) > 2 * len(self._calls) + 100:
            self._deadlines = [(open_.deadline, open_.number) for open_ in self._calls.values()]
            heapify(self._deadlines)
        self._out.append(Complete(call.number, result, error))

    def _abandon(self, call: Call, error: KvdError) -> None:
        """Ends the waiting. Pushes that were started go on; anything else of the call is forgotten."""
        for entry in list(call.entries):
            if not entry.is_push:
                self._settled(call, entry)
        self._withdraw(call)
        if call in self._joining:
            self._joining.remove(call)
        if call in self._waiting_staged:
            self._waiting_staged.remove(call)
            self._outbox.asks_staged = bool(self._waiting_staged)
        self._complete(call, error=error)

    @abstractmethod
    def _withdraw(self, call: Call) -> None:
        """The call waits no more: what it held on its keys is let go."""

    def _expire(self) -> None:
        while self._deadlines and self._deadlines[0][0] <= self._now:
            call = self._calls.get(heappop(self._deadlines)[1])
            if call is not None:
                self._abandon(call, self._timeout(call))

    def _fail_everything(self, error: KvdError) -> None:
        for call in list(self._calls.values()):
            self._abandon(call, error)
        self._fall_silent()

    def _fall_silent(self) -> None:
        """This node is out: whatever it had still to say, another says in its place."""
        for entry in self._outbox.entries():
            self._outbox.settled(entry)

    # ── what a caller is told ──

    def _timeout(self, call: Call) -> RequestTimeout:
        sent = any(entry.state != QUEUED for entry in call.entries) or (call.started and not call.entries)
        sent = sent or (call.started and call.pushes)  # what is queued still goes out
        waiting_for = self._waited_for(call)
        what = type(call.request).__name__.lower()
        names = [key.name for key in call.keys[:3]]
        about = f" of {', '.join(map(repr, names))}{' …' if len(call.keys) > 3 else ''}" if names else ""
        whom = ", ".join(waiting_for) if waiting_for else "nobody in particular"
        hint = "its pushes are still on their way" if call.pushes and sent else "kvd status shows who is there"
        text = f"{what}{about} did not finish before its deadline; it waits for {whom}; {hint}"
        return RequestTimeout(text, outcome="unknown" if sent else "not_sent", waiting_for=waiting_for)

    def _waited_for(self, call: Call) -> tuple[str, ...]:
        """Who may be behind it: workers that never came or are quiet, then the nodes that were asked."""
        if not self.session.joined:
            return ("scheduler",)
        ranks: dict[Any, int] = {server.incarnation: server.rank for server in self.view.servers()}
        names = [name_of("server", rank) for rank in self.view.missing_servers()]
        names += [name_of("worker", rank) for rank in self.view.required_ranks() if self.view.worker(rank) is None]
        names += [name_of("worker", rank) for rank in self.view.dead_workers()]
        names += [name_of(quiet.role, quiet.rank) for quiet in self.session.quiet]
        for entry in sorted(call.entries, key=lambda entry: entry.order):
            names.append("scheduler" if entry.peer == SCHEDULER else name_of("server", ranks.get(entry.peer, 0)))
        return tuple(dict.fromkeys(names))

    def _gone_error(self, peer: Any) -> NodeLost | None:
        """What a request to this peer ends with, if it is a server that is dead or has left."""
        if peer is None:  # it was gone before we could connect to it
            server = next((member for member in self._gone_servers if member.rank not in self._servers), None)
        else:
            server = next((member for member in self._gone_servers if member.incarnation == peer), None)
        if server is None:
            return None
        node, text = name_of("server", server.rank), self._lost_text(server.rank)
        return NodeLost(text, node=node, last_seen_s=server.last_seen_s, reason=server.reason)

    def _lost_text(self, rank: int) -> str:
        return (
            f"{name_of('server', rank)} died, and with replicas=1 its part of the keys is gone: "
            f"start the job again from its last checkpoint"
        )

    def _error_of(self, event: Received) -> KvdError | None:
        message = event.message
        if not isinstance(message, Refused):
            return None
        ranks = {server.incarnation: server.rank for server in self.view.servers()}
        node = "scheduler" if event.peer == SCHEDULER else name_of("server", ranks.get(event.sender, 0))
        return error_of(message, node)
