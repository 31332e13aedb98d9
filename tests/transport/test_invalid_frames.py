"""The other end breaks the protocol of links: the link ends and the reason is reported."""

from __future__ import annotations

import array
import fcntl
import os
import random
import socket
from collections.abc import Callable
from contextlib import suppress

import pytest

from kvd.transport.links import incoming
from kvd.transport.links.frames import (
    GOODBYE,
    HELLO,
    INLINE,
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
from kvd.transport.memory.segments import SEALS
from tests.transport.link_harness import MIB, Raw, raw_pair, until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def segment_with(raw: Raw, descriptor: int, nbytes: int, number: int = 0) -> None:
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
    raw.socket.sendmsg([prefix_of(SEGMENT, 0, 0, 0, number, nbytes)], [rights])


def sealed(nbytes: int) -> int:
    descriptor = os.memfd_create("kvd-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.posix_fallocate(descriptor, 0, nbytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    return descriptor


def unsealed(raw: Raw) -> None:
    descriptor = os.memfd_create("kvd-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 8192)
    segment_with(raw, descriptor, 8192)
    os.close(descriptor)


def no_memory(raw: Raw) -> None:
    segment_with(raw, raw.socket.fileno(), 8192)


def segment_then(*frames: bytes, said: int = 8192, number: int = 0) -> Callable[[Raw], None]:
    def act(raw: Raw) -> None:
        descriptor = sealed(8192)
        segment_with(raw, descriptor, said, number)
        os.close(descriptor)
        for frame in frames:
            raw.socket.sendall(frame)

    return act


def twice(raw: Raw) -> None:
    segment_then()(raw)
    segment_then()(raw)


def many_descriptors(raw: Raw) -> None:
    descriptors = [os.dup(0) for _ in range(5)]
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
    raw.socket.sendmsg([prefix_of(MESSAGE, 0, 1) + b"h"], [rights])
    for descriptor in descriptors:
        os.close(descriptor)


def plain(*frames: bytes) -> Callable[[Raw], None]:
    return lambda raw: raw.socket.sendall(b"".join(frames))


BAD: dict[str, Callable[[Raw], None]] = {
    "noise": plain(bytes(range(256))),
    "zeros": plain(bytes(100)),
    "unknown kind": plain(prefix_of(99, 0)),
    "huge header": plain(prefix_of(MESSAGE, 0, MAX_HEADER_BYTES + 1)),
    "huge payload": plain(prefix_of(INLINE, 0, 1, (128 << 20) + 1)),
    "hugest payload": plain(prefix_of(INLINE, 0, 0xFFFFFFFF, 0xFFFFFFFF)),
    "a release with a header": plain(prefix_of(RELEASE, 0, 10)),
    "a release of what is not leased": plain(prefix_of(RELEASE, 1), pack_numbers([7])),
    "a second hello": plain(prefix_of(HELLO, 0, 0, 0, VERSION, MAGIC)),
    "a segment without descriptor": plain(prefix_of(SEGMENT, 0, 0, 0, 0, 4096)),
    "a reference to no segment": plain(prefix_of(REFERENCE, 0, 1, 10, 3, 0), b"h"),
    "unsealed memory": unsealed,
    "no memory at all": no_memory,
    "a size other than announced": segment_then(said=4096),
    "a huge size": segment_then(said=1 << 62),
    "a size of zero": segment_then(said=0),
    "the same segment twice": twice,
    "a reference beyond the end": segment_then(prefix_of(REFERENCE, 0, 1, 8, 0, 8185), b"h"),
    "a reference far beyond the end": segment_then(prefix_of(REFERENCE, 0, 1, 8, 0, (1 << 64) - 8), b"h"),
    "a reference to too much": segment_then(prefix_of(REFERENCE, 0, 1, 8193, 0, 0), b"h"),
    "a reference to nothing": segment_then(prefix_of(REFERENCE, 0, 1, 0, 0, 8192), b"h"),
    "many descriptors": many_descriptors,
}


@pytest.mark.parametrize("name", BAD)
def test_an_invalid_frame_ends_the_link_and_is_reported(name: str) -> None:
    with raw_pair() as (raw, end):
        raw.hello()
        raw.socket.sendall(prefix_of(MESSAGE, 0, 2) + b"ok")
        until(lambda: end.messages, end)
        BAD[name](raw)
        until(lambda: end.link.has_ended, end)
        assert [header for header, _ in end.messages] == [b"ok"]
        assert len(end.garbage) == 1
        assert end.link.reason.startswith("garbage arrived: ")
        assert not end.send(b"h")
        assert raw.is_cut_off()


@pytest.mark.parametrize(
    ("first", "text"),
    [
        (prefix_of(MESSAGE, 0, 1) + b"h", "does not speak the protocol"),
        (prefix_of(HELLO, 0, 0, 0, VERSION, MAGIC + 1), "does not speak the protocol"),
        (prefix_of(HELLO, 0, 0, 0, VERSION + 1, MAGIC), "version 2"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "not a frame"),
    ],
)
def test_the_first_frame_must_be_a_hello_of_this_version(first: bytes, text: str) -> None:
    with raw_pair() as (raw, end):
        raw.socket.sendall(first)
        until(lambda: end.link.has_ended, end)
        assert text in end.garbage[0]
        assert end.messages == []


def test_a_stream_that_ends_within_a_frame_is_not_an_invalid_frame() -> None:
    with raw_pair() as (raw, end):
        raw.hello()
        frame = prefix_of(INLINE, 0, 5, 100_000) + b"hello" + bytes(500)
        raw.socket.sendall(frame)
        end.read()
        raw.socket.close()
        until(lambda: end.link.has_ended, end)
        assert (end.messages, end.garbage) == ([], [])
        assert end.link.reason == "the other side is gone"


def test_frames_may_arrive_byte_by_byte() -> None:
    with raw_pair() as (raw, end):
        body = bytes(range(250)) * 80
        frames = prefix_of(HELLO, 0, 0, 0, VERSION, MAGIC) + prefix_of(INLINE, 0, 1, len(body)) + b"h" + body
        for at in range(200):
            raw.socket.sendall(frames[at : at + 1])
            end.read()
        raw.socket.sendall(frames[200:])
        until(lambda: end.messages, end)
        assert end.bodies() == [body]


def test_random_bytes_never_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "MAX_PAYLOAD_BYTES", MIB)
    chance = random.Random(3)
    kinds = [MESSAGE, INLINE, REFERENCE, SEGMENT, RELEASE, GOODBYE, 0, 200]
    for _ in range(150):
        with raw_pair() as (raw, end):
            raw.hello()
            for _ in range(chance.randrange(1, 6)):
                fields = [chance.choice([0, 0, 1, 3, chance.randrange(1 << 16)]) for _ in range(4)]
                frame = prefix_of(chance.choice(kinds), chance.choice([0, 0, 0, 2]), *fields)
                with suppress(BrokenPipeError):  # it was cut off for the frame before
                    raw.socket.sendall(frame + chance.randbytes(chance.randrange(60)))
                end.read()
            raw.socket.close()
            until(lambda end=end: end.link.has_ended, end)  # type: ignore[misc]
