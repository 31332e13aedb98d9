"""Pushes and pulls on a server.

The way of a push: `_push` or `_push_batch` finds what it is aimed at, `_take` checks and stages it, `_advance` closes
the round when it is complete and emits Apply, the JobDone comes back to `_applied`, which commits and answers everyone
who waited.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from kvd.core.machine import (
    Apply,
    Buffer,
    Contribution,
    Effect,
    Job,
    JobDone,
    LogEntry,
    Peer,
    Received,
    ScatterList,
    Send,
    Span,
    spans_of,
)
from kvd.core.membership import name_of
from kvd.core.refusals import code_of
from kvd.core.server.admission import Answer, PushTarget, push_error, remembered
from kvd.core.server.batches import Batch, BatchTable
from kvd.core.server.groups import FusedGroup, Slice, Waiting
from kvd.core.server.keys import KeyTable
from kvd.core.server.pending import Pending, PendingTable
from kvd.core.server.rounds import PushStatus, Refusal
from kvd.core.session import SchedulerSession
from kvd.errors import KvdError
from kvd.protocol.messages import (
    ABSENT,
    ANY_CLOCK,
    SMALL_PUSH_BYTES,
    DeclareBatch,
    Done,
    ErrorCode,
    Message,
    NodeName,
    NotYet,
    NotYetReason,
    Pull,
    PullBatch,
    Push,
    PushBatch,
    Refused,
    Staged,
    Taken,
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


class ServerTransfers:
    """The data side of a server."""

    def __init__(self, settings: ServerSettings, session: SchedulerSession) -> None:
        self.incarnation = session.incarnation
        self._settings = settings
        self._session = session
        self._view = session.view
        self._table = KeyTable()
        self._batches = BatchTable()
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

    def _refuse(self, peer: Peer, request: int, error: ErrorCode, text: str, key: str = "") -> None:
        self._send(peer, Refused(request, error, text, key))

    def _not_yet(self, peer: Peer, request: int, reason: NotYetReason, text: str, key: str = "") -> None:
        self._send(peer, NotYet(request, reason, text, key))

    def _start_job(self, make: Callable[[int], Job], done: Callable[[JobDone], None]) -> None:
        job, self._next_job = self._next_job, self._next_job + 1
        self._jobs[job] = done
        self._out.append(make(job))

    def _rank_of(self, event: Received, request: int) -> int | None:
        rank = self._workers.get(event.sender)
        if rank is None:
            text = "this server does not know the sender as a worker"
            self._not_yet(event.peer, request, NotYetReason.NOT_ATTACHED, text)
        return rank

    # ── what a request is aimed at ──

    def _declare(self, event: Received, message: DeclareBatch) -> None:
        if self._rank_of(event, message.request) is not None:
            self._batches.declare(event.sender, message.batch, message.slice_ids)
            self._send(event.peer, Done(message.request))

    def _batch_of(self, event: Received, request: int, number: int) -> Batch | None:
        batch = self._batches.find(event.sender, number)
        if batch is None:
            text = f"batch {number} is not known here (any more)"
            self._not_yet(event.peer, request, NotYetReason.UNKNOWN_BATCH, text)
        return batch

    def _slices_of(self, event: Received, request: int, slice_ids: Sequence[tuple[str, int]]) -> list[Slice] | None:
        slices = []
        for key, index in slice_ids:
            slice_ = self._table.slices.get((key, index))
            if slice_ is None:
                text = f"server {self._session.rank} has no slice {index} of key {key!r}"
                self._refuse(event.peer, request, ErrorCode.KEY_NOT_FOUND, text, key)
                return None
            slices.append(slice_)
        return slices

    def _targets_of_batch(
        self, event: Received, request: int, batch: Batch, clock: int, *, push: bool
    ) -> list[PushTarget] | None:
        """All of a group, if the slices of the batch are one, or can become it; else each for itself."""
        group = batch.group
        if group is not None and not group.is_gone:
            return [PushTarget(group, None, clock, group.nbytes)]
        batch.is_apart = batch.is_apart or group is not None
        slices = self._slices_of(event, request, batch.slice_ids)
        if slices is None:
            return None
        if push and not batch.is_apart and len(set(slices)) == len(slices):
            batch.group = self._table.fuse(slices)
            if batch.group is not None:
                return [PushTarget(batch.group, None, clock, batch.group.nbytes)]
        return self._targets_of_slices(event, request, slices, [clock] * len(slices), push=push)

    def _targets_of_slices(
        self, event: Received, request: int, slices: Sequence[Slice], clocks: Sequence[int], *, push: bool
    ) -> list[PushTarget] | None:
        """Each slice for itself. A push of a slice without the others of its group parts them."""
        if push and len(set(slices)) < len(slices):
            text = "a push brings a slice once"
            self._refuse(event.peer, request, ErrorCode.PROTOCOL_ERROR, text, slices[0].key)
            return None
        for slice_ in slices:
            if push and len(slice_.group.slices) > 1:
                if not slice_.group.is_quiescent:
                    text = "it is being updated with others"
                    self._not_yet(event.peer, request, NotYetReason.UPDATING, text, slice_.key)
                    return None
                self._table.part(slice_.group)
        return [
            PushTarget(slice_.group, slice_, clock, slice_.nbytes) for slice_, clock in zip(slices, clocks, strict=True)
        ]

    # ── pushes ──

    def _push(self, event: Received, push: Push) -> None:
        rank = self._rank_of(event, push.request)
        if rank is None or self._asked_again(event, push.request):
            return
        slices = self._slices_of(event, push.request, [(part.key, part.slice_index) for part in push.parts])
        if slices is None:
            return
        clocks = [part.clock for part in push.parts]
        self._take(event, push, rank, self._targets_of_slices(event, push.request, slices, clocks, push=True))

    def _push_batch(self, event: Received, push: PushBatch) -> None:
        rank = self._rank_of(event, push.request)
        if rank is None or self._asked_again(event, push.request):
            return
        batch = self._batch_of(event, push.request, push.batch)
        if batch is not None:
            self._take(event, push, rank, self._targets_of_batch(event, push.request, batch, push.clock, push=True))

    def _take(self, event: Received, push: Push | PushBatch, rank: int, targets: list[PushTarget] | None) -> None:
        """Stages a push that is in order, lets it wait for its commit, and closes what rounds it completes."""
        if targets is None:
            return
        self._came_over[rank] = event.peer
        merge = self._view.settings.merge
        error = push_error(push, event, rank, targets, merge) or self._limit_error(push.request, rank, targets)
        if error is not None:
            self._send(event.peer, remembered(error, event.sender, rank, targets))
            return
        if not push.probe:
            self._stage(event, push, rank, targets)
        pending = Pending(event.peer, event.sender, push.request, True, push.pull, len(targets))
        self._await(pending, rank, targets)
        for target in targets:
            self._advance(target.group)
        self._fail_blocked_of(targets)
        if (
            (push.probe or event.nbytes > self._settings.small_push_bytes)
            and not pending.closed
            and any(target.group.log.counted_clock(rank) < target.clock for target in targets)
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

    def _limit_error(self, request: int, rank: int, targets: list[PushTarget]) -> Answer | None:
        """A push that counts already is answered at once, however many wait."""
        if len(self._pending) < MAX_PENDING or all(
            target.group.log.committed_clock(rank) >= target.clock for target in targets
        ):
            return None
        is_new = any(target.group.log.turn(rank, target.clock) is PushStatus.NEXT for target in targets)
        text = f"{MAX_PENDING} requests wait already"
        return Refused(request, ErrorCode.NOT_ALLOWED, text) if is_new else NotYet(request, NotYetReason.BUSY, text)

    def _stage(self, event: Received, push: Push | PushBatch, rank: int, targets: list[PushTarget]) -> None:
        offset = 0
        for target in targets:
            if target.group.log.turn(rank, target.clock) is PushStatus.NEXT:
                span = None if push.how == ABSENT else Span(event.payload, offset, target.nbytes)
                target.group.log.taken[rank] = (event.sender, push.request)
                target.group.log.stage(Contribution(rank, target.clock, span, push.samples, push.how))
            offset += padded(target.nbytes)

    def _await(self, pending: Pending, rank: int, targets: list[PushTarget]) -> None:
        """Lets the request wait for each of its targets, or takes what is there already."""
        pending.spans = [()] * len(targets)
        pending.versions = [0] * len(targets)
        self._pending.open(pending)
        for position, target in enumerate(targets):
            waiting = Waiting(pending, position, rank, target.clock, target.slice)
            if not self._settle(target.group, waiting):
                target.group.waiting.append(waiting)
            if pending.closed:
                return

    def _advance(self, group: FusedGroup) -> None:
        """Closes the next round of a group if it is complete, and has it applied. One job of a group runs at a time."""
        if group.working:
            return
        if group.tasks and group.log.closing is None:
            group.working = True
            group.tasks.pop(0)()
            return
        record = group.log.close_next(self._required)
        while record is not None and not record.contributions:
            self._commit(group, group.log.current)
            record = group.log.close_next(self._required)
        if record is None:
            return
        optimizer = group.optimizer_for(record.number)
        merge = self._view.settings.merge or "sum"
        log = group.log
        self._start_job(
            lambda job: Apply(
                job,
                group.number,
                group.layout,
                group.dtype,
                group.nbytes,
                log.current,
                record.contributions,
                record.assign,
                merge,
                optimizer,
            ),
            lambda done: self._applied(group, done),
        )

    def _applied(self, group: FusedGroup, done: JobDone) -> None:
        """With one replica the record is committed as soon as it is applied."""
        if done.error is not None:
            self._not_applied(group, done.error)
        else:
            self._commit(group, done.result)
            self._advance(group)
            if self._dead:
                self._fail_blocked(group)

    def _commit(self, group: FusedGroup, buffer: Buffer | ScatterList) -> None:
        """The closed round becomes a version: those who waited for it are answered."""
        group.log.commit(buffer)
        waiting, group.waiting = group.waiting, []
        for entry in waiting:
            if not self._settle(group, entry):
                group.waiting.append(entry)

    def _not_applied(self, group: FusedGroup, error: KvdError) -> None:
        """The update failed: those whose pushes were in it, and those who wait for what they staged later, are told."""
        record = group.log.give_up()
        clocks = {contribution.rank: contribution.clock for contribution in record.contributions}
        what = (
            f"{len(group.slices)} slices from {group.slices[0].index}"
            if len(group.slices) > 1
            else f"slice {group.slices[0].index}"
        )
        self._emit(LogEntry("error", f"{what} of {group.key!r} could not be updated: {error}"))
        waiting, group.waiting = group.waiting, []
        for entry in waiting:
            if entry.clock >= clocks.get(entry.rank, entry.clock + 1):
                code = code_of(error)
                text = f"the update of {group.key!r} failed: {error}"
                pending = entry.pending
                if pending.push:
                    refusal = Refusal(pending.sender, pending.request, code, text[:1000])
                    group.log.refuse(entry.rank, refusal)
                taken = Taken.PART if pending.is_of_many else Taken.NOTHING  # the others have taken theirs
                self._fail(pending, Refused(pending.request, code, text[:1000], group.key, taken))
            else:
                group.waiting.append(entry)
        self._advance(group)
        if self._dead:
            self._fail_blocked(group)

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
        self._give(event, pull.request, rank, self._targets_of_slices(event, pull.request, slices, clocks, push=False))

    def _pull_batch(self, event: Received, pull: PullBatch) -> None:
        rank = self._rank_of(event, pull.request)
        if rank is None or self._asked_again(event, pull.request):
            return
        batch = self._batch_of(event, pull.request, pull.batch)
        if batch is not None:
            self._give(
                event, pull.request, rank, self._targets_of_batch(event, pull.request, batch, pull.clock, push=False)
            )

    def _give(self, event: Received, request: int, rank: int, targets: list[PushTarget] | None) -> None:
        if targets is None:
            return
        if len(self._pending) >= MAX_PENDING:
            self._refuse(event.peer, request, ErrorCode.NOT_ALLOWED, f"{MAX_PENDING} requests wait already")
            return
        self._await(Pending(event.peer, event.sender, request, False, True, len(targets)), rank, targets)
        self._fail_blocked_of(targets)

    def _settle(self, group: FusedGroup, waiting: Waiting) -> bool:
        """Takes the group's part of the answer if it is there; answers when it was the last. True: waits no more."""
        pending, log = waiting.pending, group.log
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
                    f"version {version} of {group.key!r} is not kept any more, the store is at {log.version}: "
                    f"rewind to a step that is"
                )
                taken = Taken.PART if pending.push else Taken.NOTHING
                self._fail(pending, Refused(pending.request, ErrorCode.NOT_ALLOWED, text, group.key, taken))
                return True
            slice_ = waiting.slice
            spans = spans_of(buffer, group.nbytes) if slice_ is None else (slice_.span(buffer),)
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

    def _blockers(self, group: FusedGroup) -> list[int]:
        """Ranks that the group's waiting requests wait for."""
        log = group.log
        if not group.waiting or log.closing is not None:
            return []
        if log.sync:
            return log.missing(log.closed + 1, self._required)
        if log.staleness < 0:
            return []
        slowest = log.slowest(self._required)
        return [rank for rank in self._required if log.staged_clock(rank) == slowest]

    def _fail_blocked_of(self, targets: list[PushTarget]) -> None:
        if self._dead:
            for target in targets:
                self._fail_blocked(target.group)

    def _fail_blocked(self, group: FusedGroup) -> None:
        """Tells those who wait for a dead worker. What they pushed stays staged, should it come back."""
        lost = [rank for rank in self._blockers(group) if rank in self._dead]
        if not lost:
            return
        waiting, group.waiting = group.waiting, []
        nodes = tuple(NodeName("worker", rank) for rank in lost)
        names = ", ".join(name_of(*node) for node in nodes)
        for entry in waiting:
            text = f"key {group.key!r} waits for {names}, which died: restart it under its node id"
            last_seen_s = self._dead[lost[0]]
            request = entry.pending.request
            refusal = Refused(request, ErrorCode.NODE_LOST, text, group.key, nodes=nodes, last_seen_s=last_seen_s)
            self._fail(entry.pending, refusal)
