"""The server: it leads slices, merges what the workers push, and serves what is committed.

Here are its messages, the view, and the keys; what becomes of a push is in `kvd.core.server.push`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from kvd.core.machine import (
    SCHEDULER,
    Complete,
    Create,
    Effect,
    Event,
    InvalidFrame,
    JobDone,
    LocalCall,
    LogEntry,
    Peer,
    Received,
    Span,
)
from kvd.core.membership import DEAD, GONE, LEFT, name_of
from kvd.core.refusals import code_of
from kvd.core.server.control import ServerControl
from kvd.core.server.keys import MAX_SLICES, Live
from kvd.core.server.push import ServerSettings, ServerTransfers
from kvd.core.server.rounds import SliceLog
from kvd.core.session import FIRST_REQUEST, SchedulerSession
from kvd.protocol.messages import (
    Activate,
    Attach,
    ClockQuery,
    Clocks,
    DeclareBatch,
    Departure,
    Done,
    Epoch,
    ErrorCode,
    Init,
    KeyInfo,
    KeyList,
    Leave,
    ListKeys,
    Lookup,
    NodeName,
    NotYet,
    NotYetReason,
    Publish,
    Pull,
    PullBatch,
    Push,
    PushBatch,
    Refused,
    StatusQuery,
    StatusReport,
    View,
)

MAX_ATTACHING = 1024
MAX_REPLACED = 1 << 16
LINK_GONE = "zmq: the link is gone"

__all__ = ["ServerMachine", "ServerSettings"]


class ServerMachine(ServerTransfers):
    """The state machine of a server."""

    def __init__(self, settings: ServerSettings, session: SchedulerSession) -> None:
        super().__init__(settings, session)
        self._attached: dict[int, int] = {}  # rank → incarnation
        self._paths: dict[int, str] = {}  # rank → how its messages travel, as it said in its Attach
        self._replaced: OrderedDict[int, None] = OrderedDict()  # incarnations of workers that change nothing any more
        self._successors: set[int] = set()  # incarnations of workers whose rank was here before they came
        self._attaching: dict[int, tuple[Peer, Attach]] = {}  # incarnations that no view has named yet
        self._creating: dict[tuple[str, int], int] = {}  # slices whose Create is under way, and their bytes
        self._control = ServerControl(self._table, self._start_job, self._advance, self._emit)
        self._handlers: dict[type[Any], Callable[[Received, Any], None]] = {
            PushBatch: self._push_batch,
            PullBatch: self._pull_batch,
            Push: self._push,
            Pull: self._pull,
            DeclareBatch: self._declare,
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
    def epoch(self) -> Epoch:
        return self._view.epoch

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
        elif isinstance(event, InvalidFrame) and event.peer == SCHEDULER:
            self._session.invalid_frame(event.text)
        if self._session.is_due(now):
            self._out.extend(self._session.tick(now))
        effects, self._out = self._out, []  # they refer to memory that others wait for
        return effects

    def next_deadline(self) -> float | None:
        return self._session.next_deadline()

    def explain(self, now: float) -> dict[str, object]:
        groups = self._table.groups.values()
        return {
            "role": "server",
            "rank": self._session.rank,
            "incarnation": f"{self.incarnation:016x}",
            "view": list(self._view.epoch),
            "keys": len({slice_.key for slice_ in self._table.slices.values()}),
            "slices": len(self._table.slices),
            "bytes_led": self._table.bytes_led,
            "bytes_staged": sum(group.log.staged_bytes(group.nbytes) for group in groups),
            "requests_waiting": len(self._pending),
            "workers": sorted(self._attached),
            "paths": {name_of("worker", rank): self._path_of(rank) for rank in sorted(self._attached)},
            "waiting_for": sorted({name_of("worker", rank) for group in groups for rank in self._blockers(group)}),
            "optimizer": self._control.describe(),
        }

    def _path_of(self, rank: int) -> str:
        """How a worker's messages travel: as it said, as long as they still come that way."""
        said = self._paths[rank]
        needs_link = said != "" and not said.startswith("zmq")
        return LINK_GONE if needs_link and not isinstance(self._came_over[rank], tuple) else said

    def _say_goodbye(self, event: LocalCall) -> None:
        """The only thing that its own program asks of a server: to leave in good order."""
        if self._session.joined:
            self._send(SCHEDULER, Leave(FIRST_REQUEST, Departure.LEFT))
        self._session.close()
        self._emit(Complete(event.call))

    # ── dispatch ──

    def _receive(self, event: Received, now: float) -> None:
        message = event.message
        if event.peer == SCHEDULER:
            changed = self._session.receive(event, now)
            self._out.extend(self._session.take_effects())
            if changed:
                self._view_changed()
            return
        if isinstance(message, View | Done | NotYet | Refused):
            return
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(event, message)
        elif event.sender in self._replaced:  # it has no rank, but is not an observer either
            self._rank_of(event, getattr(message, "request", 0))
        elif not self._control.receive(event, self._workers.get(event.sender)):
            text = f"a server takes no {type(message).__name__}"
            self._refuse(event.peer, getattr(message, "request", 0), ErrorCode.PROTOCOL_ERROR, text)

    # ── membership ──

    def _view_changed(self) -> None:
        for member in self._view.members.values():
            if member.role != "worker" or member.incarnation in self._replaced:  # a scheduler without its record
                continue  # may take one for new that has long had a successor
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
        for group in self._table.groups.values():
            self._advance(group)
            self._fail_blocked(group)

    def _detach(self, rank: int, incarnation: int) -> None:
        """Another incarnation has the rank: the earlier one changes nothing any more."""
        self._workers.pop(incarnation, None)
        self._attached.pop(rank, None)
        self._successors.discard(incarnation)
        self._replaced[incarnation] = None
        while len(self._replaced) > MAX_REPLACED:
            self._replaced.popitem(last=False)
        self._pending.drop_sender(incarnation)
        self._control.drop_sender(incarnation)
        self._batches.drop_sender(incarnation)
        for group in self._table.groups.values():
            group.log.drop_unclosed(rank)
            group.waiting = [waiting for waiting in group.waiting if not waiting.pending.closed]
        self._emit(LogEntry("info", f"{name_of('worker', rank)} was replaced; its open contributions are dropped"))

    def _attach(self, event: Received, attach: Attach) -> None:
        rank = self._workers.get(event.sender)
        if rank is not None:
            self._welcome(event.sender, rank, event.peer, attach)
            return
        if event.sender in self._replaced:
            text = "another process took this one's place: stop it"
            self._refuse(event.peer, attach.request, ErrorCode.REPLACED, text)
            return
        member = self._view.by_incarnation(event.sender)
        if member is not None and member.role == "worker":
            self._welcome(event.sender, member.rank, event.peer, attach)
        elif len(self._attaching) < MAX_ATTACHING:
            self._attaching[event.sender] = (event.peer, attach)  # its view is on the way to us

    def _welcome(self, incarnation: int, rank: int, peer: Peer, attach: Attach) -> None:
        """Answers an heir, whose rank has pushed or made keys here before it came, with Clocks: the scheduler may not
        know that."""
        counted = [group.log.own_clock(rank) for group in self._table.groups.values()]
        if incarnation not in self._workers and (any(counted) or (rank == 0 and counted)):
            self._successors.add(incarnation)
        self._workers[incarnation] = rank
        self._attached[rank] = incarnation
        self._paths[rank] = attach.path
        self._came_over[rank] = peer
        if incarnation in self._successors:
            versions = [group.log.version for group in self._table.groups.values()]
            answer = Clocks(attach.request, min(counted), max(counted), min(versions), max(versions))
            self._send(peer, answer)
        else:
            self._send(peer, Done(attach.request))

    # ── keys ──

    def _init(self, event: Received, init: Init) -> None:
        rank = self._rank_of(event, init.request)
        if rank is None:
            return
        place = (init.key, init.index)
        old = self._table.slices.get(place)
        if old is not None and old.creator == event.sender and old.spec == init.spec:
            is_newer = init.request > old.request  # an init that was given up, and made again with other values
            if not is_newer or self._table.is_in_use(init.key):
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

    def _init_error(self, event: Received, init: Init, rank: int) -> tuple[ErrorCode, str] | None:
        spec, settings = init.spec, self._view.settings
        old = self._table.slices.get((init.key, init.index))
        if rank != 0:
            return ErrorCode.NOT_ALLOWED, "only worker 0 makes keys; the others wait for them"
        if init.index >= spec.num_slices or event.nbytes != spec.slice_nbytes(init.index):
            return ErrorCode.PROTOCOL_ERROR, f"slice {init.index} of {spec} does not have {event.nbytes} bytes"
        if self._table.is_in_use(init.key):
            return _in_use(init.key)
        if spec.num_slices > MAX_SLICES * settings.num_servers:
            return ErrorCode.NOT_ALLOWED, f"key {init.key!r} has {spec.num_slices} slices: choose a larger slice_bytes"
        staging = settings.rounds_ahead * settings.num_workers
        led = self._table.bytes_led + sum(self._creating.values()) - (0 if old is None else old.nbytes)
        demand = (led + self._still_to_come(init)) * (3 + staging)
        if demand > self._settings.memory_limit_bytes or len(self._table.slices) >= MAX_SLICES:
            return ErrorCode.NOT_ALLOWED, (
                f"key {init.key!r} would take this server to {demand >> 20} MiB (3 copies, and {staging} staged), its "
                f"limit is {self._settings.memory_limit_bytes >> 20} MiB: add servers, or raise memory_limit_bytes"
            )
        return None

    def _still_to_come(self, init: Init) -> int:
        """The bytes of this slice, and of the others if it is the first of its key that comes here: a key that does not
        fit is refused before a part of it takes room."""
        spec = init.spec
        if self._table.of_key(init.key) or any(key == init.key for key, _ in self._creating):
            return spec.slice_nbytes(init.index)
        mine = self._session.rank
        return sum(
            spec.slice_nbytes(index)
            for index in range(spec.num_slices)
            if index == init.index or self._view.server_of(init.key, index) == mine
        )

    def _created(self, event: Received, init: Init, done: JobDone) -> None:
        del self._creating[init.key, init.index]
        if event.sender not in self._workers:
            return  # it was replaced: its successor makes the key anew
        if done.error is not None:
            self._send(event.peer, Refused(init.request, code_of(done.error), str(done.error), init.key))
            return
        if self._table.is_in_use(init.key):  # since it was asked
            self._refuse(event.peer, init.request, *_in_use(init.key), key=init.key)
            return
        settings = self._view.settings
        log = SliceLog(settings.mode != "async", settings.rounds_ahead, settings.staleness, done.result)
        self._table.add(init.key, init.index, init.spec, log, event.sender, self._control.optimizer, init.request)
        self._send(event.peer, Done(init.request))

    def _publish(self, event: Received, publish: Publish) -> None:
        rank = self._rank_of(event, publish.request)
        if rank is None:
            return
        made = self._table.slices.get((publish.key, 0))
        if rank != 0 or made is None or made.spec != publish.spec:
            self._refuse(
                event.peer,
                publish.request,
                ErrorCode.NOT_ALLOWED,
                "only worker 0 publishes, and only what it made",
                publish.key,
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
            self._refuse(event.peer, lookup.request, ErrorCode.KEY_NOT_FOUND, text, lookup.key)
        elif not self._table.await_live(lookup.key, event.peer, lookup.request):
            text = "too many nodes wait for keys"
            self._refuse(event.peer, lookup.request, ErrorCode.NOT_ALLOWED, text, lookup.key)
        else:
            self._fail_lookups_without_rank_0()

    def _fail_lookups_without_rank_0(self) -> None:
        member = self._view.worker(0)
        if member is None or not (member.state in (LEFT, GONE) or (member.state == DEAD and 0 in self._dead)):
            return
        for key, peer, request in self._table.give_up_lookups():
            text = f"key {key!r} was not made: worker 0, which makes the keys, is {member.state}; restart it"
            self._send(
                peer,
                Refused(
                    request,
                    ErrorCode.NODE_LOST,
                    text,
                    key,
                    nodes=(NodeName("worker", 0),),
                    last_seen_s=member.last_seen_s,
                ),
            )

    def _clocks(self, event: Received, query: ClockQuery) -> None:
        rank = self._rank_of(event, query.request)
        if rank is None:
            return
        logs = [slice_.log for slice_ in self._table.of_key(query.key)]
        if not logs:
            text = f"no slice of {query.key!r} is here"
            self._refuse(event.peer, query.request, ErrorCode.KEY_NOT_FOUND, text, query.key)
            return
        if any(log.is_closing_of(rank) for log in logs):
            # The update may yet fail. Whoever took the clock for counted would then wait for its own push for ever.
            text = "a push of this rank is being applied"
            self._not_yet(event.peer, query.request, NotYetReason.UPDATING, text, query.key)
            return
        clocks = [max(log.counted_clock(rank), log.resume_clock(rank)) for log in logs]
        versions = [log.version for log in logs]
        self._send(event.peer, Clocks(query.request, min(clocks), max(clocks), min(versions), max(versions)))

    def _activate(self, event: Received, activate: Activate) -> None:
        rank = self._rank_of(event, activate.request)
        if rank is None:
            return
        slices = self._table.of_key(activate.key)
        targets = self._targets_of_slices(event, activate.request, slices, [activate.clock] * len(slices), push=True)
        if targets is None:
            return
        for target in targets:
            target.group.log.activate(rank, activate.clock)
            self._advance(target.group)
        self._send(event.peer, Done(activate.request))

    def _list_keys(self, event: Received, query: ListKeys) -> None:
        entries, more = self._table.page(query.after)
        self._send(event.peer, KeyList(query.request, entries, more))

    def _status(self, event: Received, query: StatusQuery) -> None:
        self._send(event.peer, StatusReport(query.request))

    def validate(self) -> None:
        """Each slice is where its group says."""
        assert all(entry.group.slices[entry.position] is entry for entry in self._table.slices.values()), "slice astray"


def _in_use(key: str) -> tuple[ErrorCode, str]:
    return ErrorCode.KEY_EXISTS, f"key {key!r} is in use here already: take another name, or restart the cluster"
