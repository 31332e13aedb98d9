"""What a server holds of one partition that another one leads, and how it answers the records of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvd.core.machine import Received
from kvd.core.server.effects import ServerEffects
from kvd.core.server.groups import Slice
from kvd.core.server.handled import Handled
from kvd.core.server.keys import KeyTable
from kvd.core.server.row_records import RowRecords
from kvd.optimizer import Optimizer
from kvd.protocol.messages import NO_VIEW, Done, Epoch, ErrorCode, HoldLoop, NotYetReason, SliceId


@dataclass(slots=True, eq=False)
class HeldPartition:
    """What this server holds of one partition.

    Attributes:
        leader: the incarnation whose records made it so.
        table: the slices; keys are live in it as they are at the leader.
        rows: bytes of the parts of tables whose pieces have come, and that are not in the table yet; by key and index.
        row_records: merged rows that have come before the record of their round.
        loops: by their first step: the newest HoldLoop.
        optimizer, as_set, generation: the newest that was set there, with all changes, and as it was set.
        handled: requests of the leader that need not be carried out again.
        is_broken: a round could not be applied as the leader has applied it.
        since: the view that the leader knew when this began; what was sent before that is of an earlier time.
    """

    leader: int
    table: KeyTable
    rows: dict[tuple[str, int], int] = field(default_factory=dict)
    row_records: RowRecords = field(default_factory=RowRecords)
    loops: dict[int, HoldLoop] = field(default_factory=dict)
    optimizer: Optimizer | None = None
    as_set: Optimizer | None = None
    generation: int = 0
    handled: Handled = field(default_factory=Handled)
    since: Epoch = NO_VIEW
    is_broken: bool = False

    @property
    def table_nbytes(self) -> int:
        """The memory of parts of tables."""
        return self.table.table_nbytes + sum(self.rows.values()) + self.row_records.nbytes

    def find(self, slice_id: SliceId) -> Slice | None:
        """The slice of this creation, if it is here."""
        slice_ = self.table.slices.get((slice_id.key, slice_id.slice_index))
        return None if slice_ is None or slice_.creation != slice_id.creation else slice_


class RecordAnswers:
    """The answers to the records of leaders."""

    def __init__(self, effects: ServerEffects) -> None:
        self._effects = effects

    def done(self, event: Received, held: HeldPartition) -> None:
        """The record is held: from now on a copy of the message changes nothing."""
        message: Any = event.message
        held.handled.add(message.request)
        self.confirm(event)

    def confirm(self, event: Received) -> None:
        """The record is held, and a copy of the message changes nothing anyway."""
        message: Any = event.message
        self._effects.send(event.peer, Done(message.request))

    def later(self, event: Received, text: str) -> None:
        """It is to be sent again: what comes before it is under way."""
        message: Any = event.message
        self._effects.not_yet(event.peer, message.request, NotYetReason.UPDATING, text)

    def refuse(self, event: Received, text: str, error: ErrorCode = ErrorCode.NOT_ALLOWED, key: str = "") -> None:
        """It cannot be held."""
        message: Any = event.message
        self._effects.refuse(event.peer, message.request, error, text, key)
