"""Keys on ZeroMQ sockets: who comes in, who is told why not, and what a stranger can do."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvd.core.machine import SCHEDULER, CallerPeer, Peer, Span
from kvd.core.principals import HOLDER, KeyRole, Principal
from kvd.errors import ConnectError
from kvd.transport.finding import Outcome
from kvd.transport.zmq.curve import Admit, Curve, Keypair, is_key, new_keypair, public_key_of
from kvd.transport.zmq.probe import try_handshake
from kvd.transport.zmq.transport import ZmqTransport
from tests.waiting import eventually

DEADLINE_S = 30.0
ADDRESSES = ["tcp://127.0.0.1:0", "tcp://[::1]:0", "ipc://@kvd-test-curve"]


def curve(own: Keypair, expected: str, admit: Admit = lambda key: None) -> Curve:
    return Curve(own, expected, "", admit, "a test")


class Node:
    """A transport, and what came."""

    def __init__(self, keys: Curve | None) -> None:
        self.transport = ZmqTransport(curve=keys)
        self.received: list[tuple[bytes, Principal]] = []
        self.garbage: list[str] = []
        self.callers: list[Peer] = []

    def start(self) -> None:
        self.transport.start(self._take, lambda peer, text: self.garbage.append(text))

    def _take(self, peer: Peer, header: bytes, payload: memoryview | None, principal: Principal) -> None:
        self.received.append((header, principal))
        if isinstance(peer, CallerPeer):
            self.callers.append(peer)
            self.transport.send(peer, b"answer to " + header, [])


@asynccontextmanager
async def nodes(*keys: Curve | None) -> AsyncIterator[list[Node]]:
    made = [Node(own) for own in keys]
    for node in made:
        node.start()
    try:
        yield made
    finally:
        for node in made:
            node.transport.close(0)


@pytest.mark.parametrize("address", ADDRESSES)
def test_who_holds_the_key_of_the_cluster_comes_in(address: str) -> None:
    shared = new_keypair()
    keys = curve(shared, shared.public, lambda key: HOLDER if key == shared.public else None)

    async def main() -> None:
        async with nodes(keys, keys) as (server, client):
            where = server.transport.listen(address)
            client.transport.connect(SCHEDULER, where)
            client.transport.send(SCHEDULER, b"hello", [Span(b"payload", 0, 7)])
            await eventually(lambda: len(client.received) == 1)
            assert server.received == [(b"hello", HOLDER)]

    asyncio.run(main())


def test_a_message_says_whose_key_it_came_with() -> None:
    listener, one, other = new_keypair(), new_keypair(), new_keypair()
    allowed = {pair.public: Principal(pair.public[:4], frozenset({KeyRole.WORKER})) for pair in (one, other)}

    async def main() -> None:
        async with nodes(
            curve(listener, "", allowed.get), curve(one, listener.public), curve(other, listener.public)
        ) as (server, first, second):
            where = server.transport.listen("tcp://127.0.0.1:0")
            for node, text in ((first, b"one"), (second, b"other")):
                node.transport.connect(SCHEDULER, where)
                node.transport.send(SCHEDULER, text, [])
            await eventually(lambda: len(server.received) == 2)
            assert dict(server.received) == {b"one": allowed[one.public], b"other": allowed[other.public]}

    asyncio.run(main())


def test_a_key_that_is_struck_off_the_list_is_refused_from_then_on() -> None:
    listener, one = new_keypair(), new_keypair()
    allowed = {one.public: Principal("one", frozenset({KeyRole.WORKER}))}

    async def main() -> None:
        async with nodes(curve(listener, "", allowed.get), curve(one, listener.public)) as (server, client):
            client.transport.connect(SCHEDULER, server.transport.listen("tcp://127.0.0.1:0"))
            client.transport.send(SCHEDULER, b"before", [])
            await eventually(lambda: len(server.received) == 1)
            del allowed[one.public]
            client.transport.send(SCHEDULER, b"after", [])
            await eventually(lambda: bool(server.garbage))
            assert [header for header, _ in server.received] == [b"before"]
            assert "not allowed any more" in server.garbage[0]

    asyncio.run(main())


def test_a_key_that_was_refused_comes_in_once_it_is_allowed() -> None:
    listener, one = new_keypair(), new_keypair()
    allowed: dict[str, Principal] = {}

    async def main() -> None:
        asked: list[str] = []

        def look_up(key: str) -> Principal | None:
            asked.append(key)
            return allowed.get(key)

        async with nodes(curve(listener, "", look_up), curve(one, listener.public)) as (server, client):
            where = server.transport.listen("tcp://127.0.0.1:0")
            client.transport.connect(SCHEDULER, where)
            keys = curve(one, listener.public)
            found = await asyncio.to_thread(try_handshake, where, keys, "", 10.0)
            assert found.outcome is Outcome.NOT_ADMITTED
            await eventually(lambda: len(asked) > 1, "the node itself is refused, too")
            allowed[one.public] = Principal("one", frozenset({KeyRole.WORKER}))

            def said() -> bool:
                client.transport.send(SCHEDULER, b"hello", [])
                return bool(client.received)

            await eventually(said)

    asyncio.run(main())


def test_a_node_that_announces_no_key_is_not_connected_to() -> None:
    own = new_keypair()

    async def main() -> None:
        async with nodes(curve(own, own.public)) as (client,):
            with pytest.raises(ConnectError, match="announces 'rubbish', which is no key"):
                client.transport.connect(SCHEDULER, "tcp://127.0.0.1:9", "rubbish")

    asyncio.run(main())


def test_what_a_handshake_tells() -> None:
    listener, stranger = new_keypair(), new_keypair()

    async def main() -> None:
        async with nodes(curve(listener, "", lambda key: None), None) as (secured, open_to_all):
            closed = secured.transport.listen("tcp://127.0.0.1:0")
            opened = open_to_all.transport.listen("tcp://127.0.0.1:0")
            with socket.create_server(("127.0.0.1", 0)) as free:
                nobody = f"tcp://127.0.0.1:{free.getsockname()[1]}"
            for address, keys, outcome in [
                (closed, curve(stranger, stranger.public), Outcome.OTHER_KEY),
                (closed, curve(stranger, listener.public), Outcome.NOT_ADMITTED),
                (closed, None, Outcome.WITH_KEYS),
                (opened, curve(stranger, stranger.public), Outcome.WITHOUT_KEYS),
                (opened, None, Outcome.SUCCEEDED),
                (nobody, None, Outcome.REFUSED),
                (nobody, curve(stranger, stranger.public), Outcome.REFUSED),
                ("ipc:///nowhere/x.sock", None, Outcome.REFUSED),
            ]:
                found = await asyncio.to_thread(try_handshake, address, keys, "", 10.0)
                assert found.outcome is outcome, (address, outcome, found)
            assert secured.received == open_to_all.received == []

    asyncio.run(main())


@pytest.mark.parametrize("own", [None, Keypair("", "")])
def test_something_else_than_zeromq_is_recognised(own: Keypair | None) -> None:
    keys = None if own is None else curve(new_keypair(), new_keypair().public)
    with socket.create_server(("127.0.0.1", 0)) as web:

        async def main() -> None:
            async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                await writer.drain()
                writer.close()

            server = await asyncio.start_server(answer, sock=web)
            async with server:
                address = f"tcp://127.0.0.1:{web.getsockname()[1]}"
                found = await asyncio.to_thread(try_handshake, address, keys, "", 10.0)
                assert found == (Outcome.NOT_ZMQ, "a web server (HTTP)")

        asyncio.run(main())


def test_keys_are_checked_and_secrets_not_shown() -> None:
    pair = new_keypair()
    assert is_key(pair.public)
    assert is_key(pair.secret)
    assert not is_key(pair.public[:-1])
    assert not is_key(pair.public[:-1] + '"')
    assert public_key_of(pair.secret) == pair.public
    assert pair.secret not in repr(pair)
    assert pair.secret not in repr(curve(pair, ""))
