"""Newcomers without a key at a real ROUTER: who is refused, for how long, and who notices nothing."""

from __future__ import annotations

import asyncio
import logging
import socket

import pytest

from kvd.core.machine import SCHEDULER
from kvd.core.principals import HOLDER
from kvd.transport.limits import connection_rate_limit as limits
from kvd.transport.limits.callers import Arrivals, refusal_line
from kvd.transport.limits.connection_rate_limit import ANYWHERE, THIS_HOST, place_of
from kvd.transport.limits.connections import listening_at
from kvd.transport.zmq.curve import new_keypair
from tests.fuzz.flood import flood
from tests.fuzz.zmtp import Wire, greeting
from tests.transport.test_curve import Node, curve, nodes
from tests.waiting import eventually

LIMIT = 20
HELLO = greeting(mechanism=b"CURVE") + b"\x04\xc8\x05HELLO\x01\x00" + bytes(72) + b"\x09" + bytes(119)


@pytest.fixture(autouse=True)
def no_mercy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few newcomers are allowed, and nothing is forgiven."""
    monkeypatch.setattr(limits, "UNPROVEN_LIMIT", LIMIT)
    monkeypatch.setattr(limits, "SUSPICIOUS", 1)
    monkeypatch.setattr(limits, "FORGIVEN_PER_S", 0.0)


def arrivals_of(node: Node) -> Arrivals:
    assert node.transport._callers._arrivals is not None
    return node.transport._callers._arrivals


def stranger(address: str) -> list[Wire]:
    """One more, unless it is refused."""
    try:
        wire = Wire(address, timeout_s=1.0)
    except TimeoutError:
        return []
    wire.send(HELLO)
    return [wire]


def is_refused(address: str) -> bool:
    """Whether a first packet is not answered."""
    host, port = address.removeprefix("tcp://").rsplit(":", 1)
    with socket.socket() as connection:
        connection.settimeout(0.3)
        try:
            connection.connect((host, int(port)))
        except TimeoutError:
            return True
    return False


@pytest.mark.parametrize("goes_at_once", [False, True])
def test_who_comes_too_often_is_refused_and_who_is_in_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, goes_at_once: bool
) -> None:
    shared = new_keypair()
    keys = curve(shared, shared.public, lambda key: HOLDER if key == shared.public else None)

    async def main() -> None:
        async with nodes(keys, keys, keys) as (server, client, late):
            where = server.transport.listen("tcp://127.0.0.1:0")
            client.transport.connect(SCHEDULER, where)
            client.transport.send(SCHEDULER, b"before", [])
            await eventually(lambda: len(client.received) == 1)
            assert not arrivals_of(server).refused

            wires: list[Wire] = []
            for _ in range(10 * LIMIT):
                wires += await asyncio.to_thread(stranger, where)
                if goes_at_once and wires:
                    wires.pop().reset()
                if arrivals_of(server).refused:
                    break
            # libzmq tells late where they came from: too late for those that have gone
            assert arrivals_of(server).refused
            assert arrivals_of(server).refused <= {THIS_HOST, ANYWHERE}
            assert await asyncio.to_thread(is_refused, where)
            assert "too many connections that prove no key: refusing new ones from" in caplog.text

            late.transport.connect(SCHEDULER, where)
            late.transport.send(SCHEDULER, b"late", [])
            client.transport.send(SCHEDULER, b"after", [])
            await eventually(lambda: len(client.received) == 2)
            assert not late.received

            monkeypatch.setattr(limits, "FORGIVEN_PER_S", 100.0)
            await eventually(lambda: not arrivals_of(server).refused)
            await eventually(lambda: len(late.received) == 1)
            for wire in wires:
                wire.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())


def test_a_flood_gets_no_further_than_the_limit() -> None:
    shared = new_keypair()

    async def main() -> None:
        async with nodes(curve(shared, shared.public)) as (server,):
            where = server.transport.listen("tcp://127.0.0.1:0")
            for _ in range(50):
                await asyncio.to_thread(flood, {where: HELLO}, 20, 0.2)
                if arrivals_of(server).refused:
                    break
            # a flood closes its connections: on a busy machine libzmq tells too late where they came from
            assert arrivals_of(server).refused
            assert arrivals_of(server).refused <= {THIS_HOST, ANYWHERE}
            begun, answered = await asyncio.to_thread(flood, {where: HELLO}, 20, 0.5)
            assert begun >= 20
            assert not answered

    asyncio.run(main())


@pytest.mark.parametrize(("has_keys", "address"), [(True, "tcp://127.0.0.1:0"), (False, "tcp://[::1]:0")])
def test_who_says_something_may_come_as_often_as_it_likes(has_keys: bool, address: str) -> None:
    """With keys it has proven one by then; without, a message is proof enough."""
    shared = new_keypair()
    keys = curve(shared, shared.public, lambda key: HOLDER if key == shared.public else None) if has_keys else None

    async def main() -> None:
        async with nodes(keys, keys) as (server, client):
            where = server.transport.listen(address)
            for number in range(2 * LIMIT):
                client.transport.connect(SCHEDULER, where)
                client.transport.send(SCHEDULER, b"%d" % number, [])
                await eventually(lambda: len(client.received) == number + 1)  # noqa: B023  it is awaited here
            assert not arrivals_of(server).refused

    asyncio.run(main())


def test_the_port_is_free_after_it_was_closed() -> None:
    async def main() -> None:
        async with nodes(None) as (server,):
            where = server.transport.listen("tcp://127.0.0.1:0")
            port = int(where.rpartition(":")[2])
            assert len(listening_at(port)) == 2  # libzmq's, and the filter's
        await eventually(lambda: not listening_at(port))
        socket.create_server(("127.0.0.1", port)).close()

    asyncio.run(main())


def test_the_line_names_who_is_refused_and_is_missing_if_nobody_is() -> None:
    """A place that is open again changes what is refused, too, and is no reason for a line."""
    assert refusal_line(frozenset()) == ""
    places = [frozenset({place_of(host)}) for host in ("10.1.2.3", "2001:db8::1", "127.0.0.1")]
    lines = [refusal_line(each) for each in (*places, frozenset({ANYWHERE}))]
    for line, name in zip(lines, ("10.1.2.3", "2001:db8::/64", "this host", "everywhere"), strict=True):
        assert line == f"too many connections that prove no key: refusing new ones from {name} for a while"
