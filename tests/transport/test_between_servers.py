"""Servers that are connected to each other, each of which listens, too."""

from __future__ import annotations

import asyncio
import gc
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from kvd.core.machine import Peer, PeerKind, ServerPeer, Span
from kvd.core.principals import KeyRole, Principal
from kvd.protocol.messages import PathKind
from kvd.transport.links.listener import TcpLinks
from kvd.transport.zmq.curve import Curve, Keypair, new_keypair
from tests.transport.host_harness import Node, Process, run
from tests.transport.link_harness import MIB, pattern
from tests.waiting import eventually

pytestmark = pytest.mark.usefixtures("nothing_left_behind", "quick_releases")

PAIRS = [new_keypair(), new_keypair()]
PRINCIPALS = {pair.public: Principal(pair.public, frozenset({KeyRole.SERVER})) for pair in PAIRS}


def keys_of(own: Keypair) -> Curve:
    """A server with a key of its own, which lets in the other."""
    return Curve(own, new_keypair().public, own.public, PRINCIPALS.get, "a test")


WAYS: dict[str, tuple[PathKind, dict[str, Any], bool]] = {
    "within the host": (PathKind.SHARED_MEMORY, {}, True),
    "within the host, without keys": (PathKind.SHARED_MEMORY, {}, False),
    "sealed": (PathKind.SEALED_TCP, {"shared_memory": False, "tcp_links": TcpLinks.EVERYWHERE}, True),
    "not sealed": (PathKind.PLAIN_TCP, {"shared_memory": False, "tcp_links": TcpLinks.EVERYWHERE}, False),
    "ZeroMQ": (PathKind.ZMQ, {"shared_memory": False, "tcp_links": TcpLinks.OFF}, True),
    "ZeroMQ without keys": (PathKind.ZMQ, {"shared_memory": False}, False),
}


def incarnation() -> ServerPeer:
    return ServerPeer(secrets.randbits(61) + 1)


async def listening(node: Node) -> tuple[ServerPeer, str]:
    """A node that can be connected to, under this name and address."""
    own = incarnation()
    address = node.transport.listen("tcp://127.0.0.1:0")
    node.transport.listen_links(own)
    return own, address


@asynccontextmanager
async def two_servers(way: str) -> AsyncIterator[tuple[Node, Node, ServerPeer, ServerPeer]]:
    """Two that are connected to each other, by a connection each, and their incarnations."""
    kind, options, with_keys = WAYS[way]
    nodes = [Node(**options, curve=keys_of(pair) if with_keys else None) for pair in PAIRS]
    try:
        found = [await listening(node) for node in nodes]
        for node, (other, address), pair in zip(nodes, found[::-1], PAIRS[::-1], strict=True):
            node.transport.connect(other, address, pair.public if with_keys else "")
        for node, (other, _) in zip(nodes, found[::-1], strict=True):
            await node.decided()
            assert node.transport.paths()[other].kind == kind
        yield nodes[0], nodes[1], found[0][0], found[1][0]
    finally:
        for node in nodes:
            node.close()


@pytest.mark.parametrize("way", WAYS)
def test_two_servers_send_each_other_records_and_answers_at_the_same_time(way: str) -> None:
    async def main() -> None:
        async with two_servers(way) as (one, two, name_of_one, name_of_two):
            bodies = [pattern(nbytes, nbytes) for nbytes in (1, 70_000, MIB, 3 * MIB + 5)]
            for number, body in enumerate(bodies):
                assert one.send(name_of_two, b"one %d" % number, body)
                assert two.send(name_of_one, b"two %d" % number, body)
            for node, name in ((one, b"two"), (two, b"one")):
                await node.has_received(len(bodies))
                for number, (peer, header, payload) in enumerate(node.messages):
                    assert peer.kind in (PeerKind.CALLER, PeerKind.LINK)
                    assert header == b"%s %d" % (name, number)
                    assert bytes(payload or b"") == bodies[number].tobytes()
                    if WAYS[way][2]:
                        sender = PAIRS[0] if node is two else PAIRS[1]
                        assert node.principals[header] == PRINCIPALS[sender.public]
            asked: list[tuple[Node, Node, ServerPeer]] = [(one, two, name_of_one), (two, one, name_of_two)]
            for node, _, _ in asked:
                peers = {message[0] for message in node.messages}
                node.messages.clear()
                for peer in peers:
                    assert node.send(peer, b"answer")
            for _, other, name_of_node in asked:
                await other.has_received(1)
                assert other.messages == [(name_of_node, b"answer", None)]

    run(main)


def place_of(node: Node, block: Any) -> tuple[int, int] | None:
    return node.transport.arena.locate(block)


def test_memory_is_not_used_again_while_another_server_holds_it() -> None:
    async def main() -> None:
        async with two_servers("within the host") as (one, two, _, name_of_two):
            block = one.transport.arena.allocate(MIB)
            assert block is not None
            block[:] = 5
            place, copies = place_of(one, block), one.transport.arena.total_bytes
            assert one.transport.send(name_of_two, b"h", [Span(block, 0, MIB)])
            del block
            await eventually(lambda: two.messages)
            held = two.messages.pop()[2]
            others = [one.transport.arena.allocate(MIB) for _ in range(3)]
            for other in others:
                assert other is not None
                assert place_of(one, other) != place
                other[:] = 9
            assert (np.frombuffer(held or b"", np.uint8) == 5).all()
            assert one.transport.arena.total_bytes == copies, "it was sent as it lies there"
            del held
            await eventually(lambda: not one.leases())
            again = one.transport.arena.allocate(MIB)
            assert again is not None
            assert place_of(one, again) == place
            del again, other, others

    run(main)


class Trio:
    """This process has a worker and a server, between which is a server in another process."""

    def __init__(self, **options: Any) -> None:
        self.worker, self.server = Node(**options), Node(**options)
        self.between = Process(options=() if options.get("shared_memory", True) else ("plain",))

    async def __aenter__(self) -> Trio:
        own, address = await listening(self.server)
        self.worker.transport.connect(self.between.incarnation, self.between.address)
        await self.worker.decided()
        await self.tell(b"connect %d %s" % (own, address.encode()))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.worker.close()
        self.server.close()
        self.between.close()

    async def tell(self, header: bytes, *pieces: Any) -> None:
        """Has the server between them do something."""
        assert await self.worker.answer(self.between.incarnation, header, *pieces) == (b"done", None)

    async def received(self, header: bytes) -> tuple[Peer, memoryview]:
        """What came to the other server."""
        await eventually(lambda: self.server.messages)
        peer, found, payload = self.server.messages.pop()
        assert found == header
        assert payload is not None
        return peer, payload


@pytest.mark.parametrize("shared_memory", [True, False])
def test_what_a_worker_lent_to_a_server_is_passed_on_and_given_back(shared_memory: bool) -> None:
    async def main() -> None:
        async with Trio(shared_memory=shared_memory) as trio:
            body = pattern(2 * MIB)
            await trio.tell(b"pass", body)
            peer, payload = await trio.received(b"passed")
            assert peer.kind is (PeerKind.LINK if shared_memory else PeerKind.CALLER)
            await eventually(lambda: not trio.worker.leases())
            body[:] = 0  # the worker's memory is its own again
            assert payload.tobytes() == pattern(2 * MIB).tobytes()

    run(main)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_what_a_killed_server_sent_stays_readable(shared_memory: bool) -> None:
    async def main() -> None:
        async with Trio(shared_memory=shared_memory) as trio:
            await trio.tell(b"lend%d" % (8 * MIB) if shared_memory else b"pass", np.full(8 * MIB, 77, np.uint8))
            peer, payload = await trio.received(b"lent" if shared_memory else b"passed")
            trio.between.kill()
            await eventually(lambda: peer not in trio.server.transport.paths())
            gc.collect()
            mine = [trio.server.transport.arena.allocate(8 * MIB) for _ in range(2)] if shared_memory else []
            for block in mine:
                assert block is not None
                block[:] = 1
            assert (np.frombuffer(payload, np.uint8) == 77).all()
            trio.server.transport.close(0)
            assert (np.frombuffer(payload, np.uint8) == 77).all()
            del payload, mine

    run(main)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_server_that_sends_records_at_full_speed_is_not_cut_off(
    shared_memory: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """With 32 MiB open, which is the credit: whatever the other server does meanwhile, and with little memory."""
    count, most_open = 256, 32

    class Slow(Node):
        def _take(self, peer: Peer, header: bytes, payload: memoryview | None, principal: Principal) -> None:
            assert payload is not None
            assert payload.nbytes == MIB
            self.messages.append((peer, header, None))
            if len(self.messages) in (40, 150):
                time.sleep(1.0)  # time itself: it is busy, and everything that is open waits
            self.send(peer, b"answer")

    async def main() -> None:
        trio = Trio(shared_memory=shared_memory)
        trio.server.close()
        trio.server = Slow(shared_memory=shared_memory, memory_limit_bytes=4 << 30)
        async with trio:
            await trio.tell(b"stream %d %d %d" % (count, MIB, most_open))
            await eventually(lambda: len(trio.server.messages) == count)
            assert [int(header) for _, header, _ in trio.server.messages] == list(range(count))[::-1]
            assert len({peer for peer, _, _ in trio.server.messages}) == 1
            await asyncio.sleep(0)

    run(main)
    assert "cut off" not in caplog.text
