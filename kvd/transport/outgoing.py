"""The sending half of a link. Bytes for which the socket has no room wait here."""

from __future__ import annotations

import array
import select
import socket
from collections import deque
from contextlib import suppress
from typing import Protocol, TypeAlias

from kvd.protocol.specs import MAX_PAYLOAD_BYTES

QUEUE_LIMIT_BYTES = 2 * MAX_PAYLOAD_BYTES
COST_OF_ENTRY_BYTES = 256  # memory that a queued piece takes besides its bytes
MOST_JOINED_BYTES = 64 << 10  # what is joined may be one record of a sealed link, which its reader takes in at once

FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)  # a plain number: faster than the enum

Entry: TypeAlias = tuple["bytes | memoryview", "int | None"]  # bytes, and the descriptor to send with the first of them


class Writer(Protocol):
    """Gives bytes to a socket. Raises OSError when the connection is broken."""

    has_unsent: bool
    """Whether the socket had no room for something that `write` has taken."""

    writes_at_a_time: int
    """How many writes may follow each other before the thread does something else."""

    def write(self, data: bytes | memoryview, descriptor: int | None, more: bool) -> int:
        """How many of the bytes it has taken. `more`: others follow at once."""

    def flush(self) -> None:
        """Gives the socket what it had no room for."""


class PlainWriter:
    """A socket within the host."""

    has_unsent = False
    writes_at_a_time = 64

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def write(self, data: bytes | memoryview, descriptor: int | None, more: bool) -> int:
        try:
            if descriptor is None:
                return self._socket.send(data, FLAGS)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
            return self._socket.sendmsg([data], [rights], FLAGS)
        except BlockingIOError:
            return 0

    def flush(self) -> None:
        pass


class Outgoing:
    """Belongs to the thread that has the link's lock. Raises OSError when the connection is broken.

    Attributes:
        waits: whether bytes wait for room in the socket. Any thread may ask.
    """

    def __init__(self, connection: socket.socket, writer: Writer, epoll: select.epoll) -> None:
        self._socket = connection
        self._writer = writer
        self._epoll = epoll
        self._queue: deque[Entry] = deque()
        self._queued_bytes = 0
        self._held: list[bytes | memoryview] = []  # goes with the next bytes that are pushed
        self._held_bytes = 0
        self.waits = False
        epoll.register(connection, select.EPOLLIN)

    @property
    def is_full(self) -> bool:
        return self._queued_bytes > QUEUE_LIMIT_BYTES

    @property
    def has_held(self) -> bool:
        """Whether some bytes are held back."""
        return bool(self._held)

    def hold(self, data: bytes | memoryview) -> None:
        """Sends these bytes with the next ones that are pushed, or ahead of them if they would be too many."""
        if self._held and self._held_bytes + len(data) > MOST_JOINED_BYTES:
            self._push_held()
        self._held.append(data)
        self._held_bytes += len(data)

    def push(self, data: bytes | memoryview, descriptor: int | None = None, more: bool = False) -> None:
        """Sends at once, or queues what the socket does not take. The bytes must not change until they are sent.
        `more`: others are pushed at once."""
        if self._held:
            if self._held_bytes + len(data) > MOST_JOINED_BYTES:
                self._push_held()
            else:
                data = b"".join((*self._held, data))
                self._drop_held()
        if not self.waits:
            sent = self._writer.write(data, descriptor, more)
            if sent == len(data) and not self._writer.has_unsent:
                return
            self.waits = True
            self._epoll.modify(self._socket, select.EPOLLIN | select.EPOLLOUT)
            if sent:
                data, descriptor = memoryview(data)[sent:], None
        if len(data):
            self._queue.append((data, descriptor))
            self._queued_bytes += len(data) + COST_OF_ENTRY_BYTES

    def _push_held(self) -> None:
        data = b"".join(self._held)
        self._drop_held()
        self.push(data)

    def _drop_held(self) -> None:
        self._held.clear()
        self._held_bytes = 0

    def flush(self) -> None:
        """Sends as much of the queue as the socket takes, in a bounded number of writes."""
        for _ in range(self._writer.writes_at_a_time):
            if not self._queue:
                self._writer.flush()
                if not self._writer.has_unsent:
                    self.waits = False
                    self._epoll.modify(self._socket, select.EPOLLIN)
                return
            data, descriptor = self._queue[0]
            sent = self._writer.write(data, descriptor, len(self._queue) > 1)
            if not sent:
                return
            self._queued_bytes -= sent
            if sent < len(data):
                self._queue[0] = (memoryview(data)[sent:], None)
            else:
                self._queue.popleft()
                self._queued_bytes -= COST_OF_ENTRY_BYTES

    def copy_queued(self) -> None:
        """Replaces the queued bytes by copies: the program takes its memory back."""
        self._queue = deque((bytes(data), descriptor) for data, descriptor in self._queue)

    def clear(self) -> None:
        self._drop_held()
        self._queue.clear()
        self._queued_bytes = 0
        if self.waits:
            self.waits = False
            with suppress(OSError, ValueError):
                self._epoll.modify(self._socket, select.EPOLLIN)

    def close(self) -> None:
        """Drops the queue, and readers no longer wait for the socket."""
        self.clear()
        with suppress(OSError, ValueError):
            self._epoll.unregister(self._socket)
