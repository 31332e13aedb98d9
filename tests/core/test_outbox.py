"""The outbox: priorities, order, credit, retries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvd.core.machine import Send, ServerPeer, Span
from kvd.core.outbox import (
    QUEUED,
    RETRY_FIRST_S,
    RETRY_LIMIT_S,
    RETRY_SOON_S,
    SENT,
    SETTLED,
    STAGED,
    Entry,
    EntryState,
    Outbox,
)
from kvd.protocol.messages import Command, Part, Pull, Push, SliceId

S0, S1 = ServerPeer(1 << 40), ServerPeer(1 << 41)


def ignore(event: Any) -> None: ...


def push(request: int, clock: int, *, key: str = "w", index: int = 0, nbytes: int = 10, **more: Any) -> Entry:
    message = Push(request, (Part(key, index, clock),), 0, 1, False)
    payload = (Span(f"bytes {request}", 0, nbytes),)
    send = Send(more.pop("peer", S0), message, payload)
    return Entry(send, ignore, nbytes, pushes=(SliceId(key, index),), **more)


def pull(request: int, *, key: str = "w", **more: Any) -> Entry:
    return Entry(Send(more.pop("peer", S0), Pull(request, (Part(key, 0, 1),))), ignore, **more)


def requests(sends: Sequence[Send]) -> list[int]:
    return [send.message.request for send in sends]  # type: ignore[union-attr]


def filled(*entries: Entry, credit: int = 1000, small: int = -1) -> Outbox:
    outbox = Outbox(credit, small_push_bytes=small)
    for entry in entries:
        outbox.add(entry)
    return outbox


def test_requests_leave_by_priority_then_in_order() -> None:
    outbox = filled(
        push(1, 1, key="a"),
        push(2, 1, key="b", priority=5),
        pull(3, priority=-1),
        push(4, 1, key="c", priority=5),
        pull(5),
    )
    assert requests(outbox.pump(0.0)) == [2, 4, 1, 5, 3]
    assert outbox.pump(0.0) == []
    assert len(outbox) == 5


def test_pushes_of_a_slice_keep_their_order_whatever_their_priority() -> None:
    outbox = filled(push(1, 1, priority=0), push(2, 2, priority=9), push(3, 1, key="x", priority=5), push(4, 3))
    assert requests(outbox.pump(0.0)) == [3, 1, 2, 4]


def test_a_push_of_many_slices_waits_for_all_of_them() -> None:
    both = Entry(Send(S0, Push(3, (Part("a", 0, 2), Part("b", 0, 2)), 0, 1, False)), ignore, 10)
    outbox = filled(push(1, 1, key="a"), push(2, 1, key="b"), both, push(4, 3, key="b"), credit=10)
    first, second, third, fourth = outbox.entries()
    for entry in (first, second, third, fourth):
        assert requests(outbox.pump(0.0)) == [entry.request]
        outbox.mark_staged(entry, 0.0)
    assert both.state is STAGED


def test_the_queue_of_one_peer_does_not_hold_up_another() -> None:
    outbox = filled(push(1, 1, nbytes=1000), push(2, 1, key="x"), push(3, 1, key="y", peer=S1), credit=1000)
    assert requests(outbox.pump(0.0)) == [1, 3]


def test_the_credit_is_never_exceeded_and_returns_at_staging() -> None:
    entries = [push(number, 1, key=f"k{number}", nbytes=40) for number in range(1, 6)]
    outbox = filled(*entries, credit=100)
    assert requests(outbox.pump(0.0)) == [1, 2]
    outbox.mark_staged(entries[0], 0.0)
    assert requests(outbox.pump(0.0)) == [3]
    outbox.mark_staged(entries[0], 0.0)  # a duplicate: the credit comes back once
    assert outbox.pump(0.0) == []
    outbox.settle(entries[1])  # answered without a Staged
    outbox.settle(entries[0])  # its credit has come back already
    assert requests(outbox.pump(0.0)) == [4]


def test_a_payload_larger_than_the_credit_goes_alone() -> None:
    big, small = push(1, 1, nbytes=500), push(2, 1, key="x", nbytes=1)
    outbox = filled(big, small, credit=100)
    assert requests(outbox.pump(0.0)) == [1]
    assert outbox.pump(0.0) == []
    outbox.mark_staged(big, 0.0)
    assert requests(outbox.pump(0.0)) == [2]


def test_intervals_start_again_once_the_server_has_the_bytes() -> None:
    entry = push(1, 1)
    outbox = filled(entry)
    outbox.pump(0.0)
    outbox.mark_staged(entry, 1.0)
    assert outbox.next_deadline() == 1.0 + RETRY_FIRST_S
    outbox.due(1.0 + RETRY_FIRST_S)
    assert outbox.next_deadline() == 1.0 + RETRY_FIRST_S + 2 * RETRY_FIRST_S


def test_a_push_of_many_bytes_is_asked_after_and_sent_again_if_it_is_not_there() -> None:
    """The bytes may still wait in front of a busy server: more of them would keep it busy."""
    entry = push(1, 1)
    outbox = filled(entry)
    (first,) = outbox.pump(0.0)
    assert probes(outbox.due(RETRY_FIRST_S)) == [(1, True)]
    outbox.retry_soon(entry, 3.0)  # as NotYet says
    outbox.validate()
    assert outbox.due(3.0 + 2 * RETRY_SOON_S) == [first]
    assert probes(outbox.due(100.0)) == [(1, True)]


def test_retries_send_the_same_request_at_growing_intervals() -> None:
    entry = pull(1)
    outbox = filled(entry)
    (first,) = outbox.pump(100.0)
    now, waits = 100.0, []
    for _ in range(6):
        due = outbox.next_deadline()
        assert due is not None
        assert outbox.due(due - 0.001) == []
        assert outbox.due(due) == [first]
        assert outbox.due(due) == []
        waits.append(due - now)
        now = due
    assert waits[0] == RETRY_FIRST_S
    assert waits == sorted(waits)
    assert waits[-1] == RETRY_LIMIT_S


def test_a_staged_push_is_retried_as_a_probe() -> None:
    entry = push(1, 1)
    outbox = filled(entry)
    outbox.pump(0.0)
    outbox.mark_staged(entry, 1.0)
    assert outbox.next_deadline() == 1.0 + RETRY_FIRST_S
    (probe,) = outbox.due(1.0 + RETRY_FIRST_S)
    assert probe == Send(S0, Push(1, (Part("w", 0, 1),), 0, 1, False, probe=True))
    assert outbox.unstaged == 0


def test_a_server_that_lost_a_staged_push_gets_the_bytes_again() -> None:
    entry, other = push(1, 1, nbytes=60), push(2, 1, key="x", nbytes=60)
    outbox = filled(entry, other, credit=100)
    outbox.pump(0.0)
    outbox.mark_staged(entry, 0.0)
    outbox.retry_soon(entry, 1.0)
    assert (entry.state, outbox.unstaged) == (SENT, 2)
    assert outbox.next_deadline() == 1.0 + RETRY_SOON_S
    (send,) = outbox.due(1.0 + RETRY_SOON_S)
    assert send.message == entry.send.message
    assert send.payload == entry.send.payload
    assert outbox.pump(1.0) == []  # its bytes are in flight again, and take credit
    outbox.mark_staged(entry, 2.0)
    assert requests(outbox.pump(2.0)) == [2]


def test_the_pause_before_a_soon_retry_is_at_most_a_second() -> None:
    entry = push(1, 1)
    outbox = filled(entry)
    outbox.pump(0.0)
    waits = []
    for _ in range(40):
        outbox.retry_soon(entry, 0.0)
        waits.append(entry.retry_at)
    assert waits[:3] == pytest.approx([0.05, 0.10, 0.15])
    assert waits[-1] == pytest.approx(1.0)


def test_a_pull_is_retried_unchanged() -> None:
    entry = pull(1)
    outbox = filled(entry)
    (first,) = outbox.pump(0.0)
    outbox.mark_staged(entry, 0.0)
    assert outbox.due(RETRY_FIRST_S) == [first]


@pytest.mark.parametrize("state", [QUEUED, SENT, STAGED])
def test_a_request_can_be_settled_from_every_state(state: EntryState) -> None:
    entry, follower = push(1, 1, nbytes=80), push(2, 2, nbytes=80)
    blocker = push(9, 1, key="x", nbytes=80)
    outbox = Outbox(100, small_push_bytes=-1)
    if state is QUEUED:
        outbox.add(blocker)
        outbox.pump(0.0)
    outbox.add(entry)
    outbox.add(follower)
    if state is not QUEUED:
        outbox.pump(0.0)
    if state is STAGED:
        outbox.mark_staged(entry, 0.0)
    assert entry.state is state
    outbox.settle(entry)
    assert entry.state is SETTLED
    assert outbox.find(1) is None
    if state is QUEUED:
        outbox.settle(blocker)
    assert requests(outbox.pump(0.0)) == [2]
    outbox.settle(follower)
    assert (len(outbox), outbox.unstaged, outbox.next_deadline()) == (0, 0, None)
    outbox.settle(follower)
    assert outbox.unstaged == 0
    assert outbox.due(1e9) == []


def test_a_push_after_a_settled_push_of_its_slice_goes_at_once() -> None:
    outbox = filled(push(1, 1))
    outbox.pump(0.0)
    outbox.settle(next(outbox.entries()))
    outbox.add(push(2, 2))
    assert requests(outbox.pump(0.0)) == [2]


def test_unstaged_counts_the_pushes_whose_bytes_may_not_have_arrived() -> None:
    first, second = push(1, 1), push(2, 2)
    outbox = filled(first, second, pull(3))
    assert outbox.unstaged == 2
    outbox.pump(0.0)
    assert outbox.unstaged == 2
    outbox.mark_staged(first, 0.0)
    assert outbox.unstaged == 1
    outbox.settle(second)
    assert outbox.unstaged == 0


def test_an_answer_to_a_queued_request_starts_no_retry() -> None:
    blocker, entry = push(1, 1, nbytes=100), push(2, 1, key="x")
    outbox = filled(blocker, entry, credit=100)
    outbox.pump(0.0)
    outbox.mark_staged(entry, 0.0)  # a peer that makes no sense
    outbox.retry_soon(entry, 0.0)
    assert entry.state is QUEUED
    assert requests(outbox.due(RETRY_SOON_S)) == []
    assert outbox.next_deadline() == RETRY_FIRST_S


def test_a_command_takes_credit_until_it_is_answered() -> None:
    command = Entry(Send(S0, Command(1, "head"), (Span("body", 0, 90),)), ignore, 90)
    outbox = filled(command, push(2, 1, nbytes=90), credit=100)
    assert requests(outbox.pump(0.0)) == [1]
    assert not command.pushes
    outbox.settle(command)
    assert requests(outbox.pump(0.0)) == [2]


# ── small pushes ──────────────────────────────────────────────────────────────────────────────────────────────────────


def probes(sends: Sequence[Send]) -> list[tuple[int, bool]]:
    """The number of each request, and whether it is a probe. A probe has no bytes."""
    for send in sends:
        assert not (send.message.probe and send.payload)  # type: ignore[union-attr]
    return [(send.message.request, send.message.probe) for send in sends]  # type: ignore[union-attr]


def test_small_pushes_take_no_credit() -> None:
    small = [push(number, 1, key=f"k{number}", nbytes=10) for number in range(1, 6)]
    large, last = push(6, 1, key="x", nbytes=11), push(7, 1, key="y", nbytes=11)
    outbox = filled(*small, large, last, push(8, 1, key="z", nbytes=10), credit=11, small=10)
    assert requests(outbox.pump(0.0)) == [1, 2, 3, 4, 5, 6]  # the last small one keeps its place behind a large one
    assert outbox.unstaged == 8
    outbox.mark_staged(large, 0.0)
    assert requests(outbox.pump(0.0)) == [7, 8]
    for entry in (*small, last):
        outbox.settle(entry)
    outbox.settle(large)
    outbox.add(push(9, 1, key="v", nbytes=11))
    assert requests(outbox.pump(0.0)) == [9]  # small pushes took no credit and returned none
    outbox.add(push(10, 1, key="u", nbytes=11))
    assert requests(outbox.pump(0.0)) == []


@pytest.mark.parametrize("nbytes", [0, 10])
def test_a_small_push_that_is_not_probed_is_retried_whole(nbytes: int) -> None:
    entry = push(1, 1, nbytes=nbytes)
    outbox = filled(entry, small=10)
    (first,) = outbox.pump(0.0)
    assert outbox.due(RETRY_FIRST_S) == [first]
    assert entry.state is SENT


def test_a_small_push_waits_for_earlier_pushes_of_its_slice() -> None:
    outbox = filled(
        push(1, 1, key="x", nbytes=100), push(2, 1, nbytes=50), push(3, 2, nbytes=1, priority=9), credit=100, small=10
    )
    assert requests(outbox.pump(0.0)) == [1]
    outbox.settle(next(outbox.entries()))
    assert requests(outbox.pump(0.0)) == [2, 3]


def test_asking_whether_all_is_staged_probes_the_small_pushes() -> None:
    sent, staged, large = push(1, 1), push(2, 1, key="x"), push(3, 1, key="y", nbytes=90)
    blocked, command = push(4, 1, key="z", nbytes=90), Entry(Send(S0, Command(5, "head")), ignore)
    outbox = filled(sent, staged, large, blocked, command, credit=100, small=10)
    outbox.pump(0.0)
    outbox.mark_staged(staged, 0.0)
    assert probes(outbox.ask_staged()) == [(1, True)]
    outbox.add(push(6, 1, key="u", nbytes=1, priority=5))
    outbox.add(push(7, 1, key="t", nbytes=20, priority=4))
    assert probes(outbox.pump(0.0)) == [(6, False), (6, True)]
    assert outbox.unstaged == 5
    outbox.mark_staged(sent, 0.0)
    assert outbox.unstaged == 4
    assert probes(outbox.ask_staged()) == [(6, True)]
    outbox.stop_asking_staged()
    outbox.add(push(8, 1, key="s", nbytes=1, priority=9))
    assert probes(outbox.pump(0.0)) == [(8, False)]


def test_a_small_push_is_probed_again_when_it_is_retried() -> None:
    """Its probe may have been refused, and no Staged answers a small push."""
    small, large = push(1, 1), push(2, 1, key="x", nbytes=50)
    outbox = filled(small, large, small=10)
    outbox.pump(0.0)
    assert probes(outbox.ask_staged()) == [(1, True)]
    outbox.retry_soon(small, 0.0)
    assert probes(outbox.due(RETRY_SOON_S)) == [(1, False), (1, True)]
    assert probes(outbox.due(RETRY_FIRST_S)) == [(2, True)]
    outbox.mark_staged(small, 3.0)
    assert (1, True) in probes(outbox.due(3.0 + RETRY_FIRST_S))


def test_a_small_push_whose_bytes_were_lost_counts_as_unstaged() -> None:
    entry = push(1, 1)
    outbox = filled(entry, credit=5, small=10)
    outbox.pump(0.0)
    outbox.mark_staged(entry, 0.0)
    assert outbox.unstaged == 0
    outbox.retry_soon(entry, 0.0)
    assert (entry.state, outbox.unstaged) == (SENT, 1)
    outbox.settle(entry)
    assert outbox.unstaged == 0
    outbox.add(push(2, 1, nbytes=11))
    assert requests(outbox.pump(0.0)) == [2]
