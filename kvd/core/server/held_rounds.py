"""Rounds that another server has closed, closed here: the replicas of its slices become the next version.

A round is held from the moment at which it is closed in the log here and its update has begun, so at most one of a
group is not applied yet; the next waits, and so does its answer. Others may let something wait for a group in the same
queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from kvd.core.machine import Apply, Contribution, Encoding, JobDone, LogEntry, Received, Span
from kvd.core.server.effects import ServerEffects
from kvd.core.server.groups import FusedGroup, Slice
from kvd.core.server.held import HeldPartition, RecordAnswers
from kvd.core.server.optimizer_names import OptimizerNames
from kvd.core.server.progress import PushRequest
from kvd.errors import KvdError
from kvd.optimizer import Optimizer
from kvd.protocol.messages import ErrorCode, Hold, HoldRows
from kvd.protocol.specs import accumulator_scale, padded

_NO_PUSH = PushRequest(0, 0)
_Take = Callable[[Received, Any, HeldPartition], None]


class _Waiting(NamedTuple):
    """A record that waits for a group to be at rest, and who takes it then."""

    event: Received
    held: HeldPartition
    take: _Take


class HeldRounds:
    """Closes and applies the rounds that leaders have closed.

    Args:
        broken: a partition cannot be held any more.
        ended: an update of this partition has ended.
    """

    def __init__(
        self,
        effects: ServerEffects,
        answers: RecordAnswers,
        optimizers: OptimizerNames,
        broken: Callable[[int], None],
        ended: Callable[[int], None],
    ) -> None:
        self._effects = effects
        self._answers = answers
        self._optimizers = optimizers
        self._broken = broken
        self._ended = ended
        self._waiting: dict[FusedGroup, deque[_Waiting]] = {}  # for the end of an update

    def hold(self, event: Received, message: Hold, held: HeldPartition) -> None:
        """Takes the record of a round."""
        slices = self._slices(event, message, held)
        if slices is None:
            return
        busy = next((slice_.group for slice_ in slices if not slice_.group.is_quiescent), None)
        if busy is not None:
            self.wait(busy, event, held, self.hold)
            return
        optimizer = self._optimizers.find(message.optimizer)
        if isinstance(optimizer, KvdError):
            self._answers.refuse(event, str(optimizer))
            return
        version = slices[0].log.closed
        if any(slice_.log.closed != version for slice_ in slices) or message.version > version + 1:
            text = f"record {message.version} of {slices[0].key!r} came when {version} were held"
            self._answers.refuse(event, text, key=slices[0].key)
            return
        if message.version == version + 1:
            rows = held.row_records.take(slices[0].slice_id, message.version, message.rows_before)
            if rows is None:
                self._answers.later(event, "rows of this round are on their way")
                return
            self._begin(event, message, held, slices, optimizer, rows)
        self._answers.confirm(event)  # a copy is known by the version that it makes

    def hold_rows(self, event: Received, message: HoldRows, held: HeldPartition) -> None:
        """Takes rows of a round whose record comes later."""
        slice_ = held.find(message.part)
        if slice_ is None or not slice_.group.is_of_table:
            text = f"this server does not hold part {message.part.slice_index} of a table {message.part.key!r}"
            self._answers.refuse(event, text, ErrorCode.KEY_NOT_FOUND, message.part.key)
            return
        if message.version > slice_.log.closed + 1:
            text = f"rows of record {message.version} of {message.part.key!r} came when {slice_.log.closed} were held"
            self._answers.refuse(event, text, key=message.part.key)
            return
        piece = Span(event.payload, 0, event.nbytes)
        is_late = message.version <= slice_.log.closed
        if is_late or held.row_records.add(message.part, message.version, message.place, piece):
            self._answers.confirm(event)  # a copy is known by its place in the round
        else:
            text = f"a round of table {message.part.key!r} has too many rows"
            self._answers.refuse(event, text, key=message.part.key)

    def _slices(self, event: Received, message: Hold, held: HeldPartition) -> list[Slice] | None:
        slices = []
        for slice_id in message.slice_ids:
            slice_ = held.find(slice_id)
            if slice_ is None:
                text = f"this server does not hold slice {slice_id.slice_index} of key {slice_id.key!r}"
                self._answers.refuse(event, text, ErrorCode.KEY_NOT_FOUND, slice_id.key)
                return None
            slices.append(slice_)
        return slices

    def wait(self, busy: FusedGroup, event: Received, held: HeldPartition, take: _Take) -> None:
        """Calls `take` with this record after those that wait for the group already. One that came again is answered
        when its turn comes."""
        queue = self._waiting.setdefault(busy, deque())
        name = _name_of(event)
        if all(_name_of(other.event) != name for other in queue):
            queue.append(_Waiting(event, held, take))

    def go_on(self, group: FusedGroup) -> None:
        """The group is at rest: takes what has waited for it."""
        for event, held, take in self._waiting.pop(group, ()):
            take(event, event.message, held)
        self._ended(group.partition)

    def _begin(
        self,
        event: Received,
        message: Hold,
        held: HeldPartition,
        slices: list[Slice],
        optimizer: Optimizer | None,
        rows: list[Span],
    ) -> None:
        """Closes the round as the leader has closed it, for all slices as one, or for each if they differ here.

        Args:
            rows: of a table, those that came before.
        """
        group = slices[0].group if slices[0].group.slices == tuple(slices) else None
        if group is None:
            for slice_ in slices:
                if len(slice_.group.slices) > 1:
                    held.table.part(slice_.group)
            group = held.table.fuse(slices)
        if group is not None:
            self._close(group, message, [*rows, Span(event.payload, 0, event.nbytes)], optimizer)
        else:
            for slice_, span in zip(slices, _spans(event, message, slices), strict=True):
                self._close(slice_.group, message, [span], optimizer)

    def _close(self, group: FusedGroup, message: Hold, spans: Sequence[Span], optimizer: Optimizer | None) -> None:
        log = group.log
        for rank, clock, samples, how, step, place in message.given:
            log.stage(Contribution(rank, clock, None, samples, how, step, place), _NO_PUSH)
        if not message.given:
            record = log.close_empty()
        else:
            closed = log.close_next([given.rank for given in message.given] if log.sync else ())
            assert closed is not None, f"a round that the leader closed is open here: {message}"
            record = closed
        if message.generation > group.generation:
            self._effects.emit(group.renew(optimizer, message.generation))
        group.optimizer_for(message.version)  # changes that took effect before
        group.optimizer = optimizer if message.generation == group.generation else group.optimizer
        if not record.contributions:
            group.commit(log.current, group.encoded)
            return
        how = record.contributions[0].how
        merged = tuple([Contribution(place, 1, span, 1, how) for place, span in enumerate(spans)])
        self._effects.start_job(
            lambda job: Apply(
                job,
                group.number,
                group.layout,
                group.dtype,
                group.nbytes,
                log.current,
                merged,
                record.assign,
                "sum",
                optimizer if message.is_gradient else None,
                is_merged=message.is_gradient,
                encoding=None if message.coding is None else Encoding(message.coding, message.version),
                is_final=not message.is_gradient,
            ),
            partial(self._applied, group, is_coded=message.coding is not None),
        )

    def _applied(self, group: FusedGroup, done: JobDone, *, is_coded: bool) -> None:
        if done.error is not None:
            text = f"{group.description} could not be updated as its leader has updated it: {done.error}"
            self._effects.emit(LogEntry("error", text))
            group.log.give_up()
            self._broken(group.partition)
        elif is_coded:
            value, _, encoded = done.result
            group.commit(value, encoded)
        else:
            group.commit(done.result)
        self.go_on(group)

    def forget_waiting(self, partition: int) -> None:
        """Forgets the records of a partition that wait: they were not answered, so they are not held."""
        for group in [group for group in self._waiting if group.partition == partition]:
            del self._waiting[group]

    def validate(self) -> None:
        """Raises AssertionError if records wait for nothing."""
        for group in self._waiting:
            assert not group.is_quiescent, f"records wait for {group.description}, which is not being updated"


def _name_of(event: Received) -> tuple[int, int]:
    message: Any = event.message
    return event.sender, message.request


def _spans(event: Received, message: Hold, slices: Sequence[Slice]) -> list[Span]:
    """The part of the payload of each slice. Slices start at multiples of 8 bytes of their values; a gradient may have
    a wider dtype."""
    spans = []
    offset = 0
    for slice_ in slices:
        scale = accumulator_scale(slice_.spec.dtype) if message.is_gradient else 1
        offset = padded(offset)
        spans.append(Span(event.payload, offset * scale, slice_.nbytes * scale))
        offset += slice_.nbytes
    return spans
