"""Which path messages take: a link or ZeroMQ, and why. With real processes."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.core.machine import SCHEDULER, PeerKind, ServerPeer
from kvd.protocol.messages import PathKind
from kvd.transport.links.listener import TcpLinks
from tests.transport.host_harness import ROOT, Node, Process, run, two_nodes, with_process
from tests.transport.link_harness import MIB
from tests.waiting import eventually

pytestmark = pytest.mark.usefixtures("nothing_left_behind", "quick_releases")


def test_messages_to_a_process_of_this_host_go_over_the_link() -> None:
    async def program(node: Node, process: Process) -> None:
        assert node.transport.paths() == {process.incarnation: (PathKind.SHARED_MEMORY, "")}
        for nbytes in (0, 1000, 3 * MIB):
            body = secrets.token_bytes(nbytes)
            header, answer = await node.answer(process.incarnation, b"echo", body)
            assert header == b"echo"
            assert bytes(answer or b"") == body
        _, lent = await node.answer(process.incarnation, b"lease200000")
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
            assert peer.kind is PeerKind.LINK
            assert server.transport.paths() == {peer: (PathKind.SHARED_MEMORY, "")}
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


def test_links_that_are_turned_off_and_peers_that_are_not_servers() -> None:
    async def program(node: Node, process: Process) -> None:
        node.transport.connect(SCHEDULER, process.address)
        assert node.transport.paths() == {
            process.incarnation: (PathKind.ZMQ, "turned off"),
            SCHEDULER: (PathKind.ZMQ, "turned off"),
        }
        assert await node.answer(process.incarnation, b"echo") == (b"echo", None)

    async def only_servers(node: Node, process: Process) -> None:
        node.transport.connect(SCHEDULER, process.address)
        assert node.transport.paths()[SCHEDULER] == (PathKind.ZMQ, "links lead to servers only")
        assert await node.answer(SCHEDULER, b"echo") == (b"echo", None)

    with_process(program, shared_memory=False, tcp_links=TcpLinks.OFF)
    with_process(only_servers)


def test_without_a_listener_for_links_the_reason_is_kept() -> None:
    async def program(node: Node, process: Process) -> None:
        node.transport.connect(ServerPeer(process.incarnation + 1), process.address)
        await node.decided()
        kind, reason = node.transport.paths()[ServerPeer(process.incarnation + 1)]
        assert (kind, reason.split(":")[0]) == (PathKind.ZMQ, "no link at this host")
        assert await node.answer(ServerPeer(process.incarnation + 1), b"echo") == (b"echo", None)

    with_process(program)


def test_without_memfd_the_link_carries_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")

    async def program(node: Node, process: Process) -> None:
        kind, reason = node.transport.paths()[process.incarnation]
        assert kind == PathKind.UNIX_SOCKET
        assert "memfd_create" in reason
        body = secrets.token_bytes(5 * MIB)
        _, answer = await node.answer(process.incarnation, b"echo", body)
        assert answer is not None
        assert bytes(answer) == body
        assert node.leases() == 0
        del answer

    with_process(program)


def test_only_zmq_reaches_another_network_namespace(tmp_path: Path) -> None:
    """The peer shares the file system and listens at a path there. Names of links do not cross namespaces."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-n", "true"], capture_output=True, check=False).returncode:
        pytest.skip("the kernel does not let this user make a network namespace")
    code = f"""if True:
        import asyncio, time
        from kvd.transport.host import HostTransport
        async def main():
            transport = HostTransport()
            transport.start(lambda peer, header, body, _: transport.send(peer, header, []), print)
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
            node.transport.connect(ServerPeer(4711), f"ipc://{tmp_path}/s")
            await node.decided()
            kind, reason = node.transport.paths()[ServerPeer(4711)]
            assert kind == PathKind.ZMQ
            assert "network namespace" in reason
            assert await node.answer(ServerPeer(4711), b"echo") == (b"echo", None)
            node.close()

        run(main)
        process.communicate("\n", timeout=20)
