"""Links that other processes open to this server: its offers, its listening sockets, and the links that are up."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from enum import Enum
from itertools import count
from typing import TypeAlias

from kvd.core.machine import LinkPeer, Peer
from kvd.core.principals import Principal
from kvd.transport.links.handshake import HalfOpen, Medium, Proven, as_server
from kvd.transport.links.link import Link
from kvd.transport.links.offers import OFFER_LIFE_S, Offer, OfferBook, pack_none, pack_offer
from kvd.transport.links.sealing import why_not
from kvd.transport.links.sockets import (
    other_user,
    tcp_address_of,
    tcp_listener,
    tune,
    unix_name,
    unix_socket,
)

BACKLOG = 128  # a peer that finds it full uses ZeroMQ
MAX_HALF_OPEN = 64  # at each door
ACCEPTS_AT_A_TIME = 16
RETRY_ACCEPT_S = 1.0
PROVE_WITHIN_S = 3.0
PROVE_WITHIN_HOST_S = 10.0  # processes of one host may share few processors

Enter: TypeAlias = "Callable[[socket.socket, Proven], None]"
"""(connection, who is at its other end). Takes a link that has proven itself."""


class TcpLinks(Enum):
    """Where links over TCP are used: the values of the setting `tcp_links`."""

    OFF = "off"
    BETWEEN_HOSTS = "auto"  # not for servers that only this host can reach
    EVERYWHERE = "always"


class ListeningSocket:
    """One listening socket. At most `MAX_HALF_OPEN` connections at a time may try to prove themselves.

    One that fails keeps its place until its time is up. So strangers who come again and again cost a bounded number of
    handshakes per second, and are not even accepted meanwhile.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        medium: Medium,
        offers: OfferBook,
        incarnation: int,
        enter: Enter,
    ) -> None:
        self._loop = loop
        self._listener = listener
        self._medium = medium
        self._offers = offers
        self._incarnation = incarnation
        self._enter = enter
        self._half_open: dict[HalfOpen, float] = {}  # with the time until which each keeps its place
        self._places = MAX_HALF_OPEN
        self._closed = False
        loop.add_reader(listener, self._accept)

    def close(self) -> None:
        self._closed = True
        if not self._loop.is_closed():
            self._loop.remove_reader(self._listener)
        self._listener.close()
        for half_open in list(self._half_open):
            half_open.close()
        self._half_open.clear()

    def _accept(self) -> None:
        for _ in range(ACCEPTS_AT_A_TIME):
            if not self._places:
                self._loop.remove_reader(self._listener)  # until a place is free
                return
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError:  # no descriptors left: peers use ZeroMQ meanwhile
                self._loop.remove_reader(self._listener)
                self._loop.call_later(RETRY_ACCEPT_S, self._accept_again)
                return
            self._hear(connection)

    def _accept_again(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._listener, self._accept)

    def _hear(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        if self._medium is Medium.UNIX and other_user(connection):
            connection.close()
            return
        if self._medium is not Medium.UNIX:
            tune(connection)
        limit_s = PROVE_WITHIN_HOST_S if self._medium is Medium.UNIX else PROVE_WITHIN_S
        talk = as_server(self._offers, self._incarnation, self._medium)
        self._places -= 1
        half_open = HalfOpen(self._loop, connection, talk, self._heard, limit_s)
        self._half_open[half_open] = self._loop.time() + limit_s

    def _heard(self, half_open: HalfOpen, outcome: Proven | str) -> None:
        until = self._half_open.pop(half_open)
        if isinstance(outcome, Proven):
            self._free_place()
            self._enter(half_open.socket, outcome)
        else:
            self._loop.call_at(until, self._free_place)

    def _free_place(self) -> None:
        self._places += 1
        if self._places == 1:
            self._accept_again()


class LinkListener:
    """All that a server does to get links.

    Args:
        enter: takes the links.
        unix: whether processes of this host may open links.
        tcp_links: which nodes may over TCP.
        tcp: what such links consist of.

    Attributes:
        address: where the server listens with ZeroMQ.
    """

    def __init__(self, enter: Enter, *, unix: bool, tcp_links: TcpLinks, tcp: Medium) -> None:
        self.address = ""
        self._enter = enter
        self._unix = unix
        self._tcp_links = tcp_links
        self._tcp = tcp
        self._offers = OfferBook(time.monotonic)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._incarnation = 0
        self._sockets: dict[Medium, socket.socket] = {}
        self._listening: list[ListeningSocket] = []
        self._forgetting: asyncio.TimerHandle | None = None  # set while there are offers
        self._no_tcp = "the server has links over TCP turned off"

    @property
    def tcp_address(self) -> tuple[str, int] | None:
        """Host and port for links over TCP, if it listens there."""
        listener = self._sockets.get(self._tcp)
        return None if listener is None else listener.getsockname()[:2]

    def listen(self, incarnation: int) -> None:
        """Listens as the server of this incarnation, where it can: everything works without links."""
        self._incarnation = incarnation
        if self._unix:
            self._listen_within_host()
        if self._tcp_links is not TcpLinks.OFF:
            reason = why_not() if self._tcp is Medium.SEALED_TCP else ""
            self._no_tcp = reason or self._listen_over_tcp()
        if self._loop is not None:
            self._open_listening(self._loop)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._open_listening(loop)

    def answer(self, question: bytes, asker: Peer, principal: Principal, *, is_full: bool) -> bytes:
        """What to answer to someone who asks for a link. `is_full`: there are as many links as are allowed."""
        if not self._sockets:
            return pack_none(question, self._no_tcp)
        if is_full:
            return pack_none(question, "the server has as many links as it may have")
        made = self._offers.make(asker, principal)
        if made is None:
            return pack_none(question, "too many links are being opened to this server")
        self._forget_later()
        listener = self._sockets.get(self._tcp)
        port = 0 if listener is None else listener.getsockname()[1]
        return pack_offer(question, Offer(Medium.UNIX in self._sockets, port, *made, self._no_tcp))

    def close(self) -> None:
        if self._forgetting is not None:
            self._forgetting.cancel()
        for door in self._listening:
            door.close()
        for listener in self._sockets.values():
            listener.close()
        self._listening, self._sockets = [], {}

    def _forget_later(self) -> None:
        """Secrets do not stay in memory because nobody asks any more."""
        if self._forgetting is None and self._loop is not None:
            self._forgetting = self._loop.call_later(OFFER_LIFE_S, self._forget)

    def _forget(self) -> None:
        self._forgetting = None
        self._offers.forget_old()
        if self._offers:
            self._forget_later()

    def _listen_within_host(self) -> None:
        listener = unix_socket()
        try:
            listener.bind(unix_name(self._incarnation))
            listener.listen(BACKLOG)
        except OSError:  # the name is taken
            listener.close()
            return
        self._sockets[Medium.UNIX] = listener

    def _listen_over_tcp(self) -> str:
        """Why it does not listen, or an empty text."""
        where = tcp_address_of(self.address)
        if where is None:
            return "the server is not reached over TCP"
        if self._tcp_links is TcpLinks.BETWEEN_HOSTS and where.is_local:
            return "the server can only be reached by its own host"
        try:
            self._sockets[self._tcp] = tcp_listener(where.host, BACKLOG)
        except OSError as error:
            return f"the server cannot listen for links over TCP: {error.strerror}"
        return ""

    def _open_listening(self, loop: asyncio.AbstractEventLoop) -> None:
        self._listening = [
            ListeningSocket(loop, listener, medium, self._offers, self._incarnation, self._enter)
            for medium, listener in self._sockets.items()
        ]


class AcceptedLinks:
    """Links that other processes have opened to this one: one for each of them, since each has buffers of its own.

    Any thread may call `forget`; the rest belongs to the loop's thread.
    """

    def __init__(self) -> None:
        self._names = count(1)
        self._by_asker: dict[Peer, Link] = {}
        self._lock = threading.Lock()

    def name(self) -> LinkPeer:
        """A name that no link has had."""
        return LinkPeer(f"link {next(self._names)}")

    def put(self, asker: Peer, link: Link) -> Link | None:
        """Returns the link that this one replaces, which is to be ended."""
        with self._lock:
            older, self._by_asker[asker] = self._by_asker.get(asker), link
        return older

    def forget(self, link: Link) -> None:
        """The link has ended."""
        with self._lock:
            for asker, known in self._by_asker.items():
                if known is link:
                    del self._by_asker[asker]
                    return
