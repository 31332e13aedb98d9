"""One link: frames of all sizes, payloads by reference, leases, and ends that do not keep to the protocol."""

from __future__ import annotations

import array
import fcntl
import hashlib
import os
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from kvd.transport import borrowed, incoming, outgoing
from kvd.transport.frames import (
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
from tests.transport.link_rig import MIB, End, Raw, memory_in_use, pair, raw_pair, spans, until

K16 = INLINE_BELOW_BYTES
SIZES = [0, 1, 7, 8, K16 - 1, K16, K16 + 1, 100_000, MIB, 64 * MIB]


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    before = memory_in_use()
    yield
    assert memory_in_use() == before


def pattern(nbytes: int, seed: int = 1) -> Any:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def block_of(end: End, nbytes: int, seed: int = 1) -> Any:
    block = end.arena.allocate(nbytes)
    assert block is not None
    block[:] = pattern(nbytes, seed)
    return block


# ── frames ──


@pytest.mark.parametrize("limit_bytes", [256 * MIB, 0], ids=["shared memory", "inline"])
@pytest.mark.parametrize("nbytes", SIZES)
def test_payloads_of_any_size_arrive(nbytes: int, limit_bytes: int) -> None:
    with pair(limit_bytes) as (left, right):
        body = pattern(nbytes)
        assert left.send(b"before")
        assert left.send(b"h" * 50, body)
        assert left.send(b"after")
        until(lambda: len(right.messages) == 3, right, left)
        assert [header for header, _ in right.messages] == [b"before", b"h" * 50, b"after"]
        assert right.bodies() == [None, body.tobytes(), None]
        payload = right.messages[1][1]
        assert payload is not None
        assert payload.readonly
        assert payload.nbytes == nbytes


def test_headers_up_to_the_limit_arrive_and_larger_ones_are_refused() -> None:
    with pair() as (left, right):
        for nbytes in (0, 1, 1000, MAX_HEADER_BYTES):
            assert left.send(b"x" * nbytes, bytes(nbytes % 7))
            until(lambda: right.messages, right, left)
            assert right.messages.pop()[0] == b"x" * nbytes
        with pytest.raises(ValueError, match="65537 bytes"):
            left.send(b"x" * (MAX_HEADER_BYTES + 1))
        assert left.link.is_up


@pytest.mark.parametrize("limit_bytes", [256 * MIB, 0], ids=["shared memory", "inline"])
@pytest.mark.parametrize("scale", [1, 9001])
def test_pieces_are_padded_to_8(scale: int, limit_bytes: int) -> None:
    with pair(limit_bytes) as (left, right):
        pieces = [b"abc" * scale, b"", b"12345678" * scale, b"xy" * scale]
        assert left.send(b"h", *pieces)
        until(lambda: right.messages, right, left)
        padded = b"".join(piece + bytes(-len(piece) % 8) for piece in pieces[:-1]) + pieces[-1]
        assert right.bodies() == [padded]


def test_many_messages_in_both_directions_keep_their_order() -> None:
    with pair() as (left, right):
        for number in range(5000):
            assert left.send(b"%d" % number, b"l" * (number % 50))
            assert right.send(b"%d" % number)
        until(lambda: len(left.messages) == len(right.messages) == 5000, left, right)
        for end in (left, right):
            assert [header for header, _ in end.messages] == [b"%d" % number for number in range(5000)]


# ── references ──


def test_arena_memory_is_not_copied_and_other_memory_is() -> None:
    with pair() as (left, right):
        block = block_of(left, 2 * MIB)
        before = left.arena.total_bytes
        assert left.link.send(b"whole", spans(block))
        assert left.link.send(b"part", [spans(block)[0]._replace(offset=1000, nbytes=100_000)])
        assert left.link.send(b"view", spans(block[4096:].view(np.float32).reshape(-1, 16)))
        assert left.link.send(b"memoryview", spans(memoryview(block)[8 : 8 + 50_000]))
        until(lambda: len(right.messages) == 4, right)
        whole, part, view, small = right.bodies()
        assert whole is not None
        assert whole == block.tobytes()
        assert part == whole[1000:101_000]
        assert view == whole[4096:]
        assert small == whole[8:50_008]
        block[1000:1010] = 5  # the program may not do this; here it shows that nothing was copied
        assert right.bodies()[1] == bytes([5] * 10) + part[10:]
        assert left.arena.total_bytes == before
        other = pattern(MIB, 2)
        assert left.link.send(b"other", spans(other))
        until(lambda: len(right.messages) == 5, right)
        expected = other.tobytes()
        other[:] = 0
        assert right.bodies()[4] == expected


def test_neighbours_in_the_arena_are_one_reference() -> None:
    with pair() as (left, right):
        block = block_of(left, 200_000)
        pieces = [block[:50_001], block[50_008:100_008], block[100_008:]]
        assert left.link.send(b"h", spans(*pieces))
        until(lambda: right.messages, right)
        assert right.bodies() == [block.tobytes()]
        block[0] ^= 1
        assert right.bodies() == [block.tobytes()]
        assert left.link.send(b"not in order", spans(*reversed(pieces)))
        until(lambda: len(right.messages) == 2, right)
        body = right.bodies()[1]
        assert body is not None
        assert body[: pieces[2].nbytes] == pieces[2].tobytes()
        assert body[-50_001:] == pieces[0].tobytes()


def test_without_room_in_the_arena_payloads_go_inline_and_by_reference_again_later() -> None:
    with pair(4 * MIB) as (left, right):
        for number in range(6):
            assert left.send(b"%d" % number, pattern(2 * MIB, number))
        until(lambda: len(right.messages) == 6, right, left)
        assert right.bodies() == [pattern(2 * MIB, number).tobytes() for number in range(6)]
        assert left.link.leases == 2
        right.messages.clear()
        right.link.release_gone()
        until(lambda: not left.link.leases, left)
        assert left.send(b"again", pattern(2 * MIB))
        assert left.link.leases == 1
        until(lambda: right.messages, right, left)


# ── leases ──


def test_memory_is_used_again_only_after_the_receiver_let_go_of_it() -> None:
    with pair() as (left, right):
        block = block_of(left, MIB)
        place = left.arena.locate(block)
        expected = block.tobytes()
        assert left.send(b"h", block)
        del block
        until(lambda: right.messages, right)
        others = [block_of(left, MIB, 100 + number) for number in range(20)]
        assert place not in [left.arena.locate(other) for other in others]
        assert right.bodies() == [expected]
        part = np.frombuffer(right.messages.pop()[1] or b"", np.float32)[1000:2000]
        right.send(b"traffic")
        until(lambda: left.messages, left)
        assert left.link.leases == 1  # a view of the payload is left
        assert part.tobytes() == expected[4000:8000]
        del part
        right.send(b"takes the word along")
        until(lambda: len(left.messages) == 2, left)
        assert left.link.leases == 0
        assert left.arena.locate(block_of(left, MIB)) == place


@pytest.mark.parametrize(("nbytes", "count"), [(20_000, 40), (4 * MIB, 10)], ids=["by number", "by bytes"])
def test_much_is_released_without_traffic(nbytes: int, count: int) -> None:
    with pair() as (left, right):
        right.keeps = False
        most = 0
        for _ in range(count):
            assert left.send(b"h", block_of(left, nbytes))
            until(lambda: right.messages, right, left)
            right.messages.clear()
            left.read()
            most = max(most, left.link.leases)
        assert most <= borrowed.RELEASE_EAGERLY_ABOVE + 2
        assert most * nbytes <= borrowed.RELEASE_EAGERLY_ABOVE_BYTES + 3 * nbytes
        assert left.link.leases < count


def test_more_releases_than_fit_into_one_frame() -> None:
    with pair() as (left, right):
        block = block_of(left, 20_000)
        for _ in range(1000):
            assert left.send(b"h", block)
        until(lambda: len(right.messages) == 1000, right)
        assert left.link.leases == 1000
        right.messages.clear()
        right.link.release_gone()
        until(lambda: not left.link.leases, left)
        assert not right.link.holds


def test_after_leaving_a_payload_keeps_its_memory() -> None:
    with pair() as (left, right):
        block = block_of(left, MIB)
        expected = block.tobytes()
        assert left.send(b"h", block)
        until(lambda: right.messages, right)
        right.link.leave("enough")
        assert not right.send(b"h")
        until(lambda: not left.link.is_up, left, right)
        assert left.link.reason == "the other side has ended the link"
        assert not left.send(b"h")
        for _ in range(20):
            left.read()
            right.read()
        assert left.link.leases == 1
        assert right.bodies() == [expected]
        right.messages.clear()
        until(lambda: left.link.has_ended, left)
        assert left.link.leases == 0
        until(lambda: right.link.has_ended, right)


def test_both_leave_with_payloads_of_each_other() -> None:
    with pair() as (left, right):
        assert left.send(b"h", block_of(left, MIB, 1))
        assert right.send(b"h", block_of(right, MIB, 2))
        until(lambda: left.messages and right.messages, left, right)
        left.link.leave("enough")
        right.link.leave("enough")
        left.messages.clear()
        until(lambda: right.link.has_ended or not right.link.leases, left, right)
        assert left.link.leases == 1
        assert right.bodies() == [pattern(MIB, 1).tobytes()]
        right.messages.clear()
        until(lambda: left.link.has_ended and right.link.has_ended, left, right)
        assert left.link.leases == 0


def test_closing_with_a_payload_out_keeps_the_other_side_from_using_its_memory() -> None:
    with pair() as (left, right):
        assert left.send(b"h", block_of(left, MIB))
        until(lambda: right.messages, right)
        payload = right.messages.pop()[1]
        right.close()
        for _ in range(20):
            left.read()
        assert left.link.leases == 1
        assert payload is not None
        assert bytes(payload) == pattern(MIB).tobytes()
        del payload
        until(lambda: left.link.has_ended, left)
        assert left.link.leases == 0


def test_a_forked_child_does_not_keep_the_link_open() -> None:
    with pair() as (left, right):
        assert left.send(b"h", block_of(left, MIB))
        until(lambda: right.messages, right)
        stop_reading, stop = os.pipe()
        child = os.fork()
        if child == 0:
            right.messages.clear()  # its payloads are not the parent's
            os.close(stop)
            os.read(stop_reading, 1)
            os._exit(0)
        try:
            assert right.send(b"still there")
            until(lambda: left.messages, left)
            assert left.link.leases == 1
            right.close()
            until(lambda: left.link.has_ended, left)
        finally:
            os.close(stop)
            os.close(stop_reading)
            os.waitpid(child, 0)


# ── bounds ──


def test_a_slow_reader_fills_the_queue_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outgoing, "QUEUE_LIMIT_BYTES", 3 * MIB)
    with pair(0) as (left, right):
        sent = 0
        while left.send(b"%d" % sent, bytes(100_000)):
            sent += 1
            assert sent < 100
        assert sent >= 30
        small = 0
        while left.send(b"small"):
            small += 1
        assert small == 0
        assert left.link.is_up
        until(lambda: len(right.messages) == sent, left, right)
        assert left.send(b"there is room again")
        until(lambda: len(right.messages) == sent + 1, left, right)


def test_small_messages_fill_the_queue_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outgoing, "QUEUE_LIMIT_BYTES", MIB)
    with pair(0) as (left, right):
        sent = 0
        while left.send(b"h"):
            sent += 1
        assert sent < 10_000
        until(lambda: len(right.messages) == sent, left, right)


def test_segments_are_announced_in_order_behind_what_waits() -> None:
    with pair(64 * MIB) as (left, right):
        count = 0
        while not left.link.has_waiting:
            assert left.send(b"before", bytes(K16))
            count += 1
        blocks = [block_of(left, 4 * MIB, number) for number in range(5)]
        for block in blocks:
            assert left.send(b"block", block)
        until(lambda: len(right.messages) == count + 5, left, right)
        assert right.bodies()[count:] == [block.tobytes() for block in blocks]


# ── stress ──


def test_random_payloads_in_both_directions_with_digests() -> None:
    with pair(48 * MIB, 48 * MIB) as (left, right):
        chance = random.Random(5)
        wrong: list[bytes] = []
        kept: list[tuple[bytes, memoryview | None]] = []

        def check(header: bytes, body: memoryview | None) -> None:
            if hashlib.blake2b(b"" if body is None else body, digest_size=16).digest() != header:
                wrong.append(header)

        def produce(end: End, seed: int) -> None:
            mine = random.Random(seed)
            source = pattern(3 * MIB, seed)
            for _ in range(400):
                nbytes = mine.choice([0, 10, 1000, K16, K16 + 1, 100_000, 700_000, 2 * MIB + 13])
                start = mine.randrange(source.nbytes - nbytes)
                body = source[start : start + nbytes]
                if mine.random() < 0.5 and (block := end.arena.allocate(nbytes)) is not None:
                    block[:] = body
                    body = block
                assert end.send(hashlib.blake2b(body, digest_size=16).digest(), body)

        producers = [threading.Thread(target=produce, args=(end, seed)) for seed, end in enumerate((left, right))]
        for producer in producers:
            producer.start()
        seen = 0

        def consumed() -> bool:
            nonlocal seen
            for end in (left, right):
                while end.messages:
                    seen += 1
                    kept.append(end.messages.pop(0))
            while len(kept) > 12:
                check(*kept.pop(chance.randrange(len(kept))))
            return seen == 800

        until(consumed, left, right, timeout_s=60)
        for producer in producers:
            producer.join()
        for header, body in kept:
            check(header, body)
        assert wrong == []


# ── ends that do not keep to the protocol ──


def segment_with(raw: Raw, descriptor: int, nbytes: int, number: int = 0) -> None:
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
    raw.socket.sendmsg([prefix_of(SEGMENT, 0, 0, 0, number, nbytes)], [rights])


def sealed(nbytes: int) -> int:
    descriptor = os.memfd_create("kvd-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.posix_fallocate(descriptor, 0, nbytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
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
    "a release of what was not lent": plain(prefix_of(RELEASE, 1), pack_numbers([7])),
    "a second hello": plain(prefix_of(HELLO, 0, 0, 0, VERSION, MAGIC)),
    "a segment without descriptor": plain(prefix_of(SEGMENT, 0, 0, 0, 0, 4096)),
    "a reference to no segment": plain(prefix_of(REFERENCE, 0, 1, 10, 3, 0), b"h"),
    "unsealed memory": unsealed,
    "no memory at all": no_memory,
    "another size than said": segment_then(said=4096),
    "a huge size": segment_then(said=1 << 62),
    "a size of zero": segment_then(said=0),
    "the same segment twice": twice,
    "a reference behind the end": segment_then(prefix_of(REFERENCE, 0, 1, 8, 0, 8185), b"h"),
    "a reference far behind": segment_then(prefix_of(REFERENCE, 0, 1, 8, 0, (1 << 64) - 8), b"h"),
    "a reference to too much": segment_then(prefix_of(REFERENCE, 0, 1, 8193, 0, 0), b"h"),
    "a reference to nothing": segment_then(prefix_of(REFERENCE, 0, 1, 0, 0, 8192), b"h"),
    "many descriptors": many_descriptors,
}


@pytest.mark.parametrize("name", BAD)
def test_garbage_ends_the_link_and_is_told(name: str) -> None:
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
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "no frame"),
    ],
)
def test_the_first_frame_has_to_be_a_hello_of_this_version(first: bytes, text: str) -> None:
    with raw_pair() as (raw, end):
        raw.socket.sendall(first)
        until(lambda: end.link.has_ended, end)
        assert text in end.garbage[0]
        assert end.messages == []


def test_a_stream_that_ends_within_a_frame_is_an_end_and_no_garbage() -> None:
    with raw_pair() as (raw, end):
        raw.hello()
        frame = prefix_of(INLINE, 0, 5, 100_000) + b"hello" + bytes(500)
        raw.socket.sendall(frame)
        end.read()
        raw.socket.close()
        until(lambda: end.link.has_ended, end)
        assert (end.messages, end.garbage) == ([], [])
        assert end.link.reason == "the other side is gone"


def test_frames_may_come_byte_by_byte() -> None:
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


def rights_of_maps() -> Counter[str]:
    """What this process may do with the segments that it has mapped."""
    with open("/proc/self/maps") as file:
        return Counter(line.split()[1] for line in file if "memfd:kvd" in line)


def test_the_map_of_a_segment_cannot_be_written() -> None:
    before = rights_of_maps()  # an earlier test of this process may have left a store to the garbage collector
    with pair() as (left, right):
        assert left.send(b"h", block_of(left, MIB))
        until(lambda: right.messages, right)
        payload = right.messages[0][1]
        assert payload is not None
        with pytest.raises(TypeError):
            payload[0] = 1
        with pytest.raises(ValueError, match="read-only"):
            np.frombuffer(payload, np.uint8)[0] = 1
        assert rights_of_maps() - before == Counter(["r--s", "rw-s"])
        del payload
