"""The merged rows of a round in pieces: a round of many workers may have more than one message carries."""

from __future__ import annotations

from kvd.core.machine import Span
from kvd.protocol.messages import SliceId
from kvd.protocol.specs import ROW_ID_BYTES, KeySpec

PIECE_NBYTES = 16 << 20
MOST_PIECES = 1 << 16  # of one round: as many bytes as a server has memory for

Piece = tuple[Span, ...]  # ids, then rows


def pieces_of(spec: KeySpec, merged: Span) -> list[Piece]:
    """The merged rows of a part, as a push has them, in pieces that are so themselves; there is one at least."""
    num_rows = spec.num_rows(merged.nbytes)
    assert num_rows is not None, f"{merged.nbytes} bytes are no rows of {spec}"
    step = max(1, PIECE_NBYTES // (ROW_ID_BYTES + spec.row_nbytes))
    if num_rows <= step:
        return [(merged,)]
    rows_at = merged.offset + num_rows * ROW_ID_BYTES
    pieces: list[Piece] = []
    for first in range(0, num_rows, step):
        count = min(step, num_rows - first)
        ids = Span(merged.buffer, merged.offset + first * ROW_ID_BYTES, count * ROW_ID_BYTES)
        pieces.append((ids, Span(merged.buffer, rows_at + first * spec.row_nbytes, count * spec.row_nbytes)))
    return pieces


class RowRecords:
    """Pieces that have come to a backup before the record of their round."""

    def __init__(self) -> None:
        self._pieces: dict[SliceId, dict[int, dict[int, Span]]] = {}  # by round, and by place in it

    def add(self, slice_id: SliceId, version: int, place: int, piece: Span) -> bool:
        """Keeps a piece of the round that makes this version. False if there are too many."""
        kept = self._pieces.setdefault(slice_id, {}).setdefault(version, {})
        kept[place] = piece
        return len(kept) <= MOST_PIECES

    def take(self, slice_id: SliceId, version: int, count: int) -> list[Span] | None:
        """The first so many pieces of a round, in their order; None if some are missing. None of this slice are kept
        any more then: those of rounds that were made another way are of no use."""
        kept = self._pieces.get(slice_id, {}).get(version, {})
        if any(place not in kept for place in range(count)):
            return None
        self.drop(slice_id)
        return [kept[place] for place in range(count)]

    def drop(self, slice_id: SliceId) -> None:
        """The slice is gone, or has its round."""
        self._pieces.pop(slice_id, None)

    @property
    def nbytes(self) -> int:
        """The memory of the pieces."""
        return sum([piece.nbytes for of in self._pieces.values() for kept in of.values() for piece in kept.values()])
