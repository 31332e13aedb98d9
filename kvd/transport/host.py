"""ZeroMQ to every peer, and in addition a link to each peer on this host, used while it is up.

A server listens for links under a name made of its incarnation. Such names belong to a network namespace. If the name
is unknown, the server is on another host or in another container, and messages go over ZeroMQ.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count

from kvd.core.machine import LinkPeer, Peer, PeerKind, PeerPath, Span
from kvd.protocol.messages import PathKind
from kvd.transport.base import OnGarbage, OnMessage
from kvd.transport.curve import Curve
from kvd.transport.link import Link, Sink
from kvd.transport.link_reader import LinkReader
from kvd.transport.offered import MapBudget
from kvd.transport.segments import Arena
from kvd.transport.zmq import ZmqTransport

ARENA_LIMIT_BYTES = 1 << 30
MAX_ACCEPTED = 1024
BACKLOG = 128  # a peer that finds it full uses ZeroMQ
ACCEPTS_AT_A_TIME = 16
RELEASE_INTERVAL_S = 1.0
RETRY_ACCEPT_S = 1.0

_ELSEWHERE = "no link at this host: the peer is on another host, in another network namespace, or has links turned off"
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class HostTransport:
    """Any thread may call `send`, `paths`, `has_links`, `pause_loop`, `resume_loop` and `poll_links`. The rest belongs
    to the loop's thread.

    Args:
        shared_memory: False turns links off, so that all messages go over ZeroMQ.
        arena_limit_bytes: how much shared memory this process may own. Payloads that do not fit go through the socket.
        io_threads: of ZeroMQ.
        curve: the keys of this node, for ZeroMQ; None: it uses none.
        memory_limit_bytes: what this process may have; who takes too much of it is cut off. 0: no limit.
    """

    def __init__(
        self,
        *,
        shared_memory: bool = True,
        arena_limit_bytes: int = ARENA_LIMIT_BYTES,
        io_threads: int = 1,
        curve: Curve | None = None,
        memory_limit_bytes: int = 0,
    ) -> None:
        self.arena = Arena(arena_limit_bytes if shared_memory else 0)
        self._shared_memory = shared_memory
        self._zmq = ZmqTransport(io_threads, curve, memory_limit_bytes)
        self._sink = Sink()
        self._budget = MapBudget()
        self._reader = LinkReader(self._notice)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._listener: socket.socket | None = None
        self._links: dict[Peer, Link] = {}  # those that are up, opened by us or accepted
        self._zmq_reasons: dict[Peer, str] = {}  # why a peer that we connected to has no link
        self._lock = threading.Lock()  # held to change the two above
        self._names = count(1)
        self._releasing: asyncio.TimerHandle | None = None

    # ── connections ──

    def start(self, on_message: OnMessage, on_garbage: OnGarbage) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._sink.on_message = on_message
        self._sink.on_garbage = on_garbage
        self._zmq.start(on_message, on_garbage)
        self._loop.add_reader(self._reader.fileno(), self._reader.read)
        if self._listener is not None:
            self._loop.add_reader(self._listener, self._accept, self._listener)

    def listen(self, address: str) -> str:
        return self._zmq.listen(address)

    def listen_links(self, incarnation: int) -> None:
        """Accepts links from processes of this host that know this node's incarnation."""
        if not self._shared_memory:
            return
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.bind(_link_name(incarnation))
            listener.listen(BACKLOG)
        except OSError:  # the name is taken: everything works without links
            listener.close()
            return
        self._listener = listener
        if self._loop is not None:
            self._loop.add_reader(listener, self._accept, listener)

    def connect(self, peer: Peer, address: str, key: str = "") -> None:
        """Opens a ZeroMQ connection and, if the peer is a server on this host, a link."""
        self.disconnect(peer)
        self._zmq.connect(peer, address, key)
        self._zmq_reasons[peer] = ""
        reason = self._try_link(peer)
        if reason:
            self._zmq_reasons[peer] = reason

    def disconnect(self, peer: Peer) -> None:
        self._zmq_reasons.pop(peer, None)
        with self._lock:
            link = self._links.pop(peer, None)
        if link is not None:
            link.leave("disconnected")
        self._zmq.disconnect(peer)

    def paths(self) -> dict[Peer, PeerPath]:
        """How messages travel to each peer that we connected to, and to each that has a link to us."""
        path = PeerPath(PathKind.SHARED_MEMORY)
        if not self.arena.usable:
            path = PeerPath(PathKind.UNIX_SOCKET, self.arena.problem)
        with self._lock:
            paths = {peer: PeerPath(PathKind.ZMQ, reason) for peer, reason in self._zmq_reasons.items()}
            paths.update(dict.fromkeys(self._links, path))
        return paths

    def close(self, linger_s: float) -> None:
        if self._reader.is_closed:
            return
        until = time.monotonic() + linger_s
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._reader.fileno())
            if self._listener is not None:
                self._loop.remove_reader(self._listener)
        if self._releasing is not None:
            self._releasing.cancel()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for link in self._reader.links:
            link.leave("closed")
        with self._lock:
            self._links = {}
        self._reader.flush(until)
        self._reader.close("closed")
        self.arena.close()
        self._zmq.close(max(0.0, until - time.monotonic()))

    # ── sending ──

    def send(self, peer: Peer, header: bytes, payload: Sequence[Span]) -> bool:
        link = self._links.get(peer)
        if link is not None:
            if link.send(header, payload):
                return True
            if link.is_up:
                return False  # its queue is full; over ZeroMQ the message would overtake others
            self._forget(link)
        return self._zmq.send(peer, header, payload)

    async def detach_buffers(self) -> None:
        """Returns when no queued message refers to the memory of its sender. It is sent from a copy, or lost with its
        connection. Memory in the arena stays leased."""
        for link in self._reader.links:
            link.copy_queued()
        await self._zmq.detach_buffers()

    @property
    def has_links(self) -> bool:
        """Whether any link is up."""
        return bool(self._links)

    # ── receiving on another thread ──

    def pause_loop(self) -> None:
        """Stops the loop from reading the links until `resume_loop`. The caller reads them with `poll_links`."""
        self._reader.pause_loop()

    def resume_loop(self) -> None:
        """Lets the loop read the links again, including what arrived meanwhile."""
        self._reader.resume_loop()

    def poll_links(self, timeout_s: float, wake_fd: int) -> bool:
        """Waits until a link or `wake_fd` is readable, and delivers the links' messages on this thread.

        The loop still delivers what arrives over ZeroMQ. False: the time is up, `wake_fd` is readable (the caller
        should read it), or the transport is closed.
        """
        return self._reader.wait(timeout_s, wake_fd)

    # ── links ──

    def _try_link(self, peer: Peer) -> str:
        """Opens a link to the peer. Returns why there is none, or an empty text."""
        if not self._shared_memory:
            return "turned off"
        if peer.kind is not PeerKind.SERVER:
            return "links lead to servers only"
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            connection.connect(_link_name(peer))
            reason = _untrusted(connection)
        except OSError as error:
            reason = _ELSEWHERE if error.errno == errno.ECONNREFUSED else f"no link: {error.strerror}"
        if reason:
            connection.close()
            return reason
        self._add(peer, connection)
        return ""

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS_AT_A_TIME):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError:  # no descriptors left: peers use ZeroMQ meanwhile
                self._accept_later(listener)
                return
            if len(self._reader.links) >= MAX_ACCEPTED or _untrusted(connection):
                connection.close()
            else:
                self._add(LinkPeer(f"link {next(self._names)}"), connection)

    def _accept_later(self, listener: socket.socket) -> None:
        assert self._loop is not None
        self._loop.remove_reader(listener)
        self._loop.call_later(RETRY_ACCEPT_S, self._accept_again, listener)

    def _accept_again(self, listener: socket.socket) -> None:
        if listener is self._listener and self._loop is not None:
            self._loop.add_reader(listener, self._accept, listener)

    def _add(self, peer: Peer, connection: socket.socket) -> None:
        link = Link(peer, connection, self.arena, self._reader.epoll, self._sink, self._budget)
        with self._lock:
            self._links[peer] = link
        self._reader.add(link)

    def _notice(self, link: Link) -> None:
        """A link went down, or has payloads that must be released in time. On any thread."""
        if not link.is_up:
            self._forget(link)
        if link.has_ended:
            self._reader.remove(link)
        elif link.has_unreleased and not self._reader.watches_payloads:
            self._reader.watches_payloads = True
            if threading.get_ident() == self._thread:
                self._release_later()
            elif self._loop is not None:
                with suppress(RuntimeError):  # the loop is closed, and the links soon will be
                    self._loop.call_soon_threadsafe(self._release_later)

    def _forget(self, link: Link) -> None:
        """The link is down: from now on the peer is reached over ZeroMQ, or not at all."""
        with self._lock:
            if self._links.get(link.peer) is link:
                del self._links[link.peer]
                if link.peer in self._zmq_reasons:
                    self._zmq_reasons[link.peer] = link.reason

    def _release_later(self) -> None:
        assert self._loop is not None
        self._releasing = self._loop.call_later(RELEASE_INTERVAL_S, self._release)

    def _release(self) -> None:
        """Releases payloads on links that have no traffic to take the release along."""
        for link in self._reader.links:
            link.release_gone()
        self._reader.watches_payloads = any(link.has_unreleased for link in self._reader.links)
        if self._reader.watches_payloads:
            self._release_later()


def _link_name(incarnation: int) -> str:
    """The name at which a node listens. It is abstract: no file has it."""
    return f"\0kvd/{incarnation:016x}"


def _untrusted(connection: socket.socket) -> str:
    """Why the other end cannot be trusted, or an empty text."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(packed)
    return "" if uid == os.geteuid() else f"the peer runs as user {uid}, this process as {os.geteuid()}"
