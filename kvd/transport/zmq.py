"""ZeroMQ over TCP and ipc: one ROUTER to listen, one DEALER per connection.

The descriptor of a zmq socket is edge-triggered: it becomes readable when the state of the socket changed, not as long
as there is something to read. So the socket is asked for its EVENTS after every read and every send, and drained a
bounded number of messages at a time.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Hashable, Sequence

import zmq

from kvd.errors import ConnectError
from kvd.transport.base import DRAIN_LIMIT, MAX_PAYLOAD_BYTES, OnGarbage, OnMessage, Piece, joined

HIGH_WATER_MARK = 100_000  # messages; the credit of the outbox bounds the bytes long before
COPY_BELOW_BYTES = 64 << 10  # smaller payloads are cheaper to copy than to track
RECONNECT_FIRST_MS = 50
RECONNECT_LIMIT_MS = 2000
HEARTBEAT_MS = 5000


class ZmqTransport:
    """The sockets of one node. Everything but `send` must be called on the thread that runs the loop."""

    def __init__(self, io_threads: int = 1) -> None:
        self._context = zmq.Context(io_threads=io_threads)
        self._context.max_sockets = 4096
        self._router: zmq.Socket[bytes] | None = None
        self._dealers: dict[Hashable, zmq.Socket[bytes]] = {}
        self._readers: dict[int, zmq.Socket[bytes]] = {}
        self._on_message: OnMessage | None = None
        self._on_garbage: OnGarbage | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduled: set[int] = set()
        self._thread = 0
        self._lock = threading.Lock()  # around every use of a socket: sends may come from other threads

    # ── connections ──

    def start(self, on_message: OnMessage, on_garbage: OnGarbage) -> None:
        self._on_message = on_message
        self._on_garbage = on_garbage
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        if self._router is not None:
            self._watch(self._router, None)

    def listen(self, address: str) -> str:
        router = self._context.socket(zmq.ROUTER)
        self._set_limits(router, address)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            router.bind(address)
        except zmq.ZMQError as error:
            router.close(linger=0)
            raise ConnectError(
                f"cannot listen at {address}: {error.strerror}; stop what listens there, or choose another address "
                f"(port 0 takes any free port)",
                address=address,
            ) from None
        self._router = router
        bound: bytes = router.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
        return bound.rstrip(b"\0").decode()

    def connect(self, peer: Hashable, address: str) -> None:
        self.disconnect(peer)
        dealer = self._context.socket(zmq.DEALER)
        self._set_limits(dealer, address)
        try:
            dealer.connect(address)
        except zmq.ZMQError as error:
            dealer.close(linger=0)
            raise ConnectError(f"{address} is no address to connect to: {error.strerror}", address=address) from None
        self._dealers[peer] = dealer
        self._watch(dealer, peer)

    def disconnect(self, peer: Hashable) -> None:
        dealer = self._dealers.pop(peer, None)
        if dealer is not None:
            self._unwatch(dealer)
            dealer.close(linger=0)

    def close(self, linger_s: float) -> None:
        sockets = [*self._dealers.values(), *([] if self._router is None else [self._router])]
        for socket in sockets:
            self._unwatch(socket)
            socket.close(linger=int(linger_s * 1000))
        self._dealers = {}
        self._router = None
        self._on_message = None
        self._context.term()

    @staticmethod
    def _set_limits(socket: zmq.Socket[bytes], address: str) -> None:
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_FIRST_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_LIMIT_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 4 * HEARTBEAT_MS)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.IPV6, int("[" in address))

    # ── receiving ──

    def _watch(self, socket: zmq.Socket[bytes], peer: Hashable) -> None:
        if self._loop is None:
            return
        descriptor = int(socket.getsockopt(zmq.FD))
        self._readers[descriptor] = socket
        self._loop.add_reader(descriptor, self._drain, descriptor, socket, peer)
        self._drain_soon(descriptor, socket, peer)

    def _unwatch(self, socket: zmq.Socket[bytes]) -> None:
        for descriptor, watched in list(self._readers.items()):
            if watched is socket:
                del self._readers[descriptor]
                self._scheduled.discard(descriptor)
                if self._loop is not None and not self._loop.is_closed():
                    self._loop.remove_reader(descriptor)

    def _drain_soon(self, descriptor: int, socket: zmq.Socket[bytes], peer: Hashable) -> None:
        if descriptor not in self._scheduled and self._loop is not None:
            self._scheduled.add(descriptor)
            self._loop.call_soon(self._drain, descriptor, socket, peer)

    def _drain(self, descriptor: int, socket: zmq.Socket[bytes], peer: Hashable) -> None:
        self._scheduled.discard(descriptor)
        for _ in range(DRAIN_LIMIT):
            if self._readers.get(descriptor) is not socket:
                return  # closed by what we delivered
            with self._lock:
                if not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                    return
                frames = self._receive(socket)
            self._deliver(frames, socket, peer)
        self._drain_soon(descriptor, socket, peer)

    @staticmethod
    def _receive(socket: zmq.Socket[bytes]) -> list[zmq.Frame]:
        """The frames of one message; more than there can be are read and forgotten, but counted."""
        frames = [socket.recv(zmq.NOBLOCK, copy=False)]
        while frames[-1].more:
            frames.append(socket.recv(zmq.NOBLOCK, copy=False))
        return frames

    def _deliver(self, frames: list[zmq.Frame], socket: zmq.Socket[bytes], peer: Hashable) -> None:
        """One message: [routing id] header [payload]."""
        assert self._on_message is not None
        assert self._on_garbage is not None
        if socket is self._router:
            peer = frames.pop(0).bytes
        if not 1 <= len(frames) <= 2:
            self._on_garbage(peer, f"a message of {len(frames)} frames: a header and a payload are all there is")
            return
        payload = frames[1].buffer if len(frames) == 2 else None
        self._on_message(peer, frames[0].bytes, payload)

    # ── sending ──

    def send(self, peer: Hashable, header: bytes, payload: Sequence[Piece]) -> bool:
        socket = self._dealers.get(peer)
        routed = socket is None
        if socket is None:
            socket = self._router
            if socket is None or not isinstance(peer, bytes):
                return False
        more = zmq.SNDMORE if payload else 0
        body = joined(payload) if payload else None
        with self._lock:
            try:
                if routed:
                    assert isinstance(peer, bytes)
                    socket.send(peer, zmq.NOBLOCK | zmq.SNDMORE)
                socket.send(header, zmq.NOBLOCK | more)
                if body is not None:
                    socket.send(body, zmq.NOBLOCK, copy=len(body) < COPY_BELOW_BYTES)
                readable = int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN
            except zmq.ZMQError:
                return False
        if readable:
            self._look_again(socket, None if routed else peer)
        return True

    def _look_again(self, socket: zmq.Socket[bytes], peer: Hashable) -> None:
        """A send may swallow the edge that announces a message: drain once the loop is free."""
        assert self._loop is not None
        descriptor = next((number for number, watched in self._readers.items() if watched is socket), -1)
        if threading.get_ident() == self._thread:
            self._drain_soon(descriptor, socket, peer)
        else:
            self._loop.call_soon_threadsafe(self._drain_soon, descriptor, socket, peer)
