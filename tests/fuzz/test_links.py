"""The links' frames: arbitrary streams, cut anywhere, with descriptors anywhere. The link delivers or ends; it never
raises, and keeps no descriptor and no map."""

from __future__ import annotations

import array
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvd.transport.links.frames import (
    GOODBYE,
    HELLO,
    INLINE,
    INLINE_BELOW_BYTES,
    MAGIC,
    MAX_HEADER_BYTES,
    MESSAGE,
    REFERENCE,
    RELEASE,
    SEGMENT,
    VERSION,
    pack_numbers,
    prefix_of,
)
from tests.transport.link_harness import End, Raw, memory_in_use, raw_pair, until

STEADY = settings(derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
SEGMENT_BYTES = 8192
STREAMS = 60  # in `make test`
SOAK_STREAMS = 40_000
HELLO_FRAME = prefix_of(HELLO, 0, 0, 0, VERSION, MAGIC)
SIZES = (0, 1, 8, 100, SEGMENT_BYTES, 16 << 10, (16 << 10) + 1, 40_000)  # a stream of some fits into a socket
EDGES = (*SIZES, INLINE_BELOW_BYTES, INLINE_BELOW_BYTES + 1)
NUMBERS = (0, 1, 2, 7, 4096, 8185, (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1)


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    before = memory_in_use()
    yield
    until(lambda: memory_in_use() == before)


# ── valid streams, cut anywhere ──


def message(header: bytes, body: bytes | None) -> bytes:
    if body is None:
        return prefix_of(MESSAGE, 0, len(header)) + header
    return prefix_of(INLINE, 0, len(header), len(body)) + header + body


@given(
    said=st.lists(st.tuples(st.binary(min_size=1, max_size=50), st.none() | st.sampled_from(EDGES)), max_size=8),
    cuts=st.lists(st.integers(1, 20_000), max_size=12),
)
@pytest.mark.parametrize("over_tcp", [False, True])
@settings(STEADY, max_examples=60)
def test_a_valid_stream_is_delivered_wherever_it_is_cut(
    over_tcp: bool, said: list[tuple[bytes, int | None]], cuts: list[int]
) -> None:
    wanted = [(header, None if nbytes is None else bytes(range(256)) * (nbytes // 256 + 1)) for header, nbytes in said]
    wanted = [
        (header, body if body is None else body[:nbytes])
        for (header, body), (_, nbytes) in zip(wanted, said, strict=True)
    ]
    stream = HELLO_FRAME + b"".join(message(header, body) for header, body in wanted)
    with raw_pair(over_tcp=over_tcp) as (raw, end):
        for length in cuts:
            raw.socket.sendall(stream[:length])
            stream = stream[length:]
            end.read()
        for at in range(0, len(stream), 50_000):
            raw.socket.sendall(stream[at : at + 50_000])
            end.read()
        until(lambda: len(end.messages) == len(wanted), end)
        assert [(header, None if body is None else bytes(body)) for header, body in end.messages] == wanted
        assert end.garbage == []


# ── any streams ──


@pytest.mark.parametrize("over_tcp", [False, True])
@given(stream=st.binary(max_size=400), greets=st.booleans())
@settings(STEADY, max_examples=60)
def test_any_bytes_end_the_link_or_wait_for_more(over_tcp: bool, stream: bytes, greets: bool) -> None:
    with raw_pair(over_tcp=over_tcp) as (raw, end):
        raw.socket.sendall((HELLO_FRAME if greets else b"") + stream)
        finish(raw, end)


def finish(raw: Raw, end: End) -> None:
    """The other end goes: so does this one, whatever has come."""
    end.read()
    raw.socket.close()
    until(lambda: end.link.has_ended, end)
    assert len(end.garbage) <= 1


class Streams:
    """Streams of frames by seed: most fields are what they may be, some are not, and some frames bring descriptors,
    unless they come over TCP."""

    def __init__(self, random: Random, *, over_tcp: bool) -> None:
        self._random = random
        self._over_tcp = over_tcp

    def frame(self) -> bytes:
        random = self._random
        kind = random.choice((MESSAGE, INLINE, INLINE, REFERENCE, SEGMENT, RELEASE, GOODBYE, HELLO, 0, 9))
        header = random.randbytes(random.choice((0, 1, 40, 2000)) if kind in (MESSAGE, INLINE, REFERENCE) else 0)
        nbytes = random.choice(SIZES)
        numbers = [random.choice(NUMBERS) for _ in range(random.choice((0,) * 12 + (1, 3, 255)))]
        said = len(header) if random.random() < 0.95 else random.choice((MAX_HEADER_BYTES + 1, 1 << 31))
        size = nbytes if random.random() < 0.95 else random.choice((1 << 20, (1 << 32) - 1))
        offset = SEGMENT_BYTES if kind == SEGMENT and random.random() < 0.7 else random.choice(NUMBERS)
        segment = random.choice((0, 0, 1, 2, (1 << 32) - 1))
        prefix = prefix_of(kind, len(numbers), said, size, segment, offset)
        body = bytes(nbytes) if kind == INLINE and random.random() < 0.9 else b""
        return prefix + pack_numbers(numbers) + header + body

    def play(self) -> tuple[int, int]:
        """A whole life of a link; how many messages it delivered, and whether garbage came."""
        with raw_pair(over_tcp=self._over_tcp) as (raw, end), ExitStack() as stack:
            with suppress(BrokenPipeError, ConnectionResetError):
                self._speak(raw, end, stack)
            finish(raw, end)
            return len(end.messages), len(end.garbage)

    def _speak(self, raw: Raw, end: End, stack: ExitStack) -> None:
        random = self._random
        if random.random() < 0.95:
            raw.hello()
        for _ in range(random.randrange(1, 8)):
            data = self.frame()
            if random.random() < 0.1:
                data = data[: random.randrange(len(data))]
            may_have_rights = not self._over_tcp and random.random() < 0.5
            rights = stack.enter_context(descriptors(random)) if may_have_rights else []
            cut = random.randrange(len(data) + 1)
            self._send(raw, data[:cut], rights if random.random() < 0.1 else [])
            end.read()
            self._send(raw, data[cut:], rights)
            end.read()
            if random.random() < 0.2:
                end.send(b"header", random.randbytes(100))
            end.keeps = random.random() < 0.5

    @staticmethod
    def _send(raw: Raw, data: bytes, rights: list[int]) -> None:
        if data:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", rights))] if rights else []
            sent = raw.socket.sendmsg([data], ancillary)
            raw.socket.sendall(data[sent:])


@contextmanager
def descriptors(random: Random) -> Iterator[list[int]]:
    """Some descriptors: sealed memory, unsealed, sparse, of another size; files, pipes, sockets, folders."""
    made = [_descriptor(random) for _ in range(random.choice((1, 1, 1, 2, 5)))]
    try:
        yield made
    finally:
        for number in made:
            os.close(number)


def _descriptor(random: Random) -> int:
    kind = random.randrange(8)
    if kind == 0:
        return os.open("/dev/zero", os.O_RDONLY)
    if kind == 1:
        return os.open("/", os.O_RDONLY)
    if kind == 2:
        return os.eventfd(0)
    number = os.memfd_create("fuzz", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    if kind == 3:
        os.ftruncate(number, SEGMENT_BYTES)  # sparse
    else:
        os.posix_fallocate(number, 0, SEGMENT_BYTES if kind < 7 else 100)
    if kind != 4:
        fcntl.fcntl(number, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return number


def lives(seed: int, count: int, *, over_tcp: bool = False) -> tuple[int, int]:
    """So many lives of links; how many messages came through, and how many links ended with garbage."""
    streams = Streams(Random(seed), over_tcp=over_tcp)
    outcomes = [streams.play() for _ in range(count)]
    return sum(delivered for delivered, _ in outcomes), sum(garbage for _, garbage in outcomes)


@pytest.mark.parametrize("over_tcp", [False, True])
def test_frames_and_descriptors_in_any_order(over_tcp: bool) -> None:
    delivered, garbage = lives(1, STREAMS, over_tcp=over_tcp)
    assert delivered > STREAMS // 10  # some get through
    assert STREAMS // 10 < garbage <= STREAMS


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_many_frames_and_descriptors_in_any_order() -> None:
    lives(1, STREAMS)  # what is made once is there now
    before = memory_in_use()
    for seed in range(2, 42):
        lives(seed, SOAK_STREAMS // 40)
        until(lambda: memory_in_use() == before)  # a refused descriptor is closed by a thread of its own
