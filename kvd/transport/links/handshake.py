"""Handshake of a new link: both ends prove that they know the secret of its offer, and neither says it.

::

    server → client   "kvd link", version, challenge of the server
    client → server   name of the link, challenge of the client, proof of the client
    server → client   proof of the server

All have a fixed size. The proofs, and the keys of a sealed link, are HKDF of the offer's secret and of all that was
said before, with the server's incarnation and the kind of socket. So they are worth nothing on another connection, of
another link, on the other kind of socket, or for the other side.

The functions are generators without a socket: they yield bytes to send, or how many bytes they need next. `HalfOpen`
runs them on a connection.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import os
import secrets
import socket
from collections.abc import Callable, Generator
from enum import Enum
from struct import Struct
from typing import NamedTuple, TypeAlias

from kvd.core.machine import Peer
from kvd.core.principals import Principal
from kvd.transport.links.offers import ID_BYTES, Offer, OfferBook
from kvd.transport.links.sealing import SECRET_BYTES, Opener, Sealer, link_secrets
from kvd.transport.links.streams import Seals

VERSION = 1
CHALLENGE_BYTES = 32

_GREETING = Struct(f"<8sB{CHALLENGE_BYTES}s")
_CLAIM = Struct(f"<{ID_BYTES}s{CHALLENGE_BYTES}s{SECRET_BYTES}s")
_MAGIC = b"kvd link"


class Medium(Enum):
    """What a link consists of."""

    UNIX = b"u"  # a socket within the host, in the clear
    SEALED_TCP = b"t"
    PLAIN_TCP = b"p"  # in the clear: between nodes without keys, whose secrets anybody could read


class Proven(NamedTuple):
    """The other end of a link has proven itself.

    Attributes:
        principal: who holds its key.
        medium: what the link consists of.
        seals: what seals the link, None unless it is `Medium.SEALED_TCP`.
        asker: who was offered the link. None: this process was.
    """

    principal: Principal
    medium: Medium
    seals: Seals | None
    asker: Peer | None = None


class HandshakeError(Exception):
    """The other end did not prove itself. The text says why, for people."""


Talk: TypeAlias = "Generator[bytes | int, bytes, Proven]"
"""Yields bytes to send, or the number of bytes that it needs next and is sent. Raises HandshakeError."""


def as_server(offers: OfferBook, incarnation: int, medium: Medium) -> Talk:
    """The side of the server, whose incarnation this is."""
    greeting = _GREETING.pack(_MAGIC, VERSION, secrets.token_bytes(CHALLENGE_BYTES))
    yield greeting
    link, challenge, proof = _CLAIM.unpack((yield _CLAIM.size))
    offer = offers.find(link)
    if offer is None:
        raise HandshakeError("nobody was offered this link, or it was opened already")
    known = link_secrets(offer.secret, _transcript(greeting, link, challenge, incarnation, medium))
    if not hmac.compare_digest(proof, known.client_proof):
        raise HandshakeError("the other side does not know the secret of the link")
    offers.take(link)
    yield known.server_proof
    return Proven(offer.principal, medium, _seals(known.to_client, known.to_server, medium), offer.asker)


def as_client(offer: Offer, principal: Principal, incarnation: int, medium: Medium) -> Talk:
    """The side of a node that was offered a link by the server of this incarnation, whose key this principal holds."""
    greeting = yield _GREETING.size
    magic, version, _ = _GREETING.unpack(greeting)
    if magic != _MAGIC or version != VERSION:
        raise HandshakeError("what listens there does not speak this version of links")
    challenge = secrets.token_bytes(CHALLENGE_BYTES)
    known = link_secrets(offer.secret, _transcript(greeting, offer.link, challenge, incarnation, medium))
    yield _CLAIM.pack(offer.link, challenge, known.client_proof)
    proof = yield SECRET_BYTES
    if not hmac.compare_digest(proof, known.server_proof):
        raise HandshakeError("what listens there is not the server that offered the link")
    return Proven(principal, medium, _seals(known.to_server, known.to_client, medium))


def _transcript(greeting: bytes, link: bytes, challenge: bytes, incarnation: int, medium: Medium) -> bytes:
    return b"".join((greeting, link, challenge, incarnation.to_bytes(8, "little"), medium.value))


def _seals(ours: bytes, theirs: bytes, medium: Medium) -> Seals | None:
    return Seals(Sealer(ours), Opener(theirs)) if medium is Medium.SEALED_TCP else None


Done: TypeAlias = "Callable[[HalfOpen, Proven | str], None]"
"""(the connection, who the other end is or why that is not known). Called once."""


class HalfOpen:
    """A connection whose other end has not proven itself yet: it is told little, may say little, and has little time.

    Carries out one handshake on the loop. It owns the socket until the handshake succeeds.

    Args:
        connection: a socket that does not block, connected or about to be.
        talk: this side of the handshake.
        done: called with the outcome, on the loop, but never by the constructor.
        limit_s: how long the handshake may take.

    Attributes:
        socket: the connection. Whoever is told that the other end has proven itself owns it.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection: socket.socket,
        talk: Talk,
        done: Done,
        limit_s: float,
        *,
        connecting: bool = False,
    ) -> None:
        self.socket = connection
        self._loop = loop
        self._talk = talk
        self._done: Done | None = done
        self._needed = 0
        self._received = b""
        self._timer = loop.call_later(limit_s, self._end, f"the other side did not answer within {limit_s:g} s")
        if connecting:
            loop.add_writer(connection, self._connected)
        else:
            loop.call_soon(self._begin)

    def close(self) -> None:
        """Gives the handshake up, without a word."""
        if self._done is not None:
            self._done = None
            self._detach()
            self.socket.close()

    def _connected(self) -> None:
        self._loop.remove_writer(self.socket)
        number = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            self._end(os.strerror(number))
        else:
            self._begin()

    def _begin(self) -> None:
        if self._done is not None:
            self._loop.add_reader(self.socket, self._read)
            self._go_on(None)

    def _read(self) -> None:
        try:
            data = self.socket.recv(self._needed - len(self._received))
        except BlockingIOError:
            return
        except OSError as error:
            self._end(error.strerror or "the connection broke")
            return
        if not data:
            self._end("the other side closed the connection")
            return
        self._received += data
        if len(self._received) == self._needed:
            received, self._received = self._received, b""
            self._go_on(received)

    def _go_on(self, received: bytes | None) -> None:
        """Continues with what the talk needed, until it needs more."""
        try:
            said = next(self._talk) if received is None else self._talk.send(received)
            while isinstance(said, bytes):
                if self.socket.send(said) < len(said):
                    raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))
                said = next(self._talk)
            self._needed = said
        except StopIteration as stop:
            self._end(stop.value)
        except HandshakeError as error:
            self._end(str(error))
        except OSError as error:
            self._end(error.strerror or "the connection broke")

    def _end(self, outcome: Proven | str) -> None:
        done, self._done = self._done, None
        if done is None:
            return
        self._detach()
        if isinstance(outcome, str):
            self.socket.close()
        done(self, outcome)

    def _detach(self) -> None:
        self._timer.cancel()
        self._talk.close()
        if not self._loop.is_closed():
            self._loop.remove_reader(self.socket)
            self._loop.remove_writer(self.socket)
