"""Sockets of links: their addresses, and the options by which they notice that the other end is gone."""

from __future__ import annotations

import os
import socket
import struct

from kvd.config import Address, parse_address
from kvd.errors import ConfigError
from kvd.transport.zmq.socket_options import KEEPALIVE_PROBES, KEEPALIVE_S, SILENCE_LIMIT_MS

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def unix_name(incarnation: int) -> str:
    """The name at which a server listens within its host. It is abstract: no file has it."""
    return f"\0kvd/{incarnation:016x}"


def unix_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)


def other_user(connection: socket.socket) -> str:
    """That the other end runs as another user, or an empty text."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(packed)
    return "" if uid == os.geteuid() else f"the peer runs as user {uid}, this process as {os.geteuid()}"


def tcp_address_of(address: str) -> Address | None:
    """An address of ZeroMQ. None: it does not lead over TCP, or is none (another node may have announced it)."""
    try:
        parsed = parse_address(address)
    except ConfigError:
        return None
    return parsed if parsed.scheme == "tcp" else None


def tcp_listener(host: str, backlog: int) -> socket.socket:
    """Listens at any free port of the host's number, or of all its addresses. Raises OSError."""
    (family, _, _, _, where), *_ = socket.getaddrinfo(
        host, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_PASSIVE
    )
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        listener.bind(where)
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


def tune(connection: socket.socket) -> None:
    """Sends at once, and notices as soon as ZeroMQ does (`SILENCE_LIMIT_MS`) that the other host is gone.

    The sizes of the buffers stay as they are: the kernel adapts them to the path up to tcp_rmem and tcp_wmem, unless a
    program sets them.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_LIMIT_MS)


WAKE_BYTES = 512 << 10  # a reader that wakes up for less is slower


class WakeUps:
    """Wake-ups of the reader of one socket: how much of a large payload must have arrived over TCP (SO_RCVLOWAT)."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._at = 1  # bytes that make the socket readable

    def come_for(self, at_least_to_come: int) -> None:
        """Readers wake up when so many bytes have arrived that it is worth the while, if so many are on their way."""
        wanted = max(1, min(at_least_to_come, WAKE_BYTES))
        if wanted != self._at:
            self._at = wanted
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
