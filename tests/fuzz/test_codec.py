"""Any bytes give a message within its limits or ProtocolError, in little time and memory."""

from __future__ import annotations

import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from random import Random
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvd.errors import ProtocolError
from kvd.protocol.codec import MAX_HEADER_BYTES, decode, encode
from kvd.protocol.envelope import VERSION
from kvd.protocol.messages import Epoch, SetOptimizer, UpdateOptimizer
from tests.fuzz.headers import HeaderMaker, decodes, nested
from tests.fuzz.making import KINDS
from tests.protocol.strategies import any_message

FRAMES = 40_000  # in `make test`
SOAK_FRAMES = 10_000_000
PROCESSES = 2
PIECES = 40  # of the long run: each has a seed of its own
MEMORY_PER_HEADER_BYTE = 130  # a Python object for each byte that may be one, and the list that holds it
STEADY = settings(derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))

plain_data = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)

# ── by hypothesis ──


@given(st.binary(max_size=300))
@settings(STEADY, max_examples=300)
def test_any_bytes(header: bytes) -> None:
    decodes(header)


@given(st.lists(plain_data, max_size=14))
@settings(STEADY, max_examples=300)
def test_any_list(body: list[object]) -> None:
    decodes(msgpack.packb(body))


@given(st.sampled_from(KINDS), st.lists(plain_data, max_size=8), st.lists(st.integers(0, 1 << 62), max_size=4))
@settings(STEADY, max_examples=300)
def test_any_fields_in_a_valid_envelope(kind: Any, values: list[object], numbers: list[int]) -> None:
    sender, generation, change, run = (*numbers, 0, 0, 0, 0)[:4]
    decodes(msgpack.packb([VERSION, kind.KIND, sender, generation, change, run, *values]))


@given(any_message, st.integers(0, (1 << 62) - 1), st.integers(0, 1 << 16), st.binary(max_size=6))
@settings(STEADY, max_examples=200)
def test_what_is_encoded_comes_back_and_survives_damage(message: Any, sender: int, place: int, piece: bytes) -> None:
    header = encode(message, sender, Epoch(3, 9), 5)
    assert decode(header) == (sender, Epoch(3, 9), message, 5)
    cut = place % len(header)
    decodes(header[:cut] + piece + header[cut:])
    decodes(header[:cut] + piece + header[cut + len(piece) :])


# ── by hand ──


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa0", b"\xdc\xff\xfe", b"\xdc\x0f\xff", b"\xdd\x00\x00\xff\xf0"])
@pytest.mark.parametrize("nbytes", [500, 1 << 10, 4 << 10, MAX_HEADER_BYTES])
def test_nested_promises_cost_what_the_header_weighs(opening: bytes, nbytes: int) -> None:
    """A list in a list in a list, each of which says that thousands of entries follow."""
    header = nested(opening, nbytes)[:nbytes]
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decode(header)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MEMORY_PER_HEADER_BYTE * max(nbytes, 4 << 10)


@pytest.mark.parametrize(
    "value",
    [
        b"\xc6\x7f\xff\xff\xff" + b"x",  # bytes, a text, a list, a map and an extension of 2 GiB and more
        b"\xdb\xff\xff\xff\xff" + b"x",
        b"\xdd\xff\xff\xff\xff" + b"\xc0",
        b"\xdf\xff\xff\xff\xff" + b"\xc0\xc0",
        b"\xc9\xff\xff\xff\xff\x01" + b"x",
        b"\xd4\x01x",  # extensions, a time among them
        b"\xd6\xff\x00\x00\x00\x01",
        b"\xc7\x0c\xff" + b"\xff" * 12,
        b"\xa3\xed\xa0\x80",  # a surrogate
        b"\xa2\xc3\x28",  # no UTF-8
        b"\xcf" + b"\xff" * 8,
        b"\xd3\x80" + bytes(7),
        b"\xcb\x7f\xf8" + bytes(6),  # NaN
        b"\x82\xa1a\x01\xa1a\x02",  # a key twice
        b"\x81\x01\x02",  # keys that are no texts
        b"\x81\x90\x02",
        b"\xc1",
        b"\x91" * 500 + b"\xc0",
    ],
)
@pytest.mark.parametrize("kind", [SetOptimizer, UpdateOptimizer, *KINDS[::9]])
def test_every_place_of_a_header_takes_odd_values(kind: Any, value: bytes) -> None:
    body = [VERSION, kind.KIND, 7, 3, 9, 0, 1, {"name": "SGD"}, False]
    packed = [bytes(msgpack.packb(entry)) for entry in body]
    for place in range(len(packed)):
        decodes(bytes([0x90 + len(packed)]) + b"".join([*packed[:place], value, *packed[place + 1 :]]))


def test_texts_with_surrogates_are_not_sent() -> None:
    with pytest.raises(ValueError, match="surrogates"):
        encode(UpdateOptimizer(1, {"\ud800": 1}), 7, Epoch(3, 9))


# ── by seed, many ──


def decode_many(seed: int, frames: int) -> int:
    """How many of these frames decode."""
    maker = HeaderMaker(Random(seed))
    return sum(decodes(maker.header()) for _ in range(frames))


def test_many_frames() -> None:
    valid = decode_many(1, FRAMES)
    assert FRAMES // 20 < valid < FRAMES // 2  # most are damaged, and some get through the first checks


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_ten_million_frames() -> None:
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        counts = list(pool.map(decode_many, range(2, 2 + PIECES), [SOAK_FRAMES // PIECES] * PIECES))
    assert min(counts) > SOAK_FRAMES // PIECES // 20
