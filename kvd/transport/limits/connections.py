"""The TCP connections that libzmq has accepted, seen from outside: how much they have carried, and how to end one.

libzmq says neither how much it has buffered for a connection nor lets a ROUTER close one. The kernel knows how many
bytes a connection has received, and how many of those that were sent its other end has acknowledged (TCP_INFO). A
connection is known by its cookie (SO_COOKIE), which no other socket of this host ever has, so a descriptor that libzmq
has closed, and that means something else by now, is noticed.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

SO_COOKIE = 57  # of Linux; the socket module does not name it
DESCRIPTORS = "/proc/self/fd"
INFO_BYTES = 148  # up to tcpi_notsent_bytes

_RESET_ON_CLOSE = struct.pack("@ii", 1, 0)  # the other end does not go on sending to nobody

# Of `struct tcp_info` in linux/tcp.h.
_UNACKNOWLEDGED = struct.Struct("@I"), 24
_ACKNOWLEDGED_AND_RECEIVED = struct.Struct("@QQ"), 120
_NOT_SENT = struct.Struct("@I"), 144


class ConnectionState(NamedTuple):
    """A connection, and what it has carried so far.

    Attributes:
        cookie: its name.
        descriptor: libzmq's, at the time.
        received: bytes that have arrived.
        acknowledged: bytes that the other end has taken.
        is_idle: the kernel has nothing left to send.
    """

    cookie: int
    descriptor: int
    received: int
    acknowledged: int
    is_idle: bool


def look_at(descriptor: int) -> ConnectionState | None:
    """The connection behind the descriptor; None if there is none."""
    with _borrowed(descriptor) as connection:
        return None if connection is None else _state(connection)


def accepted_at(port: int) -> Iterator[ConnectionState]:
    """All connections to a port of this process."""
    with suppress(OSError):
        for name in os.listdir(DESCRIPTORS):
            with _borrowed(int(name)) as connection:
                if connection is not None and _port_of(connection) == port:
                    state = _state(connection)
                    if state is not None:
                        yield state


def listening_at(port: int) -> list[int]:
    """The descriptors with which this process listens at a port."""
    found = []
    with suppress(OSError):
        for name in os.listdir(DESCRIPTORS):
            with _borrowed(int(name)) as listener, suppress(OSError):
                if listener is not None and _is_listening(listener) and listener.getsockname()[1] == port:
                    found.append(int(name))
    return found


def peer_host(descriptor: int) -> str:
    """The address of the other end; "" if there is none."""
    with _borrowed(descriptor) as connection:
        try:
            return "" if connection is None else str(connection.getpeername()[0])
        except OSError:
            return ""


def cut_off(state: ConnectionState) -> bool:
    """Ends the connection, if it still exists: libzmq then forgets all that it had not handed out."""
    try:
        own = os.dup(state.descriptor)  # from here on it is the same socket, whatever libzmq does
    except OSError:
        return False
    with _borrowed(own) as connection:
        is_same = connection is not None and _cookie_of(connection) == state.cookie
        if connection is not None and is_same:
            with suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                connection.shutdown(socket.SHUT_RDWR)  # libzmq sees the end, and closes its descriptor
    os.close(own)
    return is_same


@contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket | None]:
    """The descriptor as a socket, which is not closed; None if it is no TCP socket."""
    try:
        borrowed = socket.socket(fileno=descriptor)
    except OSError:
        yield None
        return
    try:
        is_tcp = borrowed.family in (socket.AF_INET, socket.AF_INET6) and borrowed.type == socket.SOCK_STREAM
        yield borrowed if is_tcp else None
    finally:
        borrowed.detach()


def _port_of(connection: socket.socket) -> int:
    """The port of this end; 0 if there is no other end."""
    try:
        connection.getpeername()
        return int(connection.getsockname()[1])
    except OSError:
        return 0


def _is_listening(listener: socket.socket) -> bool:
    return bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _cookie_of(connection: socket.socket) -> int:
    return int.from_bytes(connection.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8), "little")


def _state(connection: socket.socket) -> ConnectionState | None:
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
        cookie = _cookie_of(connection)
    except OSError:
        return None
    if len(info) < INFO_BYTES:  # an old kernel, or another one
        return None
    acknowledged, received = _field(info, _ACKNOWLEDGED_AND_RECEIVED)
    (unacknowledged,), (not_sent,) = _field(info, _UNACKNOWLEDGED), _field(info, _NOT_SENT)
    return ConnectionState(cookie, connection.fileno(), received, acknowledged, not unacknowledged and not not_sent)


def _field(info: bytes, where: tuple[struct.Struct, int]) -> tuple[int, ...]:
    layout, offset = where
    return layout.unpack_from(info, offset)
