"""What a driver needs of a transport: named connections, messages in, messages out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

from kvd.core.machine import Peer, PeerPath, Span
from kvd.core.principals import Principal
from kvd.protocol.messages import PathKind

Piece: TypeAlias = memoryview

OnMessage: TypeAlias = Callable[[Peer, bytes, memoryview | None, Principal], None]
"""(peer, header, payload, who holds the key of the connection). The payload keeps its memory alive, and nothing writes
to it."""

OnGarbage: TypeAlias = Callable[[Peer, str], None]
"""(peer, what was wrong): frames arrived that are not a message."""

HeaderOfPath: TypeAlias = Callable[[PeerPath], bytes]
"""Makes the header of a message that says how it travels."""

NOTHING = memoryview(b"")
UNKNOWN_PATH = PeerPath(PathKind.UNKNOWN)
_PADDING = [bytes(-rest % 8) for rest in range(8)]

DRAIN_LIMIT = 64  # messages taken from a socket before the loop runs other callbacks


class Transport(Protocol):
    """The connections of one node. The transport names the peers that connect to it, the caller names the others."""

    def start(self, on_message: OnMessage, on_garbage: OnGarbage) -> None:
        """Starts to deliver, on the running loop."""

    def listen(self, address: str) -> str:
        """Listens at the address. Returns it with its real port. Raises ConnectError if it is taken."""

    def connect(self, peer: Peer, address: str, key: str = "") -> None:
        """Opens a connection called `peer` in the background, and opens it again whenever it breaks. The other end must
        hold `key`, see `kvd.core.machine.Connect`."""

    def disconnect(self, peer: Peer) -> None: ...

    def send(self, peer: Peer, header: bytes, payload: Sequence[Span]) -> bool:
        """Sends without waiting. False: the peer is gone, or too much is queued for it.

        The spans' memory must not change until the receiver has dropped the payload.
        """

    def send_with_path(self, peer: Peer, header: HeaderOfPath, payload: Sequence[Span]) -> bool:
        """Like `send`, for a message that says how it travels. While that is being decided, the message waits, and so
        do all that are sent to the peer after it."""

    def paths(self) -> Mapping[Peer, PeerPath]:
        """How messages travel to the peers, as far as the transport knows."""

    def close(self, linger_s: float) -> None:
        """Stops. Queued messages get up to `linger_s` to leave."""


def pieces_of(payload: Sequence[Span]) -> list[Piece]:
    """The bytes of each span, without a copy."""
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
    """All pieces as one payload, each starting at a multiple of 8. A single piece is not copied."""
    if len(pieces) == 1:
        return pieces[0]
    return b"".join(padded(pieces))


def padded(pieces: Sequence[Piece]) -> list[bytes | memoryview]:
    """The pieces, with zeros in between so that each starts at a multiple of 8."""
    parts: list[bytes | memoryview] = []
    for piece in pieces:
        parts.append(piece)
        rest = piece.nbytes & 7
        if rest:
            parts.append(_PADDING[rest])
    if pieces and pieces[-1].nbytes & 7:
        parts.pop()
    return parts
