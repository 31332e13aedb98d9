"""Headers that are wrong in every way that we know, and what must hold when one is decoded."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from random import Random
from types import UnionType
from typing import Any, get_args, get_origin

import msgpack

from kvd.errors import ProtocolError
from kvd.protocol.codec import MAX_HEADER_BYTES, decode, encode
from kvd.protocol.envelope import VERSION
from kvd.protocol.messages import BIGGEST, Epoch
from kvd.protocol.specs import DTYPES, MAX_DIMENSIONS, MAX_KEY_NBYTES, MERGES, KeySpec
from tests.fuzz.making import KINDS, Maker, fields_of, limit_of

FORMATS = bytes(range(0x80, 0x83)) + bytes(range(0x90, 0x98)) + bytes(range(0xA0, 0xA4)) + bytes(range(0xC0, 0xE1))
"""The bytes that begin something in msgpack: maps, lists, texts, and all the formats with a length or a number."""


def decodes(header: bytes) -> bool:
    """Whether the header decodes; if so, to a message within its limits, which goes out as it came in."""
    try:
        sender, epoch, message, run = decode(header)
    except ProtocolError:
        return False
    assert type(message) in KINDS
    for number in (sender, *epoch, run):
        assert type(number) is int
        assert 0 <= number <= BIGGEST
    for name, hint in fields_of(type(message)):
        assert is_within(hint, getattr(message, name)), f"{name} of {message}"
    again = encode(message, sender, epoch, run)
    decoded = decode(again)
    assert encode(decoded.message, decoded.sender, decoded.epoch, decoded.run) == again  # NaN is not equal to itself
    return True


def is_within(annotation: Any, value: Any) -> bool:
    """Whether a value is what an annotation of a message says."""
    annotation, limit = limit_of(annotation)
    if limit is None:
        return True  # plain data, which its reader checks
    if annotation in (int, str):
        size = value if annotation is int else len(value)
        return type(value) is annotation and limit.low <= size <= limit.high
    if annotation is KeySpec:
        fits = len(value.shape) <= MAX_DIMENSIONS and 0 <= value.nbytes <= MAX_KEY_NBYTES and value.slice_bytes > 0
        fits = fits and value.merge in ("", *MERGES)
        return type(value) is KeySpec and value.dtype in DTYPES and fits
    if isinstance(annotation, UnionType):
        return value is None or is_within(get_args(annotation)[0], value)
    if get_origin(annotation) is tuple:
        inner = get_args(annotation)
        if inner[-1] is Ellipsis:
            fits = limit.low <= len(value) <= limit.high
            return type(value) is tuple and fits and all(is_within(inner[0], entry) for entry in value)
        return len(value) == len(inner) and all(map(is_within, inner, value))
    if type(value) is not annotation:
        return False
    if issubclass(annotation, Enum | bool | float):
        return True
    return all(is_within(hint, getattr(value, name)) for name, hint in fields_of(annotation))


class HeaderMaker:
    """Headers by seed. About one in four is valid.

    Args:
        random: where all choices come from.
        samples: how many valid headers the damage starts from.
    """

    def __init__(self, random: Random, samples: int = 1000) -> None:
        self._random = random
        self._maker = Maker(random)
        self._valid: list[bytes] = []
        while len(self._valid) < samples:
            message = self._maker.message([KINDS[len(self._valid) % len(KINDS)]])
            try:
                self._valid.append(encode(message, self._number(), Epoch(self._number(), 3), self._number()))
            except (ProtocolError, OverflowError):  # too long, or a number in plain data that msgpack does not have
                continue
        self._bodies = [msgpack.unpackb(header, strict_map_key=False) for header in self._valid]
        self._ways: tuple[Callable[[], bytes], ...] = (
            self._damaged,
            self._damaged,
            self._damaged,
            self._spliced,
            self._with_another_field,
            self._with_another_field,
            self._with_random_fields,
            self._of_formats,
            self._noise,
        )

    def header(self) -> bytes:
        return self._random.choice(self._ways)()

    def valid(self) -> bytes:
        return self._random.choice(self._valid)

    def _number(self) -> int:
        return self._random.choice((0, 1, 77, BIGGEST))

    def _damaged(self) -> bytes:
        random = self._random
        data = bytearray(random.choice(self._valid))
        for _ in range(random.choice((1, 1, 1, 2, 4))):
            place = int(random.random() * len(data))
            choice = int(random.random() * 5)
            if choice == 0:
                data[place] = int(random.random() * 256)
            elif choice == 1:
                data[place] ^= 1 << int(random.random() * 8)
            elif choice == 2:
                data[place] = random.choice(FORMATS)
            elif choice == 3:
                data[place:place] = random.randbytes(3)
            else:
                del data[place + 1 :]
        return bytes(data)

    def _spliced(self) -> bytes:
        """The beginning of one and the end of another."""
        one, other = self._random.choice(self._valid), self._random.choice(self._valid)
        return one[: int(self._random.random() * len(one))] + other[int(self._random.random() * len(other)) :]

    def _with_another_field(self) -> bytes:
        body = list(self._random.choice(self._bodies))
        body[int(self._random.random() * len(body))] = self._maker.plain()
        return bytes(msgpack.packb(body))

    def _with_random_fields(self) -> bytes:
        kind = self._random.choice(KINDS)
        count = len(fields_of(kind)) + self._random.choice((0, 0, 0, 1, -1))
        return bytes(msgpack.packb([VERSION, kind.KIND, 7, 3, 9, 0, *[self._maker.plain() for _ in range(count)]]))

    def _of_formats(self) -> bytes:
        """Formats in any order, with lengths that promise more than there is."""
        pieces = []
        for _ in range(int(self._random.random() * 12)):
            pieces.append(bytes([self._random.choice(FORMATS)]))
            pieces.append(
                self._random.choice((b"", b"\0", b"\xff\xff", b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", b"w"))
            )
        return b"".join(pieces)

    def _noise(self) -> bytes:
        return self._random.randbytes(int(self._random.random() * 60))


def nested(opening: bytes, levels: int) -> bytes:
    """Something in something in something …, as long as a header may be."""
    return (opening * levels)[:MAX_HEADER_BYTES]
