"""A push on the server, from its arrival to its answer. Read it from top to bottom:

resolve   `push`, `push_batch`: what the push is about (`targets`)
admit     `_admit`: whether it is let in; the table of answers is in `admission`, and a verdict is kept in `verdicts`
stage     `_stage`, `take`: the received frame is the staging buffer (`rounds`)
wait      `_admit`, `take`: the push waits for its commit (`waiting`)
close     `advance`: the round closes when it is complete (`rounds`), one at a time per group
apply     `apply`: the shell merges and updates; the machine gets its JobDone
hold      `_hold`: the backup, if there is one, holds the record (`records`)
commit    `_held`, `_commit`: the round becomes a version
answer    `_commit`: everyone who waited for it is answered (`waiting`)

Others call `advance` when something else may let a round close: a view, a worker that takes part again, the end of a
job on the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial

from kvd.core.machine import (
    Apply,
    Buffer,
    Contribution,
    Encoding,
    JobDone,
    LogEntry,
    Received,
    Span,
)
from kvd.core.membership import ViewState
from kvd.core.push_policy import is_updated
from kvd.core.refusals import code_of
from kvd.core.server.admission import Decision, admit
from kvd.core.server.attachments import Attachments
from kvd.core.server.captures import Captures
from kvd.core.server.disputes import Disputes
from kvd.core.server.effects import ServerEffects
from kvd.core.server.groups import FusedGroup, Verdict
from kvd.core.server.late import LateWorkers
from kvd.core.server.made import Made, Use, unchanged
from kvd.core.server.memory_use import MemoryUse
from kvd.core.server.merged_codings import asked_by, merged_coding, taken_by
from kvd.core.server.participants import Participants
from kvd.core.server.pending import Pending
from kvd.core.server.progress import PushRequest, Refusal
from kvd.core.server.readings import Readings
from kvd.core.server.records import Records
from kvd.core.server.round_records import record_of
from kvd.core.server.rounds import Record
from kvd.core.server.staleness import SeenStaleness
from kvd.core.server.targets import PushTarget, TargetResolver
from kvd.core.server.verdicts import Verdicts
from kvd.core.server.waiting import Waiters
from kvd.errors import KvdError
from kvd.protocol.fixed import PushNumbers
from kvd.protocol.messages import (
    ABSENT,
    ADD,
    MAX_TEXT_CHARS,
    ErrorCode,
    MergedForm,
    Push,
    PushBatch,
    Refused,
    Staged,
    Taken,
)
from kvd.protocol.specs import padded


class Pushes:
    """The pushes of all workers.

    Args:
        leaving: the partitions whose rounds do not close any more.
        memory: that of the rows of tables; what other keys need was granted when they were made.
        small_push_bytes: pushes of up to this many bytes are not answered by Staged.

    Attributes:
        late: for whom rounds wait though a quorum is there.
        staleness: of the pushes of asynchronous workers.
    """

    def __init__(
        self,
        view: ViewState,
        effects: ServerEffects,
        attachments: Attachments,
        targets: TargetResolver,
        verdicts: Verdicts,
        waiters: Waiters,
        participants: Participants,
        disputes: Disputes,
        readings: Readings,
        records: Records,
        leaving: Collection[int],
        captures: Captures,
        late: LateWorkers,
        memory: MemoryUse,
        *,
        small_push_bytes: int,
    ) -> None:
        self._view = view
        self._effects = effects
        self._attachments = attachments
        self._targets = targets
        self._verdicts = verdicts
        self._waiters = waiters
        self._participants = participants
        self._disputes = disputes
        self._readings = readings
        self._records = records
        self._leaving = leaving
        self._captures = captures
        self.late = late
        self._memory = memory
        self.staleness = SeenStaleness()
        self._small_push_bytes = small_push_bytes

    # ── resolve ──

    def push(self, event: Received, push: Push) -> None:
        if self._take_rows(event, push):
            return
        rank = self._attachments.rank_of(event, push.request)
        if rank is None or self._waiters.joins_open(event, push.request):
            return
        targets = self._targets.of_parts(event, push)
        if targets is None or not self._is_decoded_for(event, push, targets):
            return
        if self._admit(event, push, rank, targets) and targets[0].group.is_of_table:
            self._verdicts.keep(targets[0].group, event.sender, event.peer, rank)

    def push_batch(self, event: Received, push: PushBatch) -> None:
        if self._take_batch(event, push):
            return
        rank = self._attachments.rank_of(event, push.request)
        if rank is None or self._waiters.joins_open(event, push.request):
            return
        targets = self._targets.of_batch(event, push)
        if targets is not None and self._admit(event, push, rank, targets) and targets[0].slice is None:
            self._verdicts.keep(targets[0].group, event.sender, event.peer, rank)

    def _is_decoded_for(self, event: Received, push: Push, targets: list[PushTarget]) -> bool:
        """Whether the payload has become what the key needs; otherwise the sender is told."""
        group, coding = targets[0].group, push.coding
        code = ErrorCode.PROTOCOL_ERROR
        if event.fault:
            text = f"a push of key {group.key!r} cannot be decoded here: {event.fault}"
        elif coding is None:
            return True
        elif len(targets) == 1 and coding.wanted == group.dtype:
            text = "" if coding.merged is MergedForm.PLAIN else self._memory.encoded_error(group.key)
            code = ErrorCode.NOT_ALLOWED
            if not text:
                return True
        else:
            text = f"key {group.key!r} has dtype {group.dtype}, and takes a value of {coding.wanted} by itself only"
        self._effects.refuse(event.peer, push.request, code, text, group.key)
        return False

    # ── admit, wait ──

    def _admit(self, event: Received, push: Push | PushBatch, rank: int, targets: list[PushTarget]) -> bool:
        """Decides on a push, and lets it wait for its rounds. Returns whether a verdict on it may be kept."""
        request = PushRequest(event.sender, push.request)
        merge, is_full = self._view.settings.merge, self._waiters.pending.is_full_for(event.peer)
        is_apart = self._participants.leaves_out(rank)
        first = targets[0].slice
        memory_error = None
        if first is not None and first.spec.table:
            memory_error = partial(self._memory.row_error, first.key, first.spec, event.nbytes)
        decisions = admit(
            push,
            request,
            event.nbytes,
            rank,
            targets,
            merge,
            is_full=is_full,
            is_apart=is_apart,
            memory_error=memory_error,
        )
        if not isinstance(decisions, list):
            self._effects.send(event.peer, decisions)
            return False
        is_staged = not push.probe and Decision.STAGE in decisions
        if not push.probe:
            self._stage(event, push, request, rank, targets, decisions)
            if self._view.is_sync and is_staged:
                self._disputes.pushed(rank)
        if push.settled > self._readings.over:
            self._readings.step_is_over(push.settled)
        if self._captures.is_on:
            self._captures.step_is_over()
        takes = taken_by(push) if push.pull and isinstance(push, Push) else ""
        pending = Pending(event.peer, event.sender, push.request, True, push.pull, len(targets), takes=takes)
        self._waiters.wait(pending, rank, targets, _uncounted(decisions) if is_apart else ())
        for target in targets:
            self.advance(target.group)
        self._look_after([target.group for target in targets])
        if (
            (push.probe or event.nbytes > self._small_push_bytes)
            and not pending.closed
            and any(target.group.log.counted_clock(rank) < target.clock for target in targets)
        ):
            self._say_staged(pending)
        return is_staged and self._view.is_sync and push.how == ADD and not self._disputes.open

    def _take_batch(self, event: Received, push: PushBatch) -> bool:
        """Takes a push of a batch by a verdict that was kept. False: nothing was done."""
        admitted = self._verdicts.find(event.peer, event.sender, push.batch)
        if admitted is None:
            return False
        group, verdict = admitted
        if event.nbytes != group.nbytes or push.how != ADD or push.probe:
            return False
        return self.take(group, verdict, event.sender, push, push.clock, push.samples, event.payload, event.nbytes)

    def _take_rows(self, event: Received, push: Push) -> bool:
        """Takes a push to a part of a table by a verdict that was kept. False: nothing was done."""
        part, nbytes = push.parts[0], event.nbytes
        slice_ = self._targets.table_part(part)
        if slice_ is None or not (
            len(push.parts) == 1
            and push.how == ADD
            and not (push.pull or push.probe or push.coding is not None or event.fault)
            and slice_.spec.num_rows(nbytes) is not None
        ):
            return False
        admitted = self._verdicts.find(event.peer, event.sender, 0, slice_.group)
        if admitted is None or self._memory.row_error(slice_.key, slice_.spec, nbytes):
            return False
        return self.take(*admitted, event.sender, push, part.clock, push.samples, event.payload, nbytes)

    def take(
        self,
        group: FusedGroup,
        verdict: Verdict,
        sender: int,
        push: PushBatch | Push | PushNumbers,
        clock: int,
        samples: int,
        payload: Buffer,
        nbytes: int,
    ) -> bool:
        """Stages a contribution that a verdict admits, of the right size, and lets it wait for its round.

        Args:
            push: its numbers.
            payload: its `nbytes` bytes.

        Returns:
            False if it is not plainly the next push of its worker: nothing was done.
        """
        rank, peer, request, log = verdict.rank, verdict.peer, push.request, group.log
        if not log.is_next(rank, clock, sender, request):
            return False
        pending = Pending(peer, sender, request, True, push.pull, 1)
        if not self._waiters.wait_for_round(pending, group, rank, clock):
            return False
        given = Contribution(rank, clock, Span(payload, 0, nbytes), samples, ADD, push.step, push.place)
        log.stage(given, PushRequest(sender, request))
        if push.settled > self._readings.over:
            self._readings.step_is_over(push.settled)
        if self._captures.is_on:
            self._captures.step_is_over()
        self.advance(group)
        if self.late.is_on or self._participants.dead or self._disputes.open:
            self._look_after((group,))
        if nbytes > self._small_push_bytes and not pending.closed and log.closed < clock:
            self._say_staged(pending)
        return True

    def _look_after(self, groups: Sequence[FusedGroup]) -> None:
        """Pushes to these groups wait for their rounds: some of them may wait for a worker that is late or dead, or for
        workers that disagree."""
        if self.late.is_on:
            for group in groups:
                self.late.staged(group)
        for group in groups:
            self._participants.fail_blocked(group)
            self._disputes.fail_waiting(group)

    def _say_staged(self, pending: Pending) -> None:
        self._effects.send(pending.peer, Staged(pending.request))

    # ── stage ──

    def _stage(
        self,
        event: Received,
        push: Push | PushBatch,
        request: PushRequest,
        rank: int,
        targets: Sequence[PushTarget],
        decisions: Sequence[Decision],
    ) -> None:
        """Each part of the payload starts at a multiple of 8."""
        self._participants.wake(rank)
        coding = asked_by(push) if isinstance(push, Push) else None
        offset = 0
        for target, decision in zip(targets, decisions, strict=True):
            if decision is Decision.STAGE:
                span = None if push.how == ABSENT else Span(event.payload, offset, target.nbytes)
                given = Contribution(rank, target.clock, span, push.samples, push.how, push.step, push.place, coding)
                target.group.log.stage(given, request)
                if not self._view.is_sync:
                    self._participants.pushed(rank, target.group.log)
            offset += padded(target.nbytes)

    # ── close ──

    def advance(self, group: FusedGroup) -> None:
        """Closes the group's next round if it is complete, and has it applied. One job of a group runs at a time."""
        if group.working or group.is_gone:
            return
        if group.tasks and group.log.closing is None:
            group.working = True
            group.tasks.pop(0)()
            return
        if self._disputes.open or (self._leaving and group.partition in self._leaving):
            return
        record = group.log.close_next(self._participants.awaited)
        while record is not None and not record.contributions:  # all who owed it a push have left: no bytes change
            if self._records.holders and self._records.is_held(group.partition):
                self._hold(group, record, unchanged(group), Use(group.optimizer, group.generation))
                return
            self._commit(group, unchanged(group))
            record = group.log.close_next(self._participants.awaited)
        if record is not None and self._captures.is_on:
            self._captures.before_apply(group, record, partial(self.apply, group, record))
        elif record is not None:
            self.apply(group, record)

    # ── apply ──

    def apply(self, group: FusedGroup, record: Record) -> None:
        """Start the update of a round that is closed."""
        use = self._use_of(group, record)
        update = self._update_of(group, record, use, self._effects.new_job())
        self._effects.await_job(update.job, partial(self._applied, group, record, use, update))
        self._effects.emit(update)

    def _use_of(self, group: FusedGroup, record: Record) -> Use:
        """What the update of a closed round uses. Another optimizer may be set while it is under way."""
        optimizer = group.optimizer_for(record.number)
        coding = None
        if (
            optimizer is None
            and self._view.is_sync
            and record.contributions[0].coding is not None
            and not record.assign
        ):
            coding = merged_coding(group, record, self._merge_of(group))
        return Use(optimizer, group.generation, coding)

    def _update_of(self, group: FusedGroup, record: Record, use: Use, job: int) -> Apply:
        """The update of a closed round, as the job of this number."""
        optimizer, coding, assign = use.optimizer, use.coding, record.assign
        keeps_merged = (
            bool(self._records.holders)
            and (group.is_of_table or ((optimizer is not None or coding is not None) and not assign))
            and self._records.is_held(group.partition)
        )
        if optimizer is not None and not is_updated(group.dtype):
            optimizer = None
        pulled = None
        if optimizer is not None and not (self._view.is_sync or assign) and group.keeps_pulled:
            pulled = group.log.progress_of(record.contributions[0].rank).kept
        return Apply(
            job,
            group.number,
            group.layout,
            group.dtype,
            group.nbytes,
            group.log.current,
            record.contributions,
            assign,
            self._merge_of(group),
            optimizer,
            keeps_merged=keeps_merged,
            pulled=pulled,
            encoding=None if coding is None else Encoding(coding, record.number),
        )

    def _merge_of(self, group: FusedGroup) -> str:
        return group.slices[0].spec.merge or self._view.settings.merge or "sum"

    def _applied(self, group: FusedGroup, record: Record, use: Use, update: Apply, done: JobDone) -> None:
        """The job has ended: the round becomes a version, or counts for nobody."""
        if group.is_gone:  # another server leads it: what was made here counts for nobody
            group.log.give_up()
            return
        if done.error is not None:
            self._not_applied(group, done.error)
            self._go_on(group)
            return
        is_tuple = update.keeps_merged or update.encoding is not None
        made = Made(*done.result) if is_tuple else Made(done.result)
        if self._records.holders and self._records.is_held(group.partition):
            self._hold(group, record, made, use)
        else:
            self._commit(group, made)
            self._go_on(group)

    def _go_on(self, group: FusedGroup) -> None:
        self.advance(group)
        if self._participants.dead:
            self._participants.fail_blocked(group)

    # ── hold ──

    def _hold(self, group: FusedGroup, record: Record, made: Made, use: Use) -> None:
        """The backup holds the record before the round is a version."""
        messages = record_of(group, record, made, use)
        remaining = len(messages)

        def held(_: Refused | None) -> None:
            nonlocal remaining
            remaining -= 1
            if not remaining:
                self._held(group, made)

        for message, payload in messages:
            self._records.hold_round(group.partition, message, held, payload, group.slices[0].slice_id)

    def _held(self, group: FusedGroup, made: Made) -> None:
        if group.is_gone:
            group.log.give_up()
            return
        self._commit(group, made)
        self._go_on(group)

    # ── commit, answer ──

    def _commit(self, group: FusedGroup, made: Made) -> None:
        """The closed round becomes a version, and those who waited for it are answered."""
        record = group.commit(made.buffer, made.encoded)
        if group.is_of_table:
            self._memory.rows_applied()
        if not self._view.is_sync:
            self.staleness.committed(group, record)
        self._waiters.settle(group)
        if self._readings.is_on:
            self._readings.committed(group)
        if self._captures.is_on:
            self._captures.committed(group)

    # ── a worker that is lost ──

    def leave_out_the_lost(self, groups: Iterable[FusedGroup]) -> None:
        """What the lost have staged for open rounds counts in none, and they are told so, should they come back."""
        for group in groups if self._participants.apart else ():
            for rank in self._participants.apart:
                group.log.drop_unclosed(rank)
                self._waiters.leave_out(group, rank)

    # ── an update that fails ──

    def _not_applied(self, group: FusedGroup, error: KvdError) -> None:
        """The update failed: those whose pushes were in it are refused, and those who staged later ones."""
        record = group.log.give_up()
        clocks = {contribution.rank: contribution.clock for contribution in record.contributions}
        self._effects.emit(LogEntry("error", f"{group.description} could not be updated: {error}"))
        text = f"the update of {group.key!r} failed: {error}"[:MAX_TEXT_CHARS]
        code = code_of(error)
        waiting, group.waiting = group.waiting, []
        for entry in waiting:
            if entry.rank not in clocks or entry.clock < clocks[entry.rank]:
                group.waiting.append(entry)
                continue
            pending = entry.pending
            if pending.push:
                request = PushRequest(pending.sender, pending.request)
                group.log.refuse(entry.rank, Refusal(request, code, text))
            taken = Taken.PART if pending.is_of_many else Taken.NOTHING  # the other slices have taken theirs
            self._waiters.fail(pending, Refused(pending.request, code, text, group.key, taken))


def _uncounted(decisions: Sequence[Decision]) -> list[int]:
    return [position for position, decision in enumerate(decisions) if decision is Decision.UNCOUNTED]
