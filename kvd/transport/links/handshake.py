"""How both ends of a new link prove to each other that they know the secret of its offer. Neither says it.

::

    server → client   "kvd link", version, challenge of the server
    client → server   name of the link, challenge of the client, proof of the client
    server → client   proof of the server

All have a fixed size. The proofs, and the keys of a sealed link, are HKDF of the offer's secret and of all that was
said before, with the server's incarnation and the kind of socket. So they are worth nothing on another connection, of
another link, on the other kind of socket, or for the other side.

The functions are generators and know no socket: they yield bytes to send, or how many bytes they need next.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Generator
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
