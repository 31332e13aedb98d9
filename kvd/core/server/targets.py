"""What a request is about: its slices, each by itself or as one fused group. The first step of a push and of a pull."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvd.core.machine import Received
from kvd.core.server.attachments import Attachments
from kvd.core.server.batches import Batch, BatchTable
from kvd.core.server.effects import ServerEffects
from kvd.core.server.elsewhere import Elsewhere
from kvd.core.server.groups import FusedGroup, Slice
from kvd.core.server.keys import KeyTable
from kvd.core.server.records import Records
from kvd.core.session import SchedulerSession
from kvd.protocol.messages import (
    ADD,
    DeclareBatch,
    Done,
    ErrorCode,
    NotYetReason,
    Part,
    Pull,
    PullBatch,
    PullRows,
    Push,
    PushBatch,
    SliceId,
)
from kvd.protocol.specs import MAX_PAYLOAD_BYTES, ROW_ID_BYTES, no_table_text, table_text


class PushTarget(NamedTuple):
    """What a part of a push, or of a pull, is about."""

    group: FusedGroup
    slice: Slice | None  # None: all of the group
    clock: int
    nbytes: int


class TargetResolver:
    """Finds the targets of requests, and tells the sender when there are none.

    A push of a batch fuses its slices, if they are equally far; a push of a slice without the others of its group parts
    them for good, and so does a pull if the optimizer has to know what its worker has of each slice.
    """

    def __init__(
        self,
        session: SchedulerSession,
        table: KeyTable,
        batches: BatchTable,
        attachments: Attachments,
        effects: ServerEffects,
        records: Records,
        elsewhere: Elsewhere,
    ) -> None:
        self._session = session
        self._records = records
        self._elsewhere = elsewhere
        self._table = table
        self._batches = batches
        self._attachments = attachments
        self._effects = effects

    def declare(self, event: Received, message: DeclareBatch) -> None:
        """A worker says which slices it means by a batch."""
        if self._attachments.rank_of(event, message.request) is None:
            return
        if len(set(message.slice_ids)) < len(message.slice_ids):
            text = "a batch names the same slice twice: name it once"
            self._effects.refuse(event.peer, message.request, ErrorCode.PROTOCOL_ERROR, text, message.slice_ids[0].key)
            return
        known = [self._table.slices.get((slice_id.key, slice_id.slice_index)) for slice_id in message.slice_ids]
        if not self._refuses_table(event, message.request, [slice_ for slice_ in known if slice_ is not None]):
            self._batches.declare(event.sender, message.batch, message.slice_ids)
            self._effects.send(event.peer, Done(message.request))

    def of_parts(self, event: Received, message: Push | Pull) -> list[PushTarget] | None:
        """The slices that the message names; None if it was answered here."""
        slices = self._slices(event, message.request, message.parts)
        if slices is None:
            return None
        clocks = [part.clock for part in message.parts]
        if any(map(_is_table, slices)):
            return self._of_rows(event, message, slices, clocks)
        return self.of_slices(event, message.request, slices, clocks, push=isinstance(message, Push))

    def has_version(self, part: Part) -> bool:
        """Whether the part of a key is here, trained in rounds, and not older than the version that is wanted."""
        slice_ = self._table.slices.get((part.key, part.slice_index))
        return slice_ is not None and slice_.log.sync and part.clock <= slice_.log.version

    def table_part(self, part: Part) -> Slice | None:
        """The part of a table that this names, if it is here."""
        slice_ = self._table.slices.get((part.key, part.slice_index))
        if slice_ is None or slice_.spec.table is None or slice_.creation != part.creation:
            return None
        return slice_

    def of_rows(self, event: Received, message: PullRows) -> PushTarget | None:
        """The part of a table whose rows are wanted; None if it was answered here."""
        slices = self._slices(event, message.request, [message.part])
        if slices is None:
            return None
        slice_ = slices[0]
        if slice_.spec.table is None:
            self._effects.refuse(
                event.peer, message.request, ErrorCode.NOT_ALLOWED, no_table_text(slice_.key), slice_.key
            )
        elif event.nbytes % ROW_ID_BYTES:
            text = f"{event.nbytes} bytes are no row ids"
            self._effects.refuse(event.peer, message.request, ErrorCode.PROTOCOL_ERROR, text, slice_.key)
        elif (nbytes := event.nbytes // ROW_ID_BYTES * slice_.spec.row_nbytes) > MAX_PAYLOAD_BYTES:
            text = (
                f"this pull wants {nbytes >> 20} MiB of rows of table {slice_.key!r} from one server, and a message "
                f"carries at most {MAX_PAYLOAD_BYTES >> 20} MiB: pull the rows in pieces"
            )
            self._effects.refuse(event.peer, message.request, ErrorCode.NOT_ALLOWED, text, slice_.key)
        else:
            return PushTarget(slice_.group, slice_, message.part.clock, event.nbytes)
        return None

    def _of_rows(
        self, event: Received, message: Push | Pull, slices: Sequence[Slice], clocks: Sequence[int]
    ) -> list[PushTarget] | None:
        """A push to a part of a table, which is by itself; None if it was answered here."""
        table = next(filter(_is_table, slices))
        if not isinstance(message, Push) or message.pull or message.how != ADD:
            self._effects.refuse(event.peer, message.request, ErrorCode.NOT_ALLOWED, table_text(table.key), table.key)
        elif len(slices) > 1 or message.coding is not None or table.spec.num_rows(event.nbytes) is None:
            text = f"{event.nbytes} bytes are no row ids and rows of one part of table {table.key!r}"
            self._effects.refuse(event.peer, message.request, ErrorCode.PROTOCOL_ERROR, text, table.key)
        else:
            return [PushTarget(table.group, table, clocks[0], event.nbytes)]
        return None

    def of_batch(self, event: Received, message: PushBatch | PullBatch) -> list[PushTarget] | None:
        """The group of the batch that the message names, or its slices one by one; None if it was answered here."""
        batch = self._batches.find(event.sender, message.batch)
        if batch is None:
            text = f"batch {message.batch} is not known here, or not any more"
            self._effects.not_yet(event.peer, message.request, NotYetReason.UNKNOWN_BATCH, text)
            return None
        group = self._table.groups.get(batch.group) if batch.group is not None else None
        if group is not None and group.partition not in self._elsewhere.leaving:
            return [PushTarget(group, None, message.clock, group.nbytes)]
        return self._of_unfused(event, message, batch)

    def _of_unfused(self, event: Received, message: PushBatch | PullBatch, batch: Batch) -> list[PushTarget] | None:
        slices = self._slices(event, message.request, batch.slice_ids)
        if slices is None:
            return None
        batch.is_apart = batch.is_apart or batch.group is not None
        if self._refuses_table(event, message.request, slices):
            return None
        push = isinstance(message, PushBatch)
        if push and not batch.is_apart and self._records.may_join(slices):
            group = self._table.fuse(slices)
            if group is not None:
                batch.group = group.number
                return [PushTarget(group, None, message.clock, group.nbytes)]
        return self.of_slices(event, message.request, slices, [message.clock] * len(slices), push=push)

    def _refuses_table(self, event: Received, request: int, slices: Sequence[Slice]) -> bool:
        """Whether one of these is a part of a table, which is in no batch. The sender is told."""
        table = next(filter(_is_table, slices), None)
        if table is not None:
            self._effects.refuse(event.peer, request, ErrorCode.NOT_ALLOWED, table_text(table.key), table.key)
        return table is not None

    def of_slices(
        self, event: Received, request: int, slices: Sequence[Slice], clocks: Sequence[int], *, push: bool
    ) -> list[PushTarget] | None:
        """Each slice by itself; None if the sender was told that this cannot be."""
        if len(set(slices)) < len(slices):  # the answer would be larger than what the server leads
            text = f"a {'push' if push else 'pull'} names the same slice twice: name it once"
            self._effects.refuse(event.peer, request, ErrorCode.PROTOCOL_ERROR, text, slices[0].key)
            return None
        for slice_ in slices:
            if len(slice_.group.slices) > 1 and (push or self._is_kept_for(event, slice_.group)):
                if not slice_.group.is_quiescent:
                    text = "the slice is being updated together with others"
                    self._effects.not_yet(event.peer, request, NotYetReason.UPDATING, text, slice_.key)
                    return None
                self._table.part(slice_.group)
        return [
            PushTarget(slice_.group, slice_, clock, slice_.nbytes) for slice_, clock in zip(slices, clocks, strict=True)
        ]

    def _is_kept_for(self, event: Received, group: FusedGroup) -> bool:
        """Whether what is sent to this sender is kept: to a worker, where the optimizer has to know it."""
        return group.keeps_pulled and not group.log.sync and self._attachments.find(event.sender) is not None

    def _slices(
        self, event: Received, request: int, slice_ids: Sequence[Part] | Sequence[SliceId]
    ) -> list[Slice] | None:
        slices, leaving = [], self._elsewhere.leaving
        for slice_id in slice_ids:
            slice_ = self._table.slices.get((slice_id[0], slice_id[1]))
            if slice_ is not None and leaving and slice_.partition in leaving:
                slice_ = None
            if slice_ is None and self._elsewhere.has(event, request, slice_id[0], slice_id[1]):
                return None
            if slice_ is None or slice_.creation != slice_id.creation:
                text = f"{self._session.name} has no slice {slice_id[1]} of key {slice_id[0]!r}"
                if slice_ is not None:
                    text = f"key {slice_id[0]!r} was deleted, and made again: look at its new shape and value first"
                self._effects.refuse(event.peer, request, ErrorCode.KEY_NOT_FOUND, text, slice_id[0])
                return None
            slices.append(slice_)
        return slices


def _is_table(slice_: Slice) -> bool:
    return slice_.spec.table is not None
