"""The receiving half of a link over TCP between nodes without keys: the frames of a link as they are."""

from __future__ import annotations

import socket

from kvd.transport.links.expected import ExpectedFrame
from kvd.transport.links.frames import InvalidFrameError
from kvd.transport.links.incoming import Frame, FrameAssembler, ended_unless
from kvd.transport.links.wake_ups import WakeUps

READS_AT_A_TIME = 16  # a turn of the loop takes longer than a read


class PlainIncoming:
    """Reads a socket. Belongs to the thread that reads the link.

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
