"""Offers of links: what is said about a link over ZeroMQ, before there is one.

A node asks a server that it has connected to. The server answers with an offer: where it listens, and a secret of which
the link is made. Over an encrypted connection nobody else learns the secret. It serves one link, for a short time, and
stands for whoever asked: the link gets the principal of the connection over which the question came.

No message of `kvd.protocol` begins with the byte 0xC1: MessagePack never uses it.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from kvd.core.machine import Peer
from kvd.core.principals import Principal
from kvd.transport.links.sealing import SECRET_BYTES

MARK = b"\xc1kvdlink"
VERSION = 1
ID_BYTES = 16
MAX_OFFERS = 1024
OFFER_LIFE_S = 15.0
MAX_REASON_BYTES = 500

_QUESTION = Struct(f"<{len(MARK)}sBB{ID_BYTES}s")  # mark, version, kind, id of the question
_OFFER = Struct(f"<?H{ID_BYTES}s{SECRET_BYTES}s")  # listens within the host, port (0: none), id of the link, secret


class Kind(IntEnum):
    """Of a message about links."""

    ASK = 1
    OFFER = 2
    NONE = 3  # followed by the reason


class InvalidOfferError(Exception):
    """A message about links that is none."""


class Offer(NamedTuple):
    """A link that a server would accept.

    Attributes:
        unix: whether the server listens within its host.
        port: where it listens for links over TCP, 0 if it does not.
        link: the link's name, which is no secret.
        secret: what both ends prove that they know.
        reason: why the server does not listen for links over TCP; not sent if it does.
    """

    unix: bool
    port: int
    link: bytes
    secret: bytes
    reason: str = ""


def is_about_links(header: bytes) -> bool:
    """Whether a message is for the transport itself."""
    return header[:1] == MARK[:1]


def pack_ask(question: bytes) -> bytes:
    return _QUESTION.pack(MARK, VERSION, Kind.ASK, question)


def pack_offer(question: bytes, offer: Offer) -> bytes:
    packed = _OFFER.pack(offer.unix, offer.port, offer.link, offer.secret)
    return _QUESTION.pack(MARK, VERSION, Kind.OFFER, question) + packed + _text(offer.reason)


def pack_none(question: bytes, reason: str) -> bytes:
    return _QUESTION.pack(MARK, VERSION, Kind.NONE, question) + _text(reason)


def _text(reason: str) -> bytes:
    return reason.encode()[:MAX_REASON_BYTES]


def unpack(header: bytes) -> tuple[Kind, bytes, Offer | str]:
    """(kind, question, offer or reason). The reason of a question is empty.

    Raises:
        InvalidOfferError: it is none of these messages.
    """
    try:
        mark, version, kind, question = _QUESTION.unpack_from(header)
        if mark != MARK or version != VERSION:
            raise InvalidOfferError(f"a message about links of version {version}: this node speaks {VERSION}")
        rest = header[_QUESTION.size :]
        if kind == Kind.OFFER:
            reason = rest[_OFFER.size :].decode(errors="replace")
            unix, port, link, secret = _OFFER.unpack_from(rest)
            return Kind.OFFER, question, Offer(unix, port, link, secret, reason)
        if len(rest) > MAX_REASON_BYTES or (kind == Kind.ASK and rest):
            raise InvalidOfferError("a message about links is too long")
        return Kind(kind), question, rest.decode(errors="replace")
    except (struct.error, ValueError) as error:
        raise InvalidOfferError(f"a message about links is not valid: {error}") from None


# ── the server's side ──


@dataclass(frozen=True, slots=True)
class OpenOffer:
    """An offer that nobody has taken up yet."""

    asker: Peer
    principal: Principal
    secret: bytes
    until: float


class OfferBook:
    """The offers that a server has made and not forgotten: at most `MAX_OFFERS`, and one for each asker.

    Args:
        now: a clock, in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._open: dict[bytes, OpenOffer] = {}  # by the name of the link, the oldest first
        self._links: dict[Peer, bytes] = {}  # by asker

    def __len__(self) -> int:
        return len(self._open)

    def make(self, asker: Peer, principal: Principal) -> tuple[bytes, bytes] | None:
        """(name of a new link, its secret). None: too many links are being opened."""
        self.forget_old()
        self.take(self._links.get(asker, b""))
        if len(self._open) >= MAX_OFFERS:
            return None
        link, secret = secrets.token_bytes(ID_BYTES), secrets.token_bytes(SECRET_BYTES)
        self._open[link] = OpenOffer(asker, principal, secret, self._now() + OFFER_LIFE_S)
        self._links[asker] = link
        return link, secret

    def find(self, link: bytes) -> OpenOffer | None:
        """The offer of a link, unless it was taken up or is too old."""
        self.forget_old()
        return self._open.get(link)

    def take(self, link: bytes) -> OpenOffer | None:
        """Takes an offer up: nobody else can."""
        offer = self._open.pop(link, None)
        if offer is not None:
            del self._links[offer.asker]
        return offer

    def forget_old(self) -> None:
        """Forgets offers whose time is over."""
        now = self._now()
        while self._open:
            link = next(iter(self._open))
            if self._open[link].until > now:
                return
            self.take(link)
