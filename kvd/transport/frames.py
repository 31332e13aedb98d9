"""What goes over a link: prefix, numbers of released frames, header, inline payload.

One prefix serves all kinds. Both ends are the same machine, so numbers are in its own order.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

MAGIC = int.from_bytes(b"kvd link", "little")
VERSION = 1

HELLO = 1  # first of all: offset is MAGIC, segment is VERSION
MESSAGE = 2  # a header, no payload
INLINE = 3  # a header and its payload
REFERENCE = 4  # a header; the payload lies in a segment. The n-th of a connection has the number n
SEGMENT = 5  # the descriptor of a segment travels with it; offset is its size
RELEASE = 6  # nothing but released numbers
GOODBYE = 7  # the sender neither sends nor takes messages any more

MAX_HEADER_BYTES = 64 << 10
MAX_RELEASED = 255  # numbers in one frame
INLINE_BELOW_BYTES = 16 << 10  # payloads up to this are cheaper to copy than to lend

PREFIX = Struct("<BBHIIIQ")  # kind, released numbers, 0, header bytes, payload bytes, segment, offset
LARGEST_SMALL_FRAME = PREFIX.size + 8 * MAX_RELEASED + MAX_HEADER_BYTES + INLINE_BELOW_BYTES

_NUMBERS = [Struct(f"<{count}Q") for count in range(MAX_RELEASED + 1)]


class BadFrameError(Exception):
    """The other end does not keep to the protocol."""


class Prefix(NamedTuple):
    """The fields of a prefix, in their order."""

    kind: int
    released: int
    zero: int
    header_nbytes: int
    payload_nbytes: int
    segment: int
    offset: int


def prefix_of(
    kind: int, released: int, header_nbytes: int = 0, payload_nbytes: int = 0, segment: int = 0, offset: int = 0
) -> bytes:
    return PREFIX.pack(kind, released, 0, header_nbytes, payload_nbytes, segment, offset)


def pack_numbers(numbers: list[int]) -> bytes:
    return _NUMBERS[len(numbers)].pack(*numbers)


def unpack_numbers(count: int, buffer: bytearray, at: int) -> tuple[int, ...]:
    return _NUMBERS[count].unpack_from(buffer, at)
