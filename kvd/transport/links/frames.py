"""The frames of a link: a prefix, the numbers of released frames, a header, and for INLINE a payload.

All kinds of frames have the same prefix. Numbers are little-endian.
"""

from __future__ import annotations

from struct import Struct

MAGIC = int.from_bytes(b"kvd link", "little")
VERSION = 1

HELLO = 1  # the first frame: offset is MAGIC, segment is VERSION
MESSAGE = 2  # a header, no payload
INLINE = 3  # a header and its payload
REFERENCE = 4  # a header; the payload lies in a segment. The n-th REFERENCE of a link has the number n, from 0
SEGMENT = 5  # carries the descriptor of a segment; offset is the size of the segment
RELEASE = 6  # only released numbers
GOODBYE = 7  # the sender has stopped sending and taking messages

MAX_HEADER_BYTES = 64 << 10
MAX_RELEASED = 255  # in one frame
INLINE_BELOW_BYTES = 64 << 10  # payloads up to this are cheaper to copy than to lease

PREFIX = Struct("<BBHIIIQ")  # kind, released numbers, 0, header bytes, payload bytes, segment, offset
LARGEST_SMALL_FRAME = PREFIX.size + 8 * MAX_RELEASED + MAX_HEADER_BYTES + INLINE_BELOW_BYTES

_NUMBERS = [Struct(f"<{count}Q") for count in range(MAX_RELEASED + 1)]


class InvalidFrameError(Exception):
    """The other end broke the protocol of links."""


def prefix_of(
    kind: int, released: int, header_nbytes: int = 0, payload_nbytes: int = 0, segment: int = 0, offset: int = 0
) -> bytes:
    return PREFIX.pack(kind, released, 0, header_nbytes, payload_nbytes, segment, offset)


def inline_frame(header_nbytes: int, payload_nbytes: int) -> bytearray:
    """An INLINE frame that releases nothing, with a header and a payload of zeros for the caller to fill in."""
    return bytearray(prefix_of(INLINE, 0, header_nbytes, payload_nbytes) + bytes(header_nbytes + payload_nbytes))


def pack_numbers(numbers: list[int]) -> bytes:
    return _NUMBERS[len(numbers)].pack(*numbers)


def unpack_numbers(count: int, buffer: bytearray, at: int) -> tuple[int, ...]:
    return _NUMBERS[count].unpack_from(buffer, at)


class ExpectedFrame:
    """A frame with a known beginning that a thread waits for. Belongs to that thread.

    Args:
        frame: as long as the one that is expected, and beginning like it.
        head_nbytes: of its beginning.

    Attributes:
        head: how it begins. The thread may change it before it waits.
        buffer: the frame, once it was taken. It stays until the thread waits again.
        view: of the buffer.
    """

    __slots__ = ("buffer", "head", "view")

    def __init__(self, frame: bytes | bytearray, head_nbytes: int) -> None:
        self.head = bytearray(frame[:head_nbytes])
        self.buffer = bytearray(frame)
        self.view = memoryview(self.buffer)
