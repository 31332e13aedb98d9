"""Host transports in this process, and processes with a transport of their own."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kvd.core.machine import Peer, ServerPeer
from kvd.core.principals import HOLDER, Principal
from kvd.transport.host import HostTransport
from kvd.transport.zmq.curve import Curve, new_keypair
from tests.transport.link_harness import spans
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
PEER = [sys.executable, "-m", "tests.transport.host_peer"]


def cluster_keys() -> Curve:
    """What all nodes of a cluster with one key have."""
    pair = new_keypair()
    admit = {pair.public: HOLDER}.get
    return Curve(pair, pair.public, "", admit, "a test", HOLDER)


class Node:
    """A started transport in this process, and the messages that it has received."""

    def __init__(self, **options: Any) -> None:
        self.transport = HostTransport(**options)
        self.messages: list[tuple[Peer, bytes, memoryview | None]] = []
        self.principals: dict[bytes, Principal] = {}  # by the header of the message
        self.threads: set[int] = set()
        self.garbage: list[str] = []
        self.transport.start(self._take, lambda peer, text: self.garbage.append(text))

    def _take(self, peer: Peer, header: bytes, payload: memoryview | None, principal: Principal) -> None:
        self.threads.add(threading.get_ident())
        self.messages.append((peer, header, payload))
        self.principals[header] = principal

    def send(self, peer: Peer, header: bytes, *pieces: Any) -> bool:
        return self.transport.send(peer, header, spans(*pieces))

    async def answer(self, peer: Peer, header: bytes, *pieces: Any) -> tuple[bytes, memoryview | None]:
        """Sends a message and waits for the next one to arrive."""
        assert self.send(peer, header, *pieces)
        await eventually(lambda: self.messages)
        return self.messages.pop(0)[1:]

    async def decided(self) -> None:
        """Returns when it is known how messages to each server travel."""
        await eventually(lambda: not self.transport._waiting)

    async def has_received(self, count: int) -> None:
        """Returns when so many messages have come."""
        await eventually(lambda: len(self.messages) == count)

    def leases(self) -> int:
        return sum(link.leases for link in self.transport.reader.links)

    def close(self) -> None:
        self.messages.clear()
        self.transport.close(0.2)


class Process:
    """A second process that listens."""

    def __init__(self, *prefix: str, options: tuple[str, ...] = ()) -> None:
        self.incarnation = ServerPeer(secrets.randbits(61) + 1)
        self.process = subprocess.Popen(
            [*prefix, *PEER, str(self.incarnation), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        assert self.address.startswith("tcp://"), "it did not start"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        finally:
            self.process.kill()
            self.process.stdout.close()


@asynccontextmanager
async def two_nodes(**options: Any) -> AsyncIterator[tuple[Node, Node, ServerPeer]]:
    """As `connected`, with options of the client."""
    async with connected(Node(**options), Node()) as nodes:
        yield nodes


@asynccontextmanager
async def connected(client: Node, server: Node) -> AsyncIterator[tuple[Node, Node, ServerPeer]]:
    """A client connected to a server, both in this process, and the server's incarnation."""
    incarnation = ServerPeer(secrets.randbits(61) + 1)
    try:
        address = server.transport.listen("tcp://127.0.0.1:0")
        server.transport.listen_links(incarnation)
        client.transport.connect(incarnation, address)
        await client.decided()
        yield client, server, incarnation
    finally:
        client.close()
        server.close()


def run(program: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(program(), 60))


def with_process(program: Callable[[Node, Process], Awaitable[None]], *prefix: str, **options: Any) -> None:
    process = Process(*prefix)

    async def main() -> None:
        node = Node(**options)
        try:
            node.transport.connect(process.incarnation, process.address)
            await node.decided()
            await program(node, process)
        finally:
            node.close()

    try:
        run(main)
    finally:
        process.close()
