"""ZeroMQ over TCP and ipc: one ROUTER to listen, one DEALER per connection.

The descriptor of a ZeroMQ socket is edge-triggered: it becomes readable when the state of the socket changes, and does
not stay readable while messages wait. So the socket is asked for its EVENTS after every read and every send, and
drained a bounded number of messages at a time.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import secrets
import socket as unix
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import zmq

from kvd.core.machine import CallerPeer, Peer, PeerKind, PeerPath, Span
from kvd.core.principals import HOLDER
from kvd.errors import ConnectError
from kvd.protocol.specs import MAX_PAYLOAD_BYTES
from kvd.transport.base import (
    DRAIN_LIMIT,
    UNKNOWN_PATH,
    HeaderOfPath,
    OnGarbage,
    OnMessage,
    joined,
    pieces_of,
)
from kvd.transport.limits.callers import Callers
from kvd.transport.limits.process_memory import MemoryWatch, ProcessMemory
from kvd.transport.limits.quotas import Quotas
from kvd.transport.zmq.curve import Curve, KeyCheck, is_key
from kvd.transport.zmq.dealer import Dealer
from kvd.transport.zmq.socket_options import MAX_FRAME_BYTES, set_options


def begin_anywhere() -> None:
    """Let the next ROUTER of this process number its connections from a number that nobody can guess.

    A ROUTER numbers its connections, and the number becomes part of the routing id. A peer may choose an id for itself,
    also one that the ROUTER would give to another peer later: then libzmq 4.3.5 ends the process ("Assertion failed:
    ok"). The first number is meant to be random, but libzmq draws it with the C library's rand() and does not seed it,
    so it is the same in every process, and few connections lead from there to any number near it.
    """
    with suppress(OSError, AttributeError):  # a C library without it is not one that libzmq draws from
        ctypes.CDLL(None).srand(ctypes.c_uint(secrets.randbits(32)))


def why_not_listening(error: zmq.ZMQError) -> str:
    """Return the reason why an address cannot be listened on, and what to do."""
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


def someone_listens(path: str) -> bool:
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


# Plain numbers: combining members of zmq's enums takes longer than a system call.
NOBLOCK, SNDMORE, POLLIN = int(zmq.NOBLOCK), int(zmq.SNDMORE), int(zmq.POLLIN)
FD, EVENTS = int(zmq.FD), int(zmq.EVENTS)

COPY_BELOW_BYTES = 64 << 10  # smaller payloads are cheaper to copy than to track
DETACH_LIMIT_S = 2.0
DETACH_POLL_S = 0.001
MOST_FRAMES = 2 + MAX_PAYLOAD_BYTES // MAX_FRAME_BYTES  # routing id, header, pieces of the payload
FRAMES_AT_A_TIME = 256  # received before the loop runs other callbacks


@dataclass(slots=True, eq=False)
class _Reader:
    """A socket that is watched."""

    socket: zmq.Socket[bytes]
    peer: Peer | None  # the other end; None: the router
    is_scheduled: bool = False  # it is drained in the next turn of the loop
    frames: list[zmq.Frame] = field(default_factory=list)  # the first ones of a message, the rest of which is to come


class ZmqTransport:
    """The sockets of one node. Any thread may call `send`; the rest belongs to the loop's thread.

    Args:
        io_threads: of libzmq.
        curve: the keys of the node; None: it uses none, and lets everyone in.
        memory_limit_bytes: what this process may have; who takes too much of it is cut off. 0: no limit.
    """

    def __init__(self, io_threads: int = 1, curve: Curve | None = None, memory_limit_bytes: int = 0) -> None:
        self._curve = curve
        self._key_check: KeyCheck | None = None
        self._context = zmq.Context(io_threads=io_threads)
        self._context.max_sockets = 4096
        self._router: zmq.Socket[bytes] | None = None
        self._dealers: dict[Peer, Dealer] = {}
        self._uncopied: dict[Peer, deque[zmq.MessageTracker]] = {}  # payloads being sent without a copy
        self._readers: dict[int, _Reader] = {}
        self._callers = Callers(Quotas(MemoryWatch(memory_limit_bytes, ProcessMemory())))
        self._on_message: OnMessage | None = None
        self._on_garbage: OnGarbage | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
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
            self._watch(dealer.socket, peer)
            dealer.start(self._loop)
        self._callers.start(self._loop)
        self._watch_quotas()

    def listen(self, address: str, *others: str) -> str:
        """Listen at an address. Others must have the same port, and are those of the same name."""
        if address.startswith("ipc://") and someone_listens(address.removeprefix("ipc://")):
            raise ConnectError(  # libzmq would silently take the path over
                f"cannot listen at {address}: another process listens there; stop it, or choose another address",
                address=address,
            )
        begin_anywhere()
        router = self._context.socket(zmq.ROUTER)
        set_options(router, address)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if self._curve is not None:
            if self._key_check is None:
                self._key_check = KeyCheck(self._context, self._curve.admit)
            self._curve.secure_listener(router)
        bound = []
        for each in (address, *others):
            router.setsockopt(zmq.IPV6, int("[" in each or each.startswith("tcp://*")))  # * is every family
            try:
                router.bind(each)
            except zmq.ZMQError as error:
                router.close(linger=0)
                raise ConnectError(f"cannot listen at {each}: {why_not_listening(error)}", address=each) from None
            endpoint: bytes = router.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
            bound.append(endpoint.rstrip(b"\0").decode())
        self._router = router
        self._watch(router, None)
        prepare_sending_without_copies()
        if bound[0].startswith("tcp://"):
            self._callers.open(router, int(bound[0].rpartition(":")[2]))
            if self._loop is not None:
                self._callers.start(self._loop)
        return bound[0]

    def connect(self, peer: Peer, address: str, key: str = "") -> None:
        self.disconnect(peer)
        try:
            dealer = Dealer(
                self._context, address, key, self._curve, self._lock, lambda: self.connect(peer, address, key)
            )
        except zmq.ZMQError as error:
            what = f"{address} is not an address to connect to"
            if key and not is_key(key):
                what = f"the node at {address} announces {key!r}, which is no key"
            raise ConnectError(f"{what}: {error.strerror}", address=address) from None
        self._dealers[peer] = dealer
        self._watch(dealer.socket, peer)
        if self._loop is not None:
            dealer.start(self._loop)

    def endpoint_of(self, peer: Peer) -> str:
        """Return where the connection to a peer leads, in numbers; "" if it is being looked for, or there is none."""
        dealer = self._dealers.get(peer)
        return "" if dealer is None else dealer.endpoint

    def disconnect(self, peer: Peer) -> None:
        with self._lock:
            dealer = self._dealers.pop(peer, None)
            self._uncopied.pop(peer, None)
            if dealer is not None:
                self._unwatch(dealer.socket)
                dealer.close()

    async def detach_buffers(self) -> None:
        """Returns when no queued message refers to the memory of its sender, or after two seconds. A connection with
        such messages is opened again: its queued messages are lost, and libzmq drops them within milliseconds."""
        for peer, dealer in list(self._dealers.items()):
            with self._lock:
                uncopied = self._uncopied_to(peer)
            if uncopied:
                self.connect(peer, dealer.address, dealer.key)
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
            self._callers.close()
            for dealer in self._dealers.values():
                self._unwatch(dealer.socket)
                dealer.close(linger_s)
            if self._router is not None:
                self._unwatch(self._router)
                self._router.close(linger=int(linger_s * 1000))
            self._dealers = {}
            self._router = None
        if self._key_check is not None:
            self._key_check.stop()
        self._context.term()

    # ── receiving ──

    def _watch(self, socket: zmq.Socket[bytes], peer: Peer | None) -> None:
        if self._loop is None:
            return
        descriptor = int(socket.getsockopt(FD))
        reader = self._readers[descriptor] = _Reader(socket, peer)
        self._loop.add_reader(descriptor, self._drain, descriptor, reader)
        self._drain_soon(descriptor, reader)

    def _unwatch(self, socket: zmq.Socket[bytes]) -> None:
        for descriptor, reader in list(self._readers.items()):
            if reader.socket is socket:
                del self._readers[descriptor]
                if self._loop is not None and not self._loop.is_closed():
                    self._loop.remove_reader(descriptor)

    def _drain_soon(self, descriptor: int, reader: _Reader) -> None:
        if not reader.is_scheduled and self._loop is not None:
            reader.is_scheduled = True
            self._loop.call_soon(self._drain, descriptor, reader)

    def _drain(self, descriptor: int, reader: _Reader) -> None:
        reader.is_scheduled = False
        empty = False
        try:
            for _ in range(DRAIN_LIMIT):
                with self._lock:
                    # The message just delivered may have closed it.
                    empty = self._readers.get(descriptor) is not reader or not _is_readable(reader.socket)
                    if empty:
                        return
                    frames = self._receive(reader)
                if frames is None:
                    return
                self._deliver(frames, reader.socket, reader.peer)
        finally:
            if not empty:  # also after an error: no edge would announce the rest
                self._drain_soon(descriptor, reader)

    @staticmethod
    def _receive(reader: _Reader) -> list[zmq.Frame] | None:
        """The frames of one message. Of those beyond the limit only the first is kept, to show that there were more.
        None: it has so many that the rest must wait for the next turn."""
        socket, frames = reader.socket, reader.frames
        for _ in range(FRAMES_AT_A_TIME):
            frame = socket.recv(NOBLOCK, copy=False)
            if len(frames) < MOST_FRAMES + 1:
                frames.append(frame)
            if not frame.more:
                reader.frames = []
                return frames
        return None

    def _deliver(self, frames: list[zmq.Frame], socket: zmq.Socket[bytes], peer: Peer | None) -> None:
        """One message: [routing id] header [pieces of the payload]."""
        assert self._on_message is not None
        assert self._on_garbage is not None
        principal = HOLDER
        if socket is self._router:
            peer = CallerPeer(frames.pop(0).bytes)
            if not self._callers.received(peer, frames):
                return
            if self._curve is not None and frames:
                holder = self._curve.principal_of(frames[0])
                if holder is None:
                    self._on_garbage(peer, "this key is not allowed any more")
                    return
                principal = holder
        assert peer is not None
        if not frames or len(frames) >= MOST_FRAMES or any(len(frame) != MAX_FRAME_BYTES for frame in frames[1:-1]):
            what = "no frames" if not frames else "too many frames"
            self._on_garbage(peer, f"a message of {what}: it must be a header and at most one payload")
            return
        self._on_message(peer, frames[0].bytes, _payload_of(frames), principal)

    # ── sending ──

    def send(self, peer: Peer, header: bytes, payload: Sequence[Span]) -> bool:
        body = joined(pieces_of(payload)) if payload else None
        with self._lock:
            dealer = self._dealers.get(peer)
            routed = dealer is None
            if dealer is not None:
                socket = dealer.socket
            elif self._router is None or peer.kind is not PeerKind.CALLER or not self._callers.quotas.may_send(peer):
                return False
            else:
                socket = self._router
            sent = self._send_frames(
                socket, peer if routed else None, header, body, None if routed else self._uncopied_to(peer)
            )
            if sent and peer.kind is PeerKind.CALLER:
                self._callers.quotas.sent(peer, len(header) + (0 if body is None else len(body)), _lent_bytes(payload))
            # A send, also one that failed, may swallow the edge that announces a message.
            if _is_readable(socket):
                self._look_again(socket)
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
        # Made before anything is sent: if this raises, no half message lies in the socket.
        pieces = [] if body is None else _pieces_of_frames(body, is_tracked=uncopied is not None)
        try:
            if route is not None:
                socket.send(route, NOBLOCK | SNDMORE)
            socket.send(header, NOBLOCK | (SNDMORE if pieces else 0))
            left = len(pieces)
            for piece in pieces:
                left -= 1
                flags = NOBLOCK | (SNDMORE if left else 0)
                tracker = socket.send(piece, flags, copy=not isinstance(piece, zmq.Frame))
                if tracker is not None and uncopied is not None:
                    uncopied.append(tracker)
        except zmq.ZMQError:
            return False
        return True

    # ── memory ──

    def _watch_quotas(self) -> None:
        """Looks, again and again, how much those that connect to this node make it keep."""
        if self._router is None or self._loop is None or not self._callers.quotas.is_open:
            return
        with self._lock:
            is_empty = not _is_readable(self._router)
        if not is_empty:  # asking may have swallowed the edge
            self._look_again(self._router)
        self._loop.call_later(self._callers.quotas.watch(is_empty=is_empty), self._watch_quotas)

    def _look_again(self, socket: zmq.Socket[bytes]) -> None:
        """Drains the socket in the next turn of the loop."""
        assert self._loop is not None
        for descriptor, reader in list(self._readers.items()):
            if reader.socket is not socket:
                continue
            if threading.get_ident() == self._thread:
                self._drain_soon(descriptor, reader)
            else:
                with suppress(RuntimeError):  # the loop is closed, so nothing is read any more
                    self._loop.call_soon_threadsafe(self._drain_soon, descriptor, reader)


def _pieces_of_frames(body: bytes | memoryview, *, is_tracked: bool) -> list[zmq.Frame | bytes | memoryview]:
    """What to send: the payload, cut into pieces that are small enough for a frame."""
    if len(body) < COPY_BELOW_BYTES:
        return [body]
    view = memoryview(body)
    return [
        zmq.Frame(view[at : at + MAX_FRAME_BYTES], track=is_tracked, copy=False)
        for at in range(0, len(body), MAX_FRAME_BYTES)
    ]


def _payload_of(frames: Sequence[zmq.Frame]) -> memoryview | None:
    """The payload of a message; of several pieces it is a copy."""
    if len(frames) <= 2:
        return frames[1].buffer if len(frames) == 2 else None
    return memoryview(b"".join([frame.buffer for frame in frames[1:]]))


def prepare_sending_without_copies() -> None:
    """pyzmq opens sockets for the first payload without a copy. Later, no descriptor may be left for them."""
    zmq.Frame(b"\0", copy=False)


def _lent_bytes(payload: Sequence[Span]) -> int:
    """How much of a payload is sent by reference to something that this process has anyway: a version of a slice.
    Objects of type bytes are made for a message."""
    if len(payload) != 1 or payload[0].nbytes < COPY_BELOW_BYTES or type(payload[0].buffer) is bytes:
        return 0
    return payload[0].nbytes


def _drop_sent(uncopied: deque[zmq.MessageTracker]) -> None:
    """Forgets the payloads that have been sent."""
    while uncopied and uncopied[0].done:
        uncopied.popleft()


def _is_readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(EVENTS)) & POLLIN)
