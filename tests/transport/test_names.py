"""Connections to names: all addresses are tried, and a name is looked up again when its connection ends."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from kvd.core.machine import SCHEDULER
from kvd.transport.reaching import UnknownNameError, connect_to_any, look_up, number_that_accepts
from tests.transport.test_curve import nodes, until


class Names:
    """A name server with one name."""

    def __init__(self) -> None:
        self.numbers: list[str] = []
        self._real = socket.getaddrinfo

    def getaddrinfo(self, host: str, port: Any, *args: Any, **kwargs: Any) -> list[Any]:
        if host != "host.example":
            return self._real(host, port, *args, **kwargs)
        if not self.numbers:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [found for number in self.numbers for found in self._real(number, port, *args, **kwargs)]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    names = Names()
    monkeypatch.setattr(socket, "getaddrinfo", names.getaddrinfo)
    return names


def test_a_message_reaches_a_name_that_becomes_known_and_moves(names: Names) -> None:
    async def main() -> None:
        async with nodes(None, None, None) as (first, second, client):
            port = first.transport.listen("tcp://127.0.0.1:0").rpartition(":")[2]
            client.transport.connect(SCHEDULER, f"tcp://host.example:{port}")
            assert not client.transport.send(SCHEDULER, b"unknown", [])
            names.numbers = ["::1", "127.0.0.1"]  # nothing listens at the first one

            def arrives(at: Any) -> bool:
                client.transport.send(SCHEDULER, b"hello", [])
                return bool(at.received)

            await until(lambda: arrives(first))
            assert first.received[0][0] == b"hello"
            second.transport.listen(f"tcp://127.0.0.2:{port}")
            names.numbers = ["127.0.0.2"]
            first.transport.close(0)
            await until(lambda: arrives(second))

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
            await until(lambda: len(server.received) == 2)
            assert {header.decode() for header, _ in server.received} == set(numbers)

    asyncio.run(main())


def test_the_first_address_that_accepts_is_taken(names: Names) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        names.numbers = ["::1", "127.0.0.2", "127.0.0.1"]
        assert number_that_accepts("host.example", port, 10.0) == "127.0.0.1"
        with connect_to_any("host.example", port, 10.0) as connection:
            assert connection.getpeername() == ("127.0.0.1", port)
    with pytest.raises(ConnectionRefusedError):
        connect_to_any("host.example", port, 10.0)
    names.numbers = ["127.0.0.3"]
    assert number_that_accepts("host.example", port, 10.0) == "127.0.0.3"  # there is no other


@pytest.mark.parametrize("host", ["host.example", "x" * 64 + ".example"])
def test_a_name_without_addresses(host: str, names: Names) -> None:
    with pytest.raises(UnknownNameError):
        look_up(host, 9)
