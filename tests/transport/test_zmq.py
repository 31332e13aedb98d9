"""What only concerns ZeroMQ: edges, frames, addresses, sends from several threads."""

from __future__ import annotations

import asyncio
import errno
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvd.core.machine import SCHEDULER, CallerPeer, Peer, Span
from kvd.core.principals import Principal
from kvd.errors import ConnectError
from kvd.protocol.specs import MAX_PAYLOAD_BYTES
from kvd.transport.zmq.socket_options import FRAME_OVERHEAD_BYTES, MAX_FRAME_BYTES
from kvd.transport.zmq.transport import COPY_BELOW_BYTES, ZmqTransport
from tests.waiting import eventually


class Listener:
    """A transport that listens, and a plain DEALER socket connected to it."""

    def __init__(self) -> None:
        self.transport = ZmqTransport()
        self.address = self.transport.listen("tcp://127.0.0.1:0")
        self.messages: list[tuple[Peer, bytes, bytes | None]] = []
        self.garbage: list[str] = []
        self.fail_on: bytes | None = None
        self.transport.start(self._take, lambda peer, text: self.garbage.append(text))
        self.context: zmq.Context[Any] = zmq.Context()
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.linger = 0
        self.dealer.rcvtimeo = 20_000
        self.dealer.connect(self.address)

    def _take(self, peer: Peer, header: bytes, payload: memoryview | None, principal: Principal) -> None:
        self.messages.append((peer, header, None if payload is None else bytes(payload)))
        if header == self.fail_on:
            raise RuntimeError("the callback failed")

    async def until(self, count: int) -> None:
        await eventually(lambda: len(self.messages) >= count, f"{count} messages came")

    def close(self) -> None:
        self.dealer.close()
        self.context.term()
        self.transport.close(0)


def run(program: Any) -> None:
    async def main() -> None:
        listener = Listener()
        try:
            await program(listener)
        finally:
            listener.close()

    asyncio.run(main())


def test_a_failed_send_does_not_swallow_the_edge_of_a_message() -> None:
    async def program(listener: Listener) -> None:
        listener.dealer.send(b"first")
        await listener.until(1)
        await asyncio.sleep(0.05)  # time itself: the loop sleeps
        listener.dealer.send(b"second")
        time.sleep(0.1)  # noqa: ASYNC251  time itself: it arrives while the loop is busy
        assert not listener.transport.send(CallerPeer(b"nobody"), b"h", [])
        await listener.until(2)

    run(program)


def test_an_error_in_the_callback_does_not_stop_reading() -> None:
    async def program(listener: Listener) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        listener.fail_on = b"2"
        for number in range(200):
            listener.dealer.send(b"%d" % number)
        await listener.until(200)
        assert [header for _, header, _ in listener.messages] == [b"%d" % number for number in range(200)]

    run(program)


def test_messages_of_too_many_frames_are_garbage() -> None:
    async def program(listener: Listener) -> None:
        listener.dealer.send_multipart([b"h", b"p", b"x"])
        listener.dealer.send_multipart([b"f"] * 5000)
        listener.dealer.send_multipart([b"", b""])
        listener.dealer.send_multipart([b"h", b"p"])
        await listener.until(2)
        assert [message[1:] for message in listener.messages] == [(b"", b""), (b"h", b"p")]
        assert len(listener.garbage) == 2
        assert all("too many frames" in text for text in listener.garbage)

    run(program)


@pytest.mark.parametrize("nbytes", [MAX_FRAME_BYTES - 1, MAX_FRAME_BYTES, MAX_FRAME_BYTES + 1, 5 * MAX_FRAME_BYTES])
def test_a_large_payload_travels_in_pieces_and_arrives_whole(nbytes: int) -> None:
    async def program(listener: Listener) -> None:
        payload = random.Random(nbytes).randbytes(nbytes)
        listener.dealer.send_multipart([b"h", *pieces(payload)])
        await listener.until(1)
        (peer, header, received) = listener.messages[0]
        assert (header, received) == (b"h", payload)
        assert listener.transport.send(peer, b"answer", [Span(payload, 0, nbytes)])
        assert await asyncio.to_thread(listener.dealer.recv_multipart) == [b"answer", *pieces(payload)]

    run(program)


def pieces(payload: bytes) -> list[bytes]:
    return [payload[at : at + MAX_FRAME_BYTES] for at in range(0, len(payload), MAX_FRAME_BYTES)]


def test_the_largest_payload_fits_and_a_larger_one_is_garbage() -> None:
    async def program(listener: Listener) -> None:
        piece = bytes(MAX_FRAME_BYTES)
        most = MAX_PAYLOAD_BYTES // MAX_FRAME_BYTES
        for count in (most, most + 1):
            listener.dealer.send_multipart([b"h", *[piece] * count])
        listener.dealer.send(b"end")
        await listener.until(2)
        assert [(header, len(payload or b"")) for _, header, payload in listener.messages] == [
            (b"h", MAX_PAYLOAD_BYTES),
            (b"end", 0),
        ]
        assert len(listener.garbage) == 1

    run(program)


def test_a_larger_frame_ends_the_connection_of_its_sender() -> None:
    async def program(listener: Listener) -> None:
        listener.dealer.send(bytes(MAX_FRAME_BYTES + FRAME_OVERHEAD_BYTES))
        await listener.until(1)
        monitor = listener.dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        listener.dealer.send(bytes(MAX_FRAME_BYTES + FRAME_OVERHEAD_BYTES + 1))
        assert await asyncio.to_thread(monitor.poll, 20_000)
        listener.dealer.disable_monitor()
        monitor.close()
        assert len(listener.messages) == 1

    run(program)


def test_sends_from_several_threads_keep_their_frames_together() -> None:
    async def program(listener: Listener) -> None:
        listener.dealer.send(b"hello")
        await listener.until(1)
        peer = listener.messages[0][0]

        def flood(number: int) -> None:
            for step in range(300):
                header = b"%d %d" % (number, step)
                assert listener.transport.send(peer, header, [Span(header * 3000, 0, len(header) * 3000)])

        threads = [threading.Thread(target=flood, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        seen: list[list[bytes]] = []
        while len(seen) < 1200:
            seen.append(await asyncio.to_thread(listener.dealer.recv_multipart))
        for thread in threads:
            thread.join()
        assert all(body == header * 3000 for header, body in seen)
        for number in range(4):
            mine = [header for header, _ in seen if header.startswith(b"%d " % number)]
            assert mine == [b"%d %d" % (number, step) for step in range(300)]

    run(program)


def test_a_payload_that_cannot_be_prepared_leaves_no_half_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_frame(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    async def program(listener: Listener) -> None:
        listener.dealer.send(b"hello")
        await listener.until(1)
        peer = listener.messages[0][0]
        large = [Span(bytes(COPY_BELOW_BYTES), 0, COPY_BELOW_BYTES)]
        with monkeypatch.context() as patch:
            patch.setattr(zmq, "Frame", no_frame)
            with pytest.raises(OSError, match="Too many open files"):
                listener.transport.send(peer, b"first", large)
        assert listener.transport.send(peer, b"second", large)
        assert await asyncio.to_thread(listener.dealer.recv_multipart) == [b"second", bytes(COPY_BELOW_BYTES)]

    run(program)


def test_invalid_addresses_raise() -> None:
    transport = ZmqTransport()
    for address in ("nonsense", "tcp://127.0.0.1", "ipc://" + "x" * 300, "http://a:1"):
        with pytest.raises(ConnectError) as caught:
            transport.listen(address)
        assert caught.value.address == address
    for address in ("nonsense", "tcp://127.0.0.1", "ipc://" + "x" * 300):
        with pytest.raises(ConnectError):
            transport.connect(SCHEDULER, address)
    transport.close(0)


def test_a_path_that_a_dead_process_left_behind_is_free(tmp_path: Path) -> None:
    import socket

    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    transport = ZmqTransport()
    assert transport.listen(f"ipc://{path}") == f"ipc://{path}"
    transport.close(0)
    first, second = ZmqTransport(), ZmqTransport()
    address = first.listen(f"ipc://@kvd-test-{tmp_path.name}-{time.monotonic_ns()}")
    with pytest.raises(ConnectError):
        second.listen(address)
    first.close(0)
    second.close(0)


def test_connections_opened_before_the_start_are_read_too() -> None:
    async def main() -> None:
        server, client = ZmqTransport(), ZmqTransport()
        got: list[bytes] = []
        address = server.listen("tcp://127.0.0.1:0")

        def answer(peer: Peer, header: bytes, body: memoryview | None, principal: Principal) -> None:
            server.send(peer, b"answer", [])

        server.start(answer, lambda *_: None)
        client.connect(SCHEDULER, address)
        client.start(lambda peer, header, body, _: got.append(header), lambda *_: None)
        client.send(SCHEDULER, b"h", [])
        await eventually(lambda: got)
        client.close(0)
        server.close(0)
        assert got == [b"answer"]

    asyncio.run(main())
