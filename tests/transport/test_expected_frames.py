"""A thread that waits for a frame with a known beginning, while other frames arrive by the same links."""

from __future__ import annotations

import gc
import os
import select
import socket
from collections.abc import Iterator

import pytest

from kvd.core.machine import LinkPeer, Span
from kvd.core.principals import HOLDER
from kvd.transport.links.delivery import Sink
from kvd.transport.links.frames import INLINE, PREFIX, ExpectedFrame, inline_frame
from kvd.transport.links.handshake import Medium, Proven
from kvd.transport.links.link import Link
from kvd.transport.links.reader import LinkReader
from kvd.transport.memory.offered import MapBudget
from kvd.transport.memory.segments import Arena

HEADER, PAYLOAD = b"the header, and version 7", b"sixteen bytes 16"
HEAD = PREFIX.pack(INLINE, 0, 0, len(HEADER), len(PAYLOAD), 0, 0) + HEADER[:-1]


class Node:
    """Links of one process, and what arrived by them."""

    def __init__(self) -> None:
        self.arrived: list[bytes] = []
        self.noticed: list[Link] = []
        self.reader = LinkReader(self._notice)
        self.links: list[Link] = []
        self.expected = ExpectedFrame(HEAD + bytes(1 + len(PAYLOAD)), len(HEAD))
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def _notice(self, link: Link) -> None:
        self.noticed.append(link)
        if link.has_ended:
            self.reader.remove(link)

    def add(self, connection: socket.socket) -> None:
        sink, name = Sink(), f"link {len(self.links)}"
        sink.on_message = lambda peer, header, payload, principal: self.arrived.append(header)
        proven = Proven(HOLDER, Medium.UNIX, None)
        link = Link(LinkPeer(name), connection, proven, Arena(1 << 20), self.reader.epoll, sink, MapBudget())
        self.links.append(link)
        self.reader.add(link)

    def wait_for(self, timeout_s: float = 10.0) -> bytes | None:
        """What the frame has behind HEAD."""
        taken = self.reader.wait_for(self.links[0], self.expected, timeout_s, self.wake)
        return bytes(self.expected.buffer[len(HEAD) :]) if taken else None

    def wait_briefly(self) -> bytes | None:
        taken = self.reader.wait_briefly(self.links[0], self.expected, self.wake)
        return bytes(self.expected.buffer[len(HEAD) :]) if taken else None

    def close(self) -> None:
        self.reader.close("closed")
        os.close(self.wake)


@pytest.fixture(params=[1, 3], ids=["one link", "three links"])
def nodes(request: pytest.FixtureRequest) -> Iterator[tuple[Node, Node]]:
    here, there = Node(), Node()
    for _ in range(request.param):
        for node, connection in zip((here, there), socket.socketpair(), strict=True):
            node.add(connection)
    for node in (here, there):
        node.reader.read()  # the greetings
    yield here, there
    for node in (here, there):
        node.close()
    gc.collect()


def answer(link: Link, header: bytes = HEADER, payload: bytes = PAYLOAD) -> None:
    assert link.send(header, (Span(payload, 0, len(payload)),))


def test_the_expected_frame_is_taken_and_not_delivered(nodes: tuple[Node, Node]) -> None:
    here, there = nodes
    for _ in range(3):
        answer(there.links[0])
        assert here.wait_for() == HEADER[-1:] + PAYLOAD
    assert here.arrived == []


def test_what_follows_it_is_delivered(nodes: tuple[Node, Node]) -> None:
    """It is in the socket still, so that the next poll announces it."""
    here, there = nodes
    answer(there.links[0])
    answer(there.links[0], b"another")
    answer(there.links[0], b"and one more")
    assert here.wait_for() == HEADER[-1:] + PAYLOAD
    assert select.select([here.reader.fileno()], [], [], 0)[0]
    here.reader.read()
    assert here.arrived == [b"another", b"and one more"]


@pytest.mark.parametrize("other", [b"another", HEADER[:-2] + b"??", HEADER + b"?"])
def test_another_frame_is_delivered_at_once(nodes: tuple[Node, Node], other: bytes) -> None:
    """No poll would announce it: its bytes have been read."""
    here, there = nodes
    answer(there.links[0], other)
    assert here.wait_for() is None
    assert here.arrived == [other]
    answer(there.links[0])
    assert here.wait_for() == HEADER[-1:] + PAYLOAD


def test_the_frame_of_another_size_is_another_one(nodes: tuple[Node, Node]) -> None:
    here, there = nodes
    answer(there.links[0], payload=PAYLOAD + b"!")
    assert here.wait_for() is None
    assert here.arrived == [HEADER]


def test_frames_of_other_links_are_delivered_meanwhile(nodes: tuple[Node, Node]) -> None:
    here, there = nodes
    for link in there.links[1:]:
        answer(link, b"from elsewhere")
    if len(there.links) > 1:
        assert here.wait_for() is None
    answer(there.links[0])
    assert here.wait_for() == HEADER[-1:] + PAYLOAD
    assert here.arrived == [b"from elsewhere"] * (len(there.links) - 1)


def test_half_of_the_frame_is_waited_for(nodes: tuple[Node, Node]) -> None:
    here, there = nodes
    whole = bytes(HEAD + HEADER[-1:] + PAYLOAD)
    connection = there.links[0]._socket
    assert connection is not None
    for cut in (1, len(HEAD), len(whole) - 1):
        connection.socket.sendall(whole[:cut])
        assert here.wait_for() is None
        connection.socket.sendall(whole[cut:])
        assert here.wait_for() == HEADER[-1:] + PAYLOAD or here.arrived.pop() == HEADER
    assert here.arrived == []


def test_a_link_that_ends_is_noticed(nodes: tuple[Node, Node]) -> None:
    here, there = nodes
    there.links[0].end("gone")
    assert here.wait_for() is None
    assert not here.links[0].is_up
    assert here.links[0] in here.noticed
    assert here.links[0] not in here.reader.links


def test_the_time_is_up(nodes: tuple[Node, Node]) -> None:
    here, _ = nodes
    assert here.wait_for(0.01) is None
    assert not select.select([here.reader.fileno()], [], [], 0)[0]


def test_a_short_wait_is_for_the_only_link(nodes: tuple[Node, Node]) -> None:
    here, there = nodes
    is_only = len(here.links) == 1
    for _ in range(2):
        answer(there.links[0])
        assert here.wait_briefly() == (HEADER[-1:] + PAYLOAD if is_only else None)
    answer(there.links[0], b"another")
    assert here.wait_briefly() is None
    assert here.arrived == ([b"another"] if is_only else [])
    assert here.wait_briefly() is None  # nothing comes
    os.eventfd_write(here.wake, 1)
    assert here.wait_briefly() is None
    assert os.eventfd_read(here.wake) == 1


def test_a_short_wait_ends_with_the_link(nodes: tuple[Node, Node]) -> None:
    here, there = nodes
    there.links[0].end("gone")
    assert here.wait_briefly() is None
    here.reader.read()
    assert not here.links[0].is_up
    assert here.links[0] in here.noticed


def test_a_new_link_is_polled_in_place_of_the_old_one(nodes: tuple[Node, Node]) -> None:
    here, there = nodes
    assert here.wait_briefly() is None
    for link in here.links:
        link.end("gone")
        here.reader.remove(link)
    here.links.clear()
    there.links.clear()
    for node, connection in zip((here, there), socket.socketpair(), strict=True):
        node.add(connection)
        node.reader.read()
    here.reader.read()
    answer(there.links[0])
    assert here.wait_briefly() == HEADER[-1:] + PAYLOAD


def test_a_prepared_frame_is_that_of_the_message(nodes: tuple[Node, Node]) -> None:
    here, there = nodes
    frame = inline_frame(len(HEADER), len(PAYLOAD))
    frame[PREFIX.size :] = HEADER + PAYLOAD
    assert there.links[0].send_prepared(frame)
    frame[PREFIX.size :] = bytes(len(HEADER) + len(PAYLOAD))  # the caller may change it at once
    assert here.wait_for() == HEADER[-1:] + PAYLOAD
