"""The worker: it turns the calls of a program into requests, and their answers into completions.

The way of a call: `_accept` queues it behind earlier calls on its keys, `_start` cuts it into messages when all its
keys are ready and the window of their rounds is open, the outbox sends them, the answers come back to
`_transfer_answered`, and when the last is in, the call is completed.

An observer is a worker without a rank: it asks, and takes part in nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvd import errors
from kvd.core import requests
from kvd.core.machine import (
    SCHEDULER,
    Connect,
    Disconnect,
    Effect,
    Event,
    InvalidFrame,
    LocalCall,
    Received,
    ServerPeer,
    Span,
)
from kvd.core.membership import ACTIVE, DEAD, DONE, LEFT, name_of
from kvd.core.session import SchedulerSession
from kvd.core.worker.calls import Call, WorkerSettings
from kvd.core.worker.key_directory import KeyDirectory
from kvd.core.worker.keys import LOST, READY
from kvd.core.worker.outbox import Entry
from kvd.core.worker.transfer import Transfers
from kvd.errors import NodeLost, NotAllowed
from kvd.protocol.messages import (
    Attach,
    Clocks,
    Departure,
    Done,
    Enter,
    Epoch,
    ErrorCode,
    Leave,
    NodeName,
    NotYet,
    NotYetReason,
    Refused,
    Staged,
    StatusQuery,
    Taken,
)

MAX_CLOCK_REFUSALS = 400

__all__ = ["WorkerMachine", "WorkerSettings"]


class WorkerMachine(Transfers, KeyDirectory):
    """The state machine of a worker or an observer: the messages, the view, and the calls that need no key."""

    def __init__(self, settings: WorkerSettings, session: SchedulerSession) -> None:
        super().__init__(settings, session)
        self._ready_servers: set[int] = set()  # incarnations that know us
        self._generations: dict[str, int] = {}  # of barriers
        self._start_of: dict[type[Any], Callable[[Call, Any], None]] = {
            requests.JoinCluster: self._join,
            requests.TakeBack: self._take_back,
            requests.Flush: self._flush,
            requests.Barrier: self._barrier,
            requests.LeaveRounds: self._leave,
            requests.Rewind: self._rewind,
            requests.Control: self._control,
            requests.SchedulerStatus: self._scheduler_status,
            requests.InitKeys: self._init_keys,
            requests.DescribeKey: self._on_keys,
            requests.Transfer: self._on_keys,
            requests.ClockOf: self._on_keys,
            requests.SliceControl: self._on_keys,
        }

    def _begin(self, call: Call, request: Any) -> None:
        self._start_of[type(request)](call, request)

    def has_pushed(self, name: str) -> bool:
        """Whether this incarnation has pushed to the key since it took its clock up, or went back."""
        key = self._keys.get(name)
        return key is not None and key.clock != key.taken_up

    # ── the machine's interface ──

    @property
    def epoch(self) -> Epoch:
        return self.view.epoch

    def step(self, event: Event, now: float) -> list[Effect]:
        self._out = []
        self._now = now
        if isinstance(event, Received):
            self._receive(event)
        elif isinstance(event, LocalCall):
            self._accept(event)
        elif isinstance(event, InvalidFrame) and event.peer == SCHEDULER:
            self.session.invalid_frame(event.text)
            if self.session.failure is not None:
                self._fail_everything(self.session.failure)
        if self._deadlines and self._deadlines[0][0] <= now:
            self._expire()
        if self.session.is_due(now):
            self._out.extend(self.session.tick(now))
        self._out += self._outbox.due(now)
        self._out += self._outbox.pump(now)
        effects, self._out = self._out, []  # they refer to memory that others wait for
        return effects

    def next_deadline(self) -> float | None:
        soonest = self.session.next_deadline()
        retry = self._outbox.next_deadline()
        if retry is not None and (soonest is None or retry < soonest):
            soonest = retry
        if self._deadlines and (soonest is None or self._deadlines[0][0] < soonest):
            soonest = self._deadlines[0][0]
        return soonest

    def explain(self, now: float) -> dict[str, object]:
        return {
            "role": self.session.identity.role,
            "rank": self.session.rank,
            "view": list(self.view.epoch),
            "calls_open": len(self._calls),
            "requests_open": len(self._outbox),
            "clocks": {key.name: key.clock for key in self._keys.values() if key.state == READY},
        }

    # ── messages ──

    def _receive(self, event: Received) -> None:
        message = event.message
        if event.peer == SCHEDULER and self.session.receive(event, self._now):
            self._view_changed()
        if event.peer == SCHEDULER:
            self._out.extend(self.session.take_effects())
            if self.session.failure is not None:
                self._fail_everything(self.session.failure)
                return
        entry = self._outbox.find(getattr(message, "request", 0))
        if entry is None or entry.peer != event.peer:
            return
        if isinstance(message, Staged):
            self._outbox.staged(entry, self._now)
            self._check_staged()
        elif isinstance(message, NotYet):
            self._not_taken(entry, message)
        else:
            entry.answered(entry, event)

    def _not_taken(self, entry: Entry, not_yet: NotYet) -> None:
        """The other side is not ready for this: once more, soon. A push that never gets its turn is given up."""
        if not_yet.reason is NotYetReason.NOT_ATTACHED and not isinstance(entry.message, Attach):
            self._attach(entry.peer)
        if not_yet.reason is NotYetReason.UNKNOWN_BATCH and entry.plan is not None:
            self._declare(entry.plan, entry.priority)
        key = self._keys.get(not_yet.key)
        is_hopeless = not_yet.reason is NotYetReason.OUT_OF_TURN and key is not None and key.broken is not None
        if entry.attempts >= MAX_CLOCK_REFUSALS or is_hopeless:
            given_up = Refused(  # it may still be taken
                entry.request, ErrorCode.NOT_ALLOWED, not_yet.text, not_yet.key, Taken.PART
            )
            event = Received(entry.peer, 0, self.view.epoch, given_up)
            entry.answered(entry, event)
        else:
            self._outbox.again(entry, self._now)

    # ── the view ──

    def _view_changed(self) -> None:
        self._gone_servers = [server for server in self.view.servers() if server.state in (DEAD, LEFT)]
        if not self.session.joined:
            return
        for server in self.view.servers():
            connected = self._servers.get(server.rank)
            dropped = None if connected == server.incarnation else connected
            if dropped is not None:
                self._forget_server(server.rank, dropped)
            if server.rank not in self._servers and server.state == ACTIVE:
                self._servers[server.rank] = ServerPeer(server.incarnation)
                self._out.append(Connect(self._servers[server.rank], server.address))
                if self._observer:
                    self._ready_servers.add(server.incarnation)
                else:
                    self._attach(server.incarnation)
            if dropped is not None:
                self._fail_requests_to(dropped, server.rank)
            if server.state in (DEAD, LEFT):
                self._fail_calls_to(server.incarnation, server.rank)
        member = self.view.by_incarnation(self.incarnation)
        if member is not None and member.state in (DONE, LEFT):
            self._left_rounds = True  # the answer to our Leave may be lost
        elif self._left_rounds and member is not None and member.state == ACTIVE:
            self._leave_again()
        self._check_joined()

    def _leave_again(self) -> None:
        """The scheduler was started without its record, and does not know that this worker has left the rounds."""
        if not any(isinstance(entry.message, Leave) for entry in self._outbox.entries()):
            self._ask(None, SCHEDULER, Leave(0, Departure.DONE), lambda entry, event: self._settled(None, entry))

    def _attach(self, server: Any) -> None:
        if any(entry.peer == server and isinstance(entry.message, Attach) for entry in self._outbox.entries()):
            return

        def answered(entry: Entry, event: Received) -> None:
            self._settled(None, entry)
            if isinstance(event.message, Clocks):
                self.session.succeeded_the_dead()
            if isinstance(event.message, Refused) and event.message.error is ErrorCode.REPLACED:
                self.session.replaced(event.message.text)
                self._out.extend(self.session.take_effects())
                if self.session.failure is not None:
                    self._fail_everything(self.session.failure)
            if isinstance(event.message, Done | Clocks):
                self._ready_servers.add(server)
                self._check_joined()

        self._ask(None, server, Attach(0, max(self.session.rank, 0)), answered)

    def _check_joined(self) -> None:
        if not self.session.joined or self.view.epoch == (0, 0):
            return
        if not self._observer and not self.view.all_servers_active():
            return
        if self._observer or all(
            self._servers.get(server.rank) in self._ready_servers for server in self.view.servers()
        ):
            for call in self._joining:
                self._complete(call, self.session.rank)
            self._joining = []

    def _forget_server(self, rank: int, incarnation: ServerPeer) -> None:
        """The server was started anew: what it had is gone."""
        for key in self._keys.values():
            if key.state == READY and rank in key.incarnations:
                key.state = LOST
        self._ready_servers.discard(incarnation)
        del self._servers[rank]
        self._out.append(Disconnect(incarnation))

    def _fail_requests_to(self, incarnation: ServerPeer, rank: int) -> None:
        """Nobody will answer them, pushes included. What they held up goes to the server's successor."""
        self._fail_calls_to(incarnation, rank)
        for entry in self._outbox.entries():
            if entry.peer == incarnation:
                refusal = Refused(
                    entry.request, ErrorCode.NODE_LOST, self._lost_text(rank), nodes=(NodeName("server", rank),)
                )
                entry.answered(entry, Received(incarnation, incarnation, self.view.epoch, refusal))
                self._outbox.settled(entry)

    def _fail_calls_to(self, incarnation: int, rank: int) -> None:
        """Completes the calls that wait for a dead server. Its pushes stay in the outbox, should it come back."""
        member = self.view.members.get(("server", rank))
        last_seen_s = 0.0 if member is None else member.last_seen_s
        reason = "" if member is None else member.reason
        for call in list(self._calls.values()):
            if any(entry.peer == incarnation for entry in call.entries):
                error = NodeLost(
                    self._lost_text(rank), node=name_of("server", rank), last_seen_s=last_seen_s, reason=reason
                )
                self._abandon(call, error)

    # ── calls that need no key ──

    def _join(self, call: Call, request: requests.JoinCluster) -> None:
        self._joining.append(call)
        self._check_joined()

    def _flush(self, call: Call, request: requests.Flush) -> None:
        call.remaining = len(self._unsettled)
        for push in self._unsettled:
            push.flushers.append(call)
        if not call.remaining:
            self._complete(call)

    def _barrier(self, call: Call, request: requests.Barrier) -> None:
        generation = self._generations.get(request.name, 0)
        if request.passed:
            self._generations[request.name] = generation + 1
            self._complete(call)
            return

        def answered(entry: Entry, event: Received) -> None:
            self._settled(call, entry)
            error = self._error_of(event)
            if error is None or isinstance(error, errors.BarrierBroken):  # else this generation is still open
                self._generations[request.name] = generation + 1
            self._complete(call, error=error)

        self._ask(call, SCHEDULER, Enter(0, request.name, generation), answered)

    def _leave(self, call: Call, request: requests.LeaveRounds) -> None:
        def answered(entry: Entry, event: Received) -> None:
            self._settled(call, entry)
            error = self._error_of(event)
            if error is None:
                self._left_rounds = True
                if request.departure is not Departure.DONE:
                    self.session.close()
            self._complete(call, error=error)

        if self._observer:
            self.session.close()
            self._complete(call)
        else:
            self._ask(call, SCHEDULER, Leave(0, request.departure), answered)

    def _take_back(self, call: Call, request: requests.TakeBack) -> None:
        copies = {id(source): copy for source, copy in request.copies}
        for earlier in list(self._calls.values()):
            transfer = earlier.request
            if isinstance(transfer, requests.Transfer) and any(id(item.source) in copies for item in transfer.items):
                self._abandon(earlier, self._timeout(earlier))
        self._outbox.replace_sources(copies)
        self._complete(call)

    def _rewind(self, call: Call, request: requests.Rewind) -> None:
        if self._unsettled:
            text = "rewind while pushes are under way: call flush first"
            self._complete(call, error=NotAllowed(text))
            return
        self._rewound = request.clock
        for key in self._keys.values():
            key.clock = min(key.clock, max(request.clock, key.floor))
            key.taken_up = min(key.taken_up, key.clock)
            key.broken = None
        self._complete(call)

    def _scheduler_status(self, call: Call, request: requests.SchedulerStatus) -> None:
        def answered(entry: Entry, event: Received) -> None:
            self._settled(call, entry)
            self._complete(call, (event.payload, event.nbytes), self._error_of(event))

        self._ask(call, SCHEDULER, StatusQuery(0), answered)

    def _control(self, call: Call, request: requests.Control) -> None:
        if request.staged_first and (self._outbox.unstaged or any(not push.started for push in self._unsettled)):
            self._waiting_staged.append(call)
            self._out += self._outbox.ask_staged()
            return
        ranks = request.servers
        if ranks is None:
            there = (server.rank for server in self.view.servers())
            ranks = tuple(there) if self._observer else tuple(range(self.view.settings.num_servers))
        messages = request.messages * len(ranks) if len(request.messages) == 1 else request.messages
        payload = () if request.payload is None else (Span(request.payload, 0, request.nbytes),)
        peers = [self._servers.get(rank) for rank in ranks]
        self._gather(call, list(zip(peers, messages, [payload] * len(peers), strict=True)))

    def validate(self) -> None:
        """Each push that was settled had been opened."""
        assert all(key.open_pushes >= 0 for key in self._keys.values()), "a key has fewer than no open pushes"
