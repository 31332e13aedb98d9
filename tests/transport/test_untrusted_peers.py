"""Peers that a host transport must not trust: other users, too many links, invalid frames."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import subprocess
import sys
from contextlib import suppress

import pytest

from kvd.core.machine import PeerKind, ServerPeer
from kvd.protocol.messages import PathKind
from kvd.transport import host
from kvd.transport.links import listener
from kvd.transport.links.sockets import unix_name
from tests.transport.host_harness import Node, run, two_nodes
from tests.waiting import eventually

pytestmark = pytest.mark.usefixtures("nothing_left_behind", "quick_releases")


def connect_as_nobody(incarnation: int) -> str:
    """Connects to the link as another user. Returns how many bytes that user receives."""
    code = f"""if True:
        import os, socket
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
        link = socket.socket(socket.AF_UNIX)
        link.settimeout(10)
        link.connect("\\0kvd/{incarnation:016x}")
        try:
            print(len(link.recv(1000)))
        except ConnectionResetError:
            print(0)
    """
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_links_of_other_users_are_refused() -> None:
    async def main() -> None:
        async with two_nodes() as (client, server, incarnation):
            assert await asyncio.to_thread(connect_as_nobody, incarnation) == "0\n"
            assert client.send(incarnation, b"hello")
            await eventually(lambda: server.messages)
            assert len(server.transport.paths()) == 1
            assert server.garbage == []

    run(main)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_listener_of_another_user_is_not_used() -> None:
    incarnation = ServerPeer(secrets.randbits(61) + 1)
    code = f"""if True:
        import os, socket
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
        link = socket.socket(socket.AF_UNIX)
        link.bind("\\0kvd/{incarnation:016x}")
        link.listen()
        print("ready", flush=True)
        input()
    """
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"

        async def main() -> None:
            server, client = Node(), Node()
            try:
                client.transport.connect(incarnation, listening(server, ServerPeer(incarnation + 1)))
                await client.decided()
                kind, reason = client.transport.paths()[incarnation]
                assert kind == PathKind.ZMQ
                assert reason.startswith("the peer runs as user 65534, this process as 0")
            finally:
                client.close()
                server.close()

        run(main)
        process.communicate("\n", timeout=20)


def listening(server: Node, incarnation: ServerPeer) -> str:
    """Makes the node a server of this incarnation, and returns its address. A client that connects to it as another
    incarnation looks for the link of that one."""
    address = server.transport.listen("tcp://127.0.0.1:0")
    server.transport.listen_links(incarnation)
    return address


def test_links_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "MAX_ACCEPTED", 3)

    async def main() -> None:
        incarnation = ServerPeer(secrets.randbits(61) + 1)
        server, clients = Node(), [Node() for _ in range(4)]
        try:
            address = listening(server, incarnation)
            kinds = []
            for client in clients:
                client.transport.connect(incarnation, address)
                await client.decided()
                kinds.append(client.transport.paths()[incarnation].kind)
                assert client.send(incarnation, b"hello")
            assert kinds == [PathKind.SHARED_MEMORY] * 3 + [PathKind.ZMQ]
            assert "as many links" in clients[3].transport.paths()[incarnation].reason
            await eventually(lambda: len(server.messages) == 4)
            assert len(server.transport.paths()) == 3
        finally:
            for node in (*clients, server):
                node.close()

    run(main)


def everything_from(connection: socket.socket) -> bytes:
    """What the other end sent until it closed the connection."""
    received = b""
    with connection, suppress(ConnectionResetError):
        while data := connection.recv(1000):
            received += data
    return received


def greeted(connection: socket.socket) -> bool:
    """Whether the server says something."""
    try:
        return bool(connection.recv(1000))
    except TimeoutError:
        return False


def test_only_a_few_may_try_at_a_time_and_failures_keep_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "MAX_HALF_OPEN", 3)
    monkeypatch.setattr(listener, "PROVE_WITHIN_HOST_S", 1.0)

    async def main() -> None:
        async with two_nodes() as (client, server, incarnation):
            strangers = [socket.socket(socket.AF_UNIX) for _ in range(4)]
            for stranger in strangers:
                stranger.connect(unix_name(incarnation))
                stranger.settimeout(0.5)
            heard = [await asyncio.to_thread(greeted, stranger) for stranger in strangers]
            assert heard == [True, True, True, False]
            strangers[0].sendall(bytes(80))  # a wrong proof
            assert not await asyncio.to_thread(greeted, strangers[0])  # cut off
            strangers[3].settimeout(15)
            assert await asyncio.to_thread(greeted, strangers[3])
            for stranger in strangers:
                stranger.close()
            assert client.send(incarnation, b"hello")
            await eventually(lambda: server.messages)
            assert len(server.transport.paths()) == 1
            assert server.garbage == []

    run(main)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(50), "does not speak this version of links"),
        (b"kvd link\1" + bytes(32) + bytes(32), "not the server that offered the link"),
        (b"", "closed the connection"),
    ],
    ids=["other protocol", "no proof", "nothing"],
)
def test_an_impostor_at_the_name_of_a_link_gets_no_messages(said: bytes, reason: str) -> None:
    async def main() -> None:
        incarnation = ServerPeer(secrets.randbits(61) + 1)
        fake = socket.socket(socket.AF_UNIX)
        fake.bind(unix_name(incarnation))
        fake.listen()
        server, client = Node(), Node()
        try:
            client.transport.connect(incarnation, listening(server, ServerPeer(incarnation + 1)))
            assert client.send(incarnation, b"a secret")
            connection, _ = await asyncio.to_thread(fake.accept)
            connection.sendall(said)
            if not said:
                connection.shutdown(socket.SHUT_WR)
            await client.decided()
            assert client.transport.paths()[incarnation].kind == PathKind.ZMQ
            assert reason in client.transport.paths()[incarnation].reason
            await eventually(lambda: server.messages)
            assert server.messages[0][:2] == (server.messages[0][0], b"a secret")
            assert b"a secret" not in await asyncio.to_thread(everything_from, connection)
        finally:
            fake.close()
            client.close()
            server.close()

    run(main)


def test_an_invalid_frame_on_a_link_falls_back_to_zmq() -> None:
    async def main() -> None:
        async with two_nodes() as (client, server, incarnation):
            (link,) = server.transport.reader.links
            assert link._socket is not None
            link._socket.socket.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            await eventually(lambda: client.garbage)
            kind, reason = client.transport.paths()[incarnation]
            assert kind == PathKind.ZMQ
            assert "garbage arrived" in reason
            assert client.send(incarnation, b"by zmq")
            await eventually(lambda: server.messages)

    run(main)


def test_a_side_that_cannot_send_falls_back_although_the_other_keeps_a_payload() -> None:
    async def main() -> None:
        async with two_nodes() as (client, server, incarnation):
            assert client.send(incarnation, b"h", bytes(100_000))
            await eventually(lambda: server.messages)
            for link in server.transport.reader.links:
                link.end("garbage arrived: in the other's opinion")
            assert client.send(incarnation, b"by zmq")
            kind, reason = client.transport.paths()[incarnation]
            assert (kind, reason) == (PathKind.ZMQ, "the link broke: Broken pipe")
            assert client.leases() == 1
            await eventually(lambda: len(server.messages) == 2)
            assert server.messages[1][0].kind is PeerKind.CALLER
            server.messages.clear()
            await eventually(lambda: not client.leases())

    run(main)


async def open_another(client: Node, server: Node, incarnation: ServerPeer) -> None:
    """Opens a link over the same connection as the one that the client has."""
    before = client.transport._links[incarnation]
    client.transport._seeker.seek(incarnation, server.transport._listener.address)
    await eventually(lambda: client.transport._links.get(incarnation) not in (None, before))


async def said(client: Node, server: Node, incarnation: ServerPeer, header: bytes) -> None:
    assert client.send(incarnation, header)
    await eventually(lambda: server.messages and server.messages[-1][1] == header)


def test_a_node_has_one_link_however_many_it_opens() -> None:
    async def main() -> None:
        async with two_nodes() as (client, server, incarnation):
            for number in range(20):
                await open_another(client, server, incarnation)
                await said(client, server, incarnation, b"%d" % number)
                await eventually(lambda: len(server.transport.reader.links) == 1)
            assert len({peer for peer, _, _ in server.messages}) == 20
            assert len(server.transport.paths()) == 1

    run(main)


def test_links_of_other_nodes_stay_when_one_opens_another() -> None:
    async def main() -> None:
        async with two_nodes() as (client, server, incarnation):
            other = Node()
            try:
                other.transport.connect(incarnation, server.transport._listener.address)
                await other.decided()
                theirs = other.transport._links[incarnation]
                await open_another(client, server, incarnation)
                await eventually(lambda: len(server.transport.reader.links) == 2)
                await said(other, server, incarnation, b"still here")
                assert other.transport._links[incarnation] is theirs
                assert theirs.is_up
            finally:
                other.close()

    run(main)
