"""What a transport does for a driver: connections by name, frames in, frames out."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, TypeAlias

from kvd.core.machine import Span

Piece: TypeAlias = memoryview

OnMessage: TypeAlias = Callable[[Hashable, bytes, memoryview | None], None]
"""(peer, header, payload): the payload keeps its memory alive, and nobody else writes to it."""

OnGarbage: TypeAlias = Callable[[Hashable, str], None]
"""(peer, what was wrong): frames that are no message."""

NOTHING = memoryview(b"")
_PADDING = [bytes(-rest % 8) for rest in range(8)]

MAX_PAYLOAD_BYTES = 128 << 20
DRAIN_LIMIT = 64  # messages taken from a socket before the loop gets its turn


class Transport(Protocol):
    """One node's connections. Peers that connected to us are named by the transport, those we connect to by us."""

    def start(self, on_message: OnMessage, on_garbage: OnGarbage) -> None:
        """Begins to deliver, on the loop of the caller."""

    def listen(self, address: str) -> str:
        """Listens there; gives the address with its real port. Raises ConnectError if it is taken."""

    def connect(self, peer: Hashable, address: str) -> None:
        """Opens a connection called `peer`, in the background; it comes back by itself if it breaks."""

    def disconnect(self, peer: Hashable) -> None: ...

    def send(self, peer: Hashable, header: bytes, payload: Sequence[Span]) -> bool:
        """Sends without waiting. False: not possible now (the peer is gone, or too much is queued for it).

        Nobody may write to the spans' memory until the receiver has let go of the payload.
        """

    def close(self, linger_s: float) -> None:
        """Stops, after at most so long for what is queued."""


def pieces_of(payload: Sequence[Span]) -> list[Piece]:
    """The bytes of each span, not copied."""
    pieces = []
    for buffer, offset, nbytes in payload:
        if not nbytes:
            pieces.append(NOTHING)
            continue
        view = memoryview(buffer)
        if view.format != "B" or view.ndim != 1:
            view = view.cast("B")
        pieces.append(view if nbytes == view.nbytes else view[offset : offset + nbytes])
    return pieces


def joined(pieces: Sequence[Piece]) -> bytes | memoryview:
    """One payload of several pieces, each starting at a multiple of 8; a single piece stays as it is."""
    if len(pieces) == 1:
        return pieces[0]
    return b"".join(padded(pieces))


def padded(pieces: Sequence[Piece]) -> list[bytes | memoryview]:
    """The pieces, with what is between them so that each starts at a multiple of 8."""
    parts: list[bytes | memoryview] = []
    for piece in pieces:
        parts.append(piece)
        rest = piece.nbytes & 7
        if rest:
            parts.append(_PADDING[rest])
    if pieces and pieces[-1].nbytes & 7:
        parts.pop()
    return parts
