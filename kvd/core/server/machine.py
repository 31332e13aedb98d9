"""One run in a server: it leads slices, merges what the workers push, and serves what is committed.

The machine is its table of messages and the parts that it owns; `push` tells the life of a push, `pull` that of a pull.
A worker's death arrives as a view: `_view_changed` detaches replaced workers (`attachments`), takes over who takes part
(`participants`), fails the look-ups that wait for worker 0 (`key_requests`), lets rounds close that no longer wait for
anyone (`push`), and tells those who wait for the dead (`participants`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvd.core.machine import (
    SCHEDULER,
    Buffer,
    Complete,
    Effect,
    Event,
    HandshakeFailed,
    InvalidFrame,
    JobDone,
    LocalCall,
    Peer,
    PeerKind,
    Received,
)
from kvd.core.membership import name_of
from kvd.core.server.attachments import Attachments
from kvd.core.server.batches import BatchTable
from kvd.core.server.captures import Captures
from kvd.core.server.checks import Checks
from kvd.core.server.control import ServerControl
from kvd.core.server.deletions import Deletions
from kvd.core.server.disputes import Disputes
from kvd.core.server.effects import ServerEffects
from kvd.core.server.elsewhere import Elsewhere
from kvd.core.server.giving_up import GivingUp
from kvd.core.server.handover import Handovers
from kvd.core.server.healing import Healing
from kvd.core.server.held import HeldPartition
from kvd.core.server.key_creation import KeyCreation
from kvd.core.server.key_requests import KeyRequests
from kvd.core.server.keys import KeyTable
from kvd.core.server.late import LateWorkers
from kvd.core.server.leadership import Leadership
from kvd.core.server.memory import ServerMemory
from kvd.core.server.memory_use import MemoryUse
from kvd.core.server.optimizer_agreement import OptimizerAgreement
from kvd.core.server.optimizer_records import OptimizerRecords
from kvd.core.server.out_of_step import OutOfStep
from kvd.core.server.participants import Participants
from kvd.core.server.pauses import Pauses, SliceJobs
from kvd.core.server.pull import Pulls
from kvd.core.server.push import Pushes
from kvd.core.server.readings import Readings
from kvd.core.server.records import Records
from kvd.core.server.replicas import Replicas
from kvd.core.server.replication import Replication
from kvd.core.server.resume import OF_RESUMPTION, Resumption
from kvd.core.server.round_watch import RoundWatch
from kvd.core.server.row_lists import RowLists
from kvd.core.server.shared_steps import SharedSteps
from kvd.core.server.slice_states import SliceStates
from kvd.core.server.syncing import Syncing
from kvd.core.server.targets import TargetResolver
from kvd.core.server.verdicts import Regime, Verdicts
from kvd.core.server.wait_answers import WaitAnswers
from kvd.core.server.waiting import Waiters
from kvd.core.session import FIRST_REQUEST, SchedulerSession
from kvd.protocol.fixed import PushNumbers
from kvd.protocol.messages import (
    NO_RUN,
    SMALL_PUSH_BYTES,
    Attach,
    DeclareBatch,
    Delete,
    Departure,
    Done,
    Drop,
    Epoch,
    ErrorCode,
    HeartbeatAck,
    Hold,
    HoldRows,
    Init,
    Leave,
    ListKeys,
    ListRows,
    Lookup,
    NotYet,
    Publish,
    Pull,
    PullBatch,
    PullRows,
    Push,
    PushBatch,
    ReadDone,
    ReadSlices,
    Refused,
    Rest,
    SetOptimizer,
    StatusQuery,
    StatusReport,
    Survey,
    TakeStep,
    UpdateOptimizer,
    View,
    ViewChange,
    WaitQuery,
)

# What these ask for, or change, is spread over all slices that a server leads.
ABOUT_ALL_SLICES = frozenset({Attach, Drop, TakeStep, SetOptimizer, UpdateOptimizer}) | OF_RESUMPTION
# These change nothing that the admission of a push depends on, apart from the groups and batches that they are about.
_KEEP_REGIME = frozenset(
    {PushBatch, PullBatch, Push, Pull, PullRows, DeclareBatch, HeartbeatAck, Hold, HoldRows, Done, StatusQuery}
)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What a server is told besides what the view says.

    Attributes:
        memory_limit_bytes: an init that would take the server beyond it is refused.
        fail_on_worker_loss: whether calls that wait for a dead worker fail.
        small_push_bytes: pushes of up to this many bytes are not answered by Staged.
    """

    memory_limit_bytes: int
    fail_on_worker_loss: bool
    small_push_bytes: int = SMALL_PUSH_BYTES


class _Timed(NamedTuple):
    """Those that have something to do at times, while they are on."""

    readings: Readings
    captures: Captures
    late: LateWorkers
    replication: Replication


class _Followers(NamedTuple):
    """Who is told of a new view, and of the incarnation of a worker that was replaced."""

    of_views: tuple[Callable[[], None], ...]
    of_replaced: tuple[Callable[[int], None], ...]


class ServerMachine:
    """The state machine of one run in a server. Its memory is shared with the machines of the other runs.

    Attributes:
        regime: the changes that verdicts on pushes may depend on.
        records: for backups. If they have new ones after `push` or `end_job`, `take_records` comes next.
        take_effects: returns the effects of `push` and `end_job`.
    """

    def __init__(self, settings: ServerSettings, session: SchedulerSession, memory: ServerMemory | None = None) -> None:
        self.incarnation = session.incarnation
        self.table = KeyTable()
        self._session = session
        self._memory = memory = memory or ServerMemory(settings.memory_limit_bytes)
        self._effects = effects = ServerEffects()
        self.take_effects = effects.take
        self.regime = Regime()
        out_of_step = OutOfStep(session, effects)
        self._memory_use = use = MemoryUse(
            session,
            self.table,
            memory,
            lambda: replicas.nbytes,
            lambda: replicas.table_nbytes,
            lambda: waiters.pending.row_ids_nbytes,
            lambda: captures.copied_nbytes,
            lambda: healing.nbytes,
            lambda: captures.give_up(),
            lambda: self._control.optimizer,
        )
        self._attachments = attachments = Attachments(session.view, self.table, effects)
        self._waiters = waiters = Waiters(effects)
        self._participants = participants = Participants(waiters, fail_on_loss=settings.fail_on_worker_loss)
        healing = Healing(session, effects, attachments, use.state_error, use.give_back)
        agreement = OptimizerAgreement()
        disputes = Disputes(agreement, self.table, waiters)

        def no_copy(partition: int, incarnation: int) -> None:
            if out_of_step.add(partition, incarnation):
                syncing.was_no_copy(partition, incarnation)

        self.records = records = Records(
            session, effects, lambda: self.table.creation, no_copy, lambda *failed: syncing.fail(*failed)
        )
        replicas = Replicas(
            session,
            self.table,
            effects,
            use.grant_held,
            use.grant_held_rows,
            lambda partition: no_copy(partition, session.incarnation),
        )
        elsewhere = Elsewhere(session, effects, replicas.is_handing_over)
        batches = BatchTable()
        self._verdicts = verdicts = Verdicts(self.regime, self.table, batches, elsewhere.leaving)
        readings = Readings(session.view, self.table, effects, participants, elsewhere)
        pauses = Pauses(lambda group: self._pushes.advance(group))
        captures = Captures(session.view, self.table, effects, readings, pauses, use.copy_error)
        targets = TargetResolver(session, self.table, batches, attachments, effects, records, elsewhere)
        self._pushes = pushes = Pushes(
            session.view,
            effects,
            attachments,
            targets,
            verdicts,
            waiters,
            participants,
            disputes,
            readings,
            records,
            elsewhere.leaving,
            captures,
            LateWorkers(session, effects, participants),
            use,
            small_push_bytes=settings.small_push_bytes,
        )
        slice_jobs = SliceJobs(self.table, effects, elsewhere, pauses)
        held = OptimizerRecords(effects, records, pauses)
        self._control = control = ServerControl(
            self.table,
            effects,
            attachments,
            agreement,
            disputes,
            records,
            SliceStates(effects, records, slice_jobs, use.row_error, held),
            held,
            session,
            pushes.advance,
            use.check_for,
        )
        self._deletions = deletions = Deletions(
            self.table, effects, attachments, participants, waiters, records, elsewhere, use.give_back
        )
        creation = KeyCreation(
            session,
            self.table,
            effects,
            attachments,
            control,
            deletions.take_away,
            use,
            records,
            elsewhere,
        )
        keys = KeyRequests(session, self.table, effects, attachments, participants, records, elsewhere)
        self._watch = RoundWatch(session.view, self.table, participants, keys, records, pushes.staleness)
        self._pulls = pulls = Pulls(
            effects, attachments, targets, verdicts, waiters, participants, disputes, use.ids_error
        )
        shared = SharedSteps(session.view, effects, attachments, participants, records, self._advance_all)
        handovers = Handovers(
            session, self.table, effects, records, control.held, elsewhere, replicas.is_handing_over, self._woken
        )
        giving_up = GivingUp(
            session, self.table, effects, replicas, control, keys, deletions, shared, waiters, readings, captures
        )
        leadership = Leadership(
            session,
            self.table,
            effects,
            replicas,
            control,
            shared,
            elsewhere,
            handovers,
            giving_up,
            lambda partition: no_copy(partition, session.incarnation),
            pushes.advance,
        )
        syncing = Syncing(session, self.table, effects, records, shared, control, replicas.is_handing_over, pauses)
        checks = Checks(session, self.table, effects, records, elsewhere.leaving, no_copy, pauses)
        replication = Replication(
            session,
            effects,
            records,
            replicas,
            leadership,
            syncing,
            out_of_step,
            elsewhere,
            handovers,
            giving_up,
            checks,
        )
        self._replicas = replicas
        self._timed = _Timed(readings, captures, pushes.late, replication)
        self._validated = (
            session,
            self.table,
            attachments,
            creation,
            keys,
            deletions,
            agreement,
            readings,
            captures,
            shared,
            healing,
            replication,
        )
        self._followers = _Followers(
            of_views=(
                shared.view_changed,
                keys.fail_lookups_without_rank_0,
                deletions.view_changed,
                healing.view_changed,
            ),
            of_replaced=(control.drop_sender, batches.drop_sender),
        )
        resumption = Resumption(
            session.view, self.table, effects, attachments, targets, records, elsewhere, agreement, pushes.advance
        )
        self._handlers: dict[type[Any], Callable[[Received, Any], None]] = {
            PushBatch: pushes.push_batch,
            PullBatch: pulls.pull_batch,
            Push: pushes.push,
            Pull: pulls.pull,
            PullRows: pulls.pull_rows,
            ListRows: RowLists(effects, attachments, slice_jobs).list,
            DeclareBatch: targets.declare,
            Attach: attachments.attach,
            Init: creation.init,
            Publish: keys.publish,
            Lookup: keys.lookup,
            Delete: deletions.delete,
            Drop: deletions.drop,
            ListKeys: keys.list,
            **resumption.handlers,
            TakeStep: shared.take,
            Rest: shared.rest,
            StatusQuery: lambda event, query: effects.send(event.peer, StatusReport(query.request)),
            WaitQuery: WaitAnswers(
                self.table, effects, attachments, participants, keys.lookups_of, deletions.waits_of, healing.waits_of
            ).answer,
            Survey: readings.survey,
            ReadSlices: readings.read,
            ReadDone: readings.done,
            **captures.handlers,
            **healing.handlers,
            **dict.fromkeys(replicas.kinds, replication.record),
        }

    # ── the machine's interface ──

    @property
    def run(self) -> int:
        return self._session.run

    @property
    def epoch(self) -> Epoch:
        return self._session.view.epoch

    @property
    def session(self) -> SchedulerSession:
        return self._session

    def leads(self, partition: int) -> bool:
        return self._timed.replication.leads(partition)

    def held(self, partition: int) -> HeldPartition | None:
        """What this server holds of a partition that another one leads, or has not taken over yet."""
        return self._timed.replication.held(partition)

    @property
    def differences(self) -> list[str]:
        """What backups were found to have that is not what this server has."""
        return self._timed.replication.differences

    def step(self, event: Event, now: float) -> list[Effect]:
        readings, captures, late, replication = self._timed
        readings.now = captures.now = now
        if readings.is_on:
            readings.tick(now)
        if captures.is_on:
            captures.tick(now)
        if late.is_on:
            late.tick(now)
        if isinstance(event, Received):
            self._receive(event, now)
        elif isinstance(event, JobDone):
            self.end_job(event)
        elif isinstance(event, LocalCall):
            self._say_goodbye(event)
        elif isinstance(event, InvalidFrame) and event.peer == SCHEDULER:
            self._session.invalid_frame(event.text)
        elif isinstance(event, HandshakeFailed) and event.peer == SCHEDULER:
            self._session.handshake_failed(event.error)
        if self._session.is_due(now):
            self._effects.extend(self._session.tick(now))
            self._watch.look(now)
        if replication.is_on:
            self._effects.extend(replication.tick(now))
        return self.take_effects()

    def push(self, peer: Peer, sender: int, push: PushNumbers, payload: Buffer, nbytes: int) -> bool:
        """Do what `step` does with a small push of a batch, if a verdict admits it and nothing else may be due.

        The effects are for `take_effects`, the ends of their jobs for `end_job`. The push itself changes no deadline.

        Args:
            payload: `nbytes` bytes, which stay as they are.

        Returns:
            False if nothing was done: the push is an event for `step`.
        """
        readings, captures, late, _ = self._timed
        if readings.is_on or captures.is_on or late.is_on:
            return False
        admitted = self._verdicts.find(peer, sender, push.batch)
        if admitted is None:
            return False
        group, verdict = admitted
        return nbytes == group.nbytes and self._pushes.take(
            group, verdict, sender, push, push.clock, 1, payload, nbytes
        )

    def pull(self, peer: Peer, sender: int, pull: PullBatch) -> bool:
        """The same for a pull of a batch."""
        readings, captures, late, _ = self._timed
        return not (readings.is_on or captures.is_on or late.is_on) and self._pulls.take(peer, sender, pull)

    def end_job(self, event: JobDone) -> None:
        """A job has ended."""
        self._effects.end_job(event)
        if self._deletions.going:
            self._deletions.advance()
        if self._timed.replication.is_on:
            self._timed.replication.job_ended()

    def take_records(self, now: float) -> list[Effect]:
        """Return the effects of `push` and `end_job` with the records that go to backups. The deadline may have
        changed."""
        self._effects.extend(self._timed.replication.tick(now))
        return self.take_effects()

    @property
    def memory_used_nbytes(self) -> int:
        """What this run needs now, as counted against the limit, in bytes."""
        return self._memory_use.used_nbytes

    def drop_values(self) -> None:
        """Drop the bytes of all slices: the run is given up, and this machine takes no further step.

        The machine is full of cycles, which the interpreter collects by the number of objects, not by their bytes.
        """
        self.table.drop_values()
        self._replicas.drop_values()
        self._timed.captures.give_up()

    def next_deadline(self) -> float | None:
        due = self._session.next_deadline()
        for part in self._timed:
            if part.is_on and (at := part.next_deadline()) is not None and (due is None or at < due):
                due = at  # without a generator: this is asked after each event
        return due

    def explain(self, now: float, run: int = NO_RUN) -> dict[str, object]:
        groups = self.table.groups.values()
        ranks = self._attachments.ranks
        blockers = {rank for group in groups for rank in self._participants.blockers(group)}
        blockers |= self._deletions.blockers
        return {
            "role": "server",
            "rank": self._session.rank,
            "incarnation": f"{self.incarnation:016x}",
            "view": list(self.epoch),
            "keys": len({slice_.key for slice_ in self.table.slices.values()}),
            "slices": len(self.table.slices),
            "bytes_led": self.table.bytes_led + self.table.table_nbytes,
            "bytes_staged": sum(group.log.staged_nbytes for group in groups),
            "bytes_held_by_readers": self._timed.readings.held_nbytes,
            "bytes_captured": self._timed.captures.kept_nbytes,
            "memory_used_bytes": self._memory_use.used_nbytes,
            "memory_of_other_runs_bytes": self._memory.of_others(self.run),
            "memory_limit_bytes": self._memory.limit_bytes,
            "requests_waiting": len(self._waiters.pending),
            "workers": ranks,
            "paths": {name_of("worker", rank): self._attachments.path_of(rank) for rank in ranks},
            "waiting_for": sorted(name_of("worker", rank) for rank in blockers),
            **self._watch.explain(now),
            "optimizer": self._control.describe(),
            "staleness": self._pushes.staleness.explain(),
            **(self._timed.replication.explain() if self._timed.replication.is_on else {}),
        }

    @property
    def required_ranks(self) -> list[int]:
        """The ranks that rounds wait for."""
        return self._participants.awaited

    def validate(self) -> None:
        """Raises AssertionError if an invariant of the state is broken. For simulators and tests."""
        for part in self._validated:
            part.validate()
        self._participants.validate(self._session.view)
        self._waiters.validate(self.table.groups.values())

    # ── dispatch ──

    def _receive(self, event: Received, now: float) -> None:
        message = event.message
        if type(message) not in _KEEP_REGIME:
            self.regime.change()
        if event.peer == SCHEDULER:
            changed = self._session.receive(event, now)
            self._effects.extend(self._session.take_effects())
            if changed:
                self._view_changed(now)
            return
        if isinstance(message, View | ViewChange | Done | NotYet | Refused):
            if event.peer.kind is PeerKind.SERVER:
                self._timed.replication.answered(event, now)
                self._deletions.advance()
            return
        handler = self._handlers.get(type(message))
        if self._attachments.is_foreign(event):
            self._attachments.refuse_foreign(event)
        elif type(message) in ABOUT_ALL_SLICES and self._postpones(event):
            return
        elif handler is not None:
            handler(event, message)
        elif self._attachments.is_replaced(event.sender):
            self._attachments.rank_of(event, getattr(message, "request", 0))
        elif not self._control.receive(event, now):
            text = f"a server takes no {type(message).__name__}"
            self._effects.refuse(event.peer, getattr(message, "request", 0), ErrorCode.PROTOCOL_ERROR, text)

    def _postpones(self, event: Received) -> bool:
        return not self._attachments.is_replaced(event.sender) and self._timed.replication.postpones(event)

    def _say_goodbye(self, event: LocalCall) -> None:
        """The only thing that its own program asks of a server: to leave in good order."""
        if self._session.joined:
            self._effects.send(SCHEDULER, Leave(FIRST_REQUEST, Departure.LEFT))
        self._session.close()
        self._effects.emit(Complete(event.call))

    # ── the view ──

    def _view_changed(self, now: float) -> None:
        for rank, incarnation in self._attachments.detach_replaced():
            self._forget(rank, incarnation)
        self._participants.update(self._session.view)
        self._timed.replication.view_changed()
        self._attachments.welcome_named()
        for follow in self._followers.of_views:
            follow()
        self._pushes.leave_out_the_lost(self.table.groups.values())
        for group in list(self.table.groups.values()):
            self._pushes.advance(group)
            self._participants.fail_blocked(group)
        self._pushes.late.view_changed(self.table.groups.values(), now)

    def _advance_all(self) -> None:
        for group in list(self.table.groups.values()):
            self._pushes.advance(group)

    def _woken(self) -> None:
        """Partitions that were to be handed over are served again."""
        self._advance_all()
        self._deletions.advance()

    def _forget(self, rank: int, incarnation: int) -> None:
        """The worker was replaced: what it staged for open rounds is dropped, and its requests are not answered."""
        groups = list(self.table.groups.values())
        for drop_sender in self._followers.of_replaced:
            drop_sender(incarnation)
        self._participants.wake(rank)
        self._deletions.drop_rank(rank)
        for group in groups:
            group.log.drop_unclosed(rank)
        self._waiters.drop_sender(incarnation, groups)
