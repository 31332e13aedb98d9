"""ZeroMQ to everyone, and beside it links to those of this host, which are used as long as they are up.

A server listens for links under a name made of its incarnation. Such names belong to the network namespace: where the
name is not known, the server is on another host, or in a container of its own, and ZeroMQ is the way.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Hashable, Sequence
from contextlib import suppress
from itertools import count
from typing import NamedTuple

from kvd.core.machine import Span
from kvd.transport.base import OnGarbage, OnMessage
from kvd.transport.gate import Gate
from kvd.transport.link import Link, Sink
from kvd.transport.segments import Arena
from kvd.transport.zmq import ZmqTransport

SHARED_MEMORY, UNIX_SOCKET, ZMQ = "shared memory", "unix socket", "zmq"

ARENA_LIMIT_BYTES = 1 << 30
MAX_ACCEPTED = 1024
BACKLOG = 128  # who finds it full goes on without a link
ACCEPTS_AT_A_TIME = 16
RELEASE_INTERVAL_S = 1.0
RETRY_ACCEPT_S = 1.0

_ELSEWHERE = "no link at this host: the peer is on another host, in another network namespace, or has links turned off"
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Path(NamedTuple):
    """How messages go to a peer, and why not in a quicker way."""

    kind: str
    reason: str = ""


class HostTransport:
    """Everything but `send`, `pause_loop`, `resume_loop` and `poll_links` belongs to the thread that runs the loop.

    Args:
        shared_memory: False turns links off: all goes over ZeroMQ.
        arena_limit_bytes: how much memory this process may lend to others at a time. What does not fit goes through
            the socket.
    """

    def __init__(
        self,
        *,
        shared_memory: bool = True,
        arena_limit_bytes: int = ARENA_LIMIT_BYTES,
        io_threads: int = 1,
    ) -> None:
        self.arena = Arena(arena_limit_bytes if shared_memory else 0)
        self._shared_memory = shared_memory
        self._zmq = ZmqTransport(io_threads)
        self._sink = Sink()
        self._gate = Gate(self._notice)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._listener: socket.socket | None = None
        self._links: dict[Hashable, Link] = {}  # those that are up, ours and accepted ones
        self._why_not: dict[Hashable, str] = {}  # the peers that we connected to, without a link
        self._lock = threading.Lock()  # around changes of those two
        self._names = count(1)
        self._releasing: asyncio.TimerHandle | None = None

    # ── connections ──

    def start(self, on_message: OnMessage, on_garbage: OnGarbage) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._sink.on_message = on_message
        self._sink.on_garbage = on_garbage
        self._zmq.start(on_message, on_garbage)
        self._loop.add_reader(self._gate.fileno(), self._gate.read)
        if self._listener is not None:
            self._loop.add_reader(self._listener, self._accept, self._listener)

    def listen(self, address: str) -> str:
        return self._zmq.listen(address)

    def listen_links(self, incarnation: int) -> None:
        """Takes links from processes of this host that know the incarnation of this node."""
        if not self._shared_memory:
            return
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.bind(_link_name(incarnation))
            listener.listen(BACKLOG)
        except OSError:  # only if the name is taken: then there are no links, and all works
            listener.close()
            return
        self._listener = listener
        if self._loop is not None:
            self._loop.add_reader(listener, self._accept, listener)

    def connect(self, peer: Hashable, address: str) -> None:
        """Opens the connection by ZeroMQ and, if the peer is named by its incarnation, a link beside it if there can
        be one."""
        self.disconnect(peer)
        self._zmq.connect(peer, address)
        self._why_not[peer] = ""
        reason = self._try_link(peer)
        if reason:
            self._why_not[peer] = reason

    def disconnect(self, peer: Hashable) -> None:
        self._why_not.pop(peer, None)
        with self._lock:
            link = self._links.pop(peer, None)
        if link is not None:
            link.leave("disconnected")
        self._zmq.disconnect(peer)

    def paths(self) -> dict[Hashable, Path]:
        """How messages go to each peer that we connected to, and to each that has a link to us."""
        kind = Path(SHARED_MEMORY) if self.arena.usable else Path(UNIX_SOCKET, self.arena.problem)
        with self._lock:
            paths = {peer: Path(ZMQ, reason) for peer, reason in self._why_not.items()}
            paths.update(dict.fromkeys(self._links, kind))
        return paths

    def close(self, linger_s: float) -> None:
        if self._gate.is_closed:
            return
        until = time.monotonic() + linger_s
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._gate.fileno())
            if self._listener is not None:
                self._loop.remove_reader(self._listener)
        if self._releasing is not None:
            self._releasing.cancel()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for link in self._gate.links:
            link.leave("closed")
        with self._lock:
            self._links = {}
        self._gate.flush(until)
        self._gate.close("closed")
        self.arena.close()
        self._zmq.close(max(0.0, until - time.monotonic()))

    # ── sending ──

    def send(self, peer: Hashable, header: bytes, payload: Sequence[Span]) -> bool:
        link = self._links.get(peer)
        if link is not None:
            if link.send(header, payload):
                return True
            if link.is_up:
                return False  # too much is queued: on another way it would overtake
            self._forget(link)
        return self._zmq.send(peer, header, payload)

    async def keep(self) -> None:
        """Returns when nothing is sent any more from the memory that payloads were given in. What waits there is sent
        from copies, or is lost with its connection. What lies in the arena stays lent."""
        for link in self._gate.links:
            link.keep()
        await self._zmq.keep()

    @property
    def has_links(self) -> bool:
        """Whether there is a link at the moment."""
        return bool(self._links)

    # ── receiving on another thread ──

    def pause_loop(self) -> None:
        """The loop does not read the links until `resume_loop`: the thread that calls this will, with `poll_links`."""
        self._gate.pause()

    def resume_loop(self) -> None:
        """The loop reads again, also what came meanwhile."""
        self._gate.resume()

    def poll_links(self, timeout_s: float, wake_fd: int) -> bool:
        """Waits until a link or the descriptor is readable, and delivers the messages of links on this thread.

        What came by ZeroMQ is delivered by the loop all the same. False: time is up, `wake_fd` is readable (nobody
        reads it here), or the transport is closed.
        """
        return self._gate.wait(timeout_s, wake_fd)

    # ── links ──

    def _try_link(self, peer: Hashable) -> str:
        """Opens a link to the peer; gives the reason why there is none, or nothing."""
        if not self._shared_memory:
            return "turned off"
        if not isinstance(peer, int):
            return "links lead to servers only"
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            connection.connect(_link_name(peer))
            reason = _stranger(connection)
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
            except OSError:  # no descriptors: those who ask meanwhile find another way
                self._accept_later(listener)
                return
            if len(self._gate.links) >= MAX_ACCEPTED or _stranger(connection):
                connection.close()
            else:
                self._add(("link", next(self._names)), connection)

    def _accept_later(self, listener: socket.socket) -> None:
        assert self._loop is not None
        self._loop.remove_reader(listener)
        self._loop.call_later(RETRY_ACCEPT_S, self._accept_again, listener)

    def _accept_again(self, listener: socket.socket) -> None:
        if listener is self._listener and self._loop is not None:
            self._loop.add_reader(listener, self._accept, listener)

    def _add(self, peer: Hashable, connection: socket.socket) -> None:
        link = Link(peer, connection, self.arena, self._gate.epoll, self._sink)
        with self._lock:
            self._links[peer] = link
        self._gate.add(link)

    def _notice(self, link: Link) -> None:
        """A link went down, or has lent us something that we must give back in time. On any thread."""
        if not link.is_up:
            self._forget(link)
        if link.has_ended:
            self._gate.remove(link)
        elif link.holds and not self._gate.watches_payloads:
            self._gate.watches_payloads = True
            if threading.get_ident() == self._thread:
                self._release_later()
            elif self._loop is not None:
                with suppress(RuntimeError):  # the loop is closed: so are the links, soon
                    self._loop.call_soon_threadsafe(self._release_later)

    def _forget(self, link: Link) -> None:
        """The link is down: from now on the peer is reached by ZeroMQ, or not at all."""
        with self._lock:
            if self._links.get(link.peer) is link:
                del self._links[link.peer]
                if link.peer in self._why_not:
                    self._why_not[link.peer] = link.reason

    def _release_later(self) -> None:
        assert self._loop is not None
        self._releasing = self._loop.call_later(RELEASE_INTERVAL_S, self._release)

    def _release(self) -> None:
        """Gives back what nobody uses any more, where there is no traffic that would take the word along."""
        for link in self._gate.links:
            link.release_gone()
        self._gate.watches_payloads = any(link.holds for link in self._gate.links)
        if self._gate.watches_payloads:
            self._release_later()


def _link_name(incarnation: int) -> str:
    """The name that a node listens at; it is in no file system."""
    return f"\0kvd/{incarnation:016x}"


def _stranger(connection: socket.socket) -> str:
    """Why the other end is not to be trusted, or nothing."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(packed)
    return "" if uid == os.geteuid() else f"the peer runs as user {uid}, this process as {os.geteuid()}"
