"""Links over TCP: sealed and plain, slow, cut, and not possible."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading

import pytest

from kvd.core.machine import PeerKind, ServerPeer
from kvd.core.principals import KeyRole, Principal
from kvd.protocol.messages import PathKind
from kvd.transport.links import streams
from kvd.transport.links.frames import INLINE_BELOW_BYTES, MAX_HEADER_BYTES
from kvd.transport.links.listener import TcpLinks
from kvd.transport.links.sealing import RECORD_BYTES
from kvd.transport.links.write_coalescing import MOST_HELD
from kvd.transport.zmq.curve import Curve, new_keypair
from tests.transport.host_harness import Node, run
from tests.transport.link_harness import MIB, pattern
from tests.transport.tcp_harness import KEYS, kind_of, tcp_node, tcp_pair, with_pair
from tests.waiting import begun, eventually

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@pytest.fixture(params=[KEYS, None], ids=["sealed", "plain"])
def keys(request: pytest.FixtureRequest) -> Curve | None:
    """Those of both nodes."""
    found: Curve | None = request.param
    return found


# ── use ──


def test_both_ends_know_what_the_link_is(keys: Curve | None) -> None:
    async def program(client: Node, server: Node, incarnation: ServerPeer) -> None:
        assert client.send(incarnation, b"hello")
        await eventually(lambda: server.messages)
        peer = server.messages[0][0]
        assert peer.kind is PeerKind.LINK
        await eventually(lambda: peer in server.transport.paths())
        assert server.transport.paths() == {peer: (kind_of(keys), "")}
        assert server.send(peer, b"answer", bytes(100_000))
        await eventually(lambda: client.messages)
        client.transport.disconnect(incarnation)
        await eventually(lambda: not server.send(peer, b"h"))
        assert server.transport.paths() == {}

    with_pair(program, keys)


EDGE = INLINE_BELOW_BYTES


@pytest.mark.parametrize(
    "nbytes",
    [0, 1, 7, EDGE, EDGE + 1, RECORD_BYTES - 1, RECORD_BYTES, RECORD_BYTES + 1, 3 * MIB + 5, 64 * MIB],
)
def test_payloads_of_any_size_arrive(nbytes: int, keys: Curve | None) -> None:
    async def program(client: Node, server: Node, incarnation: ServerPeer) -> None:
        body = pattern(nbytes)
        assert client.send(incarnation, b"before")
        assert client.send(incarnation, b"h" * 50, body)
        assert client.send(incarnation, b"after")
        await eventually(lambda: len(server.messages) == 3)
        assert [message[1] for message in server.messages] == [b"before", b"h" * 50, b"after"]
        payload = server.messages[1][2]
        assert payload is not None
        assert payload.readonly
        assert bytes(payload) == body.tobytes()

    with_pair(program, keys)


def test_large_frames_that_were_held_arrive(keys: Curve | None) -> None:
    """Joined, they would be a record that is larger than what its reader has room for."""

    async def program(client: Node, server: Node, incarnation: ServerPeer) -> None:
        assert client.send(incarnation, b"hello")
        await eventually(lambda: server.messages)
        peer, holding = server.messages.pop()[0], server.transport.holding
        headers = [bytes([number]) * (MAX_HEADER_BYTES // number) for number in range(1, MOST_HELD)]
        holding.begin()
        for header in headers:
            assert server.send(peer, header)
        assert server.send(peer, b"payload", bytes(EDGE))
        holding.end()
        await eventually(lambda: len(client.messages) == MOST_HELD)
        assert [message[1] for message in client.messages] == [*headers, b"payload"]

    with_pair(program, keys)


def test_pieces_of_all_sizes_arrive_padded(keys: Curve | None) -> None:
    async def program(client: Node, server: Node, incarnation: ServerPeer) -> None:
        for scale in (1, 9001, 200_000):
            pieces = [b"abc" * scale, b"", b"12345678" * scale, b"xy" * scale]
            assert client.send(incarnation, b"h", *pieces)
            await eventually(lambda: server.messages)
            padded = b"".join(piece + bytes(-len(piece) % 8) for piece in pieces[:-1]) + pieces[-1]
            assert bytes(server.messages.pop()[2] or b"") == padded

    with_pair(program, keys)


def test_a_list_of_many_pieces_arrives(keys: Curve | None) -> None:
    """More of them than one system call takes, small ones beside large ones."""

    async def program(client: Node, server: Node, incarnation: ServerPeer) -> None:
        pieces = [pattern(8 * ((number * 37) % 90 or 9000), number) for number in range(2500)]
        for _ in range(3):
            assert client.send(incarnation, b"h", *pieces)
        await eventually(lambda: len(server.messages) == 3)
        wanted = b"".join(piece.tobytes() for piece in pieces)
        assert [bytes(body or b"") for _, _, body in server.messages] == [wanted] * 3

    with_pair(program, keys)


def test_many_messages_in_both_directions_over_many_keys(monkeypatch: pytest.MonkeyPatch, keys: Curve | None) -> None:
    monkeypatch.setattr(
        "kvd.transport.links.sealing.Sealer.__init__.__kwdefaults__", {"records_per_key": 7, "first": 0}
    )
    monkeypatch.setattr(
        "kvd.transport.links.sealing.Opener.__init__.__kwdefaults__", {"records_per_key": 7, "first": 0}
    )

    async def program(client: Node, server: Node, incarnation: ServerPeer) -> None:
        assert client.send(incarnation, b"hello")
        await eventually(lambda: server.messages)
        peer = server.messages.pop()[0]
        for number in range(500):
            body = pattern(70_000 if number % 5 == 0 else 10, number)
            assert client.send(incarnation, b"%d" % number, body)
            assert server.send(peer, b"%d" % number, body)
        await eventually(lambda: len(server.messages) == len(client.messages) == 500)
        for node in (client, server):
            assert [header for _, header, _ in node.messages] == [b"%d" % number for number in range(500)]
            assert all(
                body == memoryview(pattern(70_000 if number % 5 == 0 else 10, number))
                for number, (_, _, body) in enumerate(node.messages)
            )

    with_pair(program, keys)


def test_a_slow_reader_bounds_the_queue_and_loses_nothing(monkeypatch: pytest.MonkeyPatch, keys: Curve | None) -> None:
    monkeypatch.setattr("kvd.transport.links.outgoing.QUEUE_LIMIT_BYTES", 3 * MIB)

    async def program(client: Node, server: Node, incarnation: ServerPeer) -> None:
        sent = 0
        body = bytes(MIB)
        while client.send(incarnation, b"%d" % sent, body):  # nobody reads: this does not return to the loop
            sent += 1
            assert sent < 200
        assert client.transport.paths()[incarnation].kind == kind_of(keys)
        await eventually(lambda: len(server.messages) == sent)
        assert client.send(incarnation, b"there is room again")
        await eventually(lambda: len(server.messages) == sent + 1)

    with_pair(program, keys)


def test_queued_payloads_can_be_detached_from_the_memory_of_the_program(keys: Curve | None) -> None:
    async def program(client: Node, server: Node, incarnation: ServerPeer) -> None:
        memory = bytearray(b"x" * (40 * MIB))
        assert client.send(incarnation, b"h", memory)
        await client.transport.detach_buffers()
        memory[:] = b"y" * len(memory)
        await eventually(lambda: server.messages)
        assert bytes(server.messages[0][2] or b"") == b"x" * len(memory)

    with_pair(program, keys)


def test_program_threads_read_links_over_tcp_while_they_wait(keys: Curve | None) -> None:
    async def program(client: Node, server: Node, incarnation: ServerPeer) -> None:
        assert client.send(incarnation, b"hello")
        await eventually(lambda: server.messages)
        client.transport.reader.pause.begin()
        waker, other = socket.socketpair()
        with waker, other:
            answer = await begun("wait", client.transport.reader.wait, 20.0, waker.fileno())
            assert server.send(server.messages[0][0], b"answer", bytes(3 * MIB))
            while not client.messages:
                await answer
                answer = asyncio.create_task(asyncio.to_thread(client.transport.reader.wait, 20.0, waker.fileno()))
            other.send(b"x")
            await answer
        assert threading.get_ident() not in client.threads
        client.transport.reader.pause.end()

    with_pair(program, keys)


# ── ends ──


def test_a_server_that_is_gone_is_noticed(keys: Curve | None) -> None:
    async def program(client: Node, server: Node, incarnation: ServerPeer) -> None:
        server.close()
        await eventually(lambda: client.transport.paths()[incarnation].kind == PathKind.ZMQ)
        assert client.transport.paths()[incarnation].reason in (
            "the other side ended the link",
            "the other side is gone",
        )

    with_pair(program, keys)


def test_a_link_ends_before_the_numbers_of_its_records_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.transport.links.sealing.MOST_RECORDS", 5)

    async def program(client: Node, server: Node, incarnation: ServerPeer) -> None:
        for number in range(20):
            assert client.send(incarnation, b"%d" % number)
        kind, reason = client.transport.paths()[incarnation]
        assert kind == PathKind.ZMQ
        assert "used up" in reason
        await eventually(lambda: len(server.messages) >= 20)
        headers = {message[1] for message in server.messages}
        assert headers == {b"%d" % number for number in range(20)}

    with_pair(program)


# ── whose link it is ──


def test_a_message_over_a_link_says_whose_key_asked_for_it_and_the_link_ends_with_the_key() -> None:
    listener, one, other = new_keypair(), new_keypair(), new_keypair()
    allowed = {
        pair.public: Principal(pair.public[:4], frozenset({KeyRole.WORKER}), key=pair.public) for pair in (one, other)
    }
    server_keys = Curve(listener, "", listener.public, lambda key: allowed.get(key), "a test")

    async def main() -> None:
        client_keys = Curve(one, listener.public, "", allowed.get, "a test")
        async with tcp_pair(server_keys, client_keys) as (client, server, incarnation):
            second = tcp_node(Curve(other, listener.public, "", allowed.get, "a test"))
            try:
                second.transport.connect(incarnation, server.transport._listener.address)
                await second.decided()
                for node in (client, second):
                    assert node.transport.paths()[incarnation].kind == PathKind.SEALED_TCP
                assert client.send(incarnation, b"one")
                assert second.send(incarnation, b"other")
                await eventually(lambda: len(server.messages) == 2)
                assert server.principals == {b"one": allowed[one.public], b"other": allowed[other.public]}
                del allowed[other.public]
                server.transport.end_links_of_others(server_keys.still_admits)
                await eventually(lambda: second.transport.paths()[incarnation].kind == PathKind.ZMQ)
                assert client.transport.paths()[incarnation].kind == PathKind.SEALED_TCP
                assert client.send(incarnation, b"still here")
                assert second.send(incarnation, b"not any more")
                await eventually(lambda: server.garbage and len(server.messages) == 3)
                assert "not allowed any more" in server.garbage[0]
            finally:
                second.close()

    run(main)


# ── not possible ──


@pytest.mark.parametrize(
    ("server_options", "reason"),
    [
        ({"tcp_links": TcpLinks.OFF}, "the server has links over TCP turned off"),
        ({"tcp_links": TcpLinks.BETWEEN_HOSTS}, "can only be reached by its own host"),
    ],
)
def test_a_server_that_does_not_listen_says_why(server_options: dict[str, TcpLinks], reason: str) -> None:
    async def main() -> None:
        incarnation = ServerPeer(4711)
        client, server = tcp_node(), Node(shared_memory=False, curve=KEYS, **server_options)
        try:
            address = server.transport.listen("tcp://127.0.0.1:0")
            server.transport.listen_links(incarnation)
            assert server.transport.link_address is None
            client.transport.connect(incarnation, address)
            await client.decided()
            kind, said = client.transport.paths()[incarnation]
            assert kind == PathKind.ZMQ
            assert reason in said
            assert client.send(incarnation, b"hello")
            await eventually(lambda: server.messages)
        finally:
            client.close()
            server.close()

    run(main)


def test_without_cryptography_zmq_carries_everything_and_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)

    async def main() -> None:
        async with tcp_pair() as (client, server, incarnation):
            kind, reason = client.transport.paths()[incarnation]
            assert kind == PathKind.ZMQ
            assert "the package cryptography cannot be imported" in reason
            assert server.transport.link_address is None
            assert client.send(incarnation, b"hello", bytes(50_000))
            await eventually(lambda: server.messages)

    run(main)


def test_records_larger_than_their_frame_and_shared_memory_are_refused() -> None:
    async def program(client: Node, server: Node, incarnation: ServerPeer) -> None:
        (link,) = client.transport.reader.links
        writer = link._out._writer
        assert isinstance(writer, streams.SealedWriter)
        writer.write(bytes(300_000), None)
        await eventually(lambda: server.garbage)
        assert "goes beyond its frame" in server.garbage[0]

    with_pair(program)
