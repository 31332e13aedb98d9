"""What someone between the hosts can do to a link over TCP, and what a stranger at its port can."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from kvd.core.machine import ServerPeer
from kvd.protocol.messages import PathKind
from kvd.transport.links import listener
from kvd.transport.links.connector import LinkConnector
from tests.transport.host_harness import Node, run
from tests.transport.tcp_harness import tcp_node, with_pair
from tests.waiting import eventually

CLAIM_BYTES = 80  # what a client says to prove itself

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


class Relay:
    """Stands between a client and the link port of a server, and may change what passes.

    Args:
        port: of the server.
        change: gets the direction ("up" or "down"), what arrived, and how many bytes went before.
    """

    def __init__(self, port: int, change: Callable[[str, bytes, int], bytes]) -> None:
        self._port = port
        self._change = change
        self._tasks: list[asyncio.Task[None]] = []
        self.port = 0
        self.seen = b""
        self.passed = {"up": 0, "down": 0}

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._port)
        await asyncio.gather(self._pump("up", reader, up_writer), self._pump("down", up_reader, writer))

    async def _pump(self, direction: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                self.seen += data
                writer.write(self._change(direction, data, self.passed[direction]))
                self.passed[direction] += len(data)
                await writer.drain()
        writer.close()

    async def close(self) -> None:
        self._server.close()
        await self._server.wait_closed()


@asynccontextmanager
async def relayed(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[str, bytes, int], bytes]
) -> AsyncIterator[tuple[Node, Node, ServerPeer, Relay]]:
    """A client whose link leads through a relay."""
    incarnation = ServerPeer(secrets.randbits(61) + 1)
    client, server = tcp_node(), tcp_node()
    relay = None
    try:
        address = server.transport.listen("tcp://127.0.0.1:0")
        server.transport.listen_links(incarnation)
        assert server.transport.link_address is not None
        relay = Relay(server.transport.link_address[1], change)
        await relay.start()
        connect = LinkConnector._connect
        port = relay.port
        monkeypatch.setattr(
            LinkConnector,
            "_connect",
            lambda self, search, offer, family, where: connect(self, search, offer, family, ("127.0.0.1", port)),
        )
        client.transport.connect(incarnation, address)
        await client.decided()
        yield client, server, incarnation, relay
    finally:
        client.close()
        server.close()
        if relay is not None:
            await relay.close()


def test_who_reads_along_sees_neither_messages_nor_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with relayed(monkeypatch, lambda direction, data, passed: data) as (client, server, incarnation, relay):
            text = b"a text that nobody else may read"
            assert client.send(incarnation, text, text * 10_000)
            await eventually(lambda: server.messages)
            assert len(relay.seen) > 300_000
            assert text not in relay.seen
            assert client.transport.paths()[incarnation].kind == PathKind.SEALED_TCP

    run(main)


def flip_later(direction: str, data: bytes, passed: int) -> bytes:
    """Changes one bit of what the client says after the handshake and its hello."""
    if direction == "up" and passed > CLAIM_BYTES:
        return bytes([data[0] ^ 1]) + data[1:] if len(data) < 200 else data[:100] + bytes([data[100] ^ 1]) + data[101:]
    return data


def test_a_changed_bit_ends_the_link_and_zmq_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with relayed(monkeypatch, flip_later) as (client, server, incarnation, relay):
            await eventually(lambda: relay.passed["up"] >= CLAIM_BYTES, "the proof has passed")
            assert client.send(incarnation, b"changed on the way", bytes(50_000))
            await eventually(lambda: client.transport.paths()[incarnation].kind == PathKind.ZMQ)
            assert server.messages == []
            assert "was changed on the way" in server.garbage[0] or "are allowed" in server.garbage[0]
            assert client.send(incarnation, b"by zmq")
            await eventually(lambda: server.messages)
            assert server.messages[0][1] == b"by zmq"

    run(main)


@pytest.mark.parametrize("at", [5, 60])
def test_a_changed_handshake_leads_to_zmq(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    def change(direction: str, data: bytes, passed: int) -> bytes:
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if passed == 0 and len(data) > at else data

    async def main() -> None:
        async with relayed(monkeypatch, change) as (client, server, incarnation, _):
            kind, reason = client.transport.paths()[incarnation]
            assert kind == PathKind.ZMQ
            assert "no link over TCP: " in reason
            assert client.send(incarnation, b"by zmq")
            await eventually(lambda: server.messages)

    run(main)


def test_strangers_at_the_port_are_cut_off_and_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "PROVE_WITHIN_S", 0.5)

    async def program(client: Node, server: Node, incarnation: ServerPeer) -> None:
        address = server.transport.link_address
        assert address is not None
        garbage = [b"GET / HTTP/1.1\r\n\r\n" * 10, b"", bytes(80), secrets.token_bytes(5000), b"\x16\x03\x01" * 40]
        for said in garbage * 20:
            reader, writer = await asyncio.open_connection(*address)
            with suppress(ConnectionError):
                writer.write(said)
                while await reader.read(1000):  # until it is cut off
                    pass
            writer.close()
            if len(said) < CLAIM_BYTES:
                break
        assert server.garbage == []
        assert len(server.transport.paths()) == 1
        assert client.send(incarnation, b"hello")
        await eventually(lambda: server.messages)

    with_pair(program)
