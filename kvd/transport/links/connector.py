"""Opening of links to servers: a node asks over ZeroMQ, and opens what it is offered, within the host or over TCP."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from kvd.core.machine import ServerPeer, Span
from kvd.core.principals import Principal
from kvd.transport.base import HeaderOfPath
from kvd.transport.links.handshake import HalfOpen, Medium, Proven, as_client
from kvd.transport.links.offers import ID_BYTES, Offer, pack_ask
from kvd.transport.links.outgoing import COST_OF_ENTRY_BYTES, QUEUE_LIMIT_BYTES
from kvd.transport.links.sealing import OVER_TCP, why_not
from kvd.transport.links.sockets import other_user, tcp_address_of, tune, unix_name, unix_socket
from kvd.transport.memory.leases import payload_nbytes
from kvd.transport.zmq.transport import ZmqTransport


class Waiting:
    """Messages to one server that wait until it is known whether they travel over a link: none may overtake another.

    Any thread may add messages.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: deque[tuple[bytes | HeaderOfPath, Sequence[Span]]] = deque()
        self._nbytes = 0
        self._ended = False

    def add(self, header: bytes | HeaderOfPath, payload: Sequence[Span]) -> bool | None:
        """False: too much waits. None: nothing waits any more, so the message can be sent."""
        with self._lock:
            if self._ended:
                return None
            if self._nbytes > QUEUE_LIMIT_BYTES:
                return False
            self._entries.append((header, payload))
            self._nbytes += payload_nbytes(payload) + COST_OF_ENTRY_BYTES
            return True

    def end(self, send: Callable[[bytes | HeaderOfPath, Sequence[Span]], object]) -> None:
        """Sends all messages in their order. Threads that add one wait until this is done, and are told to send it."""
        with self._lock:
            self._ended = True
            entries, self._entries = self._entries, deque()
            for header, payload in entries:
                send(header, payload)

    def drop(self) -> None:
        """Forgets all messages."""
        self.end(lambda header, payload: None)

    def copy(self) -> None:
        """The messages wait as copies from now on: the program takes its memory back."""
        with self._lock:
            self._entries = deque((header, [_copied(span) for span in payload]) for header, payload in self._entries)


def _copied(span: Span) -> Span:
    view = memoryview(span.buffer).cast("B") if span.nbytes else memoryview(b"")
    return Span(bytes(view[span.offset : span.offset + span.nbytes]), 0, span.nbytes)


ASK_AGAIN_S = 0.02
ANSWER_WITHIN_S = 10.0  # a server that does not answer would not take messages either
OPEN_WITHIN_S = 3.0
OPEN_WITHIN_HOST_S = 10.0

TURNED_OFF = "turned off"
ELSEWHERE = "no link at this host: the peer is on another host, in another network namespace, or has links turned off"

Found: TypeAlias = "Callable[[ServerPeer, socket.socket, Proven], None]"
NotFound: TypeAlias = "Callable[[ServerPeer, str, str], None]"


class _Search:
    """One link that is looked for."""

    def __init__(self, peer: ServerPeer, address: str) -> None:
        self.peer = peer
        self.address = address
        self.question = secrets.token_bytes(ID_BYTES)
        self.is_asked = False  # whether the question was sent: a name may have to be looked up first
        self.timer: asyncio.TimerHandle | None = None
        self.ask_again: asyncio.TimerHandle | None = None
        self.half_open: HalfOpen | None = None
        self.offer: Offer | None = None
        self.principal: Principal | None = None
        self.reasons: list[str] = []

    def close(self) -> None:
        for timer in (self.timer, self.ask_again):
            if timer is not None:
                timer.cancel()
        if self.half_open is not None:
            self.half_open.close()


class LinkConnector:
    """Belongs to the loop's thread. Each search ends with one call of `found` or `not_found`, unless it is given up.

    Args:
        ask: sends a message of this file's protocol over ZeroMQ. False: it was not sent, as there is no connection yet.
        connections: the ZeroMQ connections to servers.
        found: takes a connection whose other end has proven itself.
        not_found: takes the address of a server, and why there is no link to it.
        unix: whether to open links within the host.
        tcp: what links over TCP consist of; None: none are opened.
    """

    def __init__(
        self,
        ask: Callable[[ServerPeer, bytes], bool],
        connections: ZmqTransport,
        found: Found,
        not_found: NotFound,
        *,
        unix: bool,
        tcp: Medium | None,
    ) -> None:
        self._ask = ask
        self._connections = connections
        self._found = found
        self._not_found = not_found
        self._unix = unix
        self._tcp = tcp
        self._loop: asyncio.AbstractEventLoop | None = None
        self._searches: dict[ServerPeer, _Search] = {}

    @property
    def may_seek(self) -> bool:
        return self._unix or self._tcp is not None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        for search in self._searches.values():
            self._limit(search)
            if not search.is_asked:
                self._ask_for(search)

    def seek(self, peer: ServerPeer, address: str) -> None:
        """Asks the server for a link. There is a connection to it over ZeroMQ, at this address."""
        search = self._searches[peer] = _Search(peer, address)
        if not self._unix:
            search.reasons.append(TURNED_OFF)
        self._limit(search)
        self._ask_for(search)

    def give_up(self, peer: ServerPeer) -> None:
        search = self._searches.pop(peer, None)
        if search is not None:
            search.close()

    def close(self) -> None:
        for peer in list(self._searches):
            self.give_up(peer)

    def take_answer(self, peer: ServerPeer, question: bytes, offer: Offer | str, principal: Principal) -> None:
        """What the server answered: an offer, or why there is none."""
        search = self._searches.get(peer)
        if search is None or search.question != question or search.offer is not None:
            return  # an answer to an earlier question
        if isinstance(offer, str):
            self._fail(search, offer)
            return
        search.offer, search.principal = offer, principal
        assert search.timer is not None
        search.timer.cancel()
        if self._unix:
            self._open_within_host(search, offer)
        else:
            self._open_over_tcp(search, offer)

    def _ask_for(self, search: _Search) -> None:
        """Ask for a link, as soon as there is a connection. The server has its time from then on."""
        search.is_asked = self._ask(search.peer, pack_ask(search.question))
        if self._loop is None:
            return
        if not search.is_asked:
            search.ask_again = self._loop.call_later(ASK_AGAIN_S, self._ask_for, search)
        elif search.ask_again is not None:
            assert search.timer is not None
            search.timer.cancel()
            self._limit(search)

    def _limit(self, search: _Search) -> None:
        if self._loop is not None:
            reason = f"the server did not answer within {ANSWER_WITHIN_S:g} s when it was asked for a link"
            search.timer = self._loop.call_later(ANSWER_WITHIN_S, self._fail, search, reason)

    def _fail(self, search: _Search, reason: str) -> None:
        search.reasons.append(reason)
        self.give_up(search.peer)
        self._not_found(search.peer, search.address, "; ".join(search.reasons))

    # ── within the host ──

    def _open_within_host(self, search: _Search, offer: Offer) -> None:
        connection = unix_socket()
        reason = ""
        try:
            connection.connect(unix_name(search.peer))
            reason = other_user(connection)
        except OSError as error:
            reason = ELSEWHERE if error.errno == errno.ECONNREFUSED else f"no link: {error.strerror}"
        if reason:
            connection.close()
            self._try_tcp(search, offer, reason)
        else:
            self._talk(search, offer, connection, Medium.UNIX)

    def _try_tcp(self, search: _Search, offer: Offer, reason: str) -> None:
        """There is no link within the host, for this reason."""
        search.reasons.append(reason)
        self._open_over_tcp(search, offer)

    # ── over TCP ──

    def _open_over_tcp(self, search: _Search, offer: Offer) -> None:
        endpoint = self._connections.endpoint_of(search.peer)
        where = tcp_address_of(endpoint)
        reason = ""
        if self._tcp is None:
            reason = TURNED_OFF
        elif self._tcp is Medium.SEALED_TCP:
            reason = why_not()
        reason = reason or ("" if offer.port else offer.reason)
        if not reason and where is None:
            reason = "the server is not reached over TCP" if endpoint else "the connection to the server has ended"
        if reason or where is None:
            self._fail(search, f"{OVER_TCP}{reason}")
            return
        try:
            (family, *_, address), *_ = socket.getaddrinfo(
                where.host, offer.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )
        except OSError as error:  # such as an interface that is gone
            self._fail(search, f"{OVER_TCP}{error.strerror}")
            return
        self._connect(search, offer, family, address)

    def _connect(self, search: _Search, offer: Offer, family: int, where: Any) -> None:
        connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            tune(connection)
            number = connection.connect_ex(where)
            if number not in (0, errno.EINPROGRESS):
                raise OSError(number, os.strerror(number))
        except OSError as error:
            connection.close()
            self._fail(search, f"{OVER_TCP}{error.strerror}")
            return
        assert self._tcp is not None
        self._talk(search, offer, connection, self._tcp)

    # ── the handshake ──

    def _talk(self, search: _Search, offer: Offer, connection: socket.socket, medium: Medium) -> None:
        assert self._loop is not None
        assert search.principal is not None
        talk = as_client(offer, search.principal, search.peer, medium)
        done = partial(self._talked, search, offer, medium)
        connecting = medium is not Medium.UNIX
        limit_s = OPEN_WITHIN_S if connecting else OPEN_WITHIN_HOST_S
        search.half_open = HalfOpen(self._loop, connection, talk, done, limit_s, connecting=connecting)

    def _talked(
        self, search: _Search, offer: Offer, medium: Medium, half_open: HalfOpen, outcome: Proven | str
    ) -> None:
        search.half_open = None
        if isinstance(outcome, Proven):
            self.give_up(search.peer)
            self._found(search.peer, half_open.socket, outcome)
        elif medium is Medium.UNIX:
            self._try_tcp(search, offer, f"no link at this host: {outcome}")
        else:
            self._fail(search, f"{OVER_TCP}{outcome}")
