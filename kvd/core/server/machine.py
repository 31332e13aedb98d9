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
    Complete,
    Effect,
    Event,
    HandshakeFailed,
    InvalidFrame,
    JobDone,
    LocalCall,
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
from kvd.core.server.express import ExpressRounds
from kvd.core.server.giving_up import GivingUp
from kvd.core.server.handover import Handovers
from kvd.core.server.healing import Healing
from kvd.core.server.held import HeldPartition
from kvd.core.server.key_creation import KeyCreation
from kvd.core.server.key_requests import KeyRequests
from kvd.core.server.keys import KeyTable
from kvd.core.server.lane import PushLane
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
from kvd.core.server.row_lane import RowLane
from kvd.core.server.row_lists import RowLists
from kvd.core.server.shared_steps import SharedSteps
from kvd.core.server.slice_states import SliceStates
from kvd.core.server.stillness import Stillness
from kvd.core.server.syncing import Syncing
from kvd.core.server.targets import TargetResolver
from kvd.core.server.wait_answers import WaitAnswers
from kvd.core.server.waiting import Waiters
from kvd.core.session import FIRST_REQUEST, SchedulerSession
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
_USUAL = frozenset({PushBatch, PullBatch, Push, PullRows})  # the lanes say themselves what they forget when these come


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What a server is told besides what the view says.

    Attributes:
        memory_limit_bytes: an init that would take the server beyond it is refused.
        fail_on_worker_loss: whether calls that wait for a dead worker fail.
        small_push_bytes: pushes of up to this many bytes are not answered by Staged.
        lanes: whether pushes that are made again and again go a short way, see `kvd.core.server.lane`.
    """

    memory_limit_bytes: int
    fail_on_worker_loss: bool
    small_push_bytes: int = SMALL_PUSH_BYTES
    lanes: bool = True


class _Timed(NamedTuple):
    """Those that have something to do at times, while they are on."""

    readings: Readings
    captures: Captures
    late: LateWorkers
    replication: Replication


class Fast(NamedTuple):
    """What a training loop repeats goes this way: see `PushLane.hold` and `ExpressRounds.end`."""

    lane: PushLane
    express: ExpressRounds


class _Followers(NamedTuple):
    """Who is told of a new view, of the incarnation of a worker that was replaced, and of any message but `_USUAL`."""

    of_views: tuple[Callable[[], None], ...]
    of_replaced: tuple[Callable[[int], None], ...]
    of_unusual: Callable[[], None]


class ServerMachine:
    """The state machine of one run in a server. Its memory is shared with the machines of the other runs.

    Attributes:
        fast: what may be done in place of a step.
    """

    def __init__(self, settings: ServerSettings, session: SchedulerSession, memory: ServerMemory | None = None) -> None:
        self.incarnation = session.incarnation
        self.table = KeyTable()
        self._session = session
        self._memory = memory = memory or ServerMemory(settings.memory_limit_bytes)
        self._effects = effects = ServerEffects()
        batches = BatchTable()
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

        records = Records(session, effects, lambda: self.table.creation, no_copy, lambda *failed: syncing.fail(*failed))
        replicas = Replicas(
            session,
            self.table,
            effects,
            use.grant_held,
            use.grant_held_rows,
            lambda partition: no_copy(partition, session.incarnation),
        )
        elsewhere = Elsewhere(session, effects, replicas.is_handing_over)
        readings = Readings(session.view, self.table, effects, participants, elsewhere)
        pauses = Pauses(lambda group: self._pushes.advance(group))
        captures = Captures(session.view, self.table, effects, readings, pauses, use.copy_error)
        targets = TargetResolver(session, self.table, batches, attachments, effects, records, elsewhere)
        self._pushes = pushes = Pushes(
            session.view,
            effects,
            attachments,
            targets,
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
        stillness = Stillness(participants, disputes, captures, pushes.late, elsewhere.leaving)
        express = ExpressRounds(
            effects, waiters, participants, pushes, stillness, small_push_bytes=settings.small_push_bytes
        )
        lane = PushLane(
            effects,
            attachments,
            batches,
            self.table,
            waiters,
            stillness,
            readings,
            pushes.push_batch,
            pushes.advance,
            express,
            small_push_bytes=settings.small_push_bytes,
            is_on=settings.lanes,
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
        pulls = Pulls(effects, attachments, targets, waiters, participants, disputes, use.ids_error)

        def forget_all() -> None:
            lane.forget()
            row_lane.forget()

        row_lane = RowLane(
            effects,
            attachments,
            self.table,
            waiters,
            stillness,
            readings,
            use,
            pushes,
            pulls,
            forget_all,
            small_push_bytes=settings.small_push_bytes,
            is_on=settings.lanes,
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
        self.fast = Fast(lane, express)
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
            of_unusual=forget_all,
        )
        resumption = Resumption(
            session.view, self.table, effects, attachments, targets, records, elsewhere, agreement, pushes.advance
        )
        self._handlers: dict[type[Any], Callable[[Received, Any], None]] = {
            PushBatch: lane.push_batch,
            PullBatch: pulls.pull_batch,
            Push: row_lane.push,
            Pull: pulls.pull,
            PullRows: row_lane.pull,
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
        if not self.fast.express.is_idle:
            self.fast.express.materialize()
        if readings.is_on:
            readings.tick(now)
        if captures.is_on:
            captures.tick(now)
        if late.is_on:
            late.tick(now)
        if isinstance(event, Received):
            self._receive(event, now)
        elif isinstance(event, JobDone):
            self._effects.end_job(event)
            self._deletions.advance()
            if replication.is_on:
                replication.job_ended()
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
        return self._effects.take()

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
        self.fast.express.validate(self.table.groups.values())

    # ── dispatch ──

    def _receive(self, event: Received, now: float) -> None:
        message = event.message
        if type(message) not in _USUAL:
            self._followers.of_unusual()
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
        self.fast.express.is_on = not self._timed.replication.is_on
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
