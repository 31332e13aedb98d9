"""What a server is asked besides values: the optimizer, its state, and commands."""

from __future__ import annotations

from collections.abc import Callable

from kvd.core.access import may_operate
from kvd.core.machine import JobDone, LogEntry, Received, Run, Send, Span
from kvd.core.membership import name_of
from kvd.core.refusals import refusal_of
from kvd.core.server.attachments import Attachments
from kvd.core.server.command_answers import CommandAnswers
from kvd.core.server.compressors import compressor_answer
from kvd.core.server.disputes import Disputes
from kvd.core.server.effects import ServerEffects
from kvd.core.server.groups import FusedGroup
from kvd.core.server.keys import KeyTable
from kvd.core.server.optimizer_agreement import OptimizerAgreement
from kvd.core.server.optimizer_records import OptimizerRecords, change_records
from kvd.core.server.pace import Pace
from kvd.core.server.records import Records
from kvd.core.server.slice_states import SliceStates
from kvd.core.server.usable_optimizers import UsableOptimizers
from kvd.core.session import SchedulerSession
from kvd.errors import KvdError, NotAllowed
from kvd.optimizer import Optimizer, changes_from_wire, to_wire, with_hyperparameters
from kvd.protocol.messages import (
    Command,
    CommandResult,
    CompressorQuery,
    Done,
    ErrorCode,
    FetchState,
    HoldOptimizer,
    NotYetReason,
    OptimizerIs,
    OptimizerQuery,
    SetOptimizer,
    StoreState,
    UpdateOptimizer,
)


class ServerControl:
    """The control side of one server. `advance` starts the next job of a group; `check_memory` raises NotAllowed if
    there is none for what an optimizer makes the server keep."""

    def __init__(
        self,
        table: KeyTable,
        effects: ServerEffects,
        attachments: Attachments,
        agreement: OptimizerAgreement,
        disputes: Disputes,
        records: Records,
        states: SliceStates,
        held: OptimizerRecords,
        session: SchedulerSession,
        advance: Callable[[FusedGroup], None],
        check_memory: Callable[[Optimizer | None], None],
    ) -> None:
        self.optimizer: Optimizer | None = None  # with all changes: what a new key starts with
        self.generation = 0  # how many were set
        self._table = table
        self._effects = effects
        self._attachments = attachments
        self._agreement = agreement
        self._disputes = disputes
        self._records = records
        self._states = states
        self._session = session
        self._advance = advance
        self._usable = UsableOptimizers(table, check_memory)
        self._answers = CommandAnswers()
        self.held = held
        self._pace = Pace()  # of new optimizers

    def describe(self) -> object:
        """The optimizer in plain data."""
        return None if self.optimizer is None else to_wire(self.optimizer)

    def drop_sender(self, incarnation: int) -> None:
        self._answers.drop_sender(incarnation)
        self._agreement.drop_sender(incarnation)

    def receive(self, event: Received, now: float) -> bool:
        """Carries the message out if it is one of control. All but questions for the optimizer come from workers."""
        message = event.message
        if isinstance(message, OptimizerQuery):
            self._effects.send(event.peer, OptimizerIs(message.request, self.describe()))
        elif isinstance(message, Command):
            self._command_if_allowed(event, message)
        elif isinstance(message, CompressorQuery):
            if self._attachments.rank_of(event, message.request) is not None:
                self._effects.send(event.peer, compressor_answer(message, name_of("server", self._session.rank)))
        elif isinstance(message, SetOptimizer | UpdateOptimizer | FetchState | StoreState):
            rank = self._attachments.rank_of(event, message.request)
            if rank is not None:
                self._of_worker(event, message, rank, now)
        else:
            return False
        return True

    def _of_worker(
        self, event: Received, message: SetOptimizer | UpdateOptimizer | FetchState | StoreState, rank: int, now: float
    ) -> None:
        if isinstance(message, SetOptimizer) and message.is_trial:
            self._effects.send(event.peer, self._usable.answer(message))
        elif isinstance(message, SetOptimizer):
            self._set_optimizer(event, message, rank, now)
        elif isinstance(message, UpdateOptimizer):
            self._update_optimizer(event, message, rank)
        elif isinstance(message, FetchState):
            self._states.fetch(event, message)
        else:
            self._states.store(event, message)

    # ── the optimizer ──

    def _set_optimizer(self, event: Received, message: SetOptimizer, rank: int, now: float) -> None:
        if self._answers.is_known(event.sender, message.request):
            answer = self._answers.find(event.sender, message.request)
            if answer is not None:
                self._effects.emit(answer._replace(peer=event.peer))
            return
        answer = Send(event.peer, Done(message.request))
        visits, earlier = False, self.generation
        try:
            optimizer = self._usable.of(message)
            is_set = not message.loaded and self._is_set_for(event, rank, optimizer)
            visits = not is_set and self._visits_slices(event, message, rank, optimizer)
            if visits and (self.held.is_open or self._pace.is_paused(now)):
                text = "the optimizer was changed just now"
                self._effects.not_yet(event.peer, message.request, NotYetReason.BUSY, text)
                return
            if message.loaded:
                self._use(optimizer)
            elif not is_set and self._agreement.set(rank, event.sender, optimizer):
                self._use(optimizer)
                self._disputes.find_ahead(rank)
        except KvdError as error:
            answer = Send(event.peer, refusal_of(message.request, error))
        self._answers.start(event.sender, message.request)

        def held() -> None:
            self._answers.finish(event.sender, message.request, answer)
            self._effects.emit(answer)

        if self.generation > earlier:
            self.held.hold(self._generation_records, held, held)  # every server is told: who leads now has it
        else:
            held()
        if visits:
            self._visit_slices()
            self._pace.visited(len(self._table.slices), now)

    def _is_set_for(self, event: Received, rank: int, optimizer: Optimizer | None) -> bool:
        """Whether a rank without which the rounds go on sets what those who take part have set: that changes nothing.
        The first that sets one may be such a rank, as long as nobody has trained.

        Raises:
            NotAllowed: they have set others, or train without one.
        """
        if rank not in self._session.view.ranks_apart():
            return False
        if self._leads_nothing() or self._agreement.set_apart(rank, event.sender, optimizer):
            return True
        if optimizer == self.optimizer:  # a restored one
            return True
        if any(entry.trained for group in self._table.groups.values() for entry in group.log.progress.values()):
            raise NotAllowed("the workers that take part train without an optimizer: run the program that they run")
        return False

    def _generation_records(self) -> list[tuple[int, HoldOptimizer]]:
        """What the backups of all partitions are told of the newest optimizer."""
        return [(partition, self.record(partition)) for partition in self._records.partitions]

    def record(self, partition: int) -> HoldOptimizer:
        """What the backup of a partition is told of the newest optimizer."""
        wire = None if self.optimizer is None else to_wire(self.optimizer)
        as_set = self._agreement.newest
        return HoldOptimizer(0, partition, wire, None if as_set is None else to_wire(as_set), self.generation)

    def newest(self) -> tuple[Optimizer | None, Optimizer | None, int]:
        """The newest optimizer with all changes, as it was set, and how many were set."""
        return self.optimizer, self._agreement.newest, self.generation

    def _visits_slices(self, event: Received, message: SetOptimizer, rank: int, optimizer: Optimizer | None) -> bool:
        """Whether what a worker sets concerns the slices; not if it is what the others have set."""
        if self._disputes.open:
            return True
        if message.loaded:
            return optimizer != self.optimizer
        return self._agreement.is_new(rank, event.sender, optimizer)

    def _visit_slices(self) -> None:
        if self._disputes.open:
            self._disputes.fail_all()
        else:
            for group in list(self._table.groups.values()):
                self._advance(group)

    def learn(self, optimizer: Optimizer | None, as_set: Optimizer | None, generation: int) -> None:
        """What this server leads now has seen later optimizers than those that were set here."""
        if generation > self.generation:
            self.optimizer, self.generation = optimizer, generation
            self._agreement.learn(as_set)

    def _use(self, optimizer: Optimizer | None) -> None:
        """All keys are updated with it from now on. The one in use keeps its state."""
        if optimizer == self.optimizer:
            return
        self.optimizer = optimizer
        self.generation += 1
        self.held.use(self._table.groups.values(), optimizer, self.generation)
        self._effects.emit(LogEntry("info", "optimizer set", {"optimizer": repr(optimizer)}))

    def _update_optimizer(self, event: Received, message: UpdateOptimizer, rank: int) -> None:
        """In sync mode from the sender's next clock on, slice by slice; else at once. Asked twice, it is the same."""
        if self.optimizer is None and self._leads_nothing():
            self._effects.send(event.peer, Done(message.request))  # it learns the optimizer with its first partition
            return
        try:
            if self.optimizer is None:
                raise NotAllowed("no optimizer is set whose hyperparameters could change: call set_optimizer first")
            changes = changes_from_wire(message.changes)
            changed = with_hyperparameters(self.optimizer, changes)
        except KvdError as error:
            self._effects.send(event.peer, refusal_of(message.request, error))
            return
        if self.held.is_open:
            text = "the optimizer was changed just now"
            self._effects.not_yet(event.peer, message.request, NotYetReason.BUSY, text)
            return
        if self._answers.start(event.sender, message.request):
            self.optimizer = changed
            for group in self._table.groups.values():
                if group.log.sync:
                    group.change_from(group.log.staged_clock(rank) + 1, changes)
                elif group.optimizer is not None:
                    group.optimizer_for(group.log.closed + 1)  # earlier changes come first
                    group.optimizer = with_hyperparameters(group.optimizer, changes)
        groups = list(self._table.groups.values())
        self.held.hold(
            lambda: change_records(self._records.partitions, groups, message.changes),
            lambda: self._effects.send(event.peer, Done(message.request)),
            lambda: None,  # it is asked again: the server that leads a part now may have been told when it led nothing
        )

    def _leads_nothing(self) -> bool:
        """Whether the view names other servers as the leaders of all partitions."""
        view = self._session.view
        return bool(view.partitions) and self._session.rank not in view.leads()

    # ── commands ──

    def _command_if_allowed(self, event: Received, message: Command) -> None:
        """The command line asks without a rank: all may be taken when an operator has a question."""
        if may_operate(event.principal) or self._attachments.find(event.sender) is not None:
            self._command(event, message)
            return
        text = (
            f"commands come from workers that have joined, or under an operator's key, not {event.principal.describe()}"
        )
        self._effects.refuse(event.peer, message.request, ErrorCode.NOT_ALLOWED, text)

    def _command(self, event: Received, message: Command) -> None:
        answers, nbytes = self._answers, event.nbytes
        if not answers.is_known(event.sender, message.request) and not answers.may_run(nbytes):
            text = "too many commands wait already"
            self._effects.not_yet(event.peer, message.request, NotYetReason.BUSY, text)
            return
        if not self._answers.start(event.sender, message.request):
            answer = self._answers.find(event.sender, message.request)
            if answer is not None:
                self._effects.emit(answer._replace(peer=event.peer))
            return
        body = Span(event.payload, 0, nbytes)
        answers.runs(nbytes)

        def done(job: JobDone) -> None:
            answers.ran(nbytes)
            size = 0
            if job.error is not None:
                answer = Send(event.peer, refusal_of(message.request, job.error))
            else:
                size = len(job.result)
                answer = Send(event.peer, CommandResult(message.request), (Span(job.result, 0, size),))
            answers.finish(event.sender, message.request, answer, size)
            self._effects.emit(answer)

        self._effects.start_job(lambda job: Run(job, message.head, body), done)
