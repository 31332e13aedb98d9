"""The loop and waiting threads read the same links."""

from __future__ import annotations

import asyncio
import os
import threading
import time

import pytest

from kvd.core.machine import Peer
from kvd.core.principals import Principal
from tests.transport.host_harness import run, two_nodes
from tests.waiting import begun, eventually

pytestmark = pytest.mark.usefixtures("nothing_left_behind", "quick_releases")


def test_a_waiting_thread_reads_for_itself_and_the_loop_goes_on() -> None:
    async def main() -> None:
        async with two_nodes() as (client, server, incarnation):
            loop_thread = threading.get_ident()
            wake = os.eventfd(0)

            def ask() -> int:
                client.transport.reader.pause.begin()
                try:
                    assert client.send(incarnation, b"question")
                    deadline = time.monotonic() + 10
                    while not client.messages and time.monotonic() < deadline:
                        client.transport.reader.wait(1.0, wake)
                finally:
                    client.transport.reader.pause.end()
                return threading.get_ident()

            asking = await begun("wait", ask)
            await eventually(lambda: server.messages)
            assert server.send(server.messages[0][0], b"answer")
            asker = await asking
            assert client.threads == {asker}
            server.send(server.messages[0][0], b"more")
            await eventually(lambda: len(client.messages) == 2)
            assert client.threads == {asker, loop_thread}
            os.close(wake)

    run(main)


def test_messages_that_arrive_while_the_loop_is_paused_are_read_afterwards() -> None:
    async def main() -> None:
        async with two_nodes() as (client, server, incarnation):
            assert client.send(incarnation, b"hello")
            await eventually(lambda: server.messages)
            peer = server.messages[0][0]
            for number in range(300):
                client.transport.reader.pause.begin()
                client.transport.reader.pause.begin()
                assert server.send(peer, b"%d" % number)
                if number % 50 == 0:
                    await asyncio.sleep(0.02)  # time itself: nothing is read
                    assert len(client.messages) == number
                client.transport.reader.pause.end()
                if number % 50 == 0:
                    await asyncio.sleep(0.02)  # time itself: nothing is read
                    assert len(client.messages) == number
                client.transport.reader.pause.end()
                await eventually(lambda number=number: len(client.messages) == number + 1)  # type: ignore[misc]

    run(main)


def test_the_loop_finishes_a_flood_where_a_waiting_thread_left_it() -> None:
    """No poll announces the messages in the buffer of a link."""

    async def main() -> None:
        async with two_nodes() as (client, server, incarnation):
            assert client.send(incarnation, b"hello")
            await eventually(lambda: server.messages)
            client.transport.reader.pause.begin()
            for _ in range(1000):
                assert server.send(server.messages[0][0], b"flood")
            wake = os.eventfd(0)
            assert await asyncio.to_thread(client.transport.reader.wait, 1.0, wake)
            assert 0 < len(client.messages) < 1000
            client.transport.reader.pause.end()
            await eventually(lambda: len(client.messages) == 1000)
            os.close(wake)

    run(main)


def test_waiting_ends_by_timeout_by_descriptor_and_by_closing() -> None:
    async def main() -> None:
        async with two_nodes() as (client, _, _):
            await asyncio.sleep(0.05)  # time itself: the hello of the other side is read
            wake = os.eventfd(0)
            start = time.monotonic()
            assert not await asyncio.to_thread(client.transport.reader.wait, 0.05, wake)
            assert 0.04 < time.monotonic() - start < 2
            os.eventfd_write(wake, 1)
            assert not await asyncio.to_thread(client.transport.reader.wait, 20.0, wake)
            assert os.eventfd_read(wake) == 1
            waiting = await begun("wait", client.transport.reader.wait, 20.0, wake)
            client.transport.close(0)
            assert not await waiting
            assert not client.transport.reader.wait(20.0, wake)
            assert time.monotonic() - start < 10
            os.close(wake)

    run(main)


def test_threads_and_the_loop_read_together_without_loss_or_reordering() -> None:
    async def main() -> None:
        async with two_nodes() as (client, server, incarnation):
            assert client.send(incarnation, b"hello")
            await eventually(lambda: server.messages)
            peer = server.messages[0][0]
            stop = threading.Event()

            def read(pauses: bool) -> None:
                wake = os.eventfd(0)
                while not stop.is_set():
                    if pauses:
                        client.transport.reader.pause.begin()
                    client.transport.reader.wait(0.01, wake)
                    if pauses:
                        client.transport.reader.pause.end()
                os.close(wake)

            readers = [asyncio.create_task(asyncio.to_thread(read, pauses)) for pauses in (True, False)]
            for number in range(3000):
                assert server.send(peer, b"%d" % number, bytes(70_000 if number % 7 == 0 else 10))
                if number % 20 == 0:
                    await asyncio.sleep(0)
            await eventually(lambda: len(client.messages) == 3000)
            stop.set()
            await asyncio.gather(*readers)
            assert [header for _, header, _ in client.messages] == [b"%d" % number for number in range(3000)]

    run(main)


def test_an_error_in_the_callback_stops_neither_this_link_nor_others() -> None:
    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        async with two_nodes() as (client, server, incarnation):
            seen: list[bytes] = []

            def fail(peer: Peer, header: bytes, payload: memoryview | None, principal: Principal) -> None:
                seen.append(header)
                if len(seen) % 3 == 0:
                    raise (RuntimeError, ConnectionResetError)[len(seen) % 2]("the callback failed")

            server.transport._sink.on_message = fail
            for number in range(500):
                assert client.send(incarnation, b"%d" % number)
            await eventually(lambda: len(seen) == 500)
            assert seen == [b"%d" % number for number in range(500)]

    run(main)
