"""Links beside ZeroMQ, with real processes: which way messages go and why, deaths, strangers, and who reads."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvd.transport import host
from kvd.transport.host import SHARED_MEMORY, UNIX_SOCKET, ZMQ, HostTransport
from tests.transport.link_rig import MIB, memory_in_use, spans

ROOT = Path(__file__).parents[2]
PEER = [sys.executable, "-m", "tests.transport.host_peer"]


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    before = memory_in_use()
    yield
    assert memory_in_use() == before


@pytest.fixture(autouse=True)
def _release_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "RELEASE_INTERVAL_S", 0.1)


class Node:
    """A transport of this process that is started, and what it has received."""

    def __init__(self, **options: Any) -> None:
        self.transport = HostTransport(**options)
        self.messages: list[tuple[Hashable, bytes, memoryview | None]] = []
        self.threads: set[int] = set()
        self.garbage: list[str] = []
        self.transport.start(self._take, lambda peer, text: self.garbage.append(text))

    def _take(self, peer: Hashable, header: bytes, payload: memoryview | None) -> None:
        self.threads.add(threading.get_ident())
        self.messages.append((peer, header, payload))

    def send(self, peer: Hashable, header: bytes, *pieces: Any) -> bool:
        return self.transport.send(peer, header, spans(*pieces))

    async def answer(self, peer: Hashable, header: bytes, *pieces: Any) -> tuple[bytes, memoryview | None]:
        """Sends and waits for the next message."""
        assert self.send(peer, header, *pieces)
        await eventually(lambda: self.messages)
        return self.messages.pop(0)[1:]

    def leases(self) -> int:
        return sum(link.leases for link in self.transport._gate.links)

    def close(self) -> None:
        self.messages.clear()
        self.transport.close(0.2)


class Process:
    """A second process that listens."""

    def __init__(self, *prefix: str) -> None:
        self.incarnation = secrets.randbits(61) + 1
        self.process = subprocess.Popen(
            [*prefix, *PEER, str(self.incarnation)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
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


async def eventually(holds: Callable[[], Any], timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.002)


@asynccontextmanager
async def two_nodes(**options: Any) -> AsyncIterator[tuple[Node, Node, int]]:
    """A client and a server in this process, connected; and the server's incarnation."""
    incarnation = secrets.randbits(61) + 1
    client, server = Node(**options), Node()
    try:
        address = server.transport.listen("tcp://127.0.0.1:0")
        server.transport.listen_links(incarnation)
        client.transport.connect(incarnation, address)
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
            await program(node, process)
        finally:
            node.close()

    try:
        run(main)
    finally:
        process.close()


# ── which way ──


def test_messages_to_a_process_of_this_host_go_over_the_link() -> None:
    async def program(node: Node, process: Process) -> None:
        assert node.transport.paths() == {process.incarnation: (SHARED_MEMORY, "")}
        for nbytes in (0, 1000, 3 * MIB):
            body = secrets.token_bytes(nbytes)
            header, answer = await node.answer(process.incarnation, b"echo", body)
            assert header == b"echo"
            assert bytes(answer or b"") == body
        _, lent = await node.answer(process.incarnation, b"lend200000")
        assert lent is not None
        assert bytes(lent) == bytes([77]) * 200_000
        del lent

    with_process(program)


def test_answers_go_back_over_the_link_and_the_server_names_the_peer() -> None:
    async def main() -> None:
        async with two_nodes() as (client, server, incarnation):
            assert client.send(incarnation, b"hello")
            await eventually(lambda: server.messages)
            peer = server.messages[0][0]
            assert isinstance(peer, tuple)
            assert server.transport.paths() == {peer: (SHARED_MEMORY, "")}
            assert server.send(peer, b"answer", bytes(100_000))
            await eventually(lambda: client.messages)
            assert client.messages[0][:2] == (incarnation, b"answer")
            assert server.leases() == 1
            client.transport.disconnect(incarnation)
            assert client.transport.paths() == {}
            assert not client.send(incarnation, b"h")
            await eventually(lambda: not server.send(peer, b"h"))
            assert server.transport.paths() == {}

    run(main)


def test_links_turned_off_and_peers_that_are_no_servers() -> None:
    async def program(node: Node, process: Process) -> None:
        node.transport.connect("scheduler", process.address)
        assert node.transport.paths() == {
            process.incarnation: (ZMQ, "turned off"),
            "scheduler": (ZMQ, "turned off"),
        }
        assert await node.answer(process.incarnation, b"echo") == (b"echo", None)

    async def only_servers(node: Node, process: Process) -> None:
        node.transport.connect("scheduler", process.address)
        assert node.transport.paths()["scheduler"] == (ZMQ, "links lead to servers only")
        assert await node.answer("scheduler", b"echo") == (b"echo", None)

    with_process(program, shared_memory=False)
    with_process(only_servers)


def test_without_a_listener_for_links_the_reason_is_kept() -> None:
    async def program(node: Node, process: Process) -> None:
        node.transport.connect(process.incarnation + 1, process.address)
        kind, reason = node.transport.paths()[process.incarnation + 1]
        assert (kind, reason.split(":")[0]) == (ZMQ, "no link at this host")
        assert await node.answer(process.incarnation + 1, b"echo") == (b"echo", None)

    with_process(program)


def test_without_memfd_the_link_carries_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")

    async def program(node: Node, process: Process) -> None:
        kind, reason = node.transport.paths()[process.incarnation]
        assert kind == UNIX_SOCKET
        assert "memfd_create" in reason
        body = secrets.token_bytes(5 * MIB)
        _, answer = await node.answer(process.incarnation, b"echo", body)
        assert answer is not None
        assert bytes(answer) == body
        assert node.leases() == 0
        del answer

    with_process(program)


def test_another_network_namespace_is_reached_by_zmq_alone(tmp_path: Path) -> None:
    """The peer shares the file system, and listens at a path there; names of links are not seen across."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-n", "true"], capture_output=True, check=False).returncode:
        pytest.skip("the kernel does not let this user make a network namespace")
    code = f"""if True:
        import asyncio, time
        from kvd.transport.host import HostTransport
        async def main():
            transport = HostTransport()
            transport.start(lambda peer, header, body: transport.send(peer, header, []), print)
            transport.listen("ipc://{tmp_path}/s")
            transport.listen_links(4711)
            print("ready", flush=True)
            await asyncio.to_thread(input)
            transport.close(0)
        asyncio.run(main())
    """
    command = [unshare, "-n", sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"

        async def main() -> None:
            node = Node()
            node.transport.connect(4711, f"ipc://{tmp_path}/s")
            kind, reason = node.transport.paths()[4711]
            assert kind == ZMQ
            assert "network namespace" in reason
            assert await node.answer(4711, b"echo") == (b"echo", None)
            node.close()

        run(main)
        process.communicate("\n", timeout=20)


# ── strangers ──


def connect_as_nobody(incarnation: int) -> str:
    """What another user gets who connects to the link: the bytes that come before the end."""
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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_other_users_are_not_taken() -> None:
    async def main() -> None:
        async with two_nodes() as (client, server, incarnation):
            assert await asyncio.to_thread(connect_as_nobody, incarnation) == "0\n"
            assert client.send(incarnation, b"hello")
            await eventually(lambda: server.messages)
            assert len(server.transport.paths()) == 1
            assert server.garbage == []

    run(main)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_listener_of_another_user_is_not_used() -> None:
    incarnation = secrets.randbits(61) + 1
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
                ZMQ,
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


def test_garbage_on_a_link_falls_back_to_zmq() -> None:
    async def main() -> None:
        incarnation = secrets.randbits(61) + 1
        fake = socket.socket(socket.AF_UNIX)
        fake.bind(f"\0kvd/{incarnation:016x}")
        fake.listen()
        server, client = Node(shared_memory=False), Node()
        try:
            client.transport.connect(incarnation, server.transport.listen("tcp://127.0.0.1:0"))
            connection, _ = fake.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            await eventually(lambda: client.garbage)
            assert client.transport.paths()[incarnation][0] == ZMQ
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


def test_a_side_that_cannot_send_any_more_falls_back_though_the_other_keeps_a_payload() -> None:
    async def main() -> None:
        async with two_nodes() as (client, server, incarnation):
            assert client.send(incarnation, b"h", bytes(100_000))
            await eventually(lambda: server.messages)
            for link in server.transport._gate.links:
                link.end("garbage arrived: in the other's opinion")
            assert client.send(incarnation, b"by zmq")
            kind, reason = client.transport.paths()[incarnation]
            assert (kind, reason) == (ZMQ, "the link broke: Broken pipe")
            assert client.leases() == 1
            await eventually(lambda: len(server.messages) == 2)
            assert isinstance(server.messages[1][0], bytes)
            server.messages.clear()
            await eventually(lambda: not client.leases())

    run(main)


# ── leases and deaths ──


def test_payloads_are_given_back_without_traffic() -> None:
    async def main() -> None:
        async with two_nodes() as (client, server, incarnation):
            assert client.send(incarnation, b"h", bytes(100_000))
            await eventually(lambda: server.messages)
            await asyncio.sleep(0.3)
            assert client.leases() == 1
            server.messages.clear()
            await eventually(lambda: not client.leases())
            await asyncio.sleep(0.25)
            assert not server.transport._gate.watches_payloads

    run(main)


def test_a_killed_receiver_gives_back_what_it_held() -> None:
    async def program(node: Node, process: Process) -> None:
        peer = process.incarnation
        block = node.transport.arena.allocate(MIB)
        assert block is not None
        place = node.transport.arena.locate(block)
        assert await node.answer(peer, b"keep", block) == (b"kept", None)
        del block
        await asyncio.sleep(0.3)
        assert node.leases() == 1
        process.kill()
        await eventually(lambda: node.transport.paths()[peer][0] == ZMQ)
        assert node.transport.paths()[peer][1] == "the other side is gone"
        assert node.leases() == 0
        again = node.transport.arena.allocate(MIB)
        assert again is not None
        assert node.transport.arena.locate(again) == place

    with_process(program)


def test_memory_of_a_killed_owner_stays_readable() -> None:
    async def program(node: Node, process: Process) -> None:
        peer = process.incarnation
        _, lent = await node.answer(peer, b"lend%d" % (8 * MIB))
        process.kill()
        await eventually(lambda: node.transport.paths()[peer][0] == ZMQ)
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
        _, lent = await node.answer(process.incarnation, b"lend%d" % MIB)
        process.kill()
        successor = Process()
        try:
            node.transport.connect(successor.incarnation, successor.address)
            node.transport.disconnect(process.incarnation)
            assert await node.answer(successor.incarnation, b"echo") == (b"echo", None)
            _, other = await node.answer(successor.incarnation, b"lend%d" % MIB)
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


# ── who reads ──


def test_a_thread_that_waits_reads_itself_and_the_loop_goes_on() -> None:
    async def main() -> None:
        async with two_nodes() as (client, server, incarnation):
            loop_thread = threading.get_ident()
            wake = os.eventfd(0)

            def ask() -> int:
                client.transport.pause_loop()
                try:
                    assert client.send(incarnation, b"question")
                    deadline = time.monotonic() + 10
                    while not client.messages and time.monotonic() < deadline:
                        client.transport.poll_links(1.0, wake)
                finally:
                    client.transport.resume_loop()
                return threading.get_ident()

            asking = asyncio.create_task(asyncio.to_thread(ask))
            await eventually(lambda: server.messages)
            await asyncio.sleep(0.1)
            assert server.send(server.messages[0][0], b"answer")
            asker = await asking
            assert client.threads == {asker}
            server.send(server.messages[0][0], b"more")
            await eventually(lambda: len(client.messages) == 2)
            assert client.threads == {asker, loop_thread}
            os.close(wake)

    run(main)


def test_what_comes_while_the_loop_is_paused_is_read_after_it() -> None:
    async def main() -> None:
        async with two_nodes() as (client, server, incarnation):
            assert client.send(incarnation, b"hello")
            await eventually(lambda: server.messages)
            peer = server.messages[0][0]
            for number in range(300):
                client.transport.pause_loop()
                client.transport.pause_loop()
                assert server.send(peer, b"%d" % number)
                if number % 50 == 0:
                    await asyncio.sleep(0.02)
                    assert len(client.messages) == number
                client.transport.resume_loop()
                if number % 50 == 0:
                    await asyncio.sleep(0.02)
                    assert len(client.messages) == number
                client.transport.resume_loop()
                await eventually(lambda number=number: len(client.messages) == number + 1)  # type: ignore[misc]

    run(main)


def test_a_flood_is_finished_by_the_loop_where_a_waiting_thread_left_it() -> None:
    """What lies in the buffer of a link is announced by no poll."""

    async def main() -> None:
        async with two_nodes() as (client, server, incarnation):
            assert client.send(incarnation, b"hello")
            await eventually(lambda: server.messages)
            client.transport.pause_loop()
            for _ in range(1000):
                assert server.send(server.messages[0][0], b"flood")
            wake = os.eventfd(0)
            assert await asyncio.to_thread(client.transport.poll_links, 1.0, wake)
            assert 0 < len(client.messages) < 1000
            client.transport.resume_loop()
            await eventually(lambda: len(client.messages) == 1000)
            os.close(wake)

    run(main)


def test_waiting_ends_with_the_time_the_descriptor_and_the_transport() -> None:
    async def main() -> None:
        async with two_nodes() as (client, _, _):
            await asyncio.sleep(0.05)  # the hello of the other side is read
            wake = os.eventfd(0)
            start = time.monotonic()
            assert not await asyncio.to_thread(client.transport.poll_links, 0.05, wake)
            assert 0.04 < time.monotonic() - start < 2
            os.eventfd_write(wake, 1)
            assert not await asyncio.to_thread(client.transport.poll_links, 20.0, wake)
            assert os.eventfd_read(wake) == 1
            waiting = asyncio.create_task(asyncio.to_thread(client.transport.poll_links, 20.0, wake))
            await asyncio.sleep(0.1)
            client.transport.close(0)
            assert not await waiting
            assert not client.transport.poll_links(20.0, wake)
            assert time.monotonic() - start < 10
            os.close(wake)

    run(main)


def test_threads_and_the_loop_read_together_and_nothing_is_lost_or_turned_round() -> None:
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
                        client.transport.pause_loop()
                    client.transport.poll_links(0.01, wake)
                    if pauses:
                        client.transport.resume_loop()
                os.close(wake)

            readers = [asyncio.create_task(asyncio.to_thread(read, pauses)) for pauses in (True, False)]
            for number in range(3000):
                assert server.send(peer, b"%d" % number, bytes(20_000 if number % 7 == 0 else 10))
                if number % 20 == 0:
                    await asyncio.sleep(0)
            await eventually(lambda: len(client.messages) == 3000)
            stop.set()
            await asyncio.gather(*readers)
            assert [header for _, header, _ in client.messages] == [b"%d" % number for number in range(3000)]

    run(main)


def test_an_error_above_stops_neither_the_reading_nor_the_others() -> None:
    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        async with two_nodes() as (client, server, incarnation):
            seen: list[bytes] = []

            def fail(peer: Hashable, header: bytes, payload: memoryview | None) -> None:
                seen.append(header)
                if len(seen) % 3 == 0:
                    raise (RuntimeError, ConnectionResetError)[len(seen) % 2]("the one above failed")

            server.transport._sink.on_message = fail
            for number in range(500):
                assert client.send(incarnation, b"%d" % number)
            await eventually(lambda: len(seen) == 500)
            assert seen == [b"%d" % number for number in range(500)]

    run(main)
