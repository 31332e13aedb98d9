"""What every transport guarantees: over TCP, ipc, links of all kinds in addition to TCP, and within one process."""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kvd.core.machine import SCHEDULER, CallerPeer, Peer, ServerPeer
from kvd.core.principals import Principal
from kvd.errors import ConnectError
from kvd.transport.base import Transport
from kvd.transport.host import HostTransport
from kvd.transport.links.listener import TcpLinks
from kvd.transport.zmq.transport import ZmqTransport
from tests.transport.host_harness import cluster_keys
from tests.transport.in_process import MemoryNetwork, MemoryTransport
from tests.transport.link_harness import spans
from tests.waiting import eventually

SERVER = ServerPeer(secrets.randbits(60))  # its name is an incarnation, so that links to it are possible

Message = tuple[Peer, bytes, bytes | None]


class Kind:
    """One kind of transport: how to create it, and where it can listen."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.network = MemoryNetwork()
        self.keys = cluster_keys()
        tcp = "tcp://127.0.0.1:0"
        self.any_address = {"tcp": tcp, "ipc": f"ipc://{folder}/s", "memory": "memory:0"}.get(name, tcp)

    def make(self) -> Transport:
        if self.name == "memory":
            return MemoryTransport(self.network)
        if self.name == "links":
            return HostTransport()
        if self.name in ("sealed links", "plain links"):
            keys = self.keys if self.name == "sealed links" else None
            return HostTransport(shared_memory=False, tcp_links=TcpLinks.EVERYWHERE, curve=keys)
        return ZmqTransport()

    def listen(self, transport: Transport, address: str) -> str:
        bound = transport.listen(address)
        if isinstance(transport, HostTransport):
            transport.listen_links(SERVER)
        return bound


class Node:
    """A started transport and what it has received."""

    def __init__(self, kind: Kind, address: str | None = None) -> None:
        self.transport = kind.make()
        self.messages: list[Message] = []
        self.garbage: list[tuple[Peer, str]] = []
        self.address = "" if address is None else kind.listen(self.transport, address)
        self.transport.start(self._take, lambda peer, text: self.garbage.append((peer, text)))

    def _take(self, peer: Peer, header: bytes, payload: memoryview | None, principal: Principal) -> None:
        self.messages.append((peer, header, None if payload is None else bytes(payload)))

    def send(self, peer: Peer, header: bytes, *pieces: bytes) -> bool:
        return self.transport.send(peer, header, spans(*pieces))

    async def received(self, count: int) -> list[Message]:
        await eventually(lambda: len(self.messages) >= count)
        assert len(self.messages) == count
        return self.messages

    def close(self) -> None:
        self.transport.close(0.2)


async def greet(client: Node, server: Node) -> Peer:
    """Send until the server has received a message, and the last one. Return the server's name for the client."""
    server.messages.clear()
    sent: list[bytes] = []

    def received() -> bool:
        sent.append(b"hello %d" % len(sent))
        client.send(SERVER, sent[-1])
        return bool(server.messages)

    await eventually(received)
    await eventually(lambda: server.messages[-1][1] == sent[-1])
    peer = server.messages[-1][0]
    server.messages.clear()
    return peer


@pytest.fixture(params=["tcp", "ipc", "links", "sealed links", "plain links", "memory"])
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Kind:
    return Kind(request.param, tmp_path)


def with_pair(kind: Kind, program: Callable[[Node, Node, Peer], Awaitable[None]]) -> None:
    async def main() -> None:
        server, client = Node(kind, kind.any_address), Node(kind)
        try:
            client.transport.connect(SERVER, server.address)
            await program(server, client, await greet(client, server))
        finally:
            client.close()
            server.close()

    asyncio.run(main())


def test_messages_arrive_in_order_and_are_answered(kind: Kind) -> None:
    async def program(server: Node, client: Node, peer: Peer) -> None:
        for number in range(500):
            assert client.send(SERVER, b"%d" % number, *([b"body %d" % number] if number % 2 else []))
        messages = await server.received(500)
        assert [header for _, header, _ in messages] == [b"%d" % number for number in range(500)]
        assert [body for _, _, body in messages] == [b"body %d" % n if n % 2 else None for n in range(500)]
        assert {sender for sender, _, _ in messages} == {peer}
        for number in range(500):
            assert server.send(peer, b"answer %d" % number)
        assert await client.received(500) == [(SERVER, b"answer %d" % number, None) for number in range(500)]

    with_pair(kind, program)


def test_payloads_of_several_pieces_are_padded_to_8(kind: Kind) -> None:
    async def program(server: Node, client: Node, peer: Peer) -> None:
        client.send(SERVER, b"h", b"abc", b"", b"12345678", b"xy")
        client.send(SERVER, b"h", b"abc")
        client.send(SERVER, b"h", b"")
        client.send(SERVER, b"h")
        bodies = [body for _, _, body in await server.received(4)]
        assert bodies == [b"abc" + bytes(5) + b"12345678" + b"xy", b"abc", b"", None]

    with_pair(kind, program)


def test_large_payloads(kind: Kind) -> None:
    async def program(server: Node, client: Node, peer: Peer) -> None:
        large = os.urandom(1 << 20) * 9 + b"end"
        for _ in range(3):
            client.send(SERVER, b"up", large)
            server.send(peer, b"down", large, b"more")
        assert all(body == large for _, _, body in await server.received(3))
        padded = large + bytes(-len(large) % 8) + b"more"
        assert all(body == padded for _, _, body in await client.received(3))

    with_pair(kind, program)


def test_senders_may_drop_and_receivers_may_keep_a_payload(kind: Kind) -> None:
    """A received payload keeps its memory, whatever arrives later."""

    async def main() -> None:
        kept: list[memoryview] = []
        server, client = Node(kind, kind.any_address), Node(kind)
        server.transport.close(0)
        server.transport = kind.make()
        address = kind.listen(server.transport, kind.any_address)
        server.transport.start(lambda peer, header, body, _: kept.append(body) if body else None, lambda *_: None)
        client.transport.connect(SERVER, address)
        try:
            for number in range(20):
                body = bytearray([number]) * 100_000
                assert client.transport.send(SERVER, b"h", spans(body))
            await eventually(lambda: len(kept) == 20)
            assert [bytes(body) == bytes([number]) * 100_000 for number, body in enumerate(kept)] == [True] * 20
        finally:
            client.close()
            server.close()

    asyncio.run(main())


def test_send_returns_false_if_the_peer_is_gone_or_unknown(kind: Kind) -> None:
    async def program(server: Node, client: Node, peer: Peer) -> None:
        assert not client.send(SCHEDULER, b"h")
        assert not server.send(CallerPeer(b"nobody"), b"h")
        client.transport.disconnect(SERVER)
        assert not client.send(SERVER, b"h")
        await eventually(lambda: not server.send(peer, b"h"))

    with_pair(kind, program)


def test_listening_at_a_taken_address_fails_and_does_no_harm(kind: Kind) -> None:
    async def program(server: Node, client: Node, peer: Peer) -> None:
        other = kind.make()
        with pytest.raises(ConnectError) as caught:
            other.listen(server.address)
        assert caught.value.address == server.address
        other.close(0)
        client.send(SERVER, b"still there")
        assert (await server.received(1))[0][1] == b"still there"

    with_pair(kind, program)


def test_a_connection_comes_back_with_its_listener(kind: Kind) -> None:
    async def program(server: Node, client: Node, peer: Peer) -> None:
        address = server.address
        server.close()
        await asyncio.sleep(0.1)  # time itself: clients notice, or not
        client.send(SERVER, b"into the void")
        server = Node(kind, address)
        try:
            again = await greet(client, server)
            assert server.send(again, b"welcome back")
            await eventually(lambda: ((SERVER, b"welcome back", None)) in client.messages)
        finally:
            server.close()

    with_pair(kind, program)


def test_a_connection_may_be_opened_before_there_is_a_listener(kind: Kind) -> None:
    async def main() -> None:
        first = Node(kind, kind.any_address)
        address = first.address
        first.close()
        client = Node(kind)
        client.transport.connect(SERVER, address)
        await asyncio.sleep(0.05)  # time itself: the first attempts fail
        server = Node(kind, address)
        try:
            peer = await greet(client, server)
            assert server.send(peer, b"there you are")
            await eventually(lambda: client.messages)
        finally:
            client.close()
            server.close()

    asyncio.run(main())


def test_closing_leaks_nothing(kind: Kind) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def noop(server: Node, client: Node, peer: Peer) -> None:
        client.send(SERVER, b"h", bytes(200_000))
        await server.received(1)

    with_pair(kind, noop)
    before, threads = descriptors(), threading.active_count()
    for _ in range(5):
        with_pair(kind, noop)
    assert descriptors() <= before
    assert threading.active_count() <= threads


def test_a_flood_does_not_starve_the_loop(kind: Kind) -> None:
    async def program(server: Node, client: Node, peer: Peer) -> None:
        turns = 0
        most = 0
        seen = 0

        async def count_turns() -> None:
            nonlocal turns, most, seen
            while True:
                most = max(most, len(server.messages) - seen)
                seen = len(server.messages)
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count_turns())
        for _ in range(3000):
            client.send(SERVER, b"flood")
        await eventually(lambda: len(server.messages) == 3000)
        counting.cancel()
        if kind.name != "memory":  # it delivers through the loop's own queue
            assert turns > 10
            assert most <= 200

    with_pair(kind, program)


def test_nothing_is_delivered_after_close(kind: Kind) -> None:
    async def program(server: Node, client: Node, peer: Peer) -> None:
        client.send(SERVER, b"late")
        server.close()
        await asyncio.sleep(0.1)  # time itself: nothing comes
        assert server.messages == []
        assert not server.send(peer, b"h")

    with_pair(kind, program)
