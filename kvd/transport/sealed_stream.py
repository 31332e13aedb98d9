"""Both halves of a sealed link: frames become records on the way out, records become frames on the way in.

A record holds a part of one frame: all of a small one, or what comes before its payload, or a piece of the payload,
which is opened right where it belongs. Sealing is the only copy that a sender makes of a payload.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from kvd.transport.expected import ExpectedFrame
from kvd.transport.frames import InvalidFrameError
from kvd.transport.incoming import Frame, FrameAssembler, ended_unless
from kvd.transport.outgoing import FLAGS
from kvd.transport.sealing import HEAD, OVERHEAD_BYTES, RECORD_BYTES, BrokenSealError, Opener, Sealer
from kvd.transport.wake_ups import WakeUps

WRITE_BYTES = 4 << 20  # sealed at most before the caller does something else
READS_AT_A_TIME = 16  # a turn of the loop takes longer than reading and opening a record

_MORE = FLAGS | int(socket.MSG_MORE)  # the kernel waits for more before it fills a packet up


class Seals(NamedTuple):
    """One end's sealer and opener."""

    sealer: Sealer
    opener: Opener


class SealedWriter:
    """Seals what goes into a socket. What was sealed and did not fit is kept, and goes first."""

    writes_at_a_time = 4

    def __init__(self, connection: socket.socket, sealer: Sealer) -> None:
        self._socket = connection
        self._sealer = sealer
        self._record = np.empty(RECORD_BYTES + OVERHEAD_BYTES, np.uint8).data
        self._unsent = self._record[:0]
        self.has_unsent = False

    def write(self, data: bytes | bytearray | memoryview, descriptor: int | None, more: bool) -> int:
        """Seals as many of the bytes as the socket has room for, and returns their number."""
        if descriptor is not None:
            raise ValueError("descriptors do not leave the host")
        if self.has_unsent:
            self.flush()
        view = memoryview(data)
        taken = 0
        while taken < len(view) and taken < WRITE_BYTES and not self.has_unsent:
            part = view[taken : taken + RECORD_BYTES]
            try:
                self._unsent = self._record[: self._sealer.seal(part, self._record)]
            except BrokenSealError as error:
                raise OSError(0, str(error)) from None
            taken += len(part)
            goes_on = more or taken < len(view)
            self._send(_MORE if goes_on and taken < WRITE_BYTES else FLAGS)
        return taken

    def write_all(self, pieces: Sequence[bytes | memoryview]) -> int:
        """Seals as many of the pieces as the socket has room for, up to `WRITE_BYTES` of each."""
        taken = 0
        for place, piece in enumerate(pieces, 1):
            written = self.write(piece, None, place < len(pieces))
            taken += written
            if written < len(piece) or self.has_unsent:
                break
        return taken

    def flush(self) -> None:
        self._send(FLAGS)

    def _send(self, flags: int) -> None:
        with suppress(BlockingIOError):
            self._unsent = self._unsent[self._socket.send(self._unsent, flags) :]
        self.has_unsent = len(self._unsent) > 0


class SealedIncoming:
    """Reads a socket and opens the records. Belongs to the thread that reads the link."""

    reads_ahead = True

    def __init__(self, connection: socket.socket, opener: Opener) -> None:
        self._socket = connection
        self._opener = opener
        self._frames = FrameAssembler()
        self._buffer = np.empty(RECORD_BYTES + OVERHEAD_BYTES + HEAD.size, np.uint8).data
        self._start = self._end = 0  # the range of the buffer that has not been opened yet
        self._reads_left = 0
        self._wake_ups = WakeUps(connection)

    def fill(self) -> bool:
        """Reads once; to be called when `take` returns None. False: the stream has ended. Raises OSError."""
        self._reads_left = READS_AT_A_TIME - 1
        return self._read() != 0

    def _read(self) -> int:
        """Reads once. Returns the number of bytes, -1 if there are none yet, 0 at the end."""
        if self._start:
            rest = self._end - self._start
            self._buffer[:rest] = self._buffer[self._start : self._end]
            self._start, self._end = 0, rest
        # Not beyond the head of the record that follows a large one: the next read would have to move what came.
        until = len(self._buffer) if self._end < HEAD.size else self._size_of_next() + HEAD.size
        try:
            nbytes = self._socket.recv_into(self._buffer[self._end : until])
        except BlockingIOError:
            return -1
        self._end += nbytes
        return nbytes

    def take(self) -> Frame | None:
        """The next frame, None if it has not arrived completely. Within a large payload it reads on, up to a limit.

        Raises:
            InvalidFrameError: what arrived was not sealed by the other end, or breaks the protocol.
        """
        while True:
            frame = self._frames.take()
            if frame is not None:
                return frame
            if not self._open_next() and not self._read_on():
                self._wake_ups.come_for(self._frames.missing_nbytes - (self._end - self._start))
                return None

    @property
    def has_rest(self) -> bool:
        """Whether something was read that was not taken."""
        return self._start != self._end or not self._frames.is_empty

    def take_like(self, head: bytes | bytearray, rest_nbytes: int) -> bytes | None:
        """See `FrameAssembler.take_like`; a small frame is one record. Raises InvalidFrameError."""
        if self._frames.is_empty:
            self._open_next()
        return self._frames.take_like(head, rest_nbytes)

    def take_expected(self, expected: ExpectedFrame) -> bool:
        """Reads once, and takes the next frame if it is the expected one, which is one record.

        Raises:
            OSError: the connection is broken, or the stream has ended.
            InvalidFrameError: what arrived was not sealed by the other end.
        """
        ended_unless(self.fill())
        if self._frames.is_empty:
            self._open_next()
        return self._frames.take_expected(expected)

    def _read_on(self) -> bool:
        """Reads more of a large payload. False: there is nothing to read yet, or it is somebody else's turn."""
        if not self._reads_left or not self._frames.missing_nbytes:
            return False
        self._reads_left -= 1
        try:
            return self._read() > 0
        except OSError:  # the next `fill` finds that the connection is broken
            return False

    def take_all_like(self, head: bytes, rest_nbytes: int, limit: int) -> list[bytes]:
        """See `FrameAssembler.take_all_like`. Raises InvalidFrameError."""
        taken: list[bytes] = []
        while len(taken) < limit and (rest := self.take_like(head, rest_nbytes)) is not None:
            taken.append(rest)
        return taken

    def take_descriptor(self) -> int:
        raise InvalidFrameError("shared memory was offered over a link between hosts")

    def close(self) -> None:
        self._frames.close()

    def _open_next(self) -> bool:
        """Opens the next record where its bytes belong. False: it has not arrived completely."""
        if self._end - self._start < HEAD.size:
            return False
        end = self._start + self._size_of_next()
        if end > self._end:
            return False
        nbytes = end - self._start - OVERHEAD_BYTES
        room = self._frames.room()
        if nbytes > len(room):
            raise InvalidFrameError("a record goes beyond its frame")
        try:
            self._opener.open(self._buffer[self._start : end], room[:nbytes])
        except BrokenSealError as error:
            raise InvalidFrameError(str(error)) from None
        self._start = end
        self._frames.arrived(nbytes)
        return True

    def _size_of_next(self) -> int:
        """The size of the record whose head has arrived."""
        try:
            return self._opener.plain_nbytes(self._buffer[self._start : self._end]) + OVERHEAD_BYTES
        except BrokenSealError as error:
            raise InvalidFrameError(str(error)) from None
