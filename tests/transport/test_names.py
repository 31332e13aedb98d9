"""Connections to names: all addresses are tried, and a name is looked up again when its connection ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import Any

import pytest
import zmq

from kvd.core.machine import SCHEDULER, ServerPeer
from kvd.protocol.messages import PathKind
from kvd.transport.finding import Outcome
from kvd.transport.reaching import (
    UnknownNameError,
    connect_to_any,
    look_up,
    number_that_accepts,
    with_zone,
    zone_of,
)
from kvd.transport.zmq.probe import try_handshake
from tests.transport.host_harness import run
from tests.transport.names_harness import Names
from tests.transport.tcp_harness import tcp_node
from tests.transport.test_curve import nodes
from tests.waiting import eventually

NAME = "host.example"


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    names = Names()
    monkeypatch.setattr(socket, "getaddrinfo", names.getaddrinfo)
    return names


def test_a_message_reaches_a_name_that_becomes_known_and_moves(names: Names) -> None:
    async def main() -> None:
        async with nodes(None, None, None) as (first, second, client):
            port = first.transport.listen("tcp://127.0.0.1:0").rpartition(":")[2]
            client.transport.connect(SCHEDULER, f"tcp://{NAME}:{port}")
            assert not client.transport.send(SCHEDULER, b"unknown", [])
            names.known[NAME] = ["::1", "127.0.0.1"]  # nothing listens at the first one

            def arrives(at: Any) -> bool:
                client.transport.send(SCHEDULER, b"hello", [])
                return bool(at.received)

            await eventually(lambda: arrives(first))
            assert first.received[0][0] == b"hello"
            second.transport.listen(f"tcp://127.0.0.2:{port}")
            names.known[NAME] = ["127.0.0.2"]
            first.transport.close(0)
            await eventually(lambda: arrives(second))

    asyncio.run(main())


def test_all_addresses_of_a_name_are_listened_at() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    async def main() -> None:
        async with nodes(None, None, None) as (server, *clients):
            numbers = [f"tcp://127.0.0.1:{port}", f"tcp://[::1]:{port}"]
            assert server.transport.listen(*numbers) == numbers[0]
            for client, number in zip(clients, numbers, strict=True):
                client.transport.connect(SCHEDULER, number)
                client.transport.send(SCHEDULER, number.encode(), [])
            await eventually(lambda: len(server.received) == 2)
            assert {header.decode() for header, _ in server.received} == set(numbers)

    asyncio.run(main())


def test_the_first_address_that_accepts_is_taken(names: Names) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        names.known[NAME] = ["::1", "127.0.0.2", "127.0.0.1"]
        assert number_that_accepts(NAME, port, 10.0) == "127.0.0.1"
        with connect_to_any(NAME, port, 10.0) as connection:
            assert connection.getpeername() == ("127.0.0.1", port)
    with pytest.raises(ConnectionRefusedError):
        connect_to_any(NAME, port, 10.0)
    names.known[NAME] = ["127.0.0.3"]
    assert number_that_accepts(NAME, port, 10.0) == "127.0.0.3"  # there is no other


def test_a_number_that_is_known_to_accept_is_not_asked_again(names: Names) -> None:
    """At the other end such a connection would count as one that proves no key."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        port = server.getsockname()[1]
        names.known[NAME] = ["127.0.0.2", "127.0.0.1"]
        assert number_that_accepts(NAME, port, 10.0, known="127.0.0.1") == "127.0.0.1"
        with pytest.raises(BlockingIOError):
            server.accept()
        assert number_that_accepts(NAME, port, 10.0, known="127.0.0.9") == "127.0.0.1"  # the name has moved
        server.accept()[0].close()


def test_a_name_is_looked_up_again_if_no_thread_starts_or_libzmq_refuses_the_number(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, connect = threading.Thread.start, zmq.Socket.connect
    failures = {"thread": 2, "connect": 2}

    def start_later(thread: threading.Thread) -> None:
        if thread.name == "kvd-look-up" and failures["thread"]:
            failures["thread"] -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    def connect_later(self: zmq.Socket[bytes], address: str) -> Any:
        if address.startswith("tcp:") and failures["connect"]:
            failures["connect"] -= 1
            raise zmq.ZMQError(zmq.EINVAL)
        return connect(self, address)

    monkeypatch.setattr(threading.Thread, "start", start_later)
    monkeypatch.setattr(zmq.Socket, "connect", connect_later)

    async def main() -> None:
        async with nodes(None, None) as (server, client):
            port = server.transport.listen("tcp://127.0.0.1:0").rpartition(":")[2]
            names.known[NAME] = ["127.0.0.1"]
            client.transport.connect(SCHEDULER, f"tcp://{NAME}:{port}")

            def arrives() -> bool:
                client.transport.send(SCHEDULER, b"hello", [])
                return bool(server.received)

            await eventually(arrives)

    asyncio.run(main())
    assert failures == {"thread": 0, "connect": 0}


def test_a_link_leads_to_the_address_of_a_name_where_the_server_has_answered(names: Names) -> None:
    names.known[NAME] = ["127.0.0.3", "127.0.0.1"]  # nothing listens at the first one

    async def main() -> None:
        client, server, incarnation = tcp_node(), tcp_node(), ServerPeer(1)
        try:
            port = server.transport.listen("tcp://127.0.0.1:0").rpartition(":")[2]
            server.transport.listen_links(incarnation)
            client.transport.connect(incarnation, f"tcp://{NAME}:{port}")
            await client.decided()
            assert client.transport.paths()[incarnation] == (PathKind.SEALED_TCP, "")
        finally:
            client.close()
            server.close()

    run(main)


def test_an_address_of_a_family_that_the_kernel_lacks_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the IPv6 address of a name where IPv6 is disabled. No kernel makes streams of AF_NETLINK."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = server.getsockname()
        found = [(socket.AF_NETLINK, 0, 0, "", ("::1", 0)), (socket.AF_INET, 0, 0, "", where)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        assert number_that_accepts(NAME, where[1], 10.0) == "127.0.0.1"
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found[:1])
    with pytest.raises(OSError, match="not supported"):
        connect_to_any(NAME, where[1], 10.0)


@pytest.mark.parametrize("host", [NAME, "x" * 64 + ".example"])
def test_a_name_without_addresses(host: str, names: Names) -> None:
    with pytest.raises(UnknownNameError):
        look_up(host, 9)


def test_a_link_local_address_has_the_interface_of_the_host_that_uses_it() -> None:
    here, elsewhere = "tcp://[fe80::1%eth0]:9", "tcp://[fe80::1]:9"
    assert (zone_of(here), zone_of(elsewhere), zone_of("tcp://[fd00::1]:9")) == ("eth0", "", "")
    assert with_zone(here, "") == elsewhere
    assert with_zone(elsewhere, "lan1") == with_zone(here, "lan1") == "tcp://[fe80::1%lan1]:9"
    for other in ("tcp://[fd00::1]:9", "tcp://10.0.0.1:9", "ipc:///tmp/x", "nonsense"):
        assert with_zone(other, "lan1") == other


@pytest.mark.parametrize(
    ("greets", "answers", "name"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", b"", "an SSH server"),
        (b"", b"HTTP/1.0 400 Bad Request\r\n\r\n", "a web server (HTTP)"),
        (b"", b"-ERR wrong number of arguments for 'get' command\r\n", "a Redis server"),
        (b"", b"ERROR\r\n", "a program that says 'ERROR'"),
    ],
)
def test_a_service_at_the_address_is_named(greets: bytes, answers: bytes, name: str) -> None:
    """Some services greet, the others answer once a line has come."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):  # the server was closed
                while True:
                    connection, _ = server.accept()
                    connection.sendall(greets)
                    with connection, connection.makefile("rb") as lines:
                        if lines.readline().endswith(b"\n"):
                            connection.sendall(answers)

        thread = threading.Thread(target=serve)
        thread.start()
        found = try_handshake(f"tcp://127.0.0.1:{server.getsockname()[1]}", None, timeout_s=0.5)
        server.shutdown(socket.SHUT_RDWR)
    thread.join()
    assert found == (Outcome.NOT_ZMQ, name)
