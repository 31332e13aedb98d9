"""Both ends of a new link prove themselves, and what happens if one of them cannot. Without sockets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import permutations

import pytest

from kvd.core.machine import CallerPeer
from kvd.core.principals import Principal
from kvd.transport.links.handshake import HandshakeError, Medium, Proven, Talk, as_client, as_server
from kvd.transport.links.offers import Offer, OfferBook
from kvd.transport.links.sealing import OVERHEAD_BYTES, BrokenSealError, Opener, Sealer

SERVER = 4711
ASKER = CallerPeer(b"asker")
WORKER, HOST = Principal("the worker", frozenset()), Principal("the server", frozenset())


@dataclass
class Side:
    """One end, what it has said, and how it ended."""

    talk: Talk
    said: list[bytes] = field(default_factory=list)
    needs: int = 0
    proven: Proven | None = None

    def start(self) -> None:
        self._advance(None)

    def hear(self, data: bytes) -> None:
        assert len(data) == self.needs
        self._advance(data)

    def _advance(self, data: bytes | None) -> None:
        try:
            step = next(self.talk) if data is None else self.talk.send(data)
            while isinstance(step, bytes):
                self.said.append(step)
                step = next(self.talk)
            self.needs = step
        except StopIteration as stop:
            self.proven = stop.value


@dataclass
class Two:
    """A server with an offer, and a client that was told of it."""

    medium: Medium = Medium.SEALED_TCP
    client_medium: Medium | None = None
    client_thinks: int = SERVER
    book: OfferBook = field(default_factory=lambda: OfferBook(lambda: 0.0))

    def __post_init__(self) -> None:
        made = self.book.make(ASKER, WORKER)
        assert made is not None
        self.offer = Offer(True, 1, *made)
        self.server = Side(as_server(self.book, SERVER, self.medium))
        self.client = Side(as_client(self.offer, HOST, self.client_thinks, self.client_medium or self.medium))
        self.server.start()
        self.client.start()

    def shake_hands(self, network: Callable[[bytes], bytes] = bytes) -> None:
        self.client.hear(network(self.server.said[0]))
        self.server.hear(network(self.client.said[0]))
        self.client.hear(network(self.server.said[1]))


def carried(sealer: Sealer, opener: Opener) -> bytes:
    record = memoryview(bytearray(4 + OVERHEAD_BYTES))
    sealer.seal(b"text", record)
    plain = memoryview(bytearray(4))
    opener.open(record, plain)
    return bytes(plain)


def test_both_ends_prove_themselves_and_have_keys_for_each_direction() -> None:
    two = Two()
    two.shake_hands()
    client, server = two.client.proven, two.server.proven
    assert client is not None
    assert server is not None
    assert (client.principal, server.principal) == (HOST, WORKER)
    assert client.seals is not None
    assert server.seals is not None
    assert carried(client.seals.sealer, server.seals.opener) == b"text"
    assert carried(server.seals.sealer, client.seals.opener) == b"text"
    with pytest.raises(BrokenSealError):
        carried(client.seals.sealer, client.seals.opener)


def test_a_link_within_the_host_is_not_sealed() -> None:
    two = Two(Medium.UNIX)
    two.shake_hands()
    assert two.client.proven == Proven(HOST, Medium.UNIX, None)
    assert two.server.proven == Proven(WORKER, Medium.UNIX, None, ASKER)


def test_a_link_over_tcp_between_nodes_without_keys_is_not_sealed() -> None:
    two = Two(Medium.PLAIN_TCP)
    two.shake_hands()
    assert two.client.proven == Proven(HOST, Medium.PLAIN_TCP, None)
    assert two.server.proven == Proven(WORKER, Medium.PLAIN_TCP, None, ASKER)


def test_the_secret_is_never_said() -> None:
    two = Two()
    two.shake_hands()
    assert all(two.offer.secret not in said for said in two.client.said + two.server.said)


class Changing:
    """Passes on what the ends say, but for one byte of one of the three messages."""

    def __init__(self, message: int, at: int) -> None:
        self._message = message
        self._at = at
        self._passed = 0

    def __call__(self, data: bytes) -> bytes:
        changed = bytearray(data)
        if self._passed == self._message:
            changed[self._at] ^= 1
        self._passed += 1
        return bytes(changed)


def test_no_byte_of_what_is_said_can_be_changed() -> None:
    for message, nbytes in enumerate((41, 80, 32)):
        for at in range(nbytes):
            two = Two()
            with pytest.raises(HandshakeError):
                two.shake_hands(Changing(message, at))
            assert two.client.proven is None


def test_a_recorded_handshake_is_worth_nothing() -> None:
    two = Two()
    two.shake_hands()
    again = Side(as_server(two.book, SERVER, Medium.SEALED_TCP))
    again.start()
    with pytest.raises(HandshakeError, match="opened already"):
        again.hear(two.client.said[0])


def test_a_proof_is_bound_to_its_connection() -> None:
    """Someone who reads along repeats the client's proof on a connection of his own, and is faster than the client."""
    two = Two()
    two.client.hear(two.server.said[0])
    own = Side(as_server(two.book, SERVER, Medium.SEALED_TCP))
    own.start()
    with pytest.raises(HandshakeError, match="does not know the secret"):
        own.hear(two.client.said[0])
    two.server.hear(two.client.said[0])
    two.client.hear(two.server.said[1])
    assert two.client.proven is not None


def test_a_client_is_not_convinced_by_its_own_proof() -> None:
    two = Two()
    two.client.hear(two.server.said[0])
    with pytest.raises(HandshakeError, match="not the server"):
        two.client.hear(two.client.said[0][-32:])


def test_proofs_are_bound_to_the_server_and_the_kind_of_socket() -> None:
    mixed = [Two(one, other) for one, other in permutations(Medium, 2)]
    for two in (Two(client_thinks=SERVER + 1), *mixed):
        two.client.hear(two.server.said[0])
        with pytest.raises(HandshakeError, match="does not know the secret"):
            two.server.hear(two.client.said[0])


def test_a_wrong_proof_does_not_use_the_offer_up() -> None:
    two = Two()
    other = Side(as_server(two.book, SERVER, Medium.SEALED_TCP))
    other.start()
    with pytest.raises(HandshakeError):
        other.hear(two.offer.link + bytes(64))
    two.shake_hands()
    assert two.server.proven is not None
    assert len(two.book) == 0


def test_what_does_not_speak_links_is_named() -> None:
    for greeting in (b"HTTP/1.1 400 Bad Request\r\n" + bytes(15), b"kvd link\2" + bytes(32)):
        two = Two()
        with pytest.raises(HandshakeError, match="does not speak this version"):
            two.client.hear(greeting)
