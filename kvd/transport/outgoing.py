"""The sending half of a link: what the socket does not take at once waits here."""

from __future__ import annotations

import array
import select
import socket
from collections import deque
from typing import TypeAlias

from kvd.transport.base import MAX_PAYLOAD_BYTES

QUEUE_LIMIT_BYTES = 2 * MAX_PAYLOAD_BYTES
COST_OF_ENTRY_BYTES = 256  # what a queued piece takes besides its bytes
WRITES_AT_A_TIME = 64

_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)  # a plain number: quicker than the enum

Entry: TypeAlias = tuple["bytes | memoryview", "int | None"]  # bytes, and the descriptor that goes with the first


class Outgoing:
    """Not for two threads at once: the link has the lock. Raises OSError when the connection is broken."""

    def __init__(self, connection: socket.socket, epoll: select.epoll) -> None:
        self._socket = connection
        self._epoll = epoll
        self._waiting: deque[Entry] = deque()
        self._waiting_bytes = 0

    @property
    def is_full(self) -> bool:
        return self._waiting_bytes > QUEUE_LIMIT_BYTES

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    def push(self, data: bytes | memoryview, descriptor: int | None = None) -> None:
        """Sends after what waits, now if possible. The bytes must stay as they are."""
        if not self._waiting:
            sent = self._write(data, descriptor)
            if sent == len(data):
                return
            if sent:
                data, descriptor = memoryview(data)[sent:], None
            self._epoll.modify(self._socket, select.EPOLLIN | select.EPOLLOUT)
        self._waiting.append((data, descriptor))
        self._waiting_bytes += len(data) + COST_OF_ENTRY_BYTES

    def flush(self) -> None:
        """Sends of what waits as much as the socket takes, but leaves the others their turn."""
        for _ in range(WRITES_AT_A_TIME):
            if not self._waiting:
                self._epoll.modify(self._socket, select.EPOLLIN)
                return
            data, descriptor = self._waiting[0]
            sent = self._write(data, descriptor)
            if not sent:
                return
            self._waiting_bytes -= sent
            if sent < len(data):
                self._waiting[0] = (memoryview(data)[sent:], None)
            else:
                self._waiting.popleft()
                self._waiting_bytes -= COST_OF_ENTRY_BYTES

    def keep(self) -> None:
        """Copies what waits and belongs to somebody else, who takes it back."""
        self._waiting = deque((bytes(data), descriptor) for data, descriptor in self._waiting)

    def clear(self) -> None:
        self._waiting.clear()
        self._waiting_bytes = 0

    def _write(self, data: bytes | memoryview, descriptor: int | None) -> int:
        try:
            if descriptor is None:
                return self._socket.send(data, _FLAGS)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
            return self._socket.sendmsg([data], [rights], _FLAGS)
        except BlockingIOError:
            return 0
