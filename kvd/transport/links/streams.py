"""Streams of links over TCP. With keys, frames become records on the way out, and records frames on the way in.

A record holds a part of one frame: all of a small one, or what comes before its payload, or a piece of the payload,
which is opened right where it belongs. Sealing is the only copy that a sender makes of a payload.

Between nodes without keys, the frames travel as they are.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvd.transport.links.frames import ExpectedFrame, InvalidFrameError
from kvd.transport.links.incoming import Frame, FrameAssembler, ended_unless
from kvd.transport.links.outgoing import FLAGS
from kvd.transport.links.sealing import HEAD, OVERHEAD_BYTES, RECORD_BYTES, BrokenSealError, Opener, Sealer
from kvd.transport.links.sockets import WakeUps

WRITE_BYTES = 4 << 20  # sealed at most before the caller does something else
READS_AT_A_TIME = 16  # a turn of the loop takes longer than a read, or than opening a record

_SEALED_BYTES = RECORD_BYTES + OVERHEAD_BYTES + (64 << 10)  # a large record, and small ones before it
_READ_BYTES = 64 << 10  # read at least, if there is so much: a small record is followed by others
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
        self._sealed = np.empty(_SEALED_BYTES, np.uint8).data  # records that leave with one system call
        self._begin = self._end = 0  # those that were not sent yet
        self.has_unsent = False

    def write(self, data: bytes | bytearray | memoryview, descriptor: int | None) -> int:
        """Seal bytes, up to `WRITE_BYTES` and as long as the socket has room, and return how many."""
        if descriptor is not None:
            raise ValueError("descriptors do not leave the host")
        return self.write_all((data,))

    def write_all(self, pieces: Sequence[bytes | bytearray | memoryview]) -> int:
        """Seal pieces, up to `WRITE_BYTES` of each and as long as the socket has room. Return how many bytes of all.

        Small records that follow each other leave with one system call, as does a large one behind them.
        """
        if self.has_unsent:
            self.flush()
        taken, seal = 0, self._sealer.seal
        for piece in pieces:
            view = memoryview(piece)
            nbytes, at = len(view), 0
            while at < nbytes:
                if self.has_unsent:
                    return taken
                if at >= WRITE_BYTES:
                    self._send(FLAGS)
                    return taken
                part = view[at : at + RECORD_BYTES]
                if self._end + len(part) + OVERHEAD_BYTES > _SEALED_BYTES:
                    self._send(_MORE)
                    continue
                try:
                    self._end += seal(part, self._sealed[self._end :])
                except BrokenSealError as error:
                    raise OSError(0, str(error)) from None
                at += len(part)
                taken += len(part)
        if not self.has_unsent:
            self._send(FLAGS)
        return taken

    def flush(self) -> None:
        self._send(FLAGS)

    def _send(self, flags: int) -> None:
        try:
            self._begin += self._socket.send(self._sealed[self._begin : self._end], flags)
        except BlockingIOError:
            self.has_unsent = True
            return
        self.has_unsent = self._begin < self._end
        if not self.has_unsent:
            self._begin = self._end = 0


class SealedIncoming:
    """Reads a socket and opens the records. Belongs to the thread that reads the link."""

    reads_ahead = True

    def __init__(self, connection: socket.socket, opener: Opener) -> None:
        self._socket = connection
        self._opener = opener
        self._frames = FrameAssembler()
        self._buffer = np.empty(RECORD_BYTES + OVERHEAD_BYTES + HEAD.size, np.uint8).data
        self._start = self._end = 0  # the range of the buffer that has not been opened yet
        self._size = 0  # of the record that begins there; 0: its head has not arrived, or was not read yet
        self._reads_left = 0
        self._wake_ups = WakeUps(connection)

    def fill(self) -> bool:
        """Reads once; to be called when `take` returns None. False: the stream has ended. Raises OSError."""
        self._reads_left = READS_AT_A_TIME - 1
        return self._read() != 0

    def _read(self) -> int:
        """Reads once. Returns the number of bytes, -1 if there are none yet, 0 at the end."""
        end = self._end
        if self._start:
            rest = end - self._start
            self._buffer[:rest] = self._buffer[self._start : end]
            self._start, self._end, end = 0, rest, rest
        # Not beyond the head of the record that follows a large one: the next read would have to move what came.
        until = max(self._size + HEAD.size, _READ_BYTES) if self._size else len(self._buffer)
        try:
            nbytes = self._socket.recv_into(self._buffer[end:until])
        except BlockingIOError:
            return -1
        self._end = end + nbytes
        return nbytes

    def take(self) -> Frame | None:
        """The next frame, None if it has not arrived completely. Within a large payload it reads on, up to a limit.

        Raises:
            InvalidFrameError: what arrived was not sealed by the other end, or breaks the protocol.
        """
        frames = self._frames
        frame = frames.take()
        while frame is None:
            if self._open_next():
                if not frames.missing_nbytes:
                    frame = frames.take()
            elif not self._reads_left or not frames.missing_nbytes or not self._read_on():
                self._wake_ups.come_for(frames.missing_nbytes - (self._end - self._start))
                break
        return frame

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
        """Reads more of a large payload. False: there is nothing to read yet."""
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
        start, size = self._start, self._size
        if not size:
            if self._end - start < HEAD.size:
                return False
            try:
                size = self._opener.plain_nbytes(self._buffer[start : self._end]) + OVERHEAD_BYTES
            except BrokenSealError as error:
                raise InvalidFrameError(str(error)) from None
            self._size = size
        end = start + size
        if end > self._end:
            return False
        nbytes = size - OVERHEAD_BYTES
        frames = self._frames
        room = frames.missing if frames.missing_nbytes else frames.room()
        if nbytes > len(room):
            raise InvalidFrameError("a record goes beyond its frame")
        try:
            self._opener.open(self._buffer[start:end], room[:nbytes])
        except BrokenSealError as error:
            raise InvalidFrameError(str(error)) from None
        self._start, self._size = end, 0
        frames.arrived(nbytes)
        return True


class PlainIncoming:
    """The receiving half of a link without keys. Belongs to the thread that reads the link.

    What has arrived of a large payload, and the beginning of what follows it, are read with one system call, the
    payload right where it belongs.
    """

    reads_ahead = True

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._frames = FrameAssembler()
        self._wake_ups = WakeUps(connection)
        self._reads_left = 0

    def fill(self) -> bool:
        """Reads once; to be called when `take` returns None. False: the stream has ended. Raises OSError."""
        self._reads_left = READS_AT_A_TIME - 1
        return self._read() != 0

    def take(self) -> Frame | None:
        """The next frame, None if it has not arrived completely. Within a large payload it reads on, up to a limit.

        Raises:
            InvalidFrameError: what arrived breaks the protocol.
        """
        while True:
            frame = self._frames.take()
            if frame is not None:
                return frame
            if not self._read_on():
                self._wake_ups.come_for(self._frames.missing_nbytes)
                return None

    @property
    def has_rest(self) -> bool:
        """Whether something was read that was not taken."""
        return not self._frames.is_empty

    def take_all_like(self, head: bytes, rest_nbytes: int, limit: int) -> list[bytes]:
        """See `FrameAssembler.take_all_like`."""
        return self._frames.take_all_like(head, rest_nbytes, limit)

    def take_expected(self, expected: ExpectedFrame) -> bool:
        """Reads once, and takes the next frame if it is the expected one. Raises OSError, also at the end."""
        ended_unless(self.fill())
        return self._frames.take_expected(expected)

    def take_descriptor(self) -> int:
        raise InvalidFrameError("shared memory was offered over a link between hosts")

    def close(self) -> None:
        self._frames.close()

    def _read(self) -> int:
        """Reads once. Returns the number of bytes, -1 if there are none yet, 0 at the end."""
        rooms = self._frames.rooms()
        try:  # a single room is quicker without a list
            nbytes = self._socket.recv_into(rooms[0]) if len(rooms) == 1 else self._socket.recvmsg_into(rooms)[0]
        except BlockingIOError:
            return -1
        self._frames.arrived(nbytes)
        return nbytes

    def _read_on(self) -> bool:
        """Reads more of a large payload. False: there is nothing to read yet, or it is somebody else's turn."""
        if not self._reads_left or not self._frames.missing_nbytes:
            return False
        self._reads_left -= 1
        try:
            return self._read() > 0
        except OSError:  # the next `fill` finds that the connection is broken
            return False
