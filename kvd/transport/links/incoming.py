"""The receiving half of a link within a host, and how the bytes of any link become frames.

Large inline payloads are read into their own memory.
"""

from __future__ import annotations

import array
import socket
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvd.protocol.specs import MAX_PAYLOAD_BYTES
from kvd.transport.links.frames import (
    GOODBYE,
    HELLO,
    INLINE,
    INLINE_BELOW_BYTES,
    LARGEST_SMALL_FRAME,
    MAGIC,
    MAX_HEADER_BYTES,
    MESSAGE,
    PREFIX,
    REFERENCE,
    VERSION,
    ExpectedFrame,
    InvalidFrameError,
    unpack_numbers,
)
from kvd.transport.memory.offered import close_refused

BUFFER_BYTES = 256 << 10
AHEAD_BYTES = 4 << 10  # read beyond a large payload: the payload behind it would have to be moved
MOST_DESCRIPTORS = 2  # received, but not yet claimed by a frame

NOT_OF_A_FRAME = "descriptors arrived without a frame of theirs, or this process can have no more"

_ANCILLARY_BYTES = socket.CMSG_SPACE(MOST_DESCRIPTORS * array.array("i").itemsize)
_CLOSE_ON_EXEC = int(socket.MSG_CMSG_CLOEXEC)
_CUT_OFF = int(socket.MSG_CTRUNC)
_WITH_HEADER = frozenset({MESSAGE, INLINE, REFERENCE})

assert BUFFER_BYTES > LARGEST_SMALL_FRAME


def ended_unless(goes_on: bool) -> None:
    """Raises ConnectionError if the stream has ended."""
    if not goes_on:
        raise ConnectionAbortedError("the stream has ended")


class Frame(NamedTuple):
    """One frame. `payload` is an inline payload, `nbytes` the size of the payload, inline or not."""

    kind: int
    released: tuple[int, ...]
    header: bytes
    payload: memoryview | None
    nbytes: int
    segment: int
    offset: int


def check_hello(frame: Frame) -> None:
    """Raises InvalidFrameError unless this is the first frame of a link in this version."""
    if frame.kind != HELLO or frame.offset != MAGIC:
        raise InvalidFrameError("the other side does not speak the protocol of links")
    if frame.segment != VERSION:
        raise InvalidFrameError(f"the other side speaks version {frame.segment} of links, this one {VERSION}")


class FrameAssembler:
    """Puts frames together from the bytes of a stream. Belongs to the thread that reads the link.

    Attributes:
        missing: the part of a large payload that is still to arrive, in memory of the payload.
        missing_nbytes: its size; 0 if none is arriving.
    """

    def __init__(self) -> None:
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # the range of the buffer that has not been taken yet
        self._large: Frame | None = None  # the frame whose payload is arriving
        self.missing = memoryview(b"")
        self.missing_nbytes = 0

    @property
    def is_empty(self) -> bool:
        """Whether no part of a frame has arrived that has not been taken."""
        return self._large is None and self._start == self._end

    def room(self) -> memoryview:
        """Where the next bytes of the stream belong; to be called when `take` returns None. Never empty."""
        if self._large is not None:
            return self.missing
        if self._start:
            rest = self._end - self._start
            self._view[:rest] = self._view[self._start : self._end]
            self._start, self._end = 0, rest
        return self._view[self._end :]

    def rooms(self) -> list[memoryview]:
        """Where the next bytes of the stream belong, beyond the payload that is arriving, too; to be called when `take`
        returns None. The first one is not empty."""
        if self._large is None:
            return [self.room()]
        return [self.missing, self._view[:AHEAD_BYTES]]  # all that was in the buffer belonged to the payload

    def arrived(self, nbytes: int) -> None:
        """So many bytes were written to the start of the room, or of the rooms."""
        if self._large is None:
            self._end += nbytes
        else:
            ahead = nbytes - self.missing_nbytes
            self.missing = self.missing[nbytes:]
            self.missing_nbytes = max(0, -ahead)
            if ahead > 0:
                self._start, self._end = 0, ahead

    def take(self) -> Frame | None:
        """The next frame, None if it has not arrived completely. Raises InvalidFrameError."""
        if self._large is not None:
            return self._take_large()
        at, end = self._start, self._end
        if end - at < PREFIX.size:
            return None
        kind, released, zero, header_nbytes, nbytes, segment, offset = PREFIX.unpack_from(self._buffer, at)
        if not HELLO <= kind <= GOODBYE or zero or header_nbytes > MAX_HEADER_BYTES or nbytes > MAX_PAYLOAD_BYTES:
            raise InvalidFrameError("the bytes are not a frame of a link")
        if header_nbytes and kind not in _WITH_HEADER:
            raise InvalidFrameError(f"a frame of kind {kind} must not have a header")
        numbers_at = at + PREFIX.size
        header_at = numbers_at + 8 * released
        body_at = header_at + header_nbytes
        small = nbytes if kind == INLINE and nbytes <= INLINE_BELOW_BYTES else 0
        if body_at + small > end:
            return None
        numbers = unpack_numbers(released, self._buffer, numbers_at) if released else ()
        header = bytes(self._view[header_at:body_at])
        self._start = body_at + small
        if kind != INLINE:
            return Frame(kind, numbers, header, None, nbytes, segment, offset)
        if nbytes <= INLINE_BELOW_BYTES:
            payload = memoryview(bytes(self._view[body_at : self._start]))
            return Frame(kind, numbers, header, payload, nbytes, segment, offset)
        return self._begin_large(Frame(kind, numbers, header, None, nbytes, segment, offset))

    def take_like(self, head: bytes | bytearray, rest_nbytes: int) -> bytes | None:
        """What comes after `head` in the next frame, which begins so and has `rest_nbytes` bytes more. None: the next
        frame is another one, or has not arrived completely; `take` takes it."""
        body_at = self._start + len(head)
        end = body_at + rest_nbytes
        if self._large is not None or end > self._end or self._buffer[self._start : body_at] != head:
            return None
        self._start = end
        return bytes(self._view[body_at:end])

    def take_all_like(self, head: bytes, rest_nbytes: int, limit: int) -> list[bytes]:
        """The same for as many of the next frames as are like this, at most `limit`."""
        taken: list[bytes] = []
        if self._large is not None:
            return taken
        buffer, head_nbytes, start = self._buffer, len(head), self._start
        nbytes = head_nbytes + rest_nbytes
        while start + nbytes <= self._end and buffer[start : start + head_nbytes] == head and len(taken) < limit:
            taken.append(bytes(self._view[start + head_nbytes : start + nbytes]))
            start += nbytes
        self._start = start
        return taken

    def take_expected(self, expected: ExpectedFrame) -> bool:
        """Takes the next frame if it is the expected one."""
        head = expected.head
        rest = self.take_like(head, len(expected.buffer) - len(head))
        if rest is None:
            return False
        expected.buffer[len(head) :] = rest
        return True

    def put(self, data: memoryview) -> None:
        """These bytes of the stream came another way; to be called when no part of a frame is here."""
        self._start, self._end = 0, len(data)
        self._view[: len(data)] = data

    def close(self) -> None:
        self._large = None

    def _begin_large(self, frame: Frame) -> Frame | None:
        """Takes what the buffer already has of the payload. The rest is read into the payload's own memory."""
        payload = np.empty(frame.nbytes, np.uint8).data
        arrived = min(frame.nbytes, self._end - self._start)
        payload[:arrived] = self._view[self._start : self._start + arrived]
        self._start += arrived
        self.missing = payload[arrived:]
        self.missing_nbytes = frame.nbytes - arrived
        self._large = frame._replace(payload=payload.toreadonly())
        return self._take_large()

    def _take_large(self) -> Frame | None:
        if self.missing_nbytes:
            return None
        frame, self._large = self._large, None
        self.missing = memoryview(b"")
        return frame


class Incoming:
    """Reads a socket within the host, and takes the descriptors that come along. Belongs to the thread that reads the
    link.

    Attributes:
        reads_ahead: whether `take_expected` may read what follows the frame.
    """

    reads_ahead = False

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._frames = FrameAssembler()
        self._descriptors: deque[int] = deque()
        self.take: Callable[[], Frame | None] = self._frames.take
        """The next frame, None if it has not arrived completely. Raises InvalidFrameError."""
        self.take_all_like: Callable[[bytes, int, int], list[bytes]] = self._frames.take_all_like
        """See `FrameAssembler.take_all_like`."""

    @property
    def has_rest(self) -> bool:
        """Whether something was read that was not taken."""
        return not self._frames.is_empty

    def fill(self) -> bool:
        """Reads once; to be called when `take` returns None. False: the stream has ended.

        Raises:
            OSError: the connection is broken.
            InvalidFrameError: descriptors arrived without a frame.
        """
        if self._descriptors and self._frames.is_empty:
            raise InvalidFrameError(NOT_OF_A_FRAME)
        try:
            nbytes, ancillary, flags, _ = self._socket.recvmsg_into(
                [self._frames.room()], _ANCILLARY_BYTES, _CLOSE_ON_EXEC
            )
        except BlockingIOError:
            return True
        if ancillary or flags & _CUT_OFF:
            self._keep_descriptors(ancillary, flags)
        self._frames.arrived(nbytes)
        return nbytes > 0

    def take_expected(self, expected: ExpectedFrame) -> bool:
        """Reads once, right into the buffer of the frame. True: that was the frame. False: it was not; `take` takes
        what was read, if anything was.

        Raises:
            ConnectionError: the stream has ended. Other errors are those of `fill`.
        """
        if self._descriptors or not self._frames.is_empty:
            ended_unless(self.fill())
            return False
        try:
            nbytes, ancillary, flags, _ = self._socket.recvmsg_into([expected.buffer], _ANCILLARY_BYTES, _CLOSE_ON_EXEC)
        except BlockingIOError:
            return False
        if ancillary or flags & _CUT_OFF:
            self._keep_descriptors(ancillary, flags)
        if nbytes == len(expected.buffer) and expected.buffer.startswith(expected.head) and not ancillary:
            return True
        self._frames.put(expected.view[:nbytes])
        ended_unless(nbytes > 0)
        return False

    def take_descriptor(self) -> int:
        """The descriptor that came with a frame. The caller owns it from now on. Raises InvalidFrameError."""
        if not self._descriptors:
            raise InvalidFrameError("a segment came without its descriptor")
        return self._descriptors.popleft()

    def close(self) -> None:
        while self._descriptors:
            close_refused(self._descriptors.popleft())
        self._frames.close()

    def _keep_descriptors(self, ancillary: list[tuple[int, int, bytes]], flags: int) -> None:
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
                self._descriptors.extend(numbers)
        if flags & _CUT_OFF or len(self._descriptors) > MOST_DESCRIPTORS:
            raise InvalidFrameError(NOT_OF_A_FRAME)
