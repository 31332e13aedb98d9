"""Headers in which every number takes nine bytes, so that all have one length: of pushes and answers that are repeated.

They are msgpack all the same, and `kvd.protocol.codec` reads them like any other header. Who knows the layout writes or
reads one with a single call of `struct`.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

from kvd.protocol.envelope import VERSION, Decoded
from kvd.protocol.messages import ADD, BIGGEST, MOST_COUNTED, Done, Epoch, PushBatch, Values

_WIDE = 0xCF  # a number of 64 bits follows
_TRUE, _FALSE, _NONE = 0xC3, 0xC2, 0xC0
_LONG_LIST, _LIST_OF_9, _LIST_OF_7, _LIST_OF_1 = 0xDC, 0x99, 0x97, 0x91
_PUSH_ENTRIES = 16

# 16 entries: version, kind; sender, generation, change, run, request, batch, clock; how; samples; pull, probe; step,
# settled, place
_PUSH = Struct(">BHBB BQBQBQBQBQBQBQ B BQ BB BQBQBQ")
# 9 entries: version, kind; sender, generation, change, run, request; a list of one version; no coding
_VALUES = Struct(">BBB BQBQBQBQBQ B BQ B")
# 7 entries: version, kind; sender, generation, change, run, request
_DONE = Struct(">BBB BQBQBQBQBQ")
_VALUES_HEAD = Struct(">BBB BQBQBQBQBQ BB")
_VALUES_TAIL = Struct(">QB")

# The same, up to the run; and what comes behind, in which twelve bytes are how, samples, pull and probe
_PUSH_HEAD = Struct(">BHBB BQBQBQBQ")
_PUSH_TAIL = Struct(">BQBQBQ 12s BQBQBQ")
_ONE_SAMPLE = Struct(">BBQBB")
_ONE_SAMPLE_AND_PULL = _ONE_SAMPLE.pack(ADD, _WIDE, 1, _TRUE, _FALSE)
_PULLS = {_ONE_SAMPLE_AND_PULL: True, _ONE_SAMPLE.pack(ADD, _WIDE, 1, _FALSE, _FALSE): False}
# Of a push, what its calls differ in; twelve bytes are how, samples, pull and probe
_PUSH_NUMBERS = Struct(">QBQBQ 12s BQBQBQ")
_PUSH_NUMBERS_AT = _PUSH.size - _PUSH_NUMBERS.size
_NUMBER = Struct(">Q")

PUSH_NBYTES = _PUSH.size
PUSH_HEAD_NBYTES = _PUSH_HEAD.size
"""Of a push, what all pushes of a worker have in common until there is another view."""
PUSH_TAIL_NBYTES = _PUSH_TAIL.size
VALUES_NBYTES = _VALUES.size
DONE_NBYTES = _DONE.size
VALUES_HEAD_NBYTES = _VALUES_HEAD.size
"""Of an answer, what comes before its version: it is known to the one that has asked."""
VALUES_TAIL_NBYTES = _VALUES_TAIL.size
VALUES_REQUEST_AT = VALUES_HEAD_NBYTES - 2 - _NUMBER.size
"""Of an answer, where the number of its request is."""
put_number = _NUMBER.pack_into
"""Writes a number to a buffer, from a byte on."""


class PushNumbers(NamedTuple):
    """Fields that differ between the PushBatches of a worker if each is one sample that is added."""

    request: int
    batch: int
    clock: int
    pull: bool
    step: int
    settled: int
    place: int


def put_push(
    buffer: bytearray,
    at: int,
    sender: int,
    epoch: Epoch,
    run: int,
    request: int,
    batch: int,
    clock: int,
    step: int,
    settled: int,
    place: int,
) -> None:
    """Write the header of a PushBatch to `buffer`, from byte `at` on: one sample, with a pull, and no probe."""
    # fmt: off
    _PUSH.pack_into(
        buffer, at, _LONG_LIST, _PUSH_ENTRIES, VERSION, PushBatch.KIND,
        _WIDE, sender, _WIDE, epoch[0], _WIDE, epoch[1], _WIDE, run, _WIDE, request, _WIDE, batch, _WIDE, clock,
        ADD, _WIDE, 1, _TRUE, _FALSE, _WIDE, step, _WIDE, settled, _WIDE, place,
    )
    # fmt: on


def put_push_numbers(
    buffer: bytearray, at: int, request: int, batch: int, clock: int, step: int, settled: int, place: int
) -> None:
    """Write these numbers into a header that `put_push` has written to `buffer` at byte `at`."""
    # fmt: off
    _PUSH_NUMBERS.pack_into(
        buffer, at + _PUSH_NUMBERS_AT, request, _WIDE, batch, _WIDE, clock, _ONE_SAMPLE_AND_PULL,
        _WIDE, step, _WIDE, settled, _WIDE, place,
    )
    # fmt: on


def write_push(push: PushBatch, sender: int, epoch: Epoch, run: int) -> bytes | None:
    """Return the header of a push; None if it has another form."""
    if push.how != ADD or push.probe:
        return None
    # fmt: off
    return _PUSH.pack(
        _LONG_LIST, _PUSH_ENTRIES, VERSION, PushBatch.KIND, _WIDE, sender, _WIDE, epoch[0], _WIDE, epoch[1],
        _WIDE, run, _WIDE, push.request, _WIDE, push.batch, _WIDE, push.clock,
        ADD, _WIDE, push.samples, _TRUE if push.pull else _FALSE, _FALSE,
        _WIDE, push.step, _WIDE, push.settled, _WIDE, push.place,
    )
    # fmt: on


def read_push(header: bytes | memoryview) -> Decoded | None:
    """Decode a PushBatch that `write_push` wrote, of PUSH_NBYTES bytes. Returns None for any other header."""
    # fmt: off
    (
        marker, entries, version, kind,
        w1, sender, w2, generation, w3, change, w4, run, w5, request, w6, batch, w7, clock,
        how, w8, samples, pull, probe, w9, step, w10, settled, w11, place,
    ) = _PUSH.unpack(header)
    # fmt: on
    if not (
        marker == _LONG_LIST
        and entries == _PUSH_ENTRIES
        and version == VERSION
        and kind == PushBatch.KIND
        and w1 == w2 == w3 == w4 == w5 == w6 == w7 == w8 == w9 == w10 == w11 == _WIDE
        and how == ADD
        and pull in (_TRUE, _FALSE)
        and probe == _FALSE
        and sender <= BIGGEST
        and generation <= BIGGEST
        and change <= BIGGEST
        and run <= BIGGEST
        and request <= BIGGEST
        and batch <= BIGGEST
        and clock <= MOST_COUNTED
        and samples <= BIGGEST
        and step <= MOST_COUNTED
        and settled <= MOST_COUNTED
        and place <= MOST_COUNTED
    ):
        return None
    message = PushBatch(request, batch, clock, ADD, samples, pull == _TRUE, False, step, settled, place)
    return Decoded(sender, Epoch(generation, change), message, run)


def numbers_of(tail: bytes) -> PushNumbers | None:
    """Decode the numbers behind the head of a header that `write_push` wrote, of one sample.

    Returns None for any other header.
    """
    # fmt: off
    (
        w1, request, w2, batch, w3, clock, how, w4, step, w5, settled, w6, place
    ) = _PUSH_TAIL.unpack_from(tail)
    # fmt: on
    pull = _PULLS.get(how)
    if (
        pull is None
        or not w1 == w2 == w3 == w4 == w5 == w6 == _WIDE
        or request > BIGGEST
        or batch > BIGGEST
        or clock > MOST_COUNTED
        or step > MOST_COUNTED
        or settled > MOST_COUNTED
        or place > MOST_COUNTED
    ):
        return None
    return PushNumbers(request, batch, clock, pull, step, settled, place)


def push_numbers(push: PushBatch) -> PushNumbers | None:
    """Return the numbers of a push; None if it is not one sample that is added."""
    if push.how != ADD or push.samples != 1 or push.probe:
        return None
    return PushNumbers(push.request, push.batch, push.clock, push.pull, push.step, push.settled, push.place)


def values_header(sender: int, epoch: Epoch, run: int, request: int, version: int) -> bytes:
    """Return the header of an answer with one version, and no coding."""
    # fmt: off
    return _VALUES.pack(
        _LIST_OF_9, VERSION, Values.KIND, _WIDE, sender, _WIDE, epoch[0], _WIDE, epoch[1], _WIDE, run,
        _WIDE, request, _LIST_OF_1, _WIDE, version, _NONE,
    )
    # fmt: on


def done_header(sender: int, epoch: Epoch, run: int, request: int) -> bytes:
    """The header of a Done."""
    # fmt: off
    return _DONE.pack(
        _LIST_OF_7, VERSION, Done.KIND, _WIDE, sender, _WIDE, epoch[0], _WIDE, epoch[1], _WIDE, run, _WIDE, request,
    )
    # fmt: on


def write_values(values: Values, sender: int, epoch: Epoch, run: int) -> bytes | None:
    """Return the header of an answer; None if it has another form."""
    if values.coding is not None or len(values.versions) != 1:
        return None
    return values_header(sender, epoch, run, values.request, values.versions[0])


def read_values(header: bytes) -> tuple[Epoch, int, int, int] | None:
    """Decode epoch, run, request and version of an answer that `write_values` wrote. Returns None for any other
    header."""
    # fmt: off
    (
        marker, version, kind, w1, sender, w2, generation, w3, change, w4, run, w5, request,
        entries, w6, pulled, coding,
    ) = _VALUES.unpack(header)
    # fmt: on
    if not (
        marker == _LIST_OF_9
        and version == VERSION
        and kind == Values.KIND
        and w1 == w2 == w3 == w4 == w5 == w6 == _WIDE
        and entries == _LIST_OF_1
        and coding == _NONE
        and max(sender, generation, change, run, request, pulled) <= BIGGEST
    ):
        return None
    return Epoch(generation, change), run, request, pulled


def put_values_head(buffer: bytearray, at: int, sender: int, epoch: Epoch, run: int, request: int) -> None:
    """Write the header of an answer up to its version to `buffer`, from byte `at` on, to compare one with."""
    # fmt: off
    _VALUES_HEAD.pack_into(
        buffer, at, _LIST_OF_9, VERSION, Values.KIND, _WIDE, sender, _WIDE, epoch[0], _WIDE, epoch[1], _WIDE, run,
        _WIDE, request, _LIST_OF_1, _WIDE,
    )
    # fmt: on


def version_of(buffer: bytes | bytearray, at: int) -> int | None:
    """Return the version of an answer, with which its header goes on at this byte behind its head. None: it is another
    answer."""
    version, coding = _VALUES_TAIL.unpack_from(buffer, at)
    return version if coding == _NONE and version <= BIGGEST else None
