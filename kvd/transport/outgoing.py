"""The sending half of a link. Bytes for which the socket has no room wait here."""

from __future__ import annotations

import array
import select
import socket
from collections import deque
from typing import TypeAlias

from kvd.transport.base import MAX_PAYLOAD_BYTES

QUEUE_LIMIT_BYTES = 2 * MAX_PAYLOAD_BYTES
COST_OF_ENTRY_BYTES = 256  # memory that a queued piece takes besides its bytes
WRITES_AT_A_TIME = 64

_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)  # a plain number: faster than the enum

Entry: TypeAlias = tuple["bytes | memoryview", "int | None"]  # bytes, and the descriptor to send with the first of them


class Outgoing:
    """Belongs to the thread that has the link's lock. Raises OSError when the connection is broken."""

    def __init__(self, connection: socket.socket, epoll: select.epoll) -> None:
        self._socket = connection
        self._epoll = epoll
        self._queue: deque[Entry] = deque()
        self._queued_bytes = 0

    @property
    def is_full(self) -> bool:
        return self._queued_bytes > QUEUE_LIMIT_BYTES

    @property
    def is_empty(self) -> bool:
        return not self._queue

    def push(self, data: bytes | memoryview, descriptor: int | None = None) -> None:
        """Sends at once, or queues what the socket does not take. The bytes must not change until they are sent."""
        if not self._queue:
            sent = self._write(data, descriptor)
            if sent == len(data):
                return
            if sent:
                data, descriptor = memoryview(data)[sent:], None
            self._epoll.modify(self._socket, select.EPOLLIN | select.EPOLLOUT)
        self._queue.append((data, descriptor))
        self._queued_bytes += len(data) + COST_OF_ENTRY_BYTES

    def flush(self) -> None:
        """Sends as much of the queue as the socket takes, in at most `WRITES_AT_A_TIME` writes."""
        for _ in range(WRITES_AT_A_TIME):
            if not self._queue:
                self._epoll.modify(self._socket, select.EPOLLIN)
                return
            data, descriptor = self._queue[0]
            sent = self._write(data, descriptor)
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
        self._queue.clear()
        self._queued_bytes = 0

    def _write(self, data: bytes | memoryview, descriptor: int | None) -> int:
        try:
            if descriptor is None:
                return self._socket.send(data, _FLAGS)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
            return self._socket.sendmsg([data], [rights], _FLAGS)
        except BlockingIOError:
            return 0
