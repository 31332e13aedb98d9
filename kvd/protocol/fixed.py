"""Headers in which every number takes nine bytes, so that all have one length: of pushes and answers that are repeated.

They are msgpack all the same, and `kvd.protocol.codec` reads them like any other header. Who knows the layout writes or
reads one with a single call of `struct`.
"""

from __future__ import annotations

from struct import Struct

from kvd.protocol.envelope import VERSION, Decoded
from kvd.protocol.messages import ADD, BIGGEST, MOST_COUNTED, Epoch, PushBatch, Values

_WIDE = 0xCF  # a number of 64 bits follows
_TRUE, _FALSE, _NONE = 0xC3, 0xC2, 0xC0
_LONG_LIST, _LIST_OF_9, _LIST_OF_1 = 0xDC, 0x99, 0x91
_PUSH_ENTRIES = 16

# 16 entries: version, kind; sender, generation, change, run, request, batch, clock; how; samples; pull, probe; step,
# settled, place
_PUSH = Struct(">BHBB BQBQBQBQBQBQBQ B BQ BB BQBQBQ")
# 9 entries: version, kind; sender, generation, change, run, request; a list of one version; no coding
_VALUES = Struct(">BBB BQBQBQBQBQ B BQ B")
_VALUES_HEAD = Struct(">BBB BQBQBQBQBQ BB")
_VALUES_TAIL = Struct(">QB")

PUSH_NBYTES = _PUSH.size
VALUES_NBYTES = _VALUES.size
VALUES_HEAD_NBYTES = _VALUES_HEAD.size
"""Of an answer, what comes before its version: it is known to the one that has asked."""
VALUES_TAIL_NBYTES = _VALUES_TAIL.size


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
    """Writes the header of a PushBatch to `buffer`, from byte `at` on: one sample, with a pull, and no probe."""
    # fmt: off
    _PUSH.pack_into(
        buffer, at, _LONG_LIST, _PUSH_ENTRIES, VERSION, PushBatch.KIND,
        _WIDE, sender, _WIDE, epoch[0], _WIDE, epoch[1], _WIDE, run, _WIDE, request, _WIDE, batch, _WIDE, clock,
        ADD, _WIDE, 1, _TRUE, _FALSE, _WIDE, step, _WIDE, settled, _WIDE, place,
    )
    # fmt: on


def write_push(push: PushBatch, sender: int, epoch: Epoch, run: int) -> bytes | None:
    """The header of a push. None: it is written in another way."""
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
    """The PushBatch in a header of PUSH_NBYTES bytes, if it is as `write_push` writes it. None: it may be any other."""
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


def write_values(values: Values, sender: int, epoch: Epoch, run: int) -> bytes | None:
    """The header of an answer. None: it is written in another way."""
    if values.coding is not None or len(values.versions) != 1:
        return None
    # fmt: off
    return _VALUES.pack(
        _LIST_OF_9, VERSION, Values.KIND, _WIDE, sender, _WIDE, epoch[0], _WIDE, epoch[1], _WIDE, run,
        _WIDE, values.request, _LIST_OF_1, _WIDE, values.versions[0], _NONE,
    )
    # fmt: on


def read_values(header: bytes) -> tuple[Epoch, int, int] | None:
    """The epoch, run and request in a header of VALUES_NBYTES bytes, if it is as `write_values` writes it. None: it may
    be any other."""
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
    return Epoch(generation, change), run, request


def put_values_head(buffer: bytearray, at: int, sender: int, epoch: Epoch, run: int, request: int) -> None:
    """Writes the header of an answer up to its version to `buffer`, from byte `at` on, to compare one with."""
    # fmt: off
    _VALUES_HEAD.pack_into(
        buffer, at, _LIST_OF_9, VERSION, Values.KIND, _WIDE, sender, _WIDE, epoch[0], _WIDE, epoch[1], _WIDE, run,
        _WIDE, request, _LIST_OF_1, _WIDE,
    )
    # fmt: on


def version_of(tail: bytes) -> int | None:
    """The version with which the rest of the answer begins. None: it is another answer."""
    version, coding = _VALUES_TAIL.unpack_from(tail)
    return version if coding == _NONE and version <= BIGGEST else None
