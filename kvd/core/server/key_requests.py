"""Making keys and finding them: Init, Publish, Lookup, ListKeys."""

from __future__ import annotations

from kvd.core.machine import Create, JobDone, Received, Span
from kvd.core.membership import in_words
from kvd.core.refusals import refusal_of
from kvd.core.server.attachments import Attachments
from kvd.core.server.control import ServerControl
from kvd.core.server.effects import ServerEffects
from kvd.core.server.keys import MAX_SLICES, MAX_WAITING, KeyTable, Live
from kvd.core.server.memory import ServerMemory
from kvd.core.server.participants import Participants
from kvd.core.server.rounds import SliceLog
from kvd.core.session import SchedulerSession
from kvd.errors import KvdError
from kvd.protocol.messages import (
    Done,
    ErrorCode,
    Init,
    KeyInfo,
    KeyList,
    ListKeys,
    Lookup,
    MemberState,
    NodeName,
    Publish,
    Refused,
)

COPIES = 3  # of each slice that a server leads: the version, the one before, and the one that is being made


class KeyRequests:
    """Worker 0 makes keys slice by slice and publishes them; everyone else waits until they are live."""

    def __init__(
        self,
        session: SchedulerSession,
        table: KeyTable,
        effects: ServerEffects,
        attachments: Attachments,
        participants: Participants,
        control: ServerControl,
        memory: ServerMemory,
    ) -> None:
        self._session = session
        self._view = session.view
        self._table = table
        self._effects = effects
        self._attachments = attachments
        self._participants = participants
        self._control = control
        self._memory = memory
        self._creating: dict[tuple[str, int], int] = {}  # slices whose Create is under way, and their bytes

    # ── init ──

    def init(self, event: Received, init: Init) -> None:
        rank = self._attachments.rank_of(event, init.request)
        if rank is None:
            return
        slice_id = (init.key, init.index)
        old = self._table.slices.get(slice_id)
        if old is not None and old.creator == event.sender and old.spec == init.spec:
            is_newer = init.request > old.request  # an init that was given up, and made again with other values
            if not is_newer or self._table.is_in_use(init.key):
                self._effects.send(event.peer, Done(init.request))
                return
        if slice_id in self._creating:
            return  # it is asked again, and this will be done by then
        error = self._init_error(event, init, rank)
        if error is not None:
            self._effects.refuse(event.peer, init.request, *error, key=init.key)
            return
        self._creating[slice_id] = event.nbytes
        source = Span(event.payload, 0, event.nbytes)
        self._effects.start_job(
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
            text = f"key {init.key!r} has {spec.num_slices} slices: choose a larger slice_bytes"
            return ErrorCode.NOT_ALLOWED, text
        staging = settings.rounds_ahead * settings.num_workers
        led = self._table.bytes_led + sum(self._creating.values()) - (0 if old is None else old.nbytes)
        demand = (led + self._still_to_come(init)) * (COPIES + staging)
        if len(self._table.slices) >= MAX_SLICES or not self._memory.grant(self._session.run, demand):
            others = self._memory.of_others(self._session.run)
            of_others = f", besides {others >> 20} MiB of other runs" if others else ""
            return ErrorCode.NOT_ALLOWED, (
                f"key {init.key!r} would take {self._session.name} to {demand >> 20} MiB ({COPIES} copies, and "
                f"{staging} staged), its limit is {self._memory.limit_bytes >> 20} MiB{of_others}: add servers, or "
                f"raise memory_limit_bytes"
            )
        return None

    def _still_to_come(self, init: Init) -> int:
        """The bytes of this slice, and of the others if it is the first of its key that comes here: a key that does not
        fit is refused before a part of it takes memory."""
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
        if self._attachments.find(event.sender) is None:
            return  # it was replaced: its successor makes the key again
        if done.error is not None:
            self._refuse_creation(event, init, done.error)
            return
        if self._table.is_in_use(init.key):  # since it was asked
            self._effects.refuse(event.peer, init.request, *_in_use(init.key), key=init.key)
            return
        settings = self._view.settings
        log = SliceLog(self._view.is_sync, settings.rounds_ahead, settings.staleness, done.result)
        self._table.add(init.key, init.index, init.spec, log, event.sender, self._control.optimizer, init.request)
        self._effects.send(event.peer, Done(init.request))

    def _refuse_creation(self, event: Received, init: Init, error: KvdError) -> None:
        refusal = refusal_of(init.request, error)
        self._effects.refuse(event.peer, init.request, refusal.error, refusal.text, init.key)

    # ── publish and look up ──

    def publish(self, event: Received, publish: Publish) -> None:
        rank = self._attachments.rank_of(event, publish.request)
        if rank is None:
            return
        made = self._table.slices.get((publish.key, 0))
        if rank != 0 or made is None or made.spec != publish.spec:
            text = "only worker 0 publishes, and only what it made"
            self._effects.refuse(event.peer, publish.request, ErrorCode.NOT_ALLOWED, text, publish.key)
            return
        if publish.key not in self._table.live:
            for peer, request in self._table.publish(publish.key, Live(publish.spec, event.sender)):
                self._effects.send(peer, KeyInfo(request, publish.spec, event.sender))
        self._effects.send(event.peer, Done(publish.request))

    def lookup(self, event: Received, lookup: Lookup) -> None:
        live = self._table.live.get(lookup.key)
        if live is not None:
            self._effects.send(event.peer, KeyInfo(lookup.request, live.spec, live.publisher))
        elif not lookup.wait:
            text = f"no key is called {lookup.key!r}: worker 0 must init it first (kvd keys lists those there are)"
            self._effects.refuse(event.peer, lookup.request, ErrorCode.KEY_NOT_FOUND, text, lookup.key)
        elif not self._table.await_live(lookup.key, event.peer, lookup.request):
            text = f"{MAX_WAITING} look-ups wait for keys already: try again"
            self._effects.refuse(event.peer, lookup.request, ErrorCode.NOT_ALLOWED, text, lookup.key)
        else:
            self.fail_lookups_without_rank_0()

    def fail_lookups_without_rank_0(self) -> None:
        """Worker 0 makes the keys: if it is gone, nobody waits for them any longer."""
        member = self._view.worker(0)
        if member is None:
            return
        is_lost = member.state is MemberState.DEAD and 0 in self._participants.dead
        if not is_lost and member.state not in (MemberState.LEFT, MemberState.GONE):
            return
        nodes = (NodeName("worker", 0),)
        for key, peer, request in self._table.give_up_lookups():
            text = f"key {key!r} was not made: worker 0, which makes the keys, {in_words(member.state)}; restart it"
            refusal = Refused(request, ErrorCode.NODE_LOST, text, key, nodes=nodes, last_seen_s=member.last_seen_s)
            self._effects.send(peer, refusal)

    def list(self, event: Received, query: ListKeys) -> None:
        entries, more = self._table.page(query.after)
        self._effects.send(event.peer, KeyList(query.request, entries, more))


def _in_use(key: str) -> tuple[ErrorCode, str]:
    return ErrorCode.KEY_EXISTS, f"key {key!r} is in use here already: take another name, or restart the cluster"
