"""ZMTP by hand, as <https://rfc.zeromq.org/spec/37/> has it and as it must not be: bytes over a plain socket."""

from __future__ import annotations

import socket
import struct
from types import TracebackType
from typing import Self

from kvd.config import parse_address

MORE, LONG, COMMAND = 1, 2, 4  # flags of a frame
SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
TIMEOUT_S = 10.0
PATIENCE_S = 20.0  # for an answer from a loaded machine
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


def greeting(major: int = 3, minor: int = 1, mechanism: bytes = b"NULL", as_server: int = 0) -> bytes:
    """The first 64 bytes of either side."""
    return SIGNATURE + bytes([major, minor]) + mechanism.ljust(20, b"\0")[:20] + bytes([as_server]) + bytes(31)


def frame(body: bytes, flags: int = 0, *, declared: int | None = None) -> bytes:
    """One frame. `declared`: the size that it says it has, if that is not the true one."""
    nbytes = len(body) if declared is None else declared
    if nbytes > 255 or flags & LONG:
        return bytes([flags | LONG]) + nbytes.to_bytes(8, "big") + body
    return bytes([flags, nbytes]) + body


def command(name: bytes, body: bytes = b"", *, name_nbytes: int | None = None) -> bytes:
    return frame(bytes([len(name) if name_nbytes is None else name_nbytes]) + name + body, COMMAND)


def metadata(**properties: bytes) -> bytes:
    """The properties of a READY; an underscore stands for a hyphen."""
    names = [name.replace("_", "-").encode() for name in properties]
    values = properties.values()
    pairs = zip(names, values, strict=True)
    return b"".join(bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value for name, value in pairs)


def ready(socket_type: bytes = b"DEALER", identity: bytes | None = b"") -> bytes:
    properties = {"Socket_Type": socket_type} | ({} if identity is None else {"Identity": identity})
    return command(b"READY", metadata(**properties))


def message(*parts: bytes) -> bytes:
    """A whole message."""
    return b"".join(frame(part, MORE if place < len(parts) else 0) for place, part in enumerate(parts, 1))


def old_message(*parts: bytes) -> bytes:
    """A whole message of ZMTP 1.0, whose parts are short."""
    more = [1] * (len(parts) - 1) + [0]
    return b"".join(bytes([len(part) + 1, flag]) + part for part, flag in zip(parts, more, strict=True))


class Wire:
    """A plain connection to a node, without a word of ZMTP. What the node does to it is no error here."""

    def __init__(self, address: str, timeout_s: float = TIMEOUT_S) -> None:
        parsed = parse_address(address)
        if parsed.scheme == "tcp":
            self.socket = socket.create_connection((parsed.host, parsed.port), timeout=timeout_s)
        else:
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.settimeout(timeout_s)
            self.socket.connect(parsed.path)

    def send(self, data: bytes) -> bool:
        """False: the node has hung up, or takes nothing more."""
        try:
            self.socket.sendall(data)
        except (ConnectionError, TimeoutError):
            return False
        return True

    def read(self, nbytes: int = 1 << 16, timeout_s: float = TIMEOUT_S) -> bytes:
        """What has arrived; empty: nothing will, or nothing has in time."""
        self.socket.settimeout(timeout_s)
        try:
            return self.socket.recv(nbytes)
        except (ConnectionError, TimeoutError):
            return b""

    def read_until(self, end: bytes, timeout_s: float = TIMEOUT_S) -> bytes:
        """All that arrives until the end of it, or until nothing more does."""
        data = b""
        while end not in data and (piece := self.read(timeout_s=timeout_s)):
            data += piece
        return data

    def is_hung_up(self, timeout_s: float = PATIENCE_S) -> bool:
        """Whether the node ends the connection, after whatever it has to say."""
        self.socket.settimeout(timeout_s)
        try:
            while self.socket.recv(1 << 16):
                pass
        except ConnectionError:
            return True
        except TimeoutError:
            return False
        return True

    def reset(self) -> None:
        """Closes with a RST: what is under way in either direction is lost."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self.socket.close()

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Dealer(Wire):
    """A connection after its handshake. This one has no key, and a node with keys cuts its handshake short.

    What its methods give is to be sent once, in the order in which it was made.
    """

    def frame(self, body: bytes, flags: int = 0, *, declared: int | None = None) -> bytes:
        """One frame, as `frame` has it."""
        return frame(body, flags, declared=declared)

    def command(self, name: bytes, body: bytes = b"", *, name_nbytes: int | None = None) -> bytes:
        return self.frame(bytes([len(name) if name_nbytes is None else name_nbytes]) + name + body, COMMAND)

    def message(self, *parts: bytes) -> bytes:
        """A whole message."""
        return b"".join(self.frame(part, MORE if place < len(parts) else 0) for place, part in enumerate(parts, 1))


def dealer(address: str, identity: bytes = b"", timeout_s: float = TIMEOUT_S) -> Dealer:
    """A connection after the handshake of a DEALER without keys, which a node with keys cuts short."""
    wire = Dealer(address, timeout_s)
    wire.send(greeting() + ready(identity=identity))
    wire.read_until(b"ROUTER")
    return wire
