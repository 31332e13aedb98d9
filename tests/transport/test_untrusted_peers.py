"""Peers that a host transport must not trust: other users, too many links, invalid frames."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import subprocess
import sys

import pytest

from kvd.core.machine import PeerKind, ServerPeer
from kvd.protocol.messages import PathKind
from kvd.transport import host
from tests.transport.host_harness import Node, eventually, run, two_nodes

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
            node = Node()
            node.transport.connect(incarnation, "tcp://127.0.0.1:1")
            assert node.transport.paths()[incarnation] == (
                PathKind.ZMQ,
                "the peer runs as user 65534, this process as 0",
            )
            node.close()

        run(main)
        process.communicate("\n", timeout=20)


def test_links_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "MAX_ACCEPTED", 3)

    async def main() -> None:
        async with two_nodes() as (client, server, incarnation):
            name = f"\0kvd/{incarnation:016x}"
            others = [socket.socket(socket.AF_UNIX) for _ in range(4)]
            for other in others:
                other.connect(name)
                other.settimeout(10)
            received = [await asyncio.to_thread(other.recv, 1000) for other in others]
            assert [bool(data) for data in received] == [True, True, False, False]
            assert client.send(incarnation, b"hello")
            await eventually(lambda: server.messages)
            for other in others:
                other.close()
            await eventually(lambda: len(server.transport.paths()) == 1)

    run(main)


def test_an_invalid_frame_on_a_link_falls_back_to_zmq() -> None:
    async def main() -> None:
        incarnation = ServerPeer(secrets.randbits(61) + 1)
        fake = socket.socket(socket.AF_UNIX)
        fake.bind(f"\0kvd/{incarnation:016x}")
        fake.listen()
        server, client = Node(shared_memory=False), Node()
        try:
            client.transport.connect(incarnation, server.transport.listen("tcp://127.0.0.1:0"))
            connection, _ = fake.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            await eventually(lambda: client.garbage)
            assert client.transport.paths()[incarnation][0] == PathKind.ZMQ
            assert "garbage arrived" in client.transport.paths()[incarnation][1]
            assert client.send(incarnation, b"by zmq")
            await eventually(lambda: server.messages)
            assert await asyncio.to_thread(connection.recv, 1000)  # its hello
            connection.close()
        finally:
            fake.close()
            client.close()
            server.close()

    run(main)


def test_a_side_that_cannot_send_falls_back_although_the_other_keeps_a_payload() -> None:
    async def main() -> None:
        async with two_nodes() as (client, server, incarnation):
            assert client.send(incarnation, b"h", bytes(100_000))
            await eventually(lambda: server.messages)
            for link in server.transport._reader.links:
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
