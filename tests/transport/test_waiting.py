"""Messages that wait until it is known how they travel."""

from __future__ import annotations

import threading

import pytest

from kvd.core.machine import PeerPath, ServerPeer
from kvd.protocol.messages import PathKind
from kvd.transport.host import HostTransport
from kvd.transport.links import connector
from kvd.transport.links.connector import Waiting
from tests.transport.host_harness import Node, run
from tests.transport.link_harness import spans
from tests.waiting import eventually

SERVER = ServerPeer(4711)


def test_messages_leave_in_their_order_and_none_waits_afterwards() -> None:
    queue = Waiting()
    sent: list[object] = []
    for number in range(5):
        assert queue.add(b"%d" % number, spans(b"body"))
    queue.end(lambda header, payload: sent.append(header))
    assert sent == [b"0", b"1", b"2", b"3", b"4"]
    assert queue.add(b"late", ()) is None


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector, "QUEUE_LIMIT_BYTES", 10_000)
    queue = Waiting()
    large = 0
    while queue.add(b"h", spans(bytes(1000))):
        large += 1
    assert 5 < large < 12
    assert queue.add(b"h", ()) is False


def test_copies_do_not_refer_to_the_memory_of_the_sender() -> None:
    queue = Waiting()
    memory = bytearray(b"as it was")
    queue.add(b"h", [*spans(memory), *spans(b"")])
    queue.copy()
    memory[:] = b"otherwise"
    bodies: list[bytes] = []
    queue.end(lambda header, payload: bodies.extend(bytes(span.buffer) for span in payload))
    assert bodies == [b"as it was", b""]


def test_no_message_overtakes_another_when_it_is_decided() -> None:
    queue = Waiting()
    order: list[int] = []

    def flood() -> None:
        order.extend(number for number in range(2000) if queue.add(b"%d" % number, ()) is None)

    thread = threading.Thread(target=flood)
    thread.start()
    queue.end(lambda header, payload: order.append(int(header)))  # type: ignore[arg-type]
    thread.join()
    assert order == sorted(order)
    assert order == list(range(2000))


@pytest.mark.parametrize("shared_memory", [True, False])
def test_messages_sent_at_once_arrive_in_order_and_say_how_they_travel(shared_memory: bool) -> None:
    async def main() -> None:
        server, client = Node(shared_memory=shared_memory), Node()
        try:
            address = server.transport.listen("tcp://127.0.0.1:0")
            server.transport.listen_links(SERVER)
            client.transport.connect(SERVER, address)
            said: list[PeerPath] = []

            def header(path: PeerPath) -> bytes:
                said.append(path)
                return b"attach"

            assert client.transport.send_with_path(SERVER, header, ())
            for number in range(50):
                assert client.send(SERVER, b"%d" % number, bytes(number * 1000))
            await eventually(lambda: len(server.messages) == 51)
            assert [message[1] for message in server.messages] == [b"attach", *(b"%d" % n for n in range(50))]
            assert len({message[0] for message in server.messages}) == 1
            assert said == [client.transport.paths()[SERVER]]
            assert said[0].kind == (PathKind.SHARED_MEMORY if shared_memory else PathKind.ZMQ)
            assert client.transport.send_with_path(SERVER, header, ())
            assert said[1] == said[0]
        finally:
            client.close()
            server.close()

    run(main)


def test_a_server_that_answers_nothing_is_reached_over_zmq_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.transport.links.connector.ANSWER_WITHIN_S", 0.3)

    async def main() -> None:
        client = Node()
        server = Node()
        server.transport._take_about_links = lambda *_: None  # type: ignore[method-assign]
        try:
            client.transport.connect(SERVER, server.transport.listen("tcp://127.0.0.1:0"))
            assert client.send(SERVER, b"hello")
            await eventually(lambda: server.messages)
            kind, reason = client.transport.paths()[SERVER]
            assert kind == PathKind.ZMQ
            assert "did not answer" in reason
        finally:
            client.close()
            server.close()

    run(main)


def test_what_waits_leaves_when_the_transport_closes() -> None:
    async def main() -> None:
        server = Node()
        address = server.transport.listen("tcp://127.0.0.1:0")
        server.transport._take_about_links = lambda *_: None  # type: ignore[method-assign]
        client = HostTransport()
        client.start(lambda *_: None, lambda *_: None)
        client.connect(SERVER, address)
        assert client.send(SERVER, b"the last word", ())
        client.close(5.0)
        await eventually(lambda: server.messages)
        server.close()

    run(main)


def test_what_waits_for_a_peer_that_is_given_up_is_dropped() -> None:
    async def main() -> None:
        client = Node()
        client.transport.connect(SERVER, "tcp://127.0.0.1:1")
        assert client.send(SERVER, b"hello")
        client.transport.disconnect(SERVER)
        assert not client.send(SERVER, b"hello")
        assert client.transport.paths() == {}
        client.close()

    run(main)
