"""What is said about links before there is one, and the offers that a server remembers."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.core.machine import CallerPeer
from kvd.core.principals import HOLDER, Principal
from kvd.errors import ProtocolError
from kvd.protocol.codec import decode
from kvd.transport.links import offers
from kvd.transport.links.offers import (
    MARK,
    OFFER_LIFE_S,
    InvalidOfferError,
    Kind,
    Offer,
    OfferBook,
    is_about_links,
    pack_ask,
    pack_none,
    pack_offer,
    unpack,
)

QUESTION = bytes(range(16))
ASKER, OTHER = CallerPeer(b"asker"), CallerPeer(b"other")


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_messages_about_links_are_read_as_they_were_written() -> None:
    offer = Offer(unix=True, port=4242, link=b"l" * 16, secret=b"s" * 32, reason="")
    without_tcp = offer._replace(port=0, reason="the server can only be reached by its own host")
    assert unpack(pack_ask(QUESTION)) == (Kind.ASK, QUESTION, "")
    assert unpack(pack_offer(QUESTION, offer)) == (Kind.OFFER, QUESTION, offer)
    assert unpack(pack_offer(QUESTION, without_tcp)) == (Kind.OFFER, QUESTION, without_tcp)
    assert unpack(pack_none(QUESTION, "turned off")) == (Kind.NONE, QUESTION, "turned off")
    assert len(pack_none(QUESTION, "é" * 10_000)) < 600


def test_no_message_of_the_protocol_is_taken_for_one_about_links() -> None:
    assert is_about_links(pack_ask(QUESTION))
    assert not is_about_links(b"")
    with pytest.raises(ProtocolError):
        decode(pack_ask(QUESTION))


@given(st.binary(max_size=700))
def test_nothing_but_invalid_offers_is_raised(rest: bytes) -> None:
    for message in (rest, MARK + rest, pack_ask(QUESTION)[:10] + rest, pack_ask(QUESTION) + b"x" + rest):
        with suppress(InvalidOfferError):
            unpack(message)


def test_an_offer_is_taken_up_once_and_keeps_the_principal_of_who_asked() -> None:
    clock = Clock()
    book = OfferBook(clock)
    principal = Principal("w7", frozenset())
    made = book.make(ASKER, principal)
    other = book.make(OTHER, HOLDER)
    assert made is not None
    assert other is not None
    assert len({*made, *other}) == 4
    link, secret = made
    found = book.find(link)
    assert found is not None
    assert (found.principal, found.secret, found.asker) == (principal, secret, ASKER)
    assert book.take(link) is found
    assert book.find(link) is None
    assert book.take(link) is None
    assert book.find(b"unknown") is None
    assert len(book) == 1


def test_offers_are_forgotten_when_their_time_is_over() -> None:
    clock = Clock()
    book = OfferBook(clock)
    first = book.make(ASKER, HOLDER)
    clock.now = OFFER_LIFE_S / 2
    second = book.make(OTHER, HOLDER)
    assert first is not None
    assert second is not None
    clock.now = OFFER_LIFE_S
    assert book.find(first[0]) is None
    assert book.find(second[0]) is not None
    clock.now = OFFER_LIFE_S * 1.5
    book.forget_old()
    assert len(book) == 0


def test_offers_are_bounded_for_one_asker_and_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offers, "MAX_OFFERS", 3)
    clock = Clock()
    book = OfferBook(clock)
    made = [book.make(ASKER, HOLDER) for _ in range(10)]
    assert len(book) == 1
    assert made[-1] is not None
    assert book.find(made[-1][0]) is not None
    others = [book.make(CallerPeer(b"%d" % number), HOLDER) for number in range(5)]
    assert [offer is None for offer in others] == [False, False, True, True, True]
    clock.now = OFFER_LIFE_S
    assert book.make(OTHER, HOLDER) is not None
    assert len(book) == 1
