"""The outbox when another peer takes the place of one: what was open there begins anew, in its order."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from kvd.core.machine import Peer, Send, ServerPeer, Span
from kvd.core.outbox import QUEUED, RETRY_FIRST_S, SENT, SETTLED, STAGED, Entry, Outbox
from kvd.protocol.messages import Part, Pull, Push, SliceId

PEERS = tuple(ServerPeer(1 << (40 + number)) for number in range(3))
A, B, C = PEERS
CREDIT = 100


def push(request: int, clock: int, peer: Peer = A, *, key: str = "w", nbytes: int = 60, **more: Any) -> Entry:
    send = Send(peer, Push(request, (Part(key, 0, clock),), 0, 1, False), (Span(f"bytes {request}", 0, nbytes),))
    return Entry(send, lambda event: None, nbytes, pushes=(SliceId(key, 0),), **more)


def pull(request: int, peer: Peer = A, **more: Any) -> Entry:
    return Entry(Send(peer, Pull(request, (Part("w", 0, 1),))), lambda event: None, **more)


def filled(*entries: Entry, small: int = -1) -> Outbox:
    outbox = Outbox(CREDIT, small_push_bytes=small)
    for entry in entries:
        outbox.add(entry)
    return outbox


def to_b(entry: Entry) -> Peer:
    return B if entry.send.peer == A else entry.send.peer


def pumped(outbox: Outbox, now: float = 0.0) -> list[tuple[Peer, int]]:
    sends = outbox.pump(now)
    outbox.validate()
    return [(send.peer, send.message.request) for send in sends]  # type: ignore[union-attr]


def test_the_credit_of_the_old_peer_comes_back_and_that_of_the_new_one_is_taken() -> None:
    outbox = filled(push(1, 1), push(2, 1, key="v"), push(3, 1, B, key="u", nbytes=90))
    assert pumped(outbox) == [(A, 1), (B, 3)]
    moved = outbox.redirect(to_b)
    outbox.validate()
    assert [entry.request for entry in moved] == [1, 2]
    assert pumped(outbox) == []  # B has no credit left
    outbox.mark_staged(outbox.find(3), 0.0)  # type: ignore[arg-type]
    assert pumped(outbox) == [(B, 1)]
    outbox.add(push(4, 1, A, key="x", nbytes=90))
    assert pumped(outbox) == [(A, 4)]


def test_pushes_of_a_slice_keep_their_order_whatever_became_of_them() -> None:
    first, second, third = push(1, 1, nbytes=10), push(2, 2, nbytes=10, priority=5), push(3, 3, nbytes=10, priority=9)
    outbox = filled(first, second)
    assert pumped(outbox) == [(A, 1), (A, 2)]
    outbox.mark_staged(second, 0.0)
    outbox.add(third)
    outbox.redirect(to_b)
    outbox.validate()
    assert [entry.state for entry in (first, second, third)] == [QUEUED] * 3
    assert pumped(outbox) == [(B, 1), (B, 2), (B, 3)]


def test_what_was_staged_is_not_any_more_and_goes_whole() -> None:
    entry = push(1, 1)
    outbox = filled(entry)
    pumped(outbox)
    outbox.mark_staged(entry, 0.0)
    assert outbox.unstaged == 0
    outbox.redirect(to_b)
    assert outbox.unstaged == 1
    outbox.validate()
    (again,) = outbox.pump(1.0)
    assert again.peer == B
    assert again.payload == entry.send.payload
    outbox.retry_soon(entry, 1.0)  # it does not have the bytes of the old one
    (retry,) = outbox.due(1.0 + RETRY_FIRST_S)
    assert not retry.message.probe  # type: ignore[union-attr]


def test_the_retries_of_the_old_peer_end_with_it() -> None:
    entry, other = pull(1), push(2, 1, B, nbytes=CREDIT)
    outbox = filled(entry, other)
    assert pumped(outbox) == [(A, 1), (B, 2)]
    outbox.settle(other)
    outbox.redirect(to_b)
    assert outbox.due(10.0) == []
    assert outbox.next_deadline() is None
    assert pumped(outbox, 10.0) == [(B, 1)]
    assert outbox.next_deadline() == 10.0 + RETRY_FIRST_S


def test_what_is_settled_before_it_is_sent_again_lets_the_next_one_go() -> None:
    first, second = push(1, 1), push(2, 2)
    outbox = filled(first, second)
    pumped(outbox)
    outbox.redirect(to_b)
    outbox.settle(first)  # its call was given up
    outbox.validate()
    assert pumped(outbox) == [(B, 2)]


def test_nothing_changes_when_nothing_moves() -> None:
    outbox = filled(push(1, 1), pull(2))
    pumped(outbox)
    activity = outbox.activity
    assert outbox.redirect(lambda entry: entry.send.peer) == []
    assert outbox.activity == activity
    assert [entry.state for entry in outbox.entries()] == [SENT, SENT]


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_the_invariants_hold_and_each_peer_gets_the_clocks_in_order(seed: int) -> None:
    """After the last move, the one peer that a slice is at gets all its open pushes, in order and whole."""
    random = Random(seed)
    outbox = Outbox(CREDIT, small_push_bytes=random.choice((-1, 16)))
    leader: dict[str, Peer] = {key: random.choice(PEERS) for key in "uvw"}
    clocks = dict.fromkeys("uvw", 0)
    arrived: dict[tuple[str, Peer], list[int]] = {}
    request, now = 0, 0.0

    def deliver(sends: list[Send]) -> None:
        for send in sends:
            message: Any = send.message
            if isinstance(message, Push) and not message.probe:
                arrived.setdefault((message.parts[0].key, send.peer), []).append(message.parts[0].clock)

    def is_known(entry: Entry) -> bool:
        return entry.state in (SENT, STAGED)

    for _ in range(150):
        now += random.random()
        key = random.choice("uvw")
        entries = list(outbox.entries())
        what = random.choice(("push", "push", "pull", "staged", "settle", "lost", "move", "pump", "due"))
        if what == "push":
            request, clocks[key] = request + 1, clocks[key] + 1
            nbytes, priority = random.choice((10, 60, 150)), random.choice((0, 0, 1, 9))
            outbox.add(push(request, clocks[key], leader[key], key=key, nbytes=nbytes, priority=priority, topic=key))
        elif what == "pull":
            request += 1
            outbox.add(pull(request, leader[key], topic=key, priority=random.choice((0, 3))))
        elif what == "move":
            leader[key] = random.choice(PEERS)
            before = {entry.request: entry.send.peer for entry in entries}
            for entry in outbox.redirect(lambda entry: leader[entry.topic]):
                assert before[entry.request] != entry.send.peer == leader[entry.topic]
                assert entry.state is QUEUED
                arrived.pop((entry.topic, entry.send.peer), None)
        elif entries and what in ("staged", "settle", "lost"):
            entry = random.choice(entries)
            if what == "staged" and entry.pushes:
                outbox.mark_staged(entry, now)
            elif what == "settle" and is_known(entry):
                outbox.settle(entry)
            elif what == "lost" and is_known(entry):
                outbox.retry_soon(entry, now, random.choice((None, 4)))
        elif what == "pump":
            deliver(outbox.pump(now))
        elif what == "due":
            outbox.due(now)
        outbox.validate()
    for _ in range(500):
        deliver(outbox.pump(now))
        outbox.validate()
        for entry in outbox.entries():
            if is_known(entry):
                outbox.settle(entry)
    assert len(outbox) == 0
    assert outbox.unstaged == 0
    for clocks_there in arrived.values():
        assert clocks_there == sorted(set(clocks_there))


def test_a_request_that_is_over_stays_over() -> None:
    entry = push(1, 1)
    outbox = filled(entry)
    pumped(outbox)
    outbox.settle(entry)
    assert outbox.redirect(lambda entry: C) == []
    assert entry.state is SETTLED
