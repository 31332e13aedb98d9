"""Payloads by reference: what is copied, and when memory may be used again."""

from __future__ import annotations

import os
from collections import Counter

import numpy as np
import pytest

from kvd.transport.memory import remote_segments
from tests.transport.link_harness import MIB, block_of, pair, pattern, spans, until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def test_only_memory_outside_the_arena_is_copied() -> None:
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
        block[1000:1010] = 5  # programs must not do this; here it proves that nothing was copied
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


def test_memory_is_reused_only_after_the_receiver_dropped_it() -> None:
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
        assert left.link.leases == 1  # a view of the payload still exists
        assert part.tobytes() == expected[4000:8000]
        del part
        right.send(b"takes the release along")
        until(lambda: len(left.messages) == 2, left)
        assert left.link.leases == 0
        assert left.arena.locate(block_of(left, MIB)) == place


@pytest.mark.parametrize(("nbytes", "count"), [(70_000, 40), (4 * MIB, 10)], ids=["by number", "by bytes"])
def test_many_payloads_are_released_without_traffic(nbytes: int, count: int) -> None:
    with pair() as (left, right):
        right.keeps = False
        most = 0
        for _ in range(count):
            assert left.send(b"h", block_of(left, nbytes))
            until(lambda: right.messages, right, left)
            right.messages.clear()
            left.read()
            most = max(most, left.link.leases)
        assert most <= remote_segments.RELEASE_EAGERLY_ABOVE + 2
        assert most * nbytes <= remote_segments.RELEASE_EAGERLY_ABOVE_BYTES + 3 * nbytes
        assert left.link.leases < count


def test_more_releases_than_fit_into_one_frame() -> None:
    with pair() as (left, right):
        block = block_of(left, 70_000)
        for _ in range(1000):
            assert left.send(b"h", block)
        until(lambda: len(right.messages) == 1000, right)
        assert left.link.leases == 1000
        right.messages.clear()
        right.link.release_gone()
        until(lambda: not left.link.leases, left)
        assert not right.link.has_unreleased


def test_a_payload_that_cannot_be_sent_leaves_the_numbers_of_the_others_right() -> None:
    with pair() as (left, right):
        with pytest.raises(ValueError, match="65537 bytes"):
            left.send(bytes(65537), pattern(MIB))
        assert left.link.leases == 0
        for number in range(2):
            assert left.send(b"%d" % number, pattern(MIB, number))
        until(lambda: len(right.messages) == 2, right)
        right.messages.pop(0)
        right.link.release_gone()
        until(lambda: left.link.leases < 2, left)
        assert left.garbage == []
        assert (left.link.is_up, left.link.leases) == (True, 1)


def test_after_leaving_a_payload_keeps_its_memory() -> None:
    with pair() as (left, right):
        block = block_of(left, MIB)
        expected = block.tobytes()
        assert left.send(b"h", block)
        until(lambda: right.messages, right)
        right.link.leave("enough")
        assert not right.send(b"h")
        until(lambda: not left.link.is_up, left, right)
        assert left.link.reason == "the other side ended the link"
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


def test_a_payload_in_use_keeps_its_memory_after_the_link_is_closed() -> None:
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
