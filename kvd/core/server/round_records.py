"""The record of a round: what its leader sends to those who hold it."""

from __future__ import annotations

from kvd.core.machine import Span, spans_of
from kvd.core.server.groups import FusedGroup
from kvd.core.server.made import Made, Use, given_by
from kvd.core.server.rounds import Record
from kvd.core.server.row_records import Piece, pieces_of
from kvd.optimizer import to_wire
from kvd.protocol.messages import Hold, HoldRows


def record_of(
    group: FusedGroup, record: Record, made: Made, use: Use
) -> list[tuple[Hold | HoldRows, tuple[Span, ...]]]:
    """The messages of a record, with their payloads: it is held when all are. It has the new value, or a merged
    gradient; of a part of a table, the merged rows, in several messages if they are many."""
    payload: tuple[Span, ...] = ()
    before: list[Piece] = []
    if made.merged is not None and group.is_of_table:
        *before, payload = pieces_of(group.slices[0].spec, made.merged)
    elif made.merged is not None:
        payload = (made.merged,)
    elif record.contributions:
        payload = spans_of(made.buffer, group.nbytes)
    coding = use.coding if made.merged is not None else None
    slice_ids = tuple([slice_.slice_id for slice_ in group.slices])
    last = Hold(
        0,
        group.partition,
        slice_ids,
        record.number,
        tuple([given_by(contribution) for contribution in (*record.contributions, *record.repeated)]),
        made.merged is not None and (use.optimizer is not None or coding is not None),
        None if use.optimizer is None else to_wire(use.optimizer),
        use.generation,
        len(before),
        coding,
    )
    rows = [HoldRows(0, group.partition, slice_ids[0], record.number, place) for place in range(len(before))]
    return [*zip(rows, before, strict=True), (last, payload)]
