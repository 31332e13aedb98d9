"""A peer that speaks ZMTP over a bare socket, so that it can do what libzmq would not."""

from __future__ import annotations

import socket
from typing import Any

from kvd.config import parse_address
from kvd.protocol.codec import encode
from kvd.protocol.messages import NO_RUN, NO_VIEW

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
PING = b"\x04PING\0\0" + b"c" * 16  # without a time to live, with a context that comes back
STRANGER = 0x4321


def frame(body: bytes, *, more: bool = False) -> bytes:
    """A frame of a message; with `more`, another of the same message follows."""
    if len(body) < 256:
        return bytes([more, len(body)]) + body
    return bytes([2 | more]) + len(body).to_bytes(8, "big") + body


def command(body: bytes) -> bytes:
    """A short command."""
    return bytes([4, len(body)]) + body


class RawZmtp:
    """A connection after its handshake. It reads nothing unless it is told to.

    Args:
        identity: the routing id that it asks for.
    """

    def __init__(self, address: str, run: int = NO_RUN, identity: bytes = b"") -> None:
        parsed = parse_address(address)
        self.run = run
        self.socket = socket.create_connection((parsed.host, parsed.port), timeout=10)
        more = b"\x08Identity" + len(identity).to_bytes(4, "big") + identity if identity else b""
        self.socket.sendall(GREETING + command(READY + more))
        answer = b""
        while b"ROUTER" not in answer:
            received = self.socket.recv(4096)
            assert received, "the handshake was refused"
            answer += received

    def send(self, data: bytes) -> bool:
        """False: the other side has hung up."""
        try:
            self.socket.sendall(data)
        except ConnectionError:
            return False
        return True

    def frame_of(self, message: Any, sender: int = STRANGER) -> bytes:
        return frame(encode(message, sender, NO_VIEW, self.run))

    def is_cut_off(self) -> bool:
        """Whether the other side hangs up within the time-out. Throws away what it says."""
        try:
            while self.socket.recv(1 << 16):
                pass
        except TimeoutError:
            return False
        except ConnectionError:
            pass
        return True

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> RawZmtp:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
