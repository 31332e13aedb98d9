"""Pushes and pulls on a server.

The way of a push: `_push` or `_push_pack` finds what it is aimed at, `_take` checks and stages it, `_advance` closes
the round when it is complete and emits Apply, the JobDone comes back to `_applied`, which commits and answers everyone
who waited.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from kvd.core.keytable import KeyTable
from kvd.core.machine import (
    Apply,
    Buffer,
    Contribution,
    Effect,
    Job,
    JobDone,
    Note,
    Peer,
    Received,
    Rope,
    Send,
    Span,
    spans_of,
)
from kvd.core.membership import name_of
from kvd.core.packs import Pack, PackTable
from kvd.core.pushchecks import Aim, push_error, remembered
from kvd.core.requests import Pending, PendingTable
from kvd.core.session import SchedulerLink
from kvd.core.slicelog import Refusal, Turn
from kvd.core.units import Slice, Unit, Waiting
from kvd.errors import KvdError
from kvd.protocol.messages import (
    ABSENT,
    ANY_CLOCK,
    SMALL_PUSH_BYTES,
    DeclarePack,
    Done,
    Message,
    Pull,
    PullPack,
    Push,
    PushPack,
    Refused,
    Staged,
    Values,
)
from kvd.protocol.specs import padded

MAX_PENDING = 1 << 18


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What a server is told besides what the view says.

    Attributes:
        small_push_bytes: pushes of up to so many bytes are not answered by Staged.
    """

    memory_limit_bytes: int
    fail_on_worker_loss: bool
    small_push_bytes: int = SMALL_PUSH_BYTES


class ServerMoves:
    """The data side of a server."""

    def __init__(self, settings: ServerSettings, link: SchedulerLink) -> None:
        self.incarnation = link.incarnation
        self._settings = settings
        self._link = link
        self._view = link.view
        self._table = KeyTable()
        self._packs = PackTable()
        self._pending = PendingTable()
        self._workers: dict[int, int] = {}  # incarnation → rank, of the attached
        self._came_over: dict[int, Peer] = {}  # rank → the connection of its last push, or of its Attach
        self._required: list[int] = []
        self._dead: dict[int, float] = {}  # rank → last_seen_s
        self._jobs: dict[int, Callable[[JobDone], None]] = {}
        self._next_job = 1
        self._out: list[Effect] = []

    # ── what all of a server needs ──

    def _emit(self, effect: Effect) -> None:
        self._out.append(effect)

    def _send(self, peer: Peer, message: Message, payload: tuple[Span, ...] = ()) -> None:
        self._out.append(Send(peer, message, payload))

    def _refuse(self, peer: Peer, request: int, error: str, text: str, key: str = "") -> None:
        self._send(peer, Refused(request, error, text, (), key))

    def _start_job(self, make: Callable[[int], Job], done: Callable[[JobDone], None]) -> None:
        job, self._next_job = self._next_job, self._next_job + 1
        self._jobs[job] = done
        self._out.append(make(job))

    def _rank_of(self, event: Received, request: int) -> int | None:
        rank = self._workers.get(event.sender)
        if rank is None:
            self._refuse(event.peer, request, "attach", "this server does not know the sender as a worker")
        return rank

    # ── what a request is aimed at ──

    def _declare(self, event: Received, message: DeclarePack) -> None:
        if self._rank_of(event, message.request) is not None:
            self._packs.declare(event.sender, message.pack, message.places)
            self._send(event.peer, Done(message.request))

    def _pack_of(self, event: Received, request: int, number: int) -> Pack | None:
        pack = self._packs.find(event.sender, number)
        if pack is None:
            self._refuse(event.peer, request, "pack", f"pack {number} is not known here (any more)")
        return pack

    def _slices_of(self, event: Received, request: int, places: Sequence[tuple[str, int]]) -> list[Slice] | None:
        slices = []
        for key, index in places:
            slice_ = self._table.slices.get((key, index))
            if slice_ is None:
                text = f"server {self._link.rank} has no slice {index} of key {key!r}"
                self._refuse(event.peer, request, "KeyNotFound", text, key)
                return None
            slices.append(slice_)
        return slices

    def _aims_of_pack(self, event: Received, request: int, pack: Pack, clock: int, *, push: bool) -> list[Aim] | None:
        """All of a unit, if the slices of the pack are one, or can become it; else each for itself."""
        unit = pack.unit
        if unit is not None and not unit.is_gone:
            return [Aim(unit, None, clock, unit.nbytes)]
        pack.is_apart = pack.is_apart or unit is not None
        slices = self._slices_of(event, request, pack.places)
        if slices is None:
            return None
        if push and not pack.is_apart and len(set(slices)) == len(slices):
            pack.unit = self._table.fuse(slices)
            if pack.unit is not None:
                return [Aim(pack.unit, None, clock, pack.unit.nbytes)]
        return self._aims_of_slices(event, request, slices, [clock] * len(slices), push=push)

    def _aims_of_slices(
        self, event: Received, request: int, slices: Sequence[Slice], clocks: Sequence[int], *, push: bool
    ) -> list[Aim] | None:
        """Each slice for itself. A push of a slice without the others of its unit parts them."""
        if push and len(set(slices)) < len(slices):
            self._refuse(event.peer, request, "ProtocolError", "a push brings a slice once", slices[0].key)
            return None
        for slice_ in slices:
            if push and len(slice_.unit.slices) > 1:
                if not slice_.unit.is_resting:
                    self._refuse(event.peer, request, "clock", "it is being updated with others", slice_.key)
                    return None
                self._table.part(slice_.unit)
        return [Aim(slice_.unit, slice_, clock, slice_.nbytes) for slice_, clock in zip(slices, clocks, strict=True)]

    # ── pushes ──

    def _push(self, event: Received, push: Push) -> None:
        rank = self._rank_of(event, push.request)
        if rank is None or self._asked_again(event, push.request):
            return
        slices = self._slices_of(event, push.request, [(part.key, part.slice_index) for part in push.parts])
        if slices is None:
            return
        clocks = [part.clock for part in push.parts]
        self._take(event, push, rank, self._aims_of_slices(event, push.request, slices, clocks, push=True))

    def _push_pack(self, event: Received, push: PushPack) -> None:
        rank = self._rank_of(event, push.request)
        if rank is None or self._asked_again(event, push.request):
            return
        pack = self._pack_of(event, push.request, push.pack)
        if pack is not None:
            self._take(event, push, rank, self._aims_of_pack(event, push.request, pack, push.clock, push=True))

    def _take(self, event: Received, push: Push | PushPack, rank: int, aims: list[Aim] | None) -> None:
        """Stages a push that is in order, lets it wait for its commit, and closes what rounds it completes."""
        if aims is None:
            return
        self._came_over[rank] = event.peer
        merge = self._view.settings.merge
        error = push_error(push, event, rank, aims, merge) or self._limit_error(push.request, rank, aims)
        if error is not None:
            self._send(event.peer, remembered(error, event.sender, rank, aims))
            return
        if not push.probe:
            self._stage(event, push, rank, aims)
        pending = Pending(event.peer, event.sender, push.request, True, push.pull, len(aims))
        self._await(pending, rank, aims)
        for aim in aims:
            self._advance(aim.unit)
        self._fail_blocked_of(aims)
        if (
            (push.probe or event.nbytes > self._settings.small_push_bytes)
            and not pending.closed
            and any(aim.unit.log.counted_clock(rank) < aim.clock for aim in aims)
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

    def _limit_error(self, request: int, rank: int, aims: list[Aim]) -> Refused | None:
        """A push that counts already is answered at once, however many wait."""
        if len(self._pending) < MAX_PENDING or all(aim.unit.log.committed_clock(rank) >= aim.clock for aim in aims):
            return None
        is_new = any(aim.unit.log.turn(rank, aim.clock) is Turn.NEXT for aim in aims)
        return Refused(request, "NotAllowed" if is_new else "clock", f"{MAX_PENDING} requests wait already")

    def _stage(self, event: Received, push: Push | PushPack, rank: int, aims: list[Aim]) -> None:
        offset = 0
        for aim in aims:
            if aim.unit.log.turn(rank, aim.clock) is Turn.NEXT:
                span = None if push.how == ABSENT else Span(event.payload, offset, aim.nbytes)
                aim.unit.log.taken[rank] = (event.sender, push.request)
                aim.unit.log.stage(Contribution(rank, aim.clock, span, push.samples, push.how))
            offset += padded(aim.nbytes)

    def _await(self, pending: Pending, rank: int, aims: list[Aim]) -> None:
        """Lets the request wait for each of its aims, or takes what is there already."""
        pending.spans = [()] * len(aims)
        pending.versions = [0] * len(aims)
        self._pending.open(pending)
        for position, aim in enumerate(aims):
            waiting = Waiting(pending, position, rank, aim.clock, aim.slice)
            if not self._settle(aim.unit, waiting):
                aim.unit.waiting.append(waiting)
            if pending.closed:
                return

    def _advance(self, unit: Unit) -> None:
        """Closes the next round of a unit if it is complete, and has it applied. One job of a unit runs at a time."""
        if unit.working:
            return
        if unit.tasks and unit.log.closing is None:
            unit.working = True
            unit.tasks.pop(0)()
            return
        record = unit.log.close_next(self._required)
        while record is not None and not record.contributions:
            self._commit(unit, unit.log.current)
            record = unit.log.close_next(self._required)
        if record is None:
            return
        optimizer = unit.optimizer_for(record.number)
        merge = self._view.settings.merge or "sum"
        log = unit.log
        self._start_job(
            lambda job: Apply(
                job,
                unit.number,
                unit.layout,
                unit.dtype,
                unit.nbytes,
                log.current,
                record.contributions,
                record.assign,
                merge,
                optimizer,
            ),
            lambda done: self._applied(unit, done),
        )

    def _applied(self, unit: Unit, done: JobDone) -> None:
        """With one replica the record is committed as soon as it is applied."""
        if done.error is not None:
            self._not_applied(unit, done.error)
        else:
            self._commit(unit, done.result)
            self._advance(unit)
            if self._dead:
                self._fail_blocked(unit)

    def _commit(self, unit: Unit, buffer: Buffer | Rope) -> None:
        """The closed round becomes a version: those who waited for it are answered."""
        unit.log.commit(buffer)
        waiting, unit.waiting = unit.waiting, []
        for entry in waiting:
            if not self._settle(unit, entry):
                unit.waiting.append(entry)

    def _not_applied(self, unit: Unit, error: KvdError) -> None:
        """The update failed: those whose pushes were in it, and those who wait for what they staged later, are told."""
        record = unit.log.give_up()
        clocks = {contribution.rank: contribution.clock for contribution in record.contributions}
        what = (
            f"{len(unit.slices)} slices from {unit.slices[0].index}"
            if len(unit.slices) > 1
            else f"slice {unit.slices[0].index}"
        )
        self._emit(Note("error", f"{what} of {unit.key!r} could not be updated: {error}"))
        waiting, unit.waiting = unit.waiting, []
        for entry in waiting:
            if entry.clock >= clocks.get(entry.rank, entry.clock + 1):
                name = type(error).__name__
                text = f"the update of {unit.key!r} failed: {error}"
                pending = entry.pending
                if pending.push:
                    refusal = Refusal(pending.sender, pending.request, name, text[:1000])
                    unit.log.refuse(entry.rank, refusal)
                expected = entry.clock if pending.is_of_many else 0  # the others have taken theirs
                self._fail(pending, Refused(pending.request, name, text[:1000], (), unit.key, expected))
            else:
                unit.waiting.append(entry)
        self._advance(unit)
        if self._dead:
            self._fail_blocked(unit)

    # ── pulls ──

    def _pull(self, event: Received, pull: Pull) -> None:
        if self._asked_again(event, pull.request):
            return
        rank = self._workers.get(event.sender, -1)
        if rank < 0 and any(part.clock != ANY_CLOCK for part in pull.parts):
            self._rank_of(event, pull.request)
            return
        slices = self._slices_of(event, pull.request, [(part.key, part.slice_index) for part in pull.parts])
        if slices is None:
            return
        clocks = [part.clock for part in pull.parts]
        self._give(event, pull.request, rank, self._aims_of_slices(event, pull.request, slices, clocks, push=False))

    def _pull_pack(self, event: Received, pull: PullPack) -> None:
        rank = self._rank_of(event, pull.request)
        if rank is None or self._asked_again(event, pull.request):
            return
        pack = self._pack_of(event, pull.request, pull.pack)
        if pack is not None:
            self._give(event, pull.request, rank, self._aims_of_pack(event, pull.request, pack, pull.clock, push=False))

    def _give(self, event: Received, request: int, rank: int, aims: list[Aim] | None) -> None:
        if aims is None:
            return
        if len(self._pending) >= MAX_PENDING:
            self._refuse(event.peer, request, "NotAllowed", f"{MAX_PENDING} requests wait already")
            return
        self._await(Pending(event.peer, event.sender, request, False, True, len(aims)), rank, aims)
        self._fail_blocked_of(aims)

    def _settle(self, unit: Unit, waiting: Waiting) -> bool:
        """Takes the unit's part of the answer if it is there; answers when it was the last. True: waits no more."""
        pending, log = waiting.pending, unit.log
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
                    f"version {version} of {unit.key!r} is not kept any more, the store is at {log.version}: "
                    f"rewind to a step that is"
                )
                self._fail(pending, Refused(pending.request, "NotAllowed", text, (), unit.key, log.version))
                return True
            slice_ = waiting.slice
            spans = spans_of(buffer, unit.nbytes) if slice_ is None else (slice_.span(buffer),)
            pending.spans[waiting.position] = spans
            pending.versions[waiting.position] = version
        pending.remaining -= 1
        if pending.remaining == 0:
            self._answer(pending)
        return True

    def _answer(self, pending: Pending) -> None:
        spans: tuple[Span, ...] = ()
        answer: Message = Done(pending.request)
        if pending.pull:
            spans = pending.spans[0] if len(pending.spans) == 1 else tuple(chain.from_iterable(pending.spans))
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

    def _blockers(self, unit: Unit) -> list[int]:
        """Ranks that the unit's waiting requests wait for."""
        log = unit.log
        if not unit.waiting or log.closing is not None:
            return []
        if log.sync:
            return log.missing(log.closed + 1, self._required)
        if log.staleness < 0:
            return []
        slowest = log.slowest(self._required)
        return [rank for rank in self._required if log.staged_clock(rank) == slowest]

    def _fail_blocked_of(self, aims: list[Aim]) -> None:
        if self._dead:
            for aim in aims:
                self._fail_blocked(aim.unit)

    def _fail_blocked(self, unit: Unit) -> None:
        """Tells those who wait for a dead worker. What they pushed stays staged, should it come back."""
        lost = [rank for rank in self._blockers(unit) if rank in self._dead]
        if not lost:
            return
        waiting, unit.waiting = unit.waiting, []
        nodes = tuple(name_of("worker", rank) for rank in lost)
        for entry in waiting:
            text = f"key {unit.key!r} waits for {', '.join(nodes)}, which died: restart it under its node id"
            last_seen_s = self._dead[lost[0]]
            refusal = Refused(entry.pending.request, "NodeLost", text, nodes, unit.key, 0, last_seen_s)
            self._fail(entry.pending, refusal)
