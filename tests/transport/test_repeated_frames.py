"""Frames of a link that begin alike go to a taker of their own, in their order among the others."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from kvd.core.machine import LinkPeer, Span
from kvd.core.principals import HOLDER
from kvd.transport.links.delivery import Sink
from kvd.transport.links.frames import INLINE, PREFIX
from kvd.transport.links.handshake import Medium, Proven
from kvd.transport.links.link import Link
from kvd.transport.links.reader import LinkReader
from kvd.transport.memory.offered import MapBudget
from kvd.transport.memory.segments import Arena

HEADER, PAYLOAD = b"the header 7", b"sixteen bytes 16"
HEAD = PREFIX.pack(INLINE, 0, 0, len(HEADER), len(PAYLOAD), 0, 0) + HEADER[:-1]


class Taker:
    """Takes frames that begin with HEAD."""

    head = HEAD
    rest_nbytes = 1 + len(PAYLOAD)

    def __init__(self, arrived: list[bytes]) -> None:
        self.arrived = arrived

    def take_all(self, rests: list[bytes]) -> None:
        self.arrived.append(b"taken " + b"".join(rest[:1] for rest in rests))
        assert {rest[1:] for rest in rests} == {PAYLOAD}


class Pair:
    """Two ends of a link in one process."""

    def __init__(self) -> None:
        self.arrived: list[bytes] = []
        self.reader = LinkReader(lambda link: None)
        self.here, self.there = (self._link(connection) for connection in socket.socketpair())
        self.there.receive(64)
        self.reader.add(self.here)
        self.reader.read()
        self.taker = Taker(self.arrived)

    def _link(self, connection: socket.socket) -> Link:
        sink = Sink()
        sink.on_message = lambda peer, header, payload, principal: self.arrived.append(header)
        proven = Proven(HOLDER, Medium.UNIX, None)
        return Link(LinkPeer("other"), connection, proven, Arena(1 << 20), self.reader.epoll, sink, MapBudget())

    def send(self, header: bytes, payload: bytes = PAYLOAD) -> None:
        assert self.there.send(header, (Span(payload, 0, len(payload)),))

    def close(self) -> None:
        self.reader.close("closed")
        for link in (self.here, self.there):
            link.end("closed")


@pytest.fixture
def pair() -> Iterator[Pair]:
    before = len(os.listdir("/proc/self/fd"))
    pair = Pair()
    pair.here.delivery.repeated = pair.taker
    yield pair
    pair.close()
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_they_are_taken_in_their_order(pair: Pair) -> None:
    for number in b"123":
        pair.send(HEADER[:-1] + bytes([number]))
    pair.send(b"another")
    pair.send(HEADER[:-1] + b"4")
    pair.reader.read()
    assert pair.arrived == [b"taken 123", b"another", b"taken 4"]


def test_another_size_is_another_frame(pair: Pair) -> None:
    pair.send(HEADER, PAYLOAD + b"!")
    pair.send(HEADER)
    pair.reader.read()
    assert pair.arrived == [HEADER, b"taken 7"]


def test_half_a_frame_waits_for_the_rest(pair: Pair) -> None:
    whole = bytes(HEAD + HEADER[-1:] + PAYLOAD)
    connection = pair.there._socket
    assert connection is not None
    for cut in (1, len(HEAD), len(whole) - 1):
        connection.socket.sendall(whole[:cut])
        pair.reader.read()
        connection.socket.sendall(whole[cut:])
        pair.reader.read()
    assert pair.arrived == [b"taken 7"] * 3


def test_at_most_so_many_at_a_time(pair: Pair) -> None:
    for number in b"12345":
        pair.send(HEADER[:-1] + bytes([number]))
    pair.send(b"another")
    assert pair.here.receive(2)
    assert pair.arrived == [b"taken 12"]
    assert pair.here.receive(64) is False
    assert pair.arrived == [b"taken 12", b"taken 345", b"another"]


def test_a_link_that_is_down_takes_none(pair: Pair) -> None:
    pair.send(HEADER)
    pair.here.leave("enough")
    pair.reader.read()
    assert pair.arrived == []


def test_whole_frames_are_sent_as_they_are(pair: Pair) -> None:
    whole = bytes(HEAD + HEADER[-1:] + PAYLOAD)
    assert pair.there.send_frames(whole + whole)
    pair.reader.read()
    assert pair.arrived == [b"taken 77"]
    pair.there.end("gone")
    assert not pair.there.send_frames(whole)
