"""A client and a server in two network namespaces, as if on two hosts."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvd.core.machine import ServerPeer
from kvd.protocol.messages import PathKind
from kvd.transport.links.listener import TcpLinks
from kvd.transport.zmq.curve import Curve
from tests.transport.host_harness import ROOT, Node, cluster_keys, run
from tests.transport.link_harness import MIB, pattern
from tests.waiting import eventually

NETWORK = f"10.213.{os.getpid() % 250}"  # others may run this test, too
KEYS: Curve = cluster_keys()
PEER = ServerPeer(4711)
HERE, THERE = f"{NETWORK}.1", f"{NETWORK}.2"

SERVER = """if True:
    import asyncio, sys
    from kvd.core.machine import Span
    from kvd.core.principals import HOLDER
    from kvd.transport.zmq.curve import Curve, Keypair
    from kvd.transport.host import HostTransport
    async def main():
        pair = Keypair(sys.argv[2], sys.stdin.readline().strip())
        transport = HostTransport(curve=Curve(pair, pair.public, "", {pair.public: HOLDER}.get, "a test", HOLDER))
        def echo(peer, header, body, principal):
            transport.send(peer, header, [] if body is None else [Span(body, 0, body.nbytes)])
        transport.start(echo, print)
        print(transport.listen(f"tcp://{sys.argv[1]}:0"), flush=True)
        transport.listen_links(4711)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        transport.close(0.1)
    asyncio.run(main())
"""


@pytest.fixture
def other_namespace() -> Iterator[list[str]]:
    """What to put before a command that should run there. This side has the address HERE, that side THERE."""
    name = f"kvd-test-{os.getpid()}"
    ours, theirs = f"kvd{os.getpid()}", f"kvp{os.getpid()}"
    ip = shutil.which("ip")
    if ip is None or subprocess.run([ip, "netns", "add", name], capture_output=True, check=False).returncode:
        pytest.skip("this user cannot make a network namespace with ip(8)")
    there = [ip, "netns", "exec", name]
    try:
        for command in (
            [ip, "link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", name],
            [ip, "addr", "add", f"{HERE}/30", "dev", ours],
            [ip, "link", "set", ours, "up"],
            [*there, ip, "addr", "add", f"{THERE}/30", "dev", theirs],
            [*there, ip, "link", "set", theirs, "up"],
        ):
            subprocess.run(command, check=True, capture_output=True)
        yield there
    finally:
        subprocess.run([ip, "netns", "del", name], check=False, capture_output=True)  # the veth pair goes with it


@pytest.fixture
def server(other_namespace: list[str]) -> Iterator[str]:
    """The address of a server there, whose incarnation is 4711."""
    command = [*other_namespace, sys.executable, "-c", SERVER, THERE, KEYS.own.public]
    environment = {**os.environ, "PYTHONPATH": str(Path(ROOT))}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(KEYS.own.secret + "\n")
        process.stdin.flush()
        address = process.stdout.readline().strip()
        assert process.stdout.readline() == "ready\n"
        yield address
        process.stdin.close()
        assert process.wait(10) == 0


def test_a_server_in_another_namespace_is_reached_over_a_sealed_link(server: str) -> None:
    async def main() -> None:
        client = Node(curve=KEYS)
        try:
            client.transport.connect(PEER, server)
            await client.decided()
            assert client.transport.paths()[PEER] == (PathKind.SEALED_TCP, "")
            body = pattern(5 * MIB)
            assert client.send(PEER, b"echo", body)
            await eventually(lambda: client.messages)
            assert bytes(client.messages[0][2] or b"") == body.tobytes()
        finally:
            client.close()

    run(main)


@pytest.mark.parametrize("why", ["missing", "too old", "links off", "all off", "closed"])
def test_a_fallback_to_curve_is_logged_once(
    server: str, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {}
    expected = "the package cryptography cannot be imported. Install it on all hosts with pip install"
    if why == "missing":
        monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    elif why == "too old":
        monkeypatch.setattr("cryptography.hazmat.primitives.ciphers.aead.AESGCM", object)
        expected = "the package cryptography is too old. Install it on all hosts with pip install"
    elif why == "closed":
        monkeypatch.setattr(socket.socket, "connect_ex", lambda *_: errno.ECONNREFUSED)
        expected = "Connection refused. Open the ports of the servers' hosts"
    else:
        options = {"tcp_links": TcpLinks.OFF, "shared_memory": why == "links off"}
        expected = 'turned off. Set tcp_links = "auto" (KVD_TCP_LINKS) on all hosts'

    async def main() -> None:
        client = Node(curve=KEYS, **options)
        quiet = Node(curve=KEYS, warns_of_curve=False, **options)
        try:
            for node in (client, client, quiet):  # the second time, it connects again
                node.transport.connect(PEER, server)
                await node.decided()
                assert node.transport.paths()[PEER].kind == PathKind.ZMQ
        finally:
            client.close()
            quiet.close()

    run(main)
    [text] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert text.startswith(f"values travel to the server at {server} by ZeroMQ's own encryption (CURVE)")
    assert expected in text
