"""Payloads as they are sent: in one piece inline, or in one stretch of the arena."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvd.core.machine import Span
from kvd.transport.base import joined, pieces_of
from kvd.transport.segments import Arena, Bytes

SMALL_PIECE_BYTES = 16 << 10  # such pieces are joined before they are copied: that is one call for all


class Place(NamedTuple):
    """Where a payload lies, and what has to be kept so that it stays there."""

    segment: int
    offset: int
    buffers: object


def size_of(payload: Sequence[Span]) -> int:
    """The bytes of a payload whose spans each start at a multiple of 8."""
    if len(payload) == 1:
        return payload[0].nbytes
    nbytes = 0
    for span in payload:
        nbytes = _aligned(nbytes) + span.nbytes
    return nbytes


def place(arena: Arena, payload: Sequence[Span], nbytes: int) -> Place | None:
    """Where the payload lies in the arena; it is copied there if need be. None: there is no room."""
    found = _where(arena, payload)
    if found is not None:
        return Place(*found, [span.buffer for span in payload])
    block = arena.allocate(nbytes)
    if block is None:
        return None
    _fill(block, payload)
    found = arena.locate(block)
    return None if found is None else Place(*found, block)  # None: it was closed meanwhile


def _where(arena: Arena, payload: Sequence[Span]) -> tuple[int, int] | None:
    """Where the payload lies in the arena already: all spans in one segment, in their order and padded."""
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


def _locate(arena: Arena, span: Span) -> tuple[int, int] | None:
    """Segment and offset of a span. The arena gives out arrays, and programs make views of them, nothing else."""
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
