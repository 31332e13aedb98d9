"""The sending half of a link. Bytes for which the socket has no room wait here."""

from __future__ import annotations

import array
import select
import socket
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice, takewhile
from typing import Protocol, TypeAlias

from kvd.protocol.specs import MAX_PAYLOAD_BYTES

QUEUE_LIMIT_BYTES = 2 * MAX_PAYLOAD_BYTES
COST_OF_ENTRY_BYTES = 256  # memory that a queued piece takes besides its bytes
MOST_JOINED_BYTES = 64 << 10  # what is joined may be one record of a sealed link, which its reader takes in at once

PIECES_AT_A_TIME = 1000  # in one system call; the kernel takes 1024
PIECES_FLUSHED = 64  # taken from the queue for one system call: a socket seldom has room for more
SMALL_PIECE_BYTES = 16 << 10  # up to this a piece is cheaper to copy than to send by itself
MOST_GATHERED_BYTES = 256 << 10

FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)  # a plain number: faster than the enum
_MORE = FLAGS | int(socket.MSG_MORE)  # over TCP the kernel waits for more before it fills a packet up

Entry: TypeAlias = tuple["bytes | memoryview", "int | None"]  # bytes, and the descriptor to send with the first of them


class Writer(Protocol):
    """Gives bytes to a socket. Raises OSError when the connection is broken."""

    has_unsent: bool
    """Whether the socket had no room for something that was taken."""

    writes_at_a_time: int
    """How many writes may follow each other before the thread does something else."""

    def write(self, data: bytes | bytearray | memoryview, descriptor: int | None) -> int:
        """Take bytes, with a descriptor of this process, and return how many."""

    def write_all(self, pieces: Sequence[bytes | memoryview]) -> int:
        """Take several pieces, one after the other, and return how many bytes."""

    def flush(self) -> None:
        """Gives the socket what it had no room for."""


class PlainWriter:
    """A socket within the host, or over TCP without keys."""

    has_unsent = False
    writes_at_a_time = 64

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def write(self, data: bytes | bytearray | memoryview, descriptor: int | None) -> int:
        try:
            if descriptor is None:
                return self._socket.send(data, FLAGS)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
            return self._socket.sendmsg([data], [rights], FLAGS)
        except BlockingIOError:
            return 0

    def write_all(self, pieces: Sequence[bytes | memoryview]) -> int:
        taken = 0
        for at in range(0, len(pieces), PIECES_AT_A_TIME):
            some = pieces[at : at + PIECES_AT_A_TIME]
            is_last = at + len(some) == len(pieces)
            try:
                sent = self._socket.sendmsg(some, (), FLAGS if is_last else _MORE)
            except BlockingIOError:
                break
            taken += sent
            if sent < sum(map(len, some)):
                break
        return taken

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

    def push(self, data: bytes | memoryview, descriptor: int | None = None) -> None:
        """Sends at once, or queues what the socket does not take. The bytes must not change until they are sent."""
        if self._held:
            if self._held_bytes + len(data) > MOST_JOINED_BYTES:
                self._push_held()
            else:
                data = b"".join((*self._held, data))
                self._drop_held()
        if not self.waits:
            sent = self._writer.write(data, descriptor)
            if sent == len(data) and not self._writer.has_unsent:
                return
            if sent:
                data, descriptor = memoryview(data)[sent:], None
            self._wait()
        if len(data):
            self._wait_with(data, descriptor)

    def push_whole(self, frame: bytearray) -> bool:
        """Sends a frame that the caller may change afterwards. False: nothing was done, as other bytes go first."""
        if self.waits or self._held:
            return False
        sent = self._writer.write(frame, None)
        if sent < len(frame):
            self._wait_with(bytes(frame[sent:]), None)
        elif self._writer.has_unsent:
            self._wait()
        return True

    def push_all(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Pushes several pieces, with as few system calls as possible."""
        if self._held:
            pieces = [b"".join(self._held), *pieces]
            self._drop_held()
        sent = 0 if self.waits else self._writer.write_all(pieces)
        for piece in pieces:
            if sent >= len(piece):
                sent -= len(piece)
            else:
                self._wait_with(memoryview(piece)[sent:], None)
                sent = 0
        if self._writer.has_unsent:
            self._wait()

    def _push_held(self) -> None:
        data = b"".join(self._held)
        self._drop_held()
        self.push(data)

    def _wait_with(self, data: bytes | memoryview, descriptor: int | None) -> None:
        """The bytes wait for room in the socket."""
        self._wait()
        self._queue.append((data, descriptor))
        self._queued_bytes += len(data) + COST_OF_ENTRY_BYTES

    def _wait(self) -> None:
        if not self.waits:
            self.waits = True
            self._epoll.modify(self._socket, select.EPOLLIN | select.EPOLLOUT)

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
            if descriptor is None:
                sent = self._writer.write_all(self._next_pieces())
            else:
                sent = self._writer.write(data, descriptor)
            if not sent:
                return
            self._drop_first(sent)

    def _next_pieces(self) -> list[bytes | memoryview]:
        """The first pieces of the queue, up to the next descriptor."""
        waiting = islice(self._queue, PIECES_FLUSHED)
        return [data for data, _ in takewhile(_has_no_descriptor, waiting)]

    def _drop_first(self, nbytes: int) -> None:
        """Drop so many bytes from the front of the queue: they were sent."""
        self._queued_bytes -= nbytes
        while nbytes:
            data, _ = self._queue[0]
            if nbytes < len(data):
                self._queue[0] = (memoryview(data)[nbytes:], None)
                return
            nbytes -= len(data)
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


def _has_no_descriptor(entry: Entry) -> bool:
    return entry[1] is None


def gathered(pieces: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """The same bytes, with small pieces that follow each other joined."""
    found: list[bytes | memoryview] = []
    run: list[bytes | memoryview] = []
    run_bytes = 0
    for piece in pieces:
        nbytes = len(piece)
        if run and (nbytes > SMALL_PIECE_BYTES or run_bytes + nbytes > MOST_GATHERED_BYTES):
            found.append(b"".join(run))
            run, run_bytes = [], 0
        if nbytes > SMALL_PIECE_BYTES:
            found.append(piece)
        else:
            run.append(piece)
            run_bytes += nbytes
    if run:
        found.append(b"".join(run))
    return found
