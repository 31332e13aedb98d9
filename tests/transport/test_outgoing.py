"""What leaves a link: all bytes, once and in order, however little room the socket has."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.transport.links.outgoing import MOST_GATHERED_BYTES, SMALL_PIECE_BYTES, Outgoing, PlainWriter, Writer, gathered
from kvd.transport.links.sealing import OVERHEAD_BYTES, RECORD_BYTES, SECRET_BYTES, Sealer
from kvd.transport.links.streams import SealedWriter
from tests.transport.link_harness import pattern, tcp_pair

STEADY = settings(derandomize=True, database=None, deadline=None, max_examples=40)
SECRET = bytes(range(SECRET_BYTES))
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


def everything_sent(
    connection: socket.socket,
    steps: list[tuple[str, list[int]]],
    other: socket.socket,
    writer: Writer | None = None,
    opened: Callable[[bytearray], bytes] = bytes,
) -> None:
    """Takes the steps over one end, reads at the other, and compares.

    Args:
        writer: of the connection; a plain one by default.
        opened: the bytes that were sent, of all bytes that have arrived.
    """
    connection.setblocking(False)
    other.setblocking(False)
    with select.epoll() as epoll:
        outgoing = Outgoing(connection, writer or PlainWriter(connection), epoll)
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
        while len(said := opened(arrived)) < len(wanted):
            outgoing.flush()
            select.select([other], [], [], 1.0)
            read()
        assert said == wanted
        outgoing.flush()
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


def opened_by_hand() -> Callable[[bytearray], bytes]:
    """What opens the records of a stream one by one, as docs/security.md describes them, without our `Opener`."""
    key = AESGCM(HKDFExpand(SHA256(), 32, b"kvd link 1 key").derive(SECRET))
    plain, place, number = bytearray(), 0, 0

    def opened(arrived: bytearray) -> bytes:
        nonlocal place, number
        while len(head := bytes(arrived[place : place + 4])) == 4:
            end = place + 4 + int.from_bytes(head, "little") + 16
            if end > len(arrived):
                break
            nonce = bytes(4) + number.to_bytes(8, "little")
            plain.extend(key.decrypt(nonce, bytes(arrived[place + 4 : end]), head))
            place, number = end, number + 1
        return bytes(plain)

    return opened


@given(STEPS)
@STEADY
def test_all_bytes_leave_in_order_in_records(steps: list[tuple[str, list[int]]]) -> None:
    one, other = tcp_pair()
    with one, other:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
        everything_sent(one, steps, other, SealedWriter(one, Sealer(SECRET)), opened_by_hand())


class Counted:
    """A socket with room for everything that counts the system calls.

    Attributes:
        sizes: the bytes of each.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def send(self, data: memoryview, flags: int) -> int:
        self.sizes.append(len(data))
        return len(data)


def test_small_records_leave_together_and_a_large_one_behind_them() -> None:
    counted: Any = Counted()
    writer = SealedWriter(counted, Sealer(SECRET))
    assert writer.write_all([bytes(100), bytes(5000), bytes(RECORD_BYTES), bytes(7)]) == 5107 + RECORD_BYTES
    assert counted.sizes == [5107 + RECORD_BYTES + 4 * OVERHEAD_BYTES]
    counted.sizes.clear()
    assert writer.write_all([bytes(2 * RECORD_BYTES)]) == 2 * RECORD_BYTES
    assert counted.sizes == 2 * [RECORD_BYTES + OVERHEAD_BYTES]


def test_queued_pieces_leave_together() -> None:
    """The socket takes what waits with one system call, not with one for each piece."""
    one, other = tcp_pair()
    with one, other, select.epoll() as epoll:
        one.setblocking(False)
        writer = Turns(one)
        outgoing = Outgoing(one, writer, epoll)
        for number in range(20):
            outgoing.push(pattern(500, number).tobytes())
        assert outgoing.waits
        writer.is_open = True
        outgoing.flush()
        assert (writer.turns, outgoing.waits) == (1, True)
        outgoing.flush()
        assert not outgoing.waits
        other.settimeout(30)
        wanted = b"".join(pattern(500, number).tobytes() for number in range(20))
        assert other.recv(len(wanted), socket.MSG_WAITALL) == wanted
        outgoing.close()


class Turns(PlainWriter):
    """A writer that has no room until it is opened, and then takes one turn per flush.

    Attributes:
        is_open: whether the socket has room.
        turns: how often several pieces were taken.
    """

    writes_at_a_time = 1

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self.is_open = False
        self.turns = 0

    def write(self, data: bytes | bytearray | memoryview, descriptor: int | None) -> int:
        return super().write(data, descriptor) if self.is_open else 0

    def write_all(self, pieces: Sequence[bytes | memoryview]) -> int:
        self.turns += 1
        return super().write_all(pieces)


def test_more_pieces_than_one_system_call_takes() -> None:
    one, other = tcp_pair()
    with one, other:
        everything_sent(one, [("push_all", [1, 0, 3] * 900), ("push", [5]), ("push_all", [200] * 2500)], other)
