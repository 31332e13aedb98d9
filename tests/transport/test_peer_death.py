"""Payloads to and from peers that pause or die. With real processes."""

from __future__ import annotations

import asyncio
import gc
import secrets
import signal
import time

import numpy as np
import pytest

from kvd.core.machine import Peer
from kvd.core.principals import Principal
from kvd.protocol.messages import PathKind
from tests.transport.host_harness import Node, Process, connected, run, two_nodes, with_process
from tests.transport.link_harness import MIB, memory_in_use
from tests.waiting import eventually

pytestmark = pytest.mark.usefixtures("nothing_left_behind", "quick_releases")


def test_payloads_are_released_without_traffic() -> None:
    async def main() -> None:
        async with two_nodes() as (client, server, incarnation):
            assert client.send(incarnation, b"h", bytes(100_000))
            await eventually(lambda: server.messages)
            await asyncio.sleep(0.3)  # time itself: payloads are released after 0.1 s
            assert client.leases() == 1
            server.messages.clear()
            await eventually(lambda: not client.leases())
            await eventually(lambda: not server.transport.reader.watches_payloads)

    run(main)


def test_a_payload_that_nobody_keeps_is_released_without_traffic() -> None:
    class Careless(Node):
        def _take(self, peer: Peer, header: bytes, payload: memoryview | None, principal: Principal) -> None:
            self.messages.append((peer, header, None))

    async def main() -> None:
        async with connected(Node(), Careless()) as (client, server, incarnation):
            assert client.send(incarnation, b"h", bytes(100_000))
            await eventually(lambda: server.messages)
            await eventually(lambda: not client.leases())
            await eventually(lambda: not server.transport.reader.watches_payloads)

    run(main)


def test_a_killed_receiver_releases_its_payloads() -> None:
    async def program(node: Node, process: Process) -> None:
        peer = process.incarnation
        block = node.transport.arena.allocate(MIB)
        assert block is not None
        place = node.transport.arena.locate(block)
        assert await node.answer(peer, b"keep", block) == (b"kept", None)
        del block
        await asyncio.sleep(0.3)  # time itself: payloads are released after 0.1 s
        assert node.leases() == 1
        process.kill()
        await eventually(lambda: node.transport.paths()[peer][0] == PathKind.ZMQ)
        assert node.transport.paths()[peer][1] == "the other side is gone"
        assert node.leases() == 0
        again = node.transport.arena.allocate(MIB)
        assert again is not None
        assert node.transport.arena.locate(again) == place

    with_process(program)


def test_memory_of_a_killed_owner_stays_readable() -> None:
    async def program(node: Node, process: Process) -> None:
        peer = process.incarnation
        _, lent = await node.answer(peer, b"lease%d" % (8 * MIB))
        process.kill()
        await eventually(lambda: node.transport.paths()[peer][0] == PathKind.ZMQ)
        gc.collect()
        values = np.frombuffer(lent or b"", np.uint8)
        assert values.nbytes == 8 * MIB
        assert (values == 77).all()
        assert memory_in_use()[2] >= 1
        node.transport.close(0)
        assert (values == 77).all()
        del values, lent

    with_process(program)


def test_a_killed_owner_and_a_successor_with_another_incarnation() -> None:
    async def program(node: Node, process: Process) -> None:
        _, lent = await node.answer(process.incarnation, b"lease%d" % MIB)
        process.kill()
        successor = Process()
        try:
            node.transport.connect(successor.incarnation, successor.address)
            node.transport.disconnect(process.incarnation)
            assert await node.answer(successor.incarnation, b"echo") == (b"echo", None)
            _, other = await node.answer(successor.incarnation, b"lease%d" % MIB)
            assert list(node.transport.paths()) == [successor.incarnation]
            assert bytes(lent or b"") == bytes(other or b"") == bytes([77]) * MIB
            del other
        finally:
            successor.close()
        del lent

    with_process(program)


def test_a_stopped_receiver_neither_blocks_nor_loses_what_was_sent() -> None:
    async def program(node: Node, process: Process) -> None:
        process.process.send_signal(signal.SIGSTOP)
        start = time.monotonic()
        body = secrets.token_bytes(300_000)
        for _ in range(20):
            assert node.send(process.incarnation, b"echo", body)
            assert node.send(process.incarnation, b"echo", body[:16_000])
        assert time.monotonic() - start < 2.0
        process.process.send_signal(signal.SIGCONT)
        await eventually(lambda: len(node.messages) == 40)
        assert [len(payload or b"") for _, _, payload in node.messages] == [300_000, 16_000] * 20
        assert all(body.startswith(payload or b"x") for _, _, payload in node.messages)

    with_process(program)
