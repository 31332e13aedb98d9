"""What this end of a link leases to the other: payloads in shared memory, which stay as they are until released."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvd.core.machine import Span
from kvd.transport.base import joined, pieces_of
from kvd.transport.memory.segments import Arena, Bytes, Segment

MAX_LEASES = 1 << 16  # beyond, payloads go inline
SMALL_PIECE_BYTES = 16 << 10  # up to this, joining the pieces first is cheaper than one copy for each
MOST_PINNED = 2  # times the bytes of a payload: more of a buffer is not kept for it, see `Arena`


class SharedPayload(NamedTuple):
    """Where a payload lies in shared memory, and the buffers to keep so that it stays there."""

    segment: int
    offset: int
    buffers: object


class Leases:
    """Belongs to the thread that has the link's lock, except `share`, which any thread may call.

    Attributes:
        announced: numbers of the segments whose descriptors the other end has.
    """

    def __init__(self, arena: Arena) -> None:
        self.announced: set[int] = set()
        self._arena = arena
        self._buffers: dict[int, object] = {}  # by the number of the frame
        self._granted = 0

    def __len__(self) -> int:
        return len(self._buffers)

    def share(self, payload: Sequence[Span], nbytes: int) -> SharedPayload | None:
        """Where the payload lies in the arena. It is copied there unless it lies there already. None: no room."""
        if len(self._buffers) >= MAX_LEASES:
            return None
        found = _find(self._arena, payload)
        if found is not None and not (self._arena.copies_parts and _pinned_nbytes(payload) > MOST_PINNED * nbytes):
            return SharedPayload(*found, [span.buffer for span in payload])
        block = self._arena.allocate(nbytes)
        if block is None:
            return None
        _fill(block, payload)
        found = self._arena.locate(block)
        return None if found is None else SharedPayload(*found, block)  # None: the arena was closed meanwhile

    def segment(self, number: int) -> Segment:
        return self._arena.segment(number)

    def grant(self, buffers: object) -> int:
        """Keeps the buffers until the other end releases the next REFERENCE. Returns the frame's number: both ends
        count these frames."""
        number = self._granted
        self._buffers[number] = buffers
        self._granted += 1
        return number

    def revoke(self, number: int) -> None:
        """The frame just granted was not sent, so the next one gets its number."""
        self._buffers.pop(number, None)
        self._granted -= 1

    def release(self, number: int) -> bool:
        """The other end has dropped the payload of a frame. False: that frame is not leased."""
        return self._buffers.pop(number, None) is not None

    def take_all(self) -> object:
        """Ends all leases. Returns their buffers, which the caller should drop outside the link's lock."""
        buffers, self._buffers = self._buffers, {}
        return buffers


def payload_nbytes(payload: Sequence[Span]) -> int:
    """The size of a payload whose spans each start at a multiple of 8."""
    if len(payload) == 1:
        return payload[0].nbytes
    nbytes = 0
    for span in payload:
        nbytes = (nbytes + 7 & ~7) + span.nbytes  # `_aligned`, without a call for each of a thousand
    return nbytes


def _find(arena: Arena, payload: Sequence[Span]) -> tuple[int, int] | None:
    """Segment and offset of a payload that lies in the arena as it must be sent: all spans in one segment, in order,
    each at the next multiple of 8."""
    start: tuple[int, int] | None = None
    nbytes = 0
    for span in payload:
        found = _locate(arena, span)
        if found is None:
            return None
        if start is None:
            start = found
        elif found != (start[0], start[1] + _aligned(nbytes)):
            return None
        nbytes = _aligned(nbytes) + span.nbytes
    return start


def _pinned_nbytes(payload: Sequence[Span]) -> int:
    """The size of the buffers that the payload lies in."""
    if len(payload) == 1:
        return int(payload[0].buffer.nbytes)
    return sum({id(span.buffer): int(span.buffer.nbytes) for span in payload}.values())


def _locate(arena: Arena, span: Span) -> tuple[int, int] | None:
    """Segment and offset of a span. Only arrays, and memoryviews of them, can lie in the arena."""
    buffer = span.buffer
    if isinstance(buffer, memoryview) and buffer.c_contiguous and buffer.nbytes:
        buffer = np.frombuffer(buffer, np.uint8)
    if not isinstance(buffer, np.ndarray) or not buffer.flags.c_contiguous or span.offset + span.nbytes > buffer.nbytes:
        return None
    found = arena.locate(buffer)
    return None if found is None else (found[0], found[1] + span.offset)


def _fill(block: Bytes, payload: Sequence[Span]) -> None:
    """Copies the payload into a block. NumPy lets other threads run meanwhile."""
    if len(payload) > 1 and block.nbytes <= len(payload) * SMALL_PIECE_BYTES:
        block[:] = np.frombuffer(joined(pieces_of(payload)), np.uint8)
        return
    end = 0
    for piece in pieces_of(payload):
        start = _aligned(end)
        block[end:start] = 0
        end = start + piece.nbytes
        if piece.nbytes:
            block[start:end] = np.frombuffer(piece, np.uint8)


def _aligned(nbytes: int) -> int:
    return (nbytes + 7) & ~7
