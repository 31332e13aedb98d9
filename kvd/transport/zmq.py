"""ZeroMQ over TCP and ipc: one ROUTER to listen, one DEALER per connection.

The descriptor of a ZeroMQ socket is edge-triggered: it becomes readable when the state of the socket changes, and does
not stay readable while messages wait. So the socket is asked for its EVENTS after every read and every send, and
drained a bounded number of messages at a time.
"""

from __future__ import annotations

import asyncio
import errno
import socket as unix
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import zmq

from kvd.core.machine import CallerPeer, Peer, PeerKind, PeerPath, Span
from kvd.core.principals import HOLDER
from kvd.errors import ConnectError
from kvd.transport.base import (
    DRAIN_LIMIT,
    MAX_PAYLOAD_BYTES,
    UNKNOWN_PATH,
    HeaderOfPath,
    OnGarbage,
    OnMessage,
    joined,
    pieces_of,
)
from kvd.transport.curve import Curve, KeyCheck
from kvd.transport.refused_handshakes import RefusedHandshake

# Plain numbers: combining members of zmq's enums takes longer than a system call.
NOBLOCK, SNDMORE, POLLIN = int(zmq.NOBLOCK), int(zmq.SNDMORE), int(zmq.POLLIN)
FD, EVENTS = int(zmq.FD), int(zmq.EVENTS)

SEND_HIGH_WATER_MARK = 20_000  # messages that wait for one peer
COPY_BELOW_BYTES = 64 << 10  # smaller payloads are cheaper to copy than to track
RECONNECT_FIRST_MS = 50
RECONNECT_LIMIT_MS = 2000
HANDSHAKE_LIMIT_MS = 5000
SILENCE_LIMIT_MS = 20_000  # until a connection to a host that does not answer is given up
KEEPALIVE_S = 5
DETACH_LIMIT_S = 2.0
DETACH_POLL_S = 0.001
MOST_FRAMES = 3  # routing id, header, payload


class ZmqTransport:
    """The sockets of one node. Any thread may call `send`; the rest belongs to the loop's thread.

    Args:
        io_threads: of libzmq.
        curve: the keys of the node; None: it uses none, and lets everyone in.
    """

    def __init__(self, io_threads: int = 1, curve: Curve | None = None) -> None:
        self._curve = curve
        self._key_check: KeyCheck | None = None
        self._context = zmq.Context(io_threads=io_threads)
        self._context.max_sockets = 4096
        self._router: zmq.Socket[bytes] | None = None
        self._dealers: dict[Peer, zmq.Socket[bytes]] = {}
        self._addresses: dict[Peer, tuple[str, str]] = {}  # of the dealers: address and key of the other end
        self._refused: dict[Peer, RefusedHandshake] = {}  # watches the dealers
        self._uncopied: dict[Peer, deque[zmq.MessageTracker]] = {}  # payloads being sent without a copy
        self._readers: dict[int, zmq.Socket[bytes]] = {}
        self._on_message: OnMessage | None = None
        self._on_garbage: OnGarbage | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduled: set[int] = set()
        self._thread = 0
        self._lock = threading.Lock()  # held to use a socket: other threads send

    # ── connections ──

    def start(self, on_message: OnMessage, on_garbage: OnGarbage) -> None:
        self._on_message = on_message
        self._on_garbage = on_garbage
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        if self._router is not None:
            self._watch(self._router, None)
        for peer, dealer in self._dealers.items():
            self._watch(dealer, peer)
            self._refused[peer].start(self._loop)

    def listen(self, address: str) -> str:
        if address.startswith("ipc://") and _someone_listens(address.removeprefix("ipc://")):
            raise ConnectError(  # libzmq would silently take the path over
                f"cannot listen at {address}: another process listens there; stop it, or choose another address",
                address=address,
            )
        router = self._context.socket(zmq.ROUTER)
        self._set_limits(router, address)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if self._curve is not None:
            if self._key_check is None:
                self._key_check = KeyCheck(self._context, self._curve.admit)
            self._curve.secure_listener(router)
        try:
            router.bind(address)
        except zmq.ZMQError as error:
            router.close(linger=0)
            raise ConnectError(f"cannot listen at {address}: {_why_not(error)}", address=address) from None
        self._router = router
        self._watch(router, None)
        prepare_sending_without_copies()
        bound: bytes = router.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
        return bound.rstrip(b"\0").decode()

    def connect(self, peer: Peer, address: str, key: str = "") -> None:
        self.disconnect(peer)
        dealer = self._context.socket(zmq.DEALER)
        self._set_limits(dealer, address)
        if self._curve is not None:
            self._curve.secure_connection(dealer, key)
        refused = RefusedHandshake(dealer, lambda: self.connect(peer, address, key))
        try:
            dealer.connect(address)
        except zmq.ZMQError as error:
            refused.stop()
            dealer.close(linger=0)
            raise ConnectError(
                f"{address} is not an address to connect to: {error.strerror}", address=address
            ) from None
        self._dealers[peer] = dealer
        self._addresses[peer] = (address, key)
        self._refused[peer] = refused
        self._watch(dealer, peer)
        if self._loop is not None:
            refused.start(self._loop)

    def disconnect(self, peer: Peer) -> None:
        with self._lock:
            dealer = self._dealers.pop(peer, None)
            self._addresses.pop(peer, None)
            self._uncopied.pop(peer, None)
            if dealer is not None:
                self._refused.pop(peer).stop()
                self._unwatch(dealer)
                dealer.close(linger=0)

    async def detach_buffers(self) -> None:
        """Returns when no queued message refers to the memory of its sender, or after two seconds. A connection with
        such messages is opened again: its queued messages are lost, and libzmq drops them within milliseconds."""
        for peer, (address, key) in list(self._addresses.items()):
            with self._lock:
                uncopied = self._uncopied_to(peer)
            if uncopied:
                self.connect(peer, address, key)
            until = time.monotonic() + DETACH_LIMIT_S
            while uncopied and time.monotonic() < until:
                await asyncio.sleep(DETACH_POLL_S)
                _drop_sent(uncopied)

    def send_with_path(self, peer: Peer, header: HeaderOfPath, payload: Sequence[Span]) -> bool:
        return self.send(peer, header(UNKNOWN_PATH), payload)

    def paths(self) -> Mapping[Peer, PeerPath]:
        return {}

    def close(self, linger_s: float) -> None:
        with self._lock:
            sockets = [*self._dealers.values(), *([] if self._router is None else [self._router])]
            for refused in self._refused.values():
                refused.stop()
            self._refused = {}
            for socket in sockets:
                self._unwatch(socket)
                socket.close(linger=int(linger_s * 1000))
            self._dealers = {}
            self._router = None
        if self._key_check is not None:
            self._key_check.stop()
        self._context.term()

    @staticmethod
    def _set_limits(socket: zmq.Socket[bytes], address: str) -> None:
        """Bounds, and no option that lets a peer stop this process.

        libzmq 4.3.5 aborts with "Assertion failed: !_io_error" when a connection ends whose input it has stopped and
        anything is then written to it: a heartbeat of ours, or the answer to one of the peer's. It stops the input of
        a connection whose queue is full, so a peer that sends more than is read, and leaves, ends the process. A
        stopped connection that is opened again gives "Assertion failed: _input_stopped" (issue 3937 of libzmq). So
        queues of received messages have no high-water mark: input never stops. ZeroMQ's heartbeats are off, since their
        timer does not look whether a connection has failed; the kernel's keepalive and TCP_USER_TIMEOUT find hosts that
        are gone within the same time.

        What a peer may make this process keep is bounded in `kvd.transport.quotas` instead.
        """
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
        socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 0)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S)
        socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, SILENCE_LIMIT_MS // 1000 // KEEPALIVE_S)
        socket.setsockopt(zmq.TCP_MAXRT, SILENCE_LIMIT_MS)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_FIRST_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_LIMIT_MS)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_LIMIT_MS)
        socket.setsockopt(zmq.IPV6, int("[" in address))

    # ── receiving ──

    def _watch(self, socket: zmq.Socket[bytes], peer: Peer | None) -> None:
        if self._loop is None:
            return
        descriptor = int(socket.getsockopt(FD))
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

    def _drain_soon(self, descriptor: int, socket: zmq.Socket[bytes], peer: Peer | None) -> None:
        if descriptor not in self._scheduled and self._loop is not None:
            self._scheduled.add(descriptor)
            self._loop.call_soon(self._drain, descriptor, socket, peer)

    def _drain(self, descriptor: int, socket: zmq.Socket[bytes], peer: Peer | None) -> None:
        self._scheduled.discard(descriptor)
        empty = False
        try:
            for _ in range(DRAIN_LIMIT):
                with self._lock:
                    # The message just delivered may have closed it.
                    empty = self._readers.get(descriptor) is not socket or not _is_readable(socket)
                    if empty:
                        return
                    frames = self._receive(socket)
                self._deliver(frames, socket, peer)
        finally:
            if not empty:  # also after an error: no edge would announce the rest
                self._drain_soon(descriptor, socket, peer)

    @staticmethod
    def _receive(socket: zmq.Socket[bytes]) -> list[zmq.Frame]:
        """The frames of one message. Of those beyond the limit only the first is kept, to show that there were more."""
        frames = [socket.recv(NOBLOCK, copy=False)]
        more = frames[0].more
        while more:
            frame = socket.recv(NOBLOCK, copy=False)
            more = frame.more
            if len(frames) < MOST_FRAMES + 1:
                frames.append(frame)
        return frames

    def _deliver(self, frames: list[zmq.Frame], socket: zmq.Socket[bytes], peer: Peer | None) -> None:
        """One message: [routing id] header [payload]."""
        assert self._on_message is not None
        assert self._on_garbage is not None
        principal = HOLDER
        if socket is self._router:
            peer = CallerPeer(frames.pop(0).bytes)
            if self._curve is not None and frames:
                holder = self._curve.principal_of(frames[0])
                if holder is None:
                    self._on_garbage(peer, "this key is not allowed any more")
                    return
                principal = holder
        assert peer is not None
        if not 1 <= len(frames) <= 2:
            what = "no frames" if not frames else "too many frames"
            self._on_garbage(peer, f"a message of {what}: it must be a header and at most one payload")
            return
        payload = frames[1].buffer if len(frames) == 2 else None
        self._on_message(peer, frames[0].bytes, payload, principal)

    # ── sending ──

    def send(self, peer: Peer, header: bytes, payload: Sequence[Span]) -> bool:
        body = joined(pieces_of(payload)) if payload else None
        with self._lock:
            socket = self._dealers.get(peer)
            routed = socket is None
            if socket is None:
                socket = self._router
                if socket is None or peer.kind is not PeerKind.CALLER:
                    return False
            sent = self._send_frames(
                socket, peer if routed else None, header, body, None if routed else self._uncopied_to(peer)
            )
            # A send, also one that failed, may swallow the edge that announces a message.
            if _is_readable(socket):
                self._look_again(socket, None if routed else peer)
        return sent

    def _uncopied_to(self, peer: Peer) -> deque[zmq.MessageTracker]:
        """The payloads that are still being sent to the peer without a copy."""
        uncopied = self._uncopied.setdefault(peer, deque())
        _drop_sent(uncopied)
        return uncopied

    @staticmethod
    def _send_frames(
        socket: zmq.Socket[bytes],
        route: Any,
        header: bytes,
        body: bytes | memoryview | None,
        uncopied: deque[zmq.MessageTracker] | None,
    ) -> bool:
        frame: zmq.Frame | bytes | memoryview | None = body
        if body is not None and len(body) >= COPY_BELOW_BYTES:
            # Made before anything is sent: if this raises, no half message lies in the socket.
            frame = zmq.Frame(body, track=uncopied is not None, copy=False)
        try:
            if route is not None:
                socket.send(route, NOBLOCK | SNDMORE)
            socket.send(header, NOBLOCK | (0 if body is None else SNDMORE))
            if frame is None:
                return True
            tracker = socket.send(frame, NOBLOCK, copy=not isinstance(frame, zmq.Frame))
            if tracker is not None and uncopied is not None:
                uncopied.append(tracker)
        except zmq.ZMQError:
            return False
        return True

    def _look_again(self, socket: zmq.Socket[bytes], peer: Peer | None) -> None:
        """Drains the socket in the next turn of the loop."""
        assert self._loop is not None
        descriptor = next((number for number, watched in self._readers.items() if watched is socket), -1)
        if threading.get_ident() == self._thread:
            self._drain_soon(descriptor, socket, peer)
        else:
            with suppress(RuntimeError):  # the loop is closed, so nothing is read any more
                self._loop.call_soon_threadsafe(self._drain_soon, descriptor, socket, peer)


def prepare_sending_without_copies() -> None:
    """pyzmq opens sockets for the first payload without a copy. Later, no descriptor may be left for them."""
    zmq.Frame(b"\0", copy=False)


def _drop_sent(uncopied: deque[zmq.MessageTracker]) -> None:
    """Forgets the payloads that have been sent."""
    while uncopied and uncopied[0].done:
        uncopied.popleft()


def _is_readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(EVENTS)) & POLLIN)


def _why_not(error: zmq.ZMQError) -> str:
    """Why an address cannot be listened on, and what to do."""
    if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):  # ENODEV: a name or an interface is unknown
        return (
            "this machine has no such address; use one that it has (`ip address` lists them), or tcp://0.0.0.0:PORT "
            "for all of them"
        )
    reason = error.strerror
    if error.errno == errno.EADDRINUSE:
        return f"{reason}; stop what listens there, or choose another address (port 0 takes any free port)"
    if error.errno == errno.EACCES:
        return f"{reason}; choose another address: ports below 1024 need root, and a path needs a folder of this user"
    return f"{reason}; choose another address"


def _someone_listens(path: str) -> bool:
    """Whether a process accepts connections at this path. A path that a dead process left behind is free."""
    if path.startswith("@"):
        return False  # an abstract name: the kernel refuses to bind it twice
    with unix.socket(unix.AF_UNIX, unix.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return False
        return True
