"""The server: it leads slices, merges what the workers push, and serves what is committed.

The way of a push: `_push` checks and stages it, `_advance` closes the round when it is complete and emits Apply, the
JobDone comes back to `_applied`, which commits and answers everyone who waited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kvd.core.keytable import MAX_SLICES, KeyTable, Live, Slice, Waiting
from kvd.core.machine import (
    SCHEDULER,
    Apply,
    Complete,
    Contribution,
    Create,
    Effect,
    Event,
    Garbled,
    JobDone,
    LocalCall,
    Note,
    Peer,
    Received,
    Send,
    Span,
)
from kvd.core.membership import DEAD, GONE, LEFT, name_of
from kvd.core.requests import Pending, PendingTable
from kvd.core.servercontrol import ServerControl
from kvd.core.session import FIRST_REQUEST, SchedulerLink
from kvd.core.slicelog import SliceLog, Turn
from kvd.errors import KvdError
from kvd.protocol.messages import (
    ABSENT,
    ADD,
    ANY_CLOCK,
    Activate,
    Attach,
    ClockQuery,
    Clocks,
    Done,
    Init,
    KeyInfo,
    KeyList,
    Leave,
    ListKeys,
    Lookup,
    Message,
    Part,
    Publish,
    Pull,
    Push,
    Refused,
    Staged,
    StatusQuery,
    StatusReport,
    Values,
    View,
    ViewNumber,
)
from kvd.protocol.specs import DTYPES, padded, payload_nbytes

MAX_PENDING = 1 << 18
MAX_ATTACHING = 1024


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What a server is told besides what the view says."""

    memory_limit_bytes: int
    fail_on_worker_loss: bool


class ServerMachine:
    """The state machine of a server."""

    def __init__(self, settings: ServerSettings, link: SchedulerLink) -> None:
        self.incarnation = link.incarnation
        self._settings = settings
        self._link = link
        self._view = link.view
        self._table = KeyTable()
        self._pending = PendingTable()
        self._workers: dict[int, int] = {}  # incarnation → rank, of the attached
        self._attached: dict[int, int] = {}  # rank → incarnation
        self._attaching: dict[int, tuple[Peer, Attach]] = {}  # incarnations that no view has named yet
        self._required: list[int] = []
        self._dead: dict[int, float] = {}  # rank → last_seen_s
        self._creating: dict[tuple[str, int], int] = {}  # slices whose Create is under way, and their bytes
        self._jobs: dict[int, Callable[[JobDone], None]] = {}
        self._next_job = 1
        self._out: list[Effect] = []
        self._control = ServerControl(self._table, self._start_job, self._advance, self._emit)
        self._handlers: dict[type[Any], Callable[[Received, Any], None]] = {
            Push: self._push,
            Pull: self._pull,
            Attach: self._attach,
            Init: self._init,
            Publish: self._publish,
            Lookup: self._lookup,
            ClockQuery: self._clocks,
            Activate: self._activate,
            ListKeys: self._list_keys,
            StatusQuery: self._status,
        }

    # ── the machine's interface ──

    @property
    def view_number(self) -> ViewNumber:
        return self._view.number

    def step(self, event: Event, now: float) -> list[Effect]:
        self._out = []
        if isinstance(event, Received):
            self._receive(event, now)
        elif isinstance(event, JobDone):
            done = self._jobs.pop(event.job, None)
            if done is not None:
                done(event)
        elif isinstance(event, LocalCall):
            self._say_goodbye(event)
        elif isinstance(event, Garbled) and event.peer == SCHEDULER:
            self._link.garbled(event.text)
        self._out.extend(self._link.tick(now))
        return self._out

    def next_deadline(self) -> float | None:
        return self._link.next_deadline()

    def explain(self, now: float) -> dict[str, object]:
        slices = self._table.slices.values()
        return {
            "role": "server",
            "rank": self._link.rank,
            "incarnation": f"{self.incarnation:016x}",
            "view": list(self._view.number),
            "keys": len({slice_.key for slice_ in slices}),
            "slices": len(self._table.slices),
            "bytes_led": self._table.bytes_led,
            "bytes_staged": sum(slice_.log.staged_bytes(slice_.nbytes) for slice_ in slices),
            "requests_waiting": len(self._pending),
            "workers": sorted(self._attached),
            "waiting_for": sorted({name_of("worker", rank) for slice_ in slices for rank in self._blockers(slice_)}),
            "optimizer": self._control.describe(),
        }

    def _say_goodbye(self, event: LocalCall) -> None:
        """The only thing that its own program asks of a server: to leave in good order."""
        if self._link.joined:
            self._send(SCHEDULER, Leave(FIRST_REQUEST, LEFT))
        self._link.close()
        self._emit(Complete(event.call))

    # ── dispatch ──

    def _receive(self, event: Received, now: float) -> None:
        message = event.message
        if event.peer == SCHEDULER:
            changed = self._link.receive(event, now)
            self._out.extend(self._link.take_effects())
            if changed:
                self._view_changed()
            return
        if isinstance(message, View | Done | Refused):
            return
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(event, message)
        elif not self._control.receive(event, self._workers.get(event.sender)):
            text = f"a server takes no {type(message).__name__}"
            self._refuse(event.peer, getattr(message, "request", 0), "ProtocolError", text)

    def _send(self, peer: Peer, message: Message, payload: tuple[Span, ...] = ()) -> None:
        self._out.append(Send(peer, message, payload))

    def _emit(self, effect: Effect) -> None:
        self._out.append(effect)

    def _refuse(self, peer: Peer, request: int, error: str, text: str, key: str = "", expected: int = 0) -> None:
        self._send(peer, Refused(request, error, text, (), key, expected))

    def _start_job(self, make: Callable[[int], Any], done: Callable[[JobDone], None]) -> None:
        """Emits the job that `make` gives for a new number; `done` gets its end. ResetState is a job without an end."""
        job = self._next_job
        self._next_job += 1
        self._jobs[job] = done
        self._emit(make(job))

    # ── membership ──

    def _view_changed(self) -> None:
        for member in self._view.members.values():
            if member.role != "worker":
                continue
            holder = self._attached.get(member.rank)
            if holder is not None and holder != member.incarnation:
                self._detach(member.rank, holder)
            waiting = self._attaching.pop(member.incarnation, None)
            if waiting is not None:
                self._welcome(member.incarnation, member.rank, *waiting)
        self._required = self._view.required_ranks()
        self._dead = {}
        if self._settings.fail_on_worker_loss:
            self._dead = {rank: member.last_seen_s for rank, member in self._view.dead_workers().items()}
        self._fail_lookups_without_rank_0()
        for slice_ in self._table.slices.values():
            self._advance(slice_)
            self._fail_blocked(slice_)

    def _detach(self, rank: int, incarnation: int) -> None:
        """Another incarnation has the rank: the earlier one changes nothing any more."""
        self._workers.pop(incarnation, None)
        self._attached.pop(rank, None)
        self._pending.drop_sender(incarnation)
        self._control.drop_sender(incarnation)
        for slice_ in self._table.slices.values():
            slice_.log.drop_unclosed(rank)
            slice_.waiting = [waiting for waiting in slice_.waiting if not waiting.pending.closed]
        self._emit(Note("info", f"{name_of('worker', rank)} was replaced; its open contributions are dropped"))

    def _attach(self, event: Received, attach: Attach) -> None:
        if event.sender in self._workers:
            self._send(event.peer, Done(attach.request))
            return
        member = self._view.by_incarnation(event.sender)
        if member is not None and member.role == "worker":
            self._welcome(event.sender, member.rank, event.peer, attach)
        elif len(self._attaching) < MAX_ATTACHING:
            self._attaching[event.sender] = (event.peer, attach)  # its view is on the way to us

    def _welcome(self, incarnation: int, rank: int, peer: Peer, attach: Attach) -> None:
        self._workers[incarnation] = rank
        self._attached[rank] = incarnation
        self._send(peer, Done(attach.request))

    def _rank_of(self, event: Received, request: int) -> int | None:
        rank = self._workers.get(event.sender)
        if rank is None:
            self._refuse(event.peer, request, "attach", "this server does not know the sender as a worker")
        return rank

    # ── keys ──

    def _init(self, event: Received, init: Init) -> None:
        rank = self._rank_of(event, init.request)
        if rank is None:
            return
        place = (init.key, init.index)
        old = self._table.slices.get(place)
        if old is not None and old.creator == event.sender and old.spec == init.spec:
            self._send(event.peer, Done(init.request))
            return
        if place in self._creating:
            return  # when it is asked again, this is done
        error = self._init_error(event, init, rank)
        if error is not None:
            self._refuse(event.peer, init.request, *error, key=init.key)
            return
        self._creating[place] = event.nbytes
        source = Span(event.payload, 0, event.nbytes)
        self._start_job(
            lambda job: Create(job, init.key, init.index, init.spec.dtype, source),
            lambda done: self._created(event, init, done),
        )

    def _init_error(self, event: Received, init: Init, rank: int) -> tuple[str, str] | None:
        spec, settings = init.spec, self._view.settings
        old = self._table.slices.get((init.key, init.index))
        if rank != 0:
            return "NotAllowed", "only worker 0 makes keys; the others wait for them"
        if init.index >= spec.num_slices or event.nbytes != spec.slice_nbytes(init.index):
            return "ProtocolError", f"slice {init.index} of {spec} does not have {event.nbytes} bytes"
        if init.key in self._table.live or (old is not None and (old.log.version or old.log.closing)):
            return "KeyExists", f"key {init.key!r} is in use here already: take another name, or restart the cluster"
        staging = settings.rounds_ahead * settings.num_workers
        led = self._table.bytes_led + sum(self._creating.values()) - (0 if old is None else old.nbytes)
        demand = (led + spec.slice_nbytes(init.index)) * (3 + staging)
        if demand > self._settings.memory_limit_bytes or len(self._table.slices) >= MAX_SLICES:
            return "NotAllowed", (
                f"key {init.key!r} would take this server to {demand >> 20} MiB (3 copies, and {staging} staged), its "
                f"limit is {self._settings.memory_limit_bytes >> 20} MiB: add servers, or raise memory_limit_bytes"
            )
        return None

    def _created(self, event: Received, init: Init, done: JobDone) -> None:
        del self._creating[init.key, init.index]
        if event.sender not in self._workers:
            return  # it was replaced: its successor makes the key anew
        if done.error is not None:
            self._refuse(event.peer, init.request, type(done.error).__name__, str(done.error), init.key)
            return
        settings = self._view.settings
        log = SliceLog(settings.mode != "async", settings.rounds_ahead, settings.staleness, done.result)
        nbytes = init.spec.slice_nbytes(init.index)
        optimizer = self._control.optimizer
        self._table.add(Slice(init.key, init.index, init.spec, nbytes, log, event.sender, optimizer))
        self._send(event.peer, Done(init.request))

    def _publish(self, event: Received, publish: Publish) -> None:
        rank = self._rank_of(event, publish.request)
        if rank is None:
            return
        made = self._table.slices.get((publish.key, 0))
        if rank != 0 or made is None or made.spec != publish.spec:
            self._refuse(
                event.peer, publish.request, "NotAllowed", "only worker 0 publishes, and only what it made", publish.key
            )
            return
        if publish.key not in self._table.live:
            for peer, request in self._table.publish(publish.key, Live(publish.spec, event.sender)):
                self._send(peer, KeyInfo(request, publish.spec, event.sender))
        self._send(event.peer, Done(publish.request))

    def _lookup(self, event: Received, lookup: Lookup) -> None:
        live = self._table.live.get(lookup.key)
        if live is not None:
            self._send(event.peer, KeyInfo(lookup.request, live.spec, live.publisher))
            return
        if not lookup.wait:
            text = f"no key is called {lookup.key!r}: worker 0 must init it first (kvd keys lists those there are)"
            self._refuse(event.peer, lookup.request, "KeyNotFound", text, lookup.key)
        elif not self._table.await_live(lookup.key, event.peer, lookup.request):
            self._refuse(event.peer, lookup.request, "NotAllowed", "too many nodes wait for keys", lookup.key)
        else:
            self._fail_lookups_without_rank_0()

    def _fail_lookups_without_rank_0(self) -> None:
        member = self._view.worker(0)
        if member is None or not (member.state in (LEFT, GONE) or (member.state == DEAD and 0 in self._dead)):
            return
        for key, peer, request in self._table.give_up_lookups():
            text = f"key {key!r} was not made: worker 0, which makes the keys, is {member.state}; restart it"
            self._send(peer, Refused(request, "NodeLost", text, ("worker 0",), key, 0, member.last_seen_s))

    def _clocks(self, event: Received, query: ClockQuery) -> None:
        rank = self._rank_of(event, query.request)
        if rank is None:
            return
        logs = [slice_.log for slice_ in self._table.of_key(query.key)]
        if not logs:
            self._refuse(event.peer, query.request, "KeyNotFound", f"no slice of {query.key!r} is here", query.key)
            return
        clocks = [log.counted_clock(rank) for log in logs]
        versions = [log.version for log in logs]
        self._send(event.peer, Clocks(query.request, min(clocks), max(clocks), min(versions), max(versions)))

    def _activate(self, event: Received, activate: Activate) -> None:
        rank = self._rank_of(event, activate.request)
        if rank is None:
            return
        for slice_ in self._table.of_key(activate.key):
            slice_.log.activate(rank, activate.clock)
            self._advance(slice_)
        self._send(event.peer, Done(activate.request))

    def _list_keys(self, event: Received, query: ListKeys) -> None:
        entries, more = self._table.page(query.after)
        self._send(event.peer, KeyList(query.request, entries, more))

    def _status(self, event: Received, query: StatusQuery) -> None:
        self._send(event.peer, StatusReport(query.request))

    # ── pushes ──

    def _push(self, event: Received, push: Push) -> None:
        rank = self._rank_of(event, push.request)
        if rank is None or self._asked_again(event, push.request):
            return
        slices = self._slices_of(event, push.request, push.parts)
        if slices is None:
            return
        error = self._push_error(event, push, rank, slices)
        if error is not None:
            self._send(event.peer, error)
            return
        if not push.probe:
            self._stage(event, push, rank, slices)
        pending = Pending(event.peer, event.sender, push.request, True, push.pull, len(slices))
        self._await(pending, rank, slices, push.parts)
        for slice_ in slices:
            self._advance(slice_)
        if not pending.closed and any(
            slice_.log.counted_clock(rank) < part.clock for slice_, part in zip(slices, push.parts, strict=True)
        ):
            self._send(event.peer, Staged(push.request))

    def _asked_again(self, event: Received, request: int) -> bool:
        """A request that is open already: its answer goes to where it was asked first, and last."""
        pending = self._pending.find(event.sender, request)
        if pending is None:
            return False
        pending.asked_again(event.peer)
        if pending.push:
            self._send(event.peer, Staged(request))
        return True

    def _slices_of(self, event: Received, request: int, parts: Iterable[Part]) -> list[Slice] | None:
        slices = []
        for part in parts:
            slice_ = self._table.slices.get((part.key, part.slice_index))
            if slice_ is None:
                text = f"server {self._link.rank} has no slice {part.slice_index} of key {part.key!r}"
                self._refuse(event.peer, request, "KeyNotFound", text, part.key)
                return None
            slices.append(slice_)
        return slices

    def _push_error(self, event: Received, push: Push, rank: int, slices: list[Slice]) -> Refused | None:
        """The refusal of a push that cannot be taken as a whole; nothing of it is staged then."""
        request = push.request
        if len(self._pending) >= MAX_PENDING:
            return Refused(request, "NotAllowed", f"{MAX_PENDING} requests wait already")
        brings_bytes = push.how != ABSENT and not push.probe
        expected_nbytes = payload_nbytes([slice_.nbytes for slice_ in slices]) if brings_bytes else 0
        if event.nbytes != expected_nbytes:
            text = f"a push of these {len(slices)} slices has {expected_nbytes} bytes, this one has {event.nbytes}"
            return Refused(request, "ProtocolError", text)
        merge = self._view.settings.merge
        for slice_, part in zip(slices, push.parts, strict=True):
            turn = slice_.log.turn(rank, part.clock)
            if turn is Turn.WRONG or (push.probe and turn is Turn.NEXT):
                expected = slice_.log.staged_clock(rank) + 1
                text = f"push {part.clock} of {part.key!r} by worker {rank} is out of turn, {expected} is next"
                return Refused(request, "clock", text, (), part.key, expected)
            if turn is Turn.NEXT and slice_.log.mixes(part.clock, push.how):
                text = f"key {part.key!r} is broadcast and pushed in the same round: all workers must do the same"
                return Refused(request, "NotAllowed", text, (), part.key)
            if push.how == ADD and not DTYPES[slice_.spec.dtype].is_float:
                if slice_.optimizer is not None:
                    text = f"key {part.key!r} is {slice_.spec.dtype}: optimizers update float keys only"
                    return Refused(request, "NotAllowed", text, (), part.key)
                if merge == "weighted":
                    text = f"key {part.key!r} is {slice_.spec.dtype}: a weighted merge takes float keys only"
                    return Refused(request, "NotAllowed", text, (), part.key)
        return None

    def _stage(self, event: Received, push: Push, rank: int, slices: list[Slice]) -> None:
        offset = 0
        for slice_, part in zip(slices, push.parts, strict=True):
            if slice_.log.turn(rank, part.clock) is Turn.NEXT:
                span = None if push.how == ABSENT else Span(event.payload, offset, slice_.nbytes)
                slice_.log.stage(Contribution(rank, part.clock, span, push.samples, push.how))
            offset += padded(slice_.nbytes)

    def _await(self, pending: Pending, rank: int, slices: list[Slice], parts: Iterable[Part]) -> None:
        """Lets the request wait for each of its slices, or takes what is there already."""
        pending.spans = [None] * len(slices)
        pending.versions = [0] * len(slices)
        self._pending.open(pending)
        for position, (slice_, part) in enumerate(zip(slices, parts, strict=True)):
            waiting = Waiting(pending, position, rank, part.clock)
            if not self._settle(slice_, waiting):
                slice_.waiting.append(waiting)
                if self._dead:
                    self._fail_blocked(slice_)
            if pending.closed:
                return

    def _advance(self, slice_: Slice) -> None:
        """Closes the next round of a slice if it is complete, and has it applied. One job of a slice runs at a time."""
        if slice_.working:
            return
        if slice_.tasks and slice_.log.closing is None:
            slice_.working = True
            slice_.tasks.pop(0)()
            return
        record = slice_.log.close_next(self._required)
        if record is None:
            return
        optimizer = slice_.optimizer_for(record.number)
        settings = self._view.settings
        self._start_job(
            lambda job: Apply(
                job,
                slice_.key,
                slice_.index,
                slice_.spec.dtype,
                slice_.log.current,
                record.contributions,
                record.assign,
                settings.merge or "sum",
                optimizer,
            ),
            lambda done: self._applied(slice_, done),
        )

    def _applied(self, slice_: Slice, done: JobDone) -> None:
        """With one replica the record is committed as soon as it is applied."""
        if done.error is not None:
            self._not_applied(slice_, done.error)
            return
        slice_.log.commit(done.result)
        waiting, slice_.waiting = slice_.waiting, []
        for entry in waiting:
            if not self._settle(slice_, entry):
                slice_.waiting.append(entry)
        self._advance(slice_)

    def _not_applied(self, slice_: Slice, error: KvdError) -> None:
        """The update failed: those whose pushes were in it, and those who wait for what they staged later, are told."""
        record = slice_.log.give_up()
        clocks = {contribution.rank: contribution.clock for contribution in record.contributions}
        self._emit(Note("error", f"slice {slice_.index} of {slice_.key!r} could not be updated: {error}"))
        waiting, slice_.waiting = slice_.waiting, []
        for entry in waiting:
            if entry.clock >= clocks.get(entry.rank, entry.clock + 1):
                name = type(error).__name__
                text = f"the update of {slice_.key!r} failed: {error}"
                self._fail(entry.pending, Refused(entry.pending.request, name, text[:1000], (), slice_.key))
            else:
                slice_.waiting.append(entry)
        self._advance(slice_)

    # ── pulls ──

    def _pull(self, event: Received, pull: Pull) -> None:
        if self._asked_again(event, pull.request):
            return
        rank = self._workers.get(event.sender, -1)
        if rank < 0 and any(part.clock != ANY_CLOCK for part in pull.parts):
            self._rank_of(event, pull.request)
            return
        slices = self._slices_of(event, pull.request, pull.parts)
        if slices is None:
            return
        if len(self._pending) >= MAX_PENDING:
            self._refuse(event.peer, pull.request, "NotAllowed", f"{MAX_PENDING} requests wait already")
            return
        pending = Pending(event.peer, event.sender, pull.request, False, True, len(slices))
        self._await(pending, rank, slices, pull.parts)

    def _settle(self, slice_: Slice, waiting: Waiting) -> bool:
        """Takes the slice's part of the answer if it is there; answers when it was the last. True: waits no more."""
        pending, log = waiting.pending, slice_.log
        if pending.closed:
            return True
        if waiting.clock != ANY_CLOCK and log.committed_clock(waiting.rank) < waiting.clock:
            return False
        if pending.pull:
            exact = log.sync and waiting.clock != ANY_CLOCK
            version = waiting.clock if exact else log.version
            buffer = log.at_version(version)
            if buffer is None:
                text = (
                    f"version {version} of {slice_.key!r} is not kept any more, the store is at {log.version}: "
                    f"rewind to a step that is"
                )
                self._fail(pending, Refused(pending.request, "NotAllowed", text, (), slice_.key, log.version))
                return True
            pending.spans[waiting.position] = Span(buffer, 0, slice_.nbytes)
            pending.versions[waiting.position] = version
        pending.remaining -= 1
        if pending.remaining == 0:
            self._answer(pending)
        return True

    def _answer(self, pending: Pending) -> None:
        spans: tuple[Span, ...] = ()
        answer: Message = Done(pending.request)
        if pending.pull:
            spans = tuple(span for span in pending.spans if span is not None)
            answer = Values(pending.request, tuple(pending.versions))
        for peer in pending.peers():
            self._send(peer, answer, spans)
        self._pending.close(pending)

    def _fail(self, pending: Pending, refusal: Refused) -> None:
        if not pending.closed:
            for peer in pending.peers():
                self._send(peer, refusal)
            self._pending.close(pending)

    # ── the dead ──

    def _blockers(self, slice_: Slice) -> list[int]:
        """Ranks that the slice's waiting requests wait for."""
        log = slice_.log
        if not slice_.waiting or log.closing is not None:
            return []
        if log.sync:
            return log.missing(log.closed + 1, self._required)
        if log.staleness < 0:
            return []
        slowest = log.slowest(self._required)
        return [rank for rank in self._required if log.staged_clock(rank) == slowest]

    def _fail_blocked(self, slice_: Slice) -> None:
        """Tells those who wait for a dead worker. What they pushed stays staged, should it come back."""
        lost = [rank for rank in self._blockers(slice_) if rank in self._dead]
        if not lost:
            return
        waiting, slice_.waiting = slice_.waiting, []
        nodes = tuple(name_of("worker", rank) for rank in lost)
        for entry in waiting:
            text = f"key {slice_.key!r} waits for {', '.join(nodes)}, which died: restart it under its node id"
            last_seen_s = self._dead[lost[0]]
            refusal = Refused(entry.pending.request, "NodeLost", text, nodes, slice_.key, 0, last_seen_s)
            self._fail(entry.pending, refusal)
