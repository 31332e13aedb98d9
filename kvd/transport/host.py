"""ZeroMQ to every peer, and in addition links to servers, used while they are up: within the host, or over TCP.

A node that connects to a server asks it for a link, over ZeroMQ (`kvd.transport.links.offers`). Until that is decided,
its messages to the server wait here, so that none overtakes another. Without a link they go over ZeroMQ.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from kvd.core.machine import BEING_OPENED, Peer, PeerKind, PeerPath, ServerPeer, Span
from kvd.core.principals import Principal
from kvd.protocol.messages import PathKind
from kvd.transport.base import UNKNOWN_PATH, HeaderOfPath, OnGarbage, OnMessage
from kvd.transport.links.connector import TURNED_OFF, LinkConnector, Waiting
from kvd.transport.links.delivery import Sink
from kvd.transport.links.handshake import Medium, Proven
from kvd.transport.links.link import Link
from kvd.transport.links.listener import AcceptedLinks, LinkListener, TcpLinks
from kvd.transport.links.offers import InvalidOfferError, Kind, is_about_links, unpack
from kvd.transport.links.reader import LinkReader
from kvd.transport.links.sealing import reason_over_tcp, remedy_for
from kvd.transport.links.sockets import tcp_address_of
from kvd.transport.links.write_coalescing import WriteCoalescing
from kvd.transport.memory.offered import MapBudget
from kvd.transport.memory.segments import Arena
from kvd.transport.reaching import with_zone, zone_of
from kvd.transport.zmq.curve import Curve
from kvd.transport.zmq.transport import ZmqTransport

logger = logging.getLogger("kvd.transport")

ARENA_LIMIT_BYTES = 1 << 30
MAX_ACCEPTED = 1024
RELEASE_INTERVAL_S = 1.0
STAY_S = 0.05  # the loop stays paused so long, and up to twice, after a thread has stopped reading

_OVER_TCP = {
    Medium.SEALED_TCP: PeerPath(PathKind.SEALED_TCP),
    Medium.PLAIN_TCP: PeerPath(PathKind.PLAIN_TCP),
}


class HostTransport:
    """Any thread may call `send`, `send_with_path`, `paths`, `has_links`, `link_to`, and what the reader says. The rest
    belongs to the loop's thread.

    Args:
        shared_memory: False turns links within the host off.
        tcp_links: where links over TCP are used. With keys they are sealed.
        arena_limit_bytes: how much shared memory this process may own. Payloads that do not fit go through the socket.
        io_threads: of ZeroMQ.
        curve: the keys of this node, for ZeroMQ; None: it uses none.
        memory_limit_bytes: what this process may have; who takes too much of it is cut off. 0: no limit.
        copies_parts: see `Arena`.
        warns_of_curve: whether to log once that values travel between hosts by ZeroMQ's own encryption, which is slow.
    """

    def __init__(
        self,
        *,
        shared_memory: bool = True,
        tcp_links: TcpLinks = TcpLinks.BETWEEN_HOSTS,
        arena_limit_bytes: int = ARENA_LIMIT_BYTES,
        io_threads: int = 1,
        curve: Curve | None = None,
        memory_limit_bytes: int = 0,
        copies_parts: bool = False,
        warns_of_curve: bool = True,
    ) -> None:
        self._warns_of_curve = warns_of_curve and curve is not None
        self.arena = Arena(arena_limit_bytes if shared_memory else 0, copies_parts=copies_parts)
        self._zmq = ZmqTransport(io_threads, curve, memory_limit_bytes)
        self._sink = Sink()
        self._budget = MapBudget()
        self.reader = LinkReader(self._notice)
        tcp = Medium.PLAIN_TCP if curve is None else Medium.SEALED_TCP
        self._listener = LinkListener(self._accepted, unix=shared_memory, tcp_links=tcp_links, tcp=tcp)
        sought = None if tcp_links is TcpLinks.OFF else tcp
        self._seeker = LinkConnector(
            self._ask, self._zmq, self._opened, self._not_opened, unix=shared_memory, tcp=sought
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._zone = ""  # the interface that leads to the scheduler, if its address names one
        self._links: dict[Peer, Link] = {}  # those that are up, opened by us or accepted
        self._zmq_reasons: dict[Peer, str] = {}  # why a peer that we connected to has no link
        self._waiting: dict[Peer, Waiting] = {}  # messages to peers for which a link is looked for
        self._lock = threading.Lock()  # held to change the links and the reasons
        self._accepted_links = AcceptedLinks()
        self._releasing: asyncio.TimerHandle | None = None

    # ── connections ──

    def start(self, on_message: OnMessage, on_garbage: OnGarbage) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._sink.on_message = on_message
        self._sink.on_garbage = on_garbage
        self._zmq.start(self._take, on_garbage)
        self._loop.add_reader(self.reader.fileno(), self.reader.read)
        self.reader.pause.stays = self._paused_loop_stays
        self._listener.start(self._loop)
        self._seeker.start(self._loop)

    def listen(self, address: str, *others: str) -> str:
        self._listener.address = self._zmq.listen(address, *others)
        return self._listener.address

    def listen_links(self, incarnation: int) -> None:
        """Makes links possible to this node, which is the server of this incarnation. Call it after `listen`."""
        self._listener.listen(incarnation)

    @property
    def link_address(self) -> tuple[str, int] | None:
        """Where this node listens for links over TCP: host and port. None: it does not."""
        return self._listener.tcp_address

    def connect(self, peer: Peer, address: str, key: str = "") -> None:
        """Opens a ZeroMQ connection and, if the peer is a server that offers one, a link."""
        self.disconnect(peer)
        if peer.kind is PeerKind.SCHEDULER:
            self._zone = zone_of(address)
        elif self._zone:
            address = with_zone(address, self._zone)
        self._zmq.connect(peer, address, key)
        if not self._seeker.may_seek:
            self._zmq_reasons[peer] = TURNED_OFF
            if peer.kind is PeerKind.SERVER:
                self._warn_of_curve(address, TURNED_OFF)
        elif peer.kind is not PeerKind.SERVER:
            self._zmq_reasons[peer] = "links lead to servers only"
        else:
            self._zmq_reasons[peer] = BEING_OPENED
            self._waiting[peer] = Waiting()
            self._seeker.seek(peer, address)

    def disconnect(self, peer: Peer) -> None:
        if peer.kind is PeerKind.SERVER:
            self._seeker.give_up(peer)
        waiting = self._waiting.pop(peer, None)
        if waiting is not None:
            waiting.drop()
        with self._lock:
            self._zmq_reasons.pop(peer, None)
            link = self._links.pop(peer, None)
        if link is not None:
            link.leave("disconnected")
        self._zmq.disconnect(peer)

    def paths(self) -> dict[Peer, PeerPath]:
        """How messages travel to each peer that we connected to, and to each that has a link to us."""
        within_host = PeerPath(PathKind.SHARED_MEMORY)
        if not self.arena.usable:
            within_host = PeerPath(PathKind.UNIX_SOCKET, self.arena.problem)
        with self._lock:
            paths = {peer: PeerPath(PathKind.ZMQ, reason) for peer, reason in self._zmq_reasons.items()}
            for peer, link in self._links.items():
                paths[peer] = _OVER_TCP.get(link.proven.medium, within_host)
        return paths

    def close(self, linger_s: float) -> None:
        if self.reader.is_closed:
            return
        until = time.monotonic() + linger_s
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self.reader.fileno())
        if self._releasing is not None:
            self._releasing.cancel()
        self._listener.close()
        self._seeker.close()
        for peer in list(self._waiting):
            self._decided(peer, "closed")
        for link in self.reader.links:
            link.leave("closed")
        with self._lock:
            self._links = {}
        self.reader.flush(until)
        self.arena.close()  # first: what others use is not used again when the links have ended
        self.reader.close("closed")
        self._zmq.close(max(0.0, until - time.monotonic()))

    def end_links_of_others(self, holds: Callable[[Principal], bool]) -> None:
        """Ends the links to this node whose other end no longer holds an allowed key."""
        for link in self.reader.links:
            if link.peer.kind is PeerKind.LINK and not holds(link.proven.principal):
                link.end("the key of the other side is not allowed any more")
                self._notice(link)

    # ── sending ──

    @property
    def holding(self) -> WriteCoalescing:
        """What lets messages without a payload wait a moment for the next one to the same peer."""
        return self._sink.holding

    def send(self, peer: Peer, header: bytes, payload: Sequence[Span]) -> bool:
        if self.reader.pause.may_stay:
            self.reader.pause.end_stay()  # the message may be answered
        if self._waiting:
            queued = self._wait(peer, header, payload)
            if queued is not None:
                return queued
        link = self._links.get(peer)
        if link is not None and link.send(header, payload):
            return True
        return self._send_now(peer, header, payload)

    def send_with_path(self, peer: Peer, header: HeaderOfPath, payload: Sequence[Span]) -> bool:
        queued = self._wait(peer, header, payload)
        return self._send_described(peer, header, payload) if queued is None else queued

    def _wait(self, peer: Peer, header: bytes | HeaderOfPath, payload: Sequence[Span]) -> bool | None:
        """Queues a message if a link to the peer is looked for. None: there is nothing to wait for."""
        waiting = self._waiting.get(peer)
        return None if waiting is None else waiting.add(header, payload)

    def _send_described(self, peer: Peer, header: bytes | HeaderOfPath, payload: Sequence[Span]) -> bool:
        if not isinstance(header, bytes):
            header = header(self.paths().get(peer, UNKNOWN_PATH))
        return self._send_now(peer, header, payload)

    def _send_now(self, peer: Peer, header: bytes, payload: Sequence[Span]) -> bool:
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
        for waiting in list(self._waiting.values()):
            waiting.copy()
        for link in self.reader.links:
            link.copy_queued()
        await self._zmq.detach_buffers()

    @property
    def has_links(self) -> bool:
        """Whether any link is up."""
        return bool(self._links)

    def link_to(self, peer: Peer) -> Link | None:
        """The link to the peer, if it is up, and no message waits until it is decided whether there is one."""
        return self._links.get(peer) if not self._waiting else None

    # ── links ──

    def _take(self, peer: Peer, header: bytes, payload: memoryview | None, principal: Principal) -> None:
        """A message that came over ZeroMQ."""
        if is_about_links(header):
            self._take_about_links(peer, header, principal)
        else:
            self._sink.on_message(peer, header, payload, principal)

    def _take_about_links(self, peer: Peer, header: bytes, principal: Principal) -> None:
        try:
            kind, question, said = unpack(header)
        except InvalidOfferError as error:
            self._sink.on_garbage(peer, str(error))
            return
        if kind is Kind.ASK and peer.kind is PeerKind.CALLER:
            is_full = len(self.reader.links) >= MAX_ACCEPTED
            self._zmq.send(peer, self._listener.answer(question, peer, principal, is_full=is_full), ())
        elif kind is not Kind.ASK and peer.kind is PeerKind.SERVER:
            self._seeker.take_answer(peer, question, said, principal)
        else:
            self._sink.on_garbage(peer, "a message about links from a node that has nothing to say about them")

    def _ask(self, peer: ServerPeer, header: bytes) -> bool:
        return self._zmq.send(peer, header, ())

    def _opened(self, peer: ServerPeer, connection: socket.socket, proven: Proven) -> None:
        self._add(peer, connection, proven)
        self._decided(peer, "")

    def _not_opened(self, peer: ServerPeer, address: str, reason: str) -> None:
        self._decided(peer, reason)
        self._warn_of_curve(address, reason)

    def _warn_of_curve(self, address: str, reason: str) -> None:
        """Log the first fallback to ZeroMQ's own encryption on the way to another host."""
        where = tcp_address_of(address)
        if self._warns_of_curve and where is not None and not where.is_local:
            self._warns_of_curve = False
            text = (
                "values travel to the server at %s by ZeroMQ's own encryption (CURVE), which takes several times as "
                "long as an encrypted link: %s. %s"
            )
            why = reason_over_tcp(reason)
            logger.warning(text, address, why, remedy_for(why))

    def _decided(self, peer: Peer, reason: str) -> None:
        """It is known how messages travel to the peer: over its link, or over ZeroMQ for this reason."""
        with self._lock:
            self._zmq_reasons[peer] = reason
        waiting = self._waiting.get(peer)
        if waiting is not None:
            waiting.end(partial(self._send_described, peer))
            del self._waiting[peer]

    def _accepted(self, connection: socket.socket, proven: Proven) -> None:
        if len(self.reader.links) >= MAX_ACCEPTED:
            connection.close()
        else:
            self._add(self._accepted_links.name(), connection, proven)

    def _add(self, peer: Peer, connection: socket.socket, proven: Proven) -> None:
        arena = self.arena if proven.medium is Medium.UNIX else Arena(0)
        link = Link(peer, connection, proven, arena, self.reader.epoll, self._sink, self._budget)
        with self._lock:
            self._links[peer] = link
        if proven.asker is not None:
            older = self._accepted_links.put(proven.asker, link)
            if older is not None:
                older.end("the other side has opened another link")
                self._notice(older)
        self.reader.add(link)

    def _notice(self, link: Link) -> None:
        """A link went down, or has payloads that must be released in time. On any thread."""
        if not link.is_up:
            self._forget(link)
        if link.has_ended:
            self.reader.remove(link)
            self._accepted_links.forget(link)
        elif link.has_unreleased and not self.reader.watches_payloads:
            self.reader.watches_payloads = True
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

    def _paused_loop_stays(self) -> None:
        """The loop stays paused though no thread reads: it looks after itself. On any thread."""
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._look_at_pause)

    def _look_at_pause(self) -> None:
        if not self.reader.is_closed and not self.reader.pause.end_if_unused():
            assert self._loop is not None
            self._loop.call_later(STAY_S, self._look_at_pause)

    def _release_later(self) -> None:
        assert self._loop is not None
        self._releasing = self._loop.call_later(RELEASE_INTERVAL_S, self._release)

    def _release(self) -> None:
        """Releases payloads on links that have no traffic to take the release along."""
        for link in self.reader.links:
            link.release_gone()
        self.reader.watches_payloads = any(link.has_unreleased for link in self.reader.links)
        if self.reader.watches_payloads:
            self._release_later()
