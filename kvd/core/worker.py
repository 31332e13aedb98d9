"""The worker: it turns the calls of a program into requests, and their answers into completions.

The way of a call: `_accept` queues it behind earlier calls on its keys, `_start` cuts it into messages when all its
keys are ready and the window of their rounds is open, the outbox sends them, the answers come back to `_moved`, and
when the last is in, the call is completed. An observer is a worker without a rank: it asks, and takes part in nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Any

from kvd import errors
from kvd.core import calls
from kvd.core.machine import (
    SCHEDULER,
    Complete,
    Connect,
    Copy,
    Disconnect,
    Effect,
    Event,
    Garbled,
    LocalCall,
    Received,
    Span,
)
from kvd.core.membership import ACTIVE, DEAD, DONE, FAILED, LEFT, name_of
from kvd.core.outbox import QUEUED, Entry, Outbox
from kvd.core.session import FIRST_REQUEST, SchedulerLink
from kvd.core.workerkeys import ASKING, LOST, READY, UNKNOWN, Batch, WorkerKey, batches
from kvd.errors import KvdError, NodeLost, NotAllowed, RequestTimeout
from kvd.protocol.messages import (
    ABSENT,
    ANY_CLOCK,
    Activate,
    Attach,
    ClockQuery,
    Clocks,
    Done,
    Enter,
    Init,
    KeyInfo,
    Leave,
    Lookup,
    Publish,
    Pull,
    Push,
    Refused,
    Staged,
    StatusQuery,
    Values,
    ViewNumber,
)
from kvd.protocol.specs import KeySpec, padded

MAX_CLOCK_REFUSALS = 400


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a worker is told besides what the view says."""

    credit_bytes: int


@dataclass(slots=True, eq=False)
class _Call:
    """A local call under way."""

    number: int
    request: calls.Request
    deadline: float
    keys: list[WorkerKey] = field(default_factory=list)
    started: bool = False
    completed: bool = False
    remaining: int = 0  # answers that are still to come
    result: Any = None
    error: KvdError | None = None
    entries: set[Entry] = field(default_factory=set)
    unsettled: int = 0  # push messages without a final answer; outlives the call's deadline
    messages: int = 0  # that a move was cut into
    refused: int = 0  # of those
    pulls: list[tuple[WorkerKey, int]] = field(default_factory=list)  # versions that it holds the rounds back for
    flushers: list[_Call] = field(default_factory=list)

    @property
    def pushes(self) -> bool:
        return isinstance(self.request, calls.Move) and self.request.push


class WorkerMachine:
    """The state machine of a worker or an observer."""

    def __init__(self, settings: WorkerSettings, link: SchedulerLink) -> None:
        self.incarnation = link.incarnation
        self.link = link
        self.view = link.view
        self._observer = link.identity.role == "observer"
        self._outbox = Outbox(settings.credit_bytes)
        self._keys: dict[str, WorkerKey] = {}
        self._calls: dict[int, _Call] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._unsettled: set[_Call] = set()  # pushes accepted and not settled
        self._waiting_staged: list[_Call] = []
        self._joining: list[_Call] = []
        self._servers: dict[int, int] = {}  # rank → incarnation that we are connected to
        self._ready_servers: set[int] = set()  # incarnations that know us
        self._generations: dict[str, int] = {}  # of barriers
        self._rewound: int | None = None
        self._left_rounds = False
        self._next_request = FIRST_REQUEST
        self._now = 0.0
        self._out: list[Effect] = []
        self._start_of: dict[type[Any], Callable[[_Call, Any], None]] = {
            calls.JoinCluster: self._join,
            calls.Flush: self._flush,
            calls.Barrier: self._barrier,
            calls.LeaveRounds: self._leave,
            calls.Rewind: self._rewind,
            calls.Control: self._control,
            calls.SchedulerStatus: self._scheduler_status,
            calls.InitKeys: self._init_keys,
            calls.DescribeKey: self._on_keys,
            calls.Move: self._on_keys,
            calls.ClockOf: self._on_keys,
            calls.SliceControl: self._on_keys,
        }

    # ── the machine's interface ──

    @property
    def view_number(self) -> ViewNumber:
        return self.view.number

    def step(self, event: Event, now: float) -> list[Effect]:
        self._out = []
        self._now = now
        if isinstance(event, Received):
            self._receive(event)
        elif isinstance(event, LocalCall):
            self._accept(event)
        elif isinstance(event, Garbled) and event.peer == SCHEDULER:
            self.link.garbled(event.text)
            if self.link.failure is not None:
                self._fail_everything(self.link.failure)
        self._expire()
        self._out.extend(self.link.tick(now))
        self._out.extend(self._outbox.due(now))
        self._out.extend(self._outbox.pump(now))
        return self._out

    def next_deadline(self) -> float | None:
        times = [self.link.next_deadline(), self._outbox.next_deadline()]
        if self._deadlines:
            times.append(self._deadlines[0][0])
        return min((time for time in times if time is not None), default=None)

    def explain(self, now: float) -> dict[str, object]:
        return {
            "role": self.link.identity.role,
            "rank": self.link.rank,
            "view": list(self.view.number),
            "calls_open": len(self._calls),
            "requests_open": len(self._outbox),
            "clocks": {key.name: key.clock for key in self._keys.values() if key.state == READY},
        }

    # ── messages ──

    def _receive(self, event: Received) -> None:
        message = event.message
        if event.peer == SCHEDULER and self.link.receive(event, self._now):
            self._view_changed()
        self._out.extend(self.link.take_effects())
        if self.link.failure is not None:
            self._fail_everything(self.link.failure)
            return
        entry = self._outbox.find(getattr(message, "request", 0))
        if entry is None or entry.peer != event.peer:
            return
        if isinstance(message, Staged):
            self._outbox.staged(entry, self._now)
            self._check_staged()
        elif isinstance(message, Refused) and message.error in ("clock", "attach", "join"):
            self._not_taken(entry, message)
        else:
            entry.answered(entry, event)

    def _not_taken(self, entry: Entry, refused: Refused) -> None:
        """The other side is not ready for this: once more, soon. A push that never gets its turn is given up."""
        if refused.error == "attach" and not isinstance(entry.message, Attach):
            self._attach(entry.peer)
        if entry.attempts >= MAX_CLOCK_REFUSALS:
            event = Received(entry.peer, 0, self.view.number, replace(refused, error="NotAllowed"))
            entry.answered(entry, event)
        else:
            self._outbox.again(entry, self._now)

    def _ask(
        self,
        call: _Call | None,
        peer: Any,
        message: Any,
        answered: Callable[[Entry, Received], None],
        payload: tuple[Span, ...] = (),
        priority: int = 0,
    ) -> Entry:
        """Puts a request, whose number is filled in here, into the outbox."""
        numbered = replace(message, request=self._next_request)
        self._next_request += 1
        nbytes = sum(span.nbytes for span in payload)
        entry = Entry(peer, numbered, answered, payload, nbytes, priority)
        if call is not None:
            call.entries.add(entry)
        self._outbox.add(entry)
        return entry

    def _settled(self, call: _Call | None, entry: Entry) -> None:
        self._outbox.settled(entry)
        if call is not None:
            call.entries.discard(entry)

    # ── the view ──

    def _view_changed(self) -> None:
        if not self.link.joined:
            return
        for server in self.view.servers():
            connected = self._servers.get(server.rank)
            dropped = None if connected == server.incarnation else connected
            if dropped is not None:
                self._forget_server(server.rank, dropped)
            if server.rank not in self._servers and server.state == ACTIVE:
                self._servers[server.rank] = server.incarnation
                self._out.append(Connect(server.incarnation, server.address))
                if self._observer:
                    self._ready_servers.add(server.incarnation)
                else:
                    self._attach(server.incarnation)
            if dropped is not None:
                self._fail_requests_to(dropped, server.rank)
            if server.state in (DEAD, LEFT):
                self._fail_calls_to(server.incarnation, server.rank)
        member = self.view.by_incarnation(self.incarnation)
        if self._left_rounds and member is not None and member.state == ACTIVE:
            self._leave_again()
        self._check_joined()

    def _leave_again(self) -> None:
        """The scheduler was started without its record, and does not know that this worker has left the rounds."""
        if not any(isinstance(entry.message, Leave) for entry in self._outbox.entries()):
            self._ask(None, SCHEDULER, Leave(0, DONE), lambda entry, event: self._settled(None, entry))

    def _attach(self, server: Any) -> None:
        if any(entry.peer == server and isinstance(entry.message, Attach) for entry in self._outbox.entries()):
            return

        def answered(entry: Entry, event: Received) -> None:
            self._settled(None, entry)
            if isinstance(event.message, Done):
                self._ready_servers.add(server)
                self._check_joined()

        self._ask(None, server, Attach(0, max(self.link.rank, 0)), answered)

    def _check_joined(self) -> None:
        if not self.link.joined or self.view.number == (0, 0):
            return
        if not self._observer and not self.view.all_servers_active():
            return
        if self._observer or all(
            self._servers.get(server.rank) in self._ready_servers for server in self.view.servers()
        ):
            for call in self._joining:
                self._complete(call, self.link.rank)
            self._joining = []

    def _forget_server(self, rank: int, incarnation: int) -> None:
        """The server was started anew: what it had is gone."""
        for key in self._keys.values():
            if key.state == READY and rank in key.incarnations:
                key.state = LOST
        self._ready_servers.discard(incarnation)
        del self._servers[rank]
        self._out.append(Disconnect(incarnation))

    def _fail_requests_to(self, incarnation: int, rank: int) -> None:
        """Nobody will answer them, pushes included. What they held up goes to the server's successor."""
        self._fail_calls_to(incarnation, rank)
        for entry in self._outbox.entries():
            if entry.peer == incarnation:
                refusal = Refused(entry.request, "NodeLost", self._lost_text(rank), (name_of("server", rank),))
                entry.answered(entry, Received(incarnation, incarnation, self.view.number, refusal))
                self._outbox.settled(entry)

    def _lost_text(self, rank: int) -> str:
        return (
            f"{name_of('server', rank)} died, and with replicas=1 its part of the keys is gone: "
            f"restart the job, or restore a snapshot"
        )

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

    # ── calls ──

    def _accept(self, event: LocalCall) -> None:
        call = _Call(event.call, event.request, event.deadline)
        self._calls[call.number] = call
        heappush(self._deadlines, (call.deadline, call.number))
        if self.link.failure is not None:
            self._complete(call, error=self.link.failure)
            return
        self._start_of[type(event.request)](call, event.request)

    def _complete(self, call: _Call, result: Any = None, error: KvdError | None = None) -> None:
        if call.completed:
            return
        call.completed = True
        self._calls.pop(call.number, None)
        if len(self._deadlines) > 2 * len(self._calls) + 100:
            self._deadlines = [(open_.deadline, open_.number) for open_ in self._calls.values()]
            heapify(self._deadlines)
        self._out.append(Complete(call.number, result, error))

    def _abandon(self, call: _Call, error: KvdError) -> None:
        """Ends the waiting. Pushes that were started go on; anything else of the call is forgotten."""
        for entry in list(call.entries):
            if not entry.is_push:
                self._settled(call, entry)
        if not call.started:
            for key in call.keys:
                if call in key.queue:
                    key.queue.remove(call)
                    self._out_of_queue(key)
            self._check_unsettled(call)
        elif not call.pushes:
            self._release_pulls(call)
        if call in self._joining:
            self._joining.remove(call)
        if call in self._waiting_staged:
            self._waiting_staged.remove(call)
        self._complete(call, error=error)

    def _expire(self) -> None:
        while self._deadlines and self._deadlines[0][0] <= self._now:
            call = self._calls.get(heappop(self._deadlines)[1])
            if call is not None:
                self._abandon(call, self._timeout(call))

    def _timeout(self, call: _Call) -> RequestTimeout:
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

    def _waited_for(self, call: _Call) -> tuple[str, ...]:
        """Who may be behind it: workers that never came or are quiet, then the nodes that were asked."""
        if not self.link.joined:
            return ("scheduler",)
        ranks: dict[Any, int] = {server.incarnation: server.rank for server in self.view.servers()}
        names = [name_of("server", rank) for rank in self.view.missing_servers()]
        names += [name_of("worker", rank) for rank in self.view.required_ranks() if self.view.worker(rank) is None]
        names += [name_of("worker", rank) for rank in self.view.dead_workers()]
        names += [name_of(quiet.role, quiet.rank) for quiet in self.link.quiet]
        for entry in sorted(call.entries, key=lambda entry: entry.order):
            names.append("scheduler" if entry.peer == SCHEDULER else name_of("server", ranks.get(entry.peer, 0)))
        return tuple(dict.fromkeys(names))

    def _fail_everything(self, error: KvdError) -> None:
        for call in list(self._calls.values()):
            self._abandon(call, error)
        self._fall_silent()

    def _fall_silent(self) -> None:
        """This node is out: whatever it had still to say, another says in its place."""
        for entry in self._outbox.entries():
            self._outbox.settled(entry)

    # ── calls that need no key ──

    def _join(self, call: _Call, request: calls.JoinCluster) -> None:
        self._joining.append(call)
        self._check_joined()

    def _flush(self, call: _Call, request: calls.Flush) -> None:
        call.remaining = len(self._unsettled)
        for push in self._unsettled:
            push.flushers.append(call)
        if not call.remaining:
            self._complete(call)

    def _barrier(self, call: _Call, request: calls.Barrier) -> None:
        generation = self._generations.get(request.name, 0)

        def answered(entry: Entry, event: Received) -> None:
            self._settled(call, entry)
            error = self._error_of(event)
            if error is None or isinstance(error, errors.BarrierBroken):  # else this generation is still open
                self._generations[request.name] = generation + 1
            self._complete(call, error=error)

        self._ask(call, SCHEDULER, Enter(0, request.name, generation), answered)

    def _leave(self, call: _Call, request: calls.LeaveRounds) -> None:
        def answered(entry: Entry, event: Received) -> None:
            self._settled(call, entry)
            error = self._error_of(event)
            if error is None:
                self._left_rounds = True
                if request.state in (LEFT, FAILED):
                    self.link.close()
            self._complete(call, error=error)

        if self._observer:
            self.link.close()
            self._complete(call)
        else:
            self._ask(call, SCHEDULER, Leave(0, request.state), answered)

    def _rewind(self, call: _Call, request: calls.Rewind) -> None:
        if self._unsettled:
            text = "rewind while pushes are under way: call flush first"
            self._complete(call, error=NotAllowed(text))
            return
        self._rewound = request.clock
        for key in self._keys.values():
            key.clock = min(key.clock, request.clock)
            key.broken = None
        self._complete(call)

    def _scheduler_status(self, call: _Call, request: calls.SchedulerStatus) -> None:
        def answered(entry: Entry, event: Received) -> None:
            self._settled(call, entry)
            self._complete(call, (event.payload, event.nbytes), self._error_of(event))

        self._ask(call, SCHEDULER, StatusQuery(0), answered)

    def _control(self, call: _Call, request: calls.Control) -> None:
        if request.staged_first and (self._outbox.unstaged or any(not push.started for push in self._unsettled)):
            self._waiting_staged.append(call)
            return
        ranks = request.servers
        if ranks is None:
            there = (server.rank for server in self.view.servers())
            ranks = tuple(there) if self._observer else tuple(range(self.view.settings.num_servers))
        messages = request.messages * len(ranks) if len(request.messages) == 1 else request.messages
        payload = () if request.payload is None else (Span(request.payload, 0, request.nbytes),)
        peers = [self._servers.get(rank) for rank in ranks]
        self._gather(call, list(zip(peers, messages, [payload] * len(peers), strict=True)))

    def _check_staged(self) -> None:
        if self._waiting_staged and not self._outbox.unstaged:
            waiting, self._waiting_staged = self._waiting_staged, []
            for call in waiting:
                assert isinstance(call.request, calls.Control)
                self._control(call, call.request)

    def _gather(self, call: _Call, requests: list[tuple[Any, Any, tuple[Span, ...]]]) -> None:
        """Asks them all; the call is answered with the answers in order, or with the first error."""
        call.started = True
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

    # ── calls on keys: their turn ──

    def _key(self, name: str) -> WorkerKey:
        key = self._keys.get(name)
        if key is None:
            key = self._keys[name] = WorkerKey(name)
        return key

    def _on_keys(self, call: _Call, request: Any) -> None:
        """Queues the call behind the earlier ones on its keys; starts it if there are none."""
        if isinstance(request, calls.Move):
            call.keys = [self._key(item.key) for item in request.items]
            if request.push:
                self._unsettled.add(call)
        else:
            call.keys = [self._key(request.key)]
        wait = isinstance(request, calls.DescribeKey) and request.wait
        for key in call.keys:
            key.queue.append(call)
        for key in call.keys:
            if key.state == UNKNOWN and not call.completed:
                self._look_up(key, wait)
        self._try_start(call)

    def _try_start(self, call: _Call) -> bool:
        """Starts the call if it is the first in the queues of all its keys, and they let it."""
        if call.started or call.completed:
            return False
        pushes = call.pushes
        window = self.view.settings.rounds_ahead
        for key in call.keys:
            if key.state in (UNKNOWN, ASKING) or key.queue[0] is not call:
                return False
            if pushes and key.holds_back(window) and key.state == READY and key.broken is None:
                return False
        error = self._start_error(call)
        for key in call.keys:
            key.queue.popleft()
        if error is not None:
            self._unsettled.discard(call)
            self._complete(call, error=error)
        else:
            call.started = True
            self._start(call)
        for key in call.keys:
            self._out_of_queue(key)
        self._check_unsettled(call)
        return True

    def _out_of_queue(self, key: WorkerKey) -> None:
        while key.queue and self._try_start(key.queue[0]):
            pass

    def _start_error(self, call: _Call) -> KvdError | None:
        for key in call.keys:
            if key.state == LOST:
                rank = (key.lost_servers(self.view) or [0])[0]
                return NodeLost(self._lost_text(rank), node=name_of("server", rank))
            for rank in key.incarnations:
                server = self.view.members.get(("server", rank))
                if server is not None and server.state in (DEAD, LEFT):
                    node = name_of("server", rank)
                    return NodeLost(
                        self._lost_text(rank), node=node, last_seen_s=server.last_seen_s, reason=server.reason
                    )
            if call.pushes and key.broken is not None:
                text = f"an earlier push of {key.name!r} was taken in part only ({key.broken}): call rewind to go on"
                return NotAllowed(text, key=key.name)
        if isinstance(call.request, calls.Move):
            return self._move_error(call, call.request)
        return None

    def _move_error(self, call: _Call, move: calls.Move) -> KvdError | None:
        if move.push and self._observer:
            return NotAllowed("an observer does not push: join as a worker")
        if move.push and self._left_rounds:
            return NotAllowed("this worker has left the rounds (join or close): it pushes no more")
        if move.push and len(set(call.keys)) < len(call.keys):
            names = [key.name for key in call.keys]
            twice = next(name for name in names if names.count(name) > 1)
            return NotAllowed(f"key {twice!r} is pushed twice in one call: add the values first", key=twice)
        for key, item in zip(call.keys, move.items, strict=True):
            if item.spec is None:
                continue
            assert key.spec is not None
            try:
                key.spec.check_same(item.spec, key.name)
            except (errors.ShapeMismatch, errors.DtypeMismatch) as error:
                return error
        return None

    def _start(self, call: _Call) -> None:
        request = call.request
        key = call.keys[0] if call.keys else None
        if isinstance(request, calls.Move):
            self._move(call, request)
        elif isinstance(request, calls.DescribeKey):
            assert key is not None
            self._complete(call, key.spec)
        elif isinstance(request, calls.ClockOf):
            assert key is not None
            self._complete(call, key.clock)
        elif isinstance(request, calls.SliceControl):
            assert key is not None
            requests: list[tuple[Any, Any, tuple[Span, ...]]] = []
            for index, message in enumerate(request.messages):
                peer = self._servers.get(key.servers[index])
                payload = (Span(request.payloads[index], 0, request.nbytes[index]),) if request.payloads else ()
                requests.append((peer, message, payload))
            self._gather(call, requests)

    # ── pushes and pulls ──

    def _move(self, call: _Call, move: calls.Move) -> None:
        """Cuts the items into slices, packs these into messages, and puts them into the outbox."""
        call.result = [None] * len(move.items)
        newest = self._observer or self._left_rounds or move.any_version
        plan = []
        for position, key in enumerate(call.keys):
            if move.push:
                key.clock += 1
                key.open_pushes += 1
            clock = key.clock if move.push or not newest else ANY_CLOCK
            if move.pull and clock != ANY_CLOCK and self.view.settings.mode != "async":
                key.pulling.append(clock)
                call.pulls.append((key, clock))
            plan.append((key, clock, position))
        packed = batches(plan, self.view.settings.slice_bytes)
        call.remaining = call.messages = len(packed)
        call.unsettled = len(packed) if move.push else 0
        for batch in packed:
            self._send_batch(call, move, batch)
        if not packed:
            self._complete(call, call.result)

    def _send_batch(self, call: _Call, move: calls.Move, batch: Batch) -> None:
        parts = tuple(batch.parts)
        payload: tuple[Span, ...] = ()
        if not move.push:
            message: Any = Pull(0, parts)
        else:
            message = Push(0, parts, move.how, move.samples, move.pull)
            if move.how != ABSENT:
                payload = tuple(
                    [Span(move.items[item].source, *span) for item, span in zip(batch.items, batch.ranges, strict=True)]
                )
        peer = self._servers.get(batch.server)
        self._ask(call, peer, message, partial(self._moved, call, move, batch), payload, move.priority)

    def _moved(self, call: _Call, move: calls.Move, batch: Batch, entry: Entry, event: Received) -> None:
        """An answer to one message of a move."""
        message = event.message
        error = self._error_of(event)
        if isinstance(message, Values) and batch.fits(len(message.versions), event.nbytes):
            self._copy_values(call, move, batch, message, event)
        elif isinstance(error, NodeLost) and move.push and message.nodes[0].startswith("worker"):  # type: ignore[union-attr]
            # The push stays staged: its worker may come back. Only the waiting ends.
            self._outbox.staged(entry, self._now)
            self._complete(call, error=error)
            self._check_staged()
            return
        elif error is None and not (isinstance(message, Done) and not move.pull):
            error = errors.ProtocolError(f"the server answered with a {type(message).__name__} that does not fit")
        self._settled(call, entry)
        call.error = call.error or error
        call.remaining -= 1
        if move.push:
            call.unsettled -= 1
            call.refused += error is not None
            self._check_staged()
        if call.remaining == 0:
            self._release_pulls(call)
            if move.push:
                self._push_settled(call)
            self._complete(call, call.result, call.error)
        elif error is not None:
            self._complete(call, error=error)
        self._check_unsettled(call)

    def _copy_values(self, call: _Call, move: calls.Move, batch: Batch, values: Values, event: Received) -> None:
        """Copies what was pulled to where the call wants it. After the deadline the memory is the program's again."""
        offset = 0
        for item, (start, nbytes), version in zip(batch.items, batch.ranges, values.versions, strict=True):
            target = move.items[item].target
            seen = call.result[item] or (version, version)
            call.result[item] = calls.Versions(min(seen[0], version), max(seen[1], version))
            if target is not None and not call.completed:
                self._out.append(Copy(target, start, Span(event.payload, offset, nbytes)))
            offset += padded(nbytes)

    def _release_pulls(self, call: _Call) -> None:
        """What the call pulled is here, or not wanted any more: the rounds may go on."""
        released, call.pulls = call.pulls, []
        for key, clock in released:
            key.pulling.remove(clock)
        if not call.pushes:
            for key, _ in released:
                self._out_of_queue(key)

    def _push_settled(self, call: _Call) -> None:
        """All messages of a push are answered: the window moves on. A push that nobody took gives its clock back."""
        assert isinstance(call.request, calls.Move)
        nobody_took_it = call.refused == call.messages
        for key in call.keys:
            key.open_pushes -= 1
            if call.refused:
                if nobody_took_it and key.open_pushes == 0:
                    key.clock -= 1
                else:
                    key.broken = call.error
        for key in call.keys:
            self._out_of_queue(key)

    def _check_unsettled(self, call: _Call) -> None:
        """Tells those who flush when a push is settled, or was never begun."""
        if not call.pushes or call.unsettled or (call not in self._unsettled and not call.flushers):
            return
        self._unsettled.discard(call)
        flushers, call.flushers = call.flushers, []
        for flusher in flushers:
            flusher.remaining -= 1
            if flusher.remaining == 0:
                self._complete(flusher)
        self._check_staged()

    # ── making and finding keys ──

    def _init_keys(self, call: _Call, request: calls.InitKeys) -> None:
        if not self.view.shards:
            self._complete(call, error=NotAllowed("this node has not joined a cluster yet"))
            return
        call.started = True
        call.remaining = len(request.items)
        call.keys = [self._key(item.key) for item in request.items]
        if not request.items:
            self._complete(call)
        for key, item in zip(call.keys, request.items, strict=True):
            assert item.spec is not None
            if self._observer or self._left_rounds:
                self._initialised(call, key, NotAllowed("only a worker that takes part in the rounds makes keys"))
            elif key.mine:
                text = f"key {key.name!r} is live already: init makes a key once; push changes its value"
                self._initialised(call, key, errors.KeyExists(text, key=key.name))
            elif self.link.rank == 0 and not self.link.predecessor:
                self._make(call, key, item)
            else:
                self._find_or_make(call, key, item)

    def _find_or_make(self, call: _Call, key: WorkerKey, item: calls.Item) -> None:
        """Rank 0 after a restart looks whether its predecessor made the key; the others wait until it is live."""
        spec = item.spec
        assert spec is not None

        def answered(entry: Entry, event: Received) -> None:
            self._settled(call, entry)
            message = event.message
            if isinstance(message, KeyInfo):
                try:
                    message.spec.check_same(spec, key.name)
                    if self.link.rank == 0 and self.link.predecessor == LEFT:
                        text = f"key {key.name!r} is live already: pull it, or take another name"
                        raise errors.KeyExists(text, key=key.name)
                except errors.RemoteError as error:
                    self._initialised(call, key, error)
                    return
                self._found(key, message.spec, lambda error: self._initialised(call, key, error))
            elif self.link.rank == 0 and isinstance(message, Refused) and message.error == "KeyNotFound":
                self._make(call, key, item)
            else:
                self._initialised(call, key, self._error_of(event))

        home = self._servers.get(self.view.server_of(key.name, 0))
        self._ask(call, home, Lookup(0, key.name, self.link.rank != 0), answered)

    def _make(self, call: _Call, key: WorkerKey, item: calls.Item) -> None:
        """Rank 0: every slice to its server, then publish."""
        spec = item.spec
        assert spec is not None
        spec = KeySpec(spec.dtype, spec.shape, self.view.settings.slice_bytes)
        key.place(spec, self.view, self._servers)
        left = spec.num_slices
        error: KvdError | None = None

        def stored(entry: Entry, event: Received) -> None:
            nonlocal left, error
            self._settled(call, entry)
            error = error or self._error_of(event)
            left -= 1
            if left == 0:
                if error is not None:
                    self._initialised(call, key, error)
                else:
                    home = self._servers.get(key.servers[0])
                    self._ask(call, home, Publish(0, key.name, spec), published)

        def published(entry: Entry, event: Received) -> None:
            self._settled(call, entry)
            failed = self._error_of(event)
            if failed is None:
                key.state = READY
            self._initialised(call, key, failed)

        for index, rank in enumerate(key.servers):
            span = Span(item.source, *spec.span(index))
            message = Init(0, key.name, spec, index)
            self._ask(call, self._servers.get(rank), message, stored, (span,))

    def _initialised(self, call: _Call, key: WorkerKey, error: KvdError | None) -> None:
        if error is None:
            key.mine = True
            self._out_of_queue(key)
        call.error = call.error or error
        call.remaining -= 1
        if call.remaining == 0:
            self._complete(call, error=call.error)

    def _look_up(self, key: WorkerKey, wait: bool = False) -> None:
        """Asks the server of slice 0 what the key is, for the calls that queue for it."""
        key.state = ASKING

        def answered(entry: Entry, event: Received) -> None:
            self._settled(None, entry)
            if isinstance(event.message, KeyInfo):
                self._found(key, event.message.spec, lambda error: self._known(key, error))
            else:
                self._known(key, self._error_of(event))

        if not self.view.shards:
            self._known(key, NotAllowed("this node has not joined a cluster yet"))
            return
        home = self._servers.get(self.view.server_of(key.name, 0))
        self._ask(None, home, Lookup(0, key.name, wait), answered)

    def _found(self, key: WorkerKey, spec: KeySpec, then: Callable[[KvdError | None], None]) -> None:
        """The key is live. A worker whose rank had an earlier holder asks where that one stood."""
        if key.state == READY:
            then(None)
            return
        key.place(spec, self.view, self._servers)
        if self._observer or not self.link.predecessor:
            key.state = READY
            then(None)
            return
        ranks = sorted(key.incarnations)
        left = len(ranks)
        clocks: list[Clocks] = []
        error: KvdError | None = None

        def answered(entry: Entry, event: Received) -> None:
            nonlocal left, error
            self._settled(None, entry)
            error = error or self._error_of(event)
            if isinstance(event.message, Clocks):
                clocks.append(event.message)
            left -= 1
            if left == 0:
                if error is not None:
                    then(error)
                else:
                    self._take_up(key, clocks, then)

        for rank in ranks:
            self._ask(None, self._servers.get(rank), ClockQuery(0, key.name), answered)

    def _take_up(self, key: WorkerKey, clocks: list[Clocks], then: Callable[[KvdError | None], None]) -> None:
        """After a death: the clock that all slices have counted, the step is redone from there. After a good-bye: the
        newest clock of all, and the servers are told that this rank counts again from there on."""
        if key.state == READY:  # it was asked twice at once, and has its clock
            then(None)
            return
        if self.link.predecessor not in (LEFT, DONE):
            key.clock = min(entry.lowest for entry in clocks)
            if self._rewound is not None:
                key.clock = min(key.clock, self._rewound)
            key.state = READY
            then(None)
            return
        key.clock = max(entry.highest for entry in clocks)
        left = len(key.incarnations)
        error: KvdError | None = None

        def answered(entry: Entry, event: Received) -> None:
            nonlocal left, error
            self._settled(None, entry)
            error = error or self._error_of(event)
            left -= 1
            if left == 0:
                if error is None:
                    key.state = READY
                then(error)

        for rank in sorted(key.incarnations):
            self._ask(None, self._servers.get(rank), Activate(0, key.name, key.clock), answered)

    def _known(self, key: WorkerKey, error: KvdError | None) -> None:
        """The calls that queue for the key go on, or fail."""
        if error is None or key.state in (READY, LOST):  # found in another way in the meantime
            self._out_of_queue(key)
            return
        key.state = UNKNOWN
        waiting = []
        for call in list(key.queue):
            if isinstance(error, errors.KeyNotFound) and getattr(call.request, "wait", False):
                waiting.append(call)
            else:
                self._abandon(call, error)
        if waiting:
            self._look_up(key, wait=True)

    # ── errors of the other side ──

    def _error_of(self, event: Received) -> KvdError | None:
        message = event.message
        if not isinstance(message, Refused):
            return None
        if message.error == "NodeLost":
            node = message.nodes[0] if message.nodes else "a node"
            return NodeLost(message.text, node=node, last_seen_s=message.last_seen_s)
        if message.error == "BarrierBroken":
            return errors.BarrierBroken(message.text, missing=message.nodes)
        if message.error == "ConfigError":
            return errors.ConfigError(message.text, setting=message.key)
        if message.error == "ProtocolError":
            return errors.ProtocolError(message.text)
        kind = _REMOTE.get(message.error, errors.RemoteError)
        ranks = {server.incarnation: server.rank for server in self.view.servers()}
        node = "scheduler" if event.peer == SCHEDULER else name_of("server", ranks.get(event.sender, 0))
        return kind(message.text, node=node, key=message.key)


_REMOTE: dict[str, type[errors.RemoteError]] = {
    kind.__name__: kind
    for kind in (
        errors.KeyNotFound,
        errors.KeyExists,
        errors.ShapeMismatch,
        errors.DtypeMismatch,
        errors.NotAllowed,
    )
}
