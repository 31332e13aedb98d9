"""Messages over one link: payloads of all sizes, order, bounds, and many at random."""

from __future__ import annotations

import hashlib
import random
import threading

import pytest

from kvd.transport.links import outgoing
from kvd.transport.links.frames import (
    INLINE_BELOW_BYTES,
    MAX_HEADER_BYTES,
)
from kvd.transport.links.write_coalescing import MOST_HELD
from tests.transport.link_harness import MIB, End, block_of, pair, pattern, until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

EDGE = INLINE_BELOW_BYTES
SIZES = [0, 1, 7, 8, EDGE - 1, EDGE, EDGE + 1, 100_000, MIB, 64 * MIB]


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


@pytest.mark.parametrize("nbytes", [8, 100_000])
@pytest.mark.parametrize("limit_bytes", [256 * MIB, 0], ids=["shared memory", "inline"])
def test_what_is_held_leaves_with_the_next_payload_or_at_the_end(limit_bytes: int, nbytes: int) -> None:
    with pair(limit_bytes) as (left, right):
        holding = left.link.delivery.sink.holding

        def received() -> list[bytes]:
            return [header for header, _ in right.messages]

        assert left.send(b"first", pattern(nbytes))  # which announces the memory, if it is shared
        until(lambda: right.messages, right, left)
        holding.begin()
        assert left.send(b"a")
        assert left.send(b"b")
        right.read()
        assert received() == [b"first"]
        assert left.send(b"c", pattern(nbytes))
        right.read()  # once: they came in one piece, but for the payload itself
        assert received()[:3] == [b"first", b"a", b"b"]
        until(lambda: len(right.messages) == 4, right, left)
        assert left.send(b"d")
        right.read()
        assert received() == [b"first", b"a", b"b", b"c"]
        holding.end()
        assert left.send(b"e")
        until(lambda: len(right.messages) == 6, right, left)
        assert received() == [b"first", b"a", b"b", b"c", b"d", b"e"]


def test_few_frames_are_held_at_once() -> None:
    with pair() as (left, right):
        holding = left.link.delivery.sink.holding
        holding.begin()
        for number in range(MOST_HELD):
            assert not right.messages
            assert left.send(b"%d" % number)
            right.read()
        until(lambda: len(right.messages) == MOST_HELD, right, left)
        assert left.send(b"held")
        left.link.leave("over")
        until(lambda: not right.link.is_up, right, left)
        assert right.messages[-1][0] == b"held"
        holding.end()


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


def test_a_slow_reader_fills_the_queue_up_to_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_segments_are_announced_in_order_behind_queued_frames() -> None:
    with pair(64 * MIB) as (left, right):
        count = 0
        while not left.link.has_queued:
            assert left.send(b"before", bytes(EDGE))
            count += 1
        blocks = [block_of(left, 4 * MIB, number) for number in range(5)]
        for block in blocks:
            assert left.send(b"block", block)
        until(lambda: len(right.messages) == count + 5, left, right)
        assert right.bodies()[count:] == [block.tobytes() for block in blocks]


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
                nbytes = mine.choice([0, 10, 1000, EDGE, EDGE + 1, 100_000, 700_000, 2 * MIB + 13])
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
