"""A rank resumes: its new holder asks for its clocks, takes part in the rounds again, and says where its program is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvd.core.machine import Received
from kvd.core.membership import ViewState
from kvd.core.places import START, PlaceKind, place_of
from kvd.core.server.attachments import Attachments
from kvd.core.server.effects import ServerEffects
from kvd.core.server.elsewhere import Elsewhere
from kvd.core.server.groups import FusedGroup
from kvd.core.server.keys import KeyTable
from kvd.core.server.optimizer_agreement import OptimizerAgreement
from kvd.core.server.records import Records
from kvd.core.server.rounds import SliceLog
from kvd.core.server.targets import TargetResolver
from kvd.protocol.messages import (
    NO_PLACE,
    Activate,
    ClockQuery,
    Clocks,
    ComeTo,
    Done,
    ErrorCode,
    HoldActivated,
    HoldPlace,
    NotYetReason,
    StepInto,
    TheyAre,
    WhereAre,
)

MOST_AHEAD = 1024
"""No slice of a key is so many rounds ahead of another. Rounds that nobody owes a push close at once, all of them."""

OF_RESUMPTION: frozenset[type[Any]] = frozenset({ClockQuery, Activate, WhereAre, StepInto, ComeTo})
"""The messages that it takes: what they ask for, or change, is spread over all slices that a server leads."""


class Resumption:
    """Answers ClockQuery, Activate, WhereAre, StepInto and ComeTo. `advance` closes the next round of a group if it is
    complete."""

    def __init__(
        self,
        view: ViewState,
        table: KeyTable,
        effects: ServerEffects,
        attachments: Attachments,
        targets: TargetResolver,
        records: Records,
        elsewhere: Elsewhere,
        agreement: OptimizerAgreement,
        advance: Callable[[FusedGroup], None],
    ) -> None:
        self._view = view
        self._table = table
        self._effects = effects
        self._attachments = attachments
        self._targets = targets
        self._records = records
        self._elsewhere = elsewhere
        self._agreement = agreement
        self._advance = advance
        self._stepped_in: dict[int, tuple[int, int]] = {}  # rank → who has stepped in, and its latest request for that
        self.handlers: dict[type[Any], Callable[[Received, Any], None]] = {
            ClockQuery: self.clocks,
            Activate: self.activate,
            WhereAre: self.where_are,
            StepInto: self.step_into,
            ComeTo: self.come_to,
        }

    def clocks(self, event: Received, query: ClockQuery) -> None:
        rank = self._attachments.rank_of(event, query.request)
        if rank is None:
            return
        logs = [slice_.log for slice_ in self._table.of_key(query.key)]
        if not logs:
            if self._elsewhere.is_news(event, query.request, query.key):
                return
            text = f"no slice of {query.key!r} is here"
            self._effects.refuse(event.peer, query.request, ErrorCode.KEY_NOT_FOUND, text, query.key)
            return
        if any(log.is_closing_of(rank) for log in logs):
            # The update may yet fail. A worker that took the clock for counted would then wait for its own push.
            text = "a push of this rank is being applied"
            self._effects.not_yet(event.peer, query.request, NotYetReason.UPDATING, text, query.key)
            return
        clocks = [max(log.counted_clock(rank), log.resume_clock(rank)) for log in logs]
        versions = [log.version for log in logs]
        place = max(log.progress_of(rank).place for log in logs)
        begun = min(log.begun_at(rank, query.place) for log in logs)
        passed_by = any(log.sync and log.progress_of(rank).staged < log.closed for log in logs)
        answer = Clocks(
            query.request, min(clocks), max(clocks), min(versions), max(versions), place, begun, passed_by=passed_by
        )
        self._effects.send(event.peer, answer)

    def activate(self, event: Received, activate: Activate) -> None:
        rank = self._attachments.rank_of(event, activate.request)
        if rank is None:
            return
        slices = self._table.of_key(activate.key)
        if not slices and self._elsewhere.is_news(event, activate.request, activate.key):
            return
        if any(slice_.creation != activate.creation for slice_ in slices):
            slices = []  # it speaks of a key that was deleted
        targets = self._targets.of_slices(event, activate.request, slices, [activate.clock] * len(slices), push=True)
        if targets is None:
            return
        logs = [target.group.log for target in targets]
        if any(activate.clock > log.staged_clock(rank) + log.rounds_ahead + MOST_AHEAD for log in logs):
            text = f"worker {rank} has not come to push {activate.clock} of key {activate.key!r}"
            self._effects.refuse(event.peer, activate.request, ErrorCode.NOT_ALLOWED, text, activate.key)
            return
        records = []
        for target in targets:
            group, slice_ = target.group, target.slice
            closed = group.log.version
            group.log.activate(rank, activate.clock)
            if slice_ is not None and self._records.is_held(group.partition):  # what is staged is not
                record = HoldActivated(0, group.partition, slice_.slice_id, closed, rank, activate.clock)
                records.append((group.partition, record))
        for target in targets:
            self._advance(target.group)
        self._records.hold_in(records, lambda: self._effects.send(event.peer, Done(activate.request)))

    # ── after a loss ──

    def where_are(self, event: Received, query: WhereAre) -> None:
        rank = self._attachments.rank_of(event, query.request)
        if rank is None or (query.frozen and not self._waits_for(rank, event, query.request)):
            return
        logs = [group.log for group in self._table.groups.values()]
        place = max([log.newest_place() for log in logs], default=START)
        own = max([log.progress_of(rank).place for log in logs], default=START)
        self._effects.send(event.peer, TheyAre(query.request, place, own))

    def step_into(self, event: Received, message: StepInto) -> None:
        rank = self._attachments.rank_of(event, message.request)
        if rank is None or not self._waits_for(rank, event, message.request):
            return
        is_copy = self._is_copy(rank, event, message)
        if not is_copy:
            self._agreement.comes_in(rank)
        records = []
        kind = PlaceKind.OUTSIDE if message.is_past_loop else PlaceKind.STEP
        place = place_of(kind, message.step) if message.step else NO_PLACE
        groups = list(self._table.groups.values())
        for group in groups:
            log, version = group.log, group.log.version
            if not is_copy:
                clock = log.clock_of_step(message.first, message.step - 1) if message.step else _newest_clock(log)
                log.activate(rank, clock, place)
            if self._records.is_held(group.partition):  # what is staged is not
                clock = log.progress_of(rank).skipped if log.sync else log.committed_clock(rank)
                records += [
                    (group.partition, HoldActivated(0, group.partition, slice_.slice_id, version, rank, clock, place))
                    for slice_ in group.slices
                ]
        for group in groups:
            self._advance(group)
        self._records.hold_in(records, lambda: self._effects.send(event.peer, Done(message.request)))

    def _is_copy(self, rank: int, event: Received, message: StepInto) -> bool:
        """Whether the worker has stepped in with this request before. The others have gone on since: it must not be
        moved to where they are now, past pushes of its own."""
        sender, request = self._stepped_in.get(rank, (0, 0))
        if sender == event.sender and message.request <= request:
            return True
        self._stepped_in[rank] = event.sender, message.request
        return False

    def _waits_for(self, rank: int, event: Received, request: int) -> bool:
        """Whether the rounds wait for this rank, as this server's view says, which is not older than the sender's. If
        not, the sender is told to ask again, or that it is lost once more.

        An earlier view is not enough, even if it names this rank: it may leave out others that wait at the point to
        which all have come since.
        """
        is_old = event.epoch > self._view.epoch
        if rank in self._view.required_ranks() and not is_old:
            return True
        if is_old:
            text = "the view that says that the rounds wait for this worker is on its way"
            self._effects.not_yet(event.peer, request, NotYetReason.UPDATING, text)
        else:
            text = f"the rounds go on without worker {rank} again: it was silent meanwhile"
            self._effects.refuse(event.peer, request, ErrorCode.NOT_ALLOWED, text)
        return False

    # ── where its program is ──

    def come_to(self, event: Received, message: ComeTo) -> None:
        rank = self._attachments.rank_of(event, message.request)
        if rank is None:
            return
        for group in self._table.groups.values():
            group.log.move_to(rank, message.place)
        records = [(partition, HoldPlace(0, partition, rank, message.place)) for partition in self._records.partitions]
        self._records.hold_in(records, lambda: self._effects.send(event.peer, Done(message.request)))


def _newest_clock(log: SliceLog) -> int:
    """The newest clock of all ranks: that of the newest closed round, or in async mode, where each has its own, the
    largest."""
    if log.sync:
        return log.closed
    return max((log.staged_clock(rank) for rank in log.progress), default=0)
