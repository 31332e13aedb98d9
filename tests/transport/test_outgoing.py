"""What leaves a link: all bytes, once and in order, however little room the socket has."""

from __future__ import annotations

import select
import socket
from contextlib import suppress
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.transport.outgoing import MOST_GATHERED_BYTES, SMALL_PIECE_BYTES, Outgoing, PlainWriter, gathered
from tests.transport.link_harness import pattern, tcp_pair

STEADY = settings(derandomize=True, database=None, deadline=None, max_examples=40)
SIZES = st.sampled_from((0, 1, 7, 500, SMALL_PIECE_BYTES, SMALL_PIECE_BYTES + 1, 100_000, 700_000))


def bytes_of(sizes: list[int]) -> list[bytes]:
    return [pattern(size, place).tobytes() for place, size in enumerate(sizes)]


@given(st.lists(SIZES, max_size=60))
@STEADY
def test_gathered_pieces_are_the_same_bytes_and_no_two_small_ones_follow_each_other(sizes: list[int]) -> None:
    pieces = bytes_of(sizes)
    found = gathered(pieces)
    assert b"".join(found) == b"".join(pieces)
    large = [piece for piece in pieces if len(piece) > SMALL_PIECE_BYTES]
    assert [piece for piece in found if any(piece is other for other in large)] == large, "a large piece was copied"
    for one, other in pairwise(found):
        assert len(one) + len(other) > min(SMALL_PIECE_BYTES, MOST_GATHERED_BYTES)


def test_a_long_run_of_small_pieces_becomes_several() -> None:
    pieces = [bytes(SMALL_PIECE_BYTES)] * 40
    assert {len(piece) for piece in gathered(pieces)[:-1]} == {MOST_GATHERED_BYTES}


STEPS = st.lists(
    st.tuples(st.sampled_from(("push", "hold", "push_all", "read")), st.lists(SIZES, min_size=1, max_size=9)),
    max_size=9,
)


def everything_sent(connection: socket.socket, steps: list[tuple[str, list[int]]], other: socket.socket) -> None:
    """Takes the steps over one end, reads at the other, and compares."""
    connection.setblocking(False)
    other.setblocking(False)
    with select.epoll() as epoll:
        outgoing = Outgoing(connection, PlainWriter(connection), epoll)
        wanted, arrived = bytearray(), bytearray()

        def read() -> None:
            with suppress(BlockingIOError):
                arrived.extend(other.recv(200_000))

        for kind, sizes in steps:
            pieces = bytes_of(sizes)
            if kind == "read":
                read()
                outgoing.flush()
                continue
            wanted += b"".join(pieces)
            if kind == "push_all":
                outgoing.push_all(pieces)
            elif kind == "push":
                outgoing.push(b"".join(pieces))
            else:
                outgoing.hold(b"".join(pieces))
        outgoing.push(b"end")
        wanted += b"end"
        while len(arrived) < len(wanted):
            outgoing.flush()
            select.select([other], [], [], 1.0)
            read()
        assert arrived == wanted
        assert not outgoing.waits
        outgoing.close()


@given(STEPS)
@STEADY
def test_all_bytes_leave_in_order_within_a_host(steps: list[tuple[str, list[int]]]) -> None:
    one, other = socket.socketpair()
    with one, other:
        everything_sent(one, steps, other)


@given(STEPS)
@STEADY
def test_all_bytes_leave_in_order_over_tcp(steps: list[tuple[str, list[int]]]) -> None:
    one, other = tcp_pair()
    with one, other:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
        everything_sent(one, steps, other)


def test_more_pieces_than_one_system_call_takes() -> None:
    one, other = tcp_pair()
    with one, other:
        everything_sent(one, [("push_all", [1, 0, 3] * 900), ("push", [5]), ("push_all", [200] * 2500)], other)
