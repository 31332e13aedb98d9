"""Orders of events in which an acknowledged push was lost once, or a call had no end. Each has its own story."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core import requests
from kvd.core.machine import Halt, Span
from kvd.errors import KeyExists, KeyNotFound, NodeLost, NotAllowed, RequestTimeout
from kvd.protocol.messages import (
    Activate,
    Attach,
    ClockQuery,
    Clocks,
    Departure,
    Done,
    Enter,
    ErrorCode,
    Init,
    Lookup,
    NodeName,
    NotYet,
    NotYetReason,
    Part,
    Publish,
    Push,
    Refused,
    Taken,
    Welcome,
)
from tests.core.fakes import SLICE, cluster, from_scheduler, init_of, member, of, one, padded_bytes, said, uint8
from tests.core.server_harness import Harness as Server
from tests.core.server_harness import kinds, not_yet, ready, refusal, values
from tests.core.worker_harness import Harness as Worker
from tests.core.worker_harness import ready as worker

# ── rounds without a worker ──


def test_a_push_for_a_round_that_was_closed_without_its_worker_is_not_acknowledged() -> None:
    harness = ready()
    harness.push(0, 1, request=11)
    assert said(harness.look(member("worker", 1, "left"))) == [Done(11)]
    late = refusal(harness.push(1, 1, request=21))  # it was lost on the way, and comes after its worker's good-bye
    assert (late.error, late.taken) == (ErrorCode.NOT_ALLOWED, Taken.PART)
    assert "closed without worker 1" in late.text
    assert refusal(harness.push(1, 1, None, request=21, probe=True)).error is ErrorCode.NOT_ALLOWED
    assert said(harness.push(0, 1, request=11)) == [Done(11)]  # the push of who was there counts


def test_only_the_counted_pushes_of_a_replaced_worker_are_known() -> None:
    harness = ready()
    for clock in (1, 2):
        harness.push(0, clock)
        harness.push(1, clock)
    harness.push(1, 3)
    harness.look(member("worker", 1, life=1))
    harness.attach(1, life=1)
    assert kinds(harness.push(1, 2, life=1)) == ["Done"]
    assert kinds(harness.push(1, 3, life=1)) == ["Staged"]


def test_a_worker_that_left_in_the_view_cannot_push() -> None:
    harness = worker()
    left = harness.call(requests.Depart(Departure.DONE), timeout_s=1.0)
    harness.wait(1.0)
    assert isinstance(harness.error(left), RequestTimeout)  # the scheduler carries it out all the same
    harness.look(member("worker", 0, "done"))
    assert isinstance(harness.error(harness.push("w")), NotAllowed)


def test_rewind_does_not_go_back_to_rounds_that_were_closed_without_the_worker() -> None:
    harness = Worker(rank=1, predecessor="left")
    call = harness.call(requests.ClockOf("w"))
    harness.found()
    query = harness.take(ClockQuery)
    harness.say(query.peer, Clocks(query.message.request, 3, 3, 3, 3))  # type: ignore[union-attr]
    harness.reply(harness.take(Activate), Done)
    assert harness.result(call) == 3
    harness.call(requests.Rewind(2))
    harness.push("w")
    assert harness.clocks() == [("w", 0, 4)]


def test_a_round_without_a_worker_left_to_push_does_not_hold_up_the_rest() -> None:
    harness = ready()
    harness.init("v", b"\7")
    for rank in (0, 1):
        harness.push(rank, 1, b"\1")  # of w; the pushes of v are lost, and both leave though their flush failed
    for rank in (0, 1):
        harness.look(member("worker", rank, "left"))
    harness.look(member("worker", 0, life=1))
    harness.attach(0, life=1)
    harness.say(0, Activate(9, "w", 1), life=1)
    harness.say(0, Activate(9, "v", 1), life=1)  # a key counts as far as the furthest of its slices
    assert values(harness.pull(0, 1, key="v", life=1)) == ((1,), [b"\7"])
    assert kinds(harness.push(0, 2, b"\5", key="v", life=1)) == ["Done"]
    assert values(harness.pull(0, 2, key="v", life=1)) == ((2,), [b"\5"])


def test_rounds_that_a_rank_skipped_stay_skipped_after_another_restart() -> None:
    harness = ready()
    harness.init("v", b"\0")
    harness.look(member("worker", 1, "left"))
    for clock in (1, 2, 3):
        harness.push(0, clock)
    for clock in (1, 2):
        harness.push(0, clock, key="v")  # its third is under way
    harness.look(member("worker", 1, life=1))
    harness.attach(1, life=1)
    for key in ("w", "v"):
        assert Done(9) in said(harness.say(1, Activate(9, key, 3), life=1))
    harness.look(member("worker", 1, life=2))  # it died before it pushed
    harness.attach(1, life=2)
    for key in ("w", "v"):
        (clocks,) = said(harness.say(1, ClockQuery(8, key), life=2))
        assert (clocks.lowest, clocks.highest) == (3, 3)
    for clock in (2, 3):
        late = refusal(harness.push(1, clock, life=2))
        assert (late.error, late.taken) == (ErrorCode.NOT_ALLOWED, Taken.PART)
    harness.push(0, 3, key="v")
    for key in ("w", "v"):
        harness.push(1, 4, b"\7", key=key, life=2)
        harness.push(0, 4, b"\1", key=key)
        assert values(harness.pull(0, 4, key=key)) == ((4,), [b"\x08"])


# ── a scheduler without its record ──


def test_a_successor_learns_its_clocks_from_the_servers() -> None:
    harness = ready()
    for rank in (0, 1):
        harness.push(rank, 1)
    assert said(harness.attach(0)) == [Done(1)]  # its own pushes are no news to it
    harness.look(member("worker", 1, life=1))
    for _ in range(2):
        assert said(harness.attach(1, life=1)) == [Clocks(1, 1, 1, 1, 1, trained=True)]
    harness.push(1, 2, life=1)
    assert said(harness.attach(1, life=1)) == [Clocks(1, 1, 1, 1, 1, trained=True)]  # what is staged does not count yet


def test_a_successor_asks_for_its_clocks_even_if_the_scheduler_knows_no_predecessor() -> None:
    harness = Worker(rank=1, joined=False)
    harness.attach = False
    harness.step(from_scheduler(Welcome(1, 1, None), (1, 0)))
    harness.look()
    attach = harness.take(Attach)
    harness.say(attach.peer, Clocks(attach.message.request, 2, 2, 2, 2))  # type: ignore[union-attr]
    harness.push("w")
    harness.found()
    query = harness.take(ClockQuery)
    harness.say(query.peer, Clocks(query.message.request, 2, 2, 2, 2))  # type: ignore[union-attr]
    assert harness.clocks() == [("w", 0, 3)]


def test_a_successor_stays_one_under_a_new_scheduler() -> None:
    harness = Worker(rank=1, predecessor="dead")
    harness.step(from_scheduler(NotYet(0, NotYetReason.NOT_JOINED, "who are you?"), (2, 0)))
    harness.step(from_scheduler(Welcome(1, 1, None), (2, 0)))
    assert harness.machine.session.predecessor == "dead"


def test_a_worker_that_a_server_calls_replaced_halts() -> None:
    harness = Worker(rank=1, joined=False)
    harness.attach = False
    harness.step(from_scheduler(Welcome(1, 1, None), (1, 0)))
    harness.look()
    attach = harness.take(Attach)
    effects = harness.say(attach.peer, Refused(attach.message.request, ErrorCode.REPLACED, "stop it"))  # type: ignore[union-attr]
    assert isinstance(one(of(Halt, effects)).error, NotAllowed)
    assert isinstance(harness.error(harness.push("w")), NotAllowed)


def test_a_barrier_that_the_predecessor_passed_is_counted() -> None:
    harness = Worker(rank=1, predecessor="dead")
    assert harness.result(harness.call(requests.Barrier("b", passed=True))) is None
    assert not harness.waiting(Enter)
    harness.call(requests.Barrier("b"))
    assert one(harness.waiting(Enter)).generation == 1


def test_a_replaced_worker_is_not_taken_back() -> None:
    harness = ready()
    for rank in (0, 1):
        harness.push(rank, 1)
    harness.look(member("worker", 1, life=1))
    harness.attach(1, life=1)
    harness.look(member("worker", 1, life=0))  # a scheduler without its record heard the ghost first
    assert refusal(harness.attach(1)).error is ErrorCode.REPLACED
    assert not_yet(harness.push(1, 1)).reason is NotYetReason.NOT_ATTACHED
    harness.push(0, 2)
    assert kinds(harness.push(1, 2, life=1)) == ["Done", "Done"]


# ── refusals that name the dead, and when they are sent ──


def test_async_a_push_within_the_bound_is_not_failed_for_a_dead_worker() -> None:
    harness = ready(settings=cluster(mode="async", staleness=1))
    harness.push(1, 1)
    harness.look(member("worker", 1, "dead"))
    for clock in (1, 2):
        assert kinds(harness.push(0, clock)) == ["Done"]
    assert refusal(harness.push(0, 3)).error is ErrorCode.NODE_LOST


def test_a_push_that_begins_to_wait_for_the_dead_when_a_round_ends_is_refused() -> None:
    harness = ready(settings=cluster(3), workers=3)
    harness.push(2, 1, request=31)
    harness.push(0, 1, request=11)
    harness.push(0, 2, request=12)
    harness.look(member("worker", 2, "dead"))  # nobody waits for it yet: it has pushed for round 1
    effects = harness.push(1, 1, request=21)
    told = {message.request: type(message).__name__ for message in said(effects)}
    assert told == {11: "Done", 21: "Done", 31: "Done", 12: "Refused"}
    assert refusal(effects).nodes == (NodeName("worker", 2),)


def test_a_push_behind_a_failed_one_is_given_up_at_once() -> None:
    harness = worker()
    first, second = harness.push("w"), harness.push("w")
    harness.refuse(Push, ErrorCode.NOT_ALLOWED, key="w")
    assert isinstance(harness.error(first), NotAllowed)
    harness.postpone(Push, NotYetReason.OUT_OF_TURN, key="w", next_clock=1)
    assert isinstance(harness.error(second), NotAllowed)
    flush = harness.call(requests.Flush())
    assert harness.result(flush) is None
    rewind = harness.call(requests.Rewind(0))
    assert harness.result(rewind) is None


# ── refusals ──


def test_the_refusal_of_a_later_push_does_not_hit_an_earlier_one() -> None:
    harness = ready()
    harness.init("v", b"\0")
    harness.push(1, 1, None, key="v", how=2)
    later = Push(12, (Part("w", 0, 2), Part("v", 0, 1)), 0, 1, False)
    answer = not_yet(harness.say(0, later, padded_bytes([b"\1", b"\1"])))
    assert answer.reason is NotYetReason.OUT_OF_TURN
    earlier = Push(11, (Part("w", 0, 1),), 0, 1, False)  # it was overtaken, on a new connection
    assert kinds(harness.say(0, earlier, b"\5")) == ["Staged"]


def test_pushes_behind_a_failed_one_that_were_not_refused_are_taken_again() -> None:
    harness = ready()
    harness.push(0, 1, request=11)
    harness.push(0, 2, request=12)
    harness.look(member("worker", 1, "dead"))  # both hear NodeLost; their bytes stay
    harness.look(member("worker", 1))
    harness.error = NotAllowed("no")
    harness.push(1, 1, request=21)
    harness.error = None
    for request, clock in ((11, 1), (12, 2)):
        assert kinds(harness.push(0, clock, request=request)) == ["Staged"]


def test_an_old_copy_does_not_take_the_clock_of_a_later_push() -> None:
    harness = ready()
    harness.push(0, 1, request=13)
    assert (
        not_yet(harness.push(0, 2, b"\7", request=12)).reason is NotYetReason.OUT_OF_TURN
    )  # given up, before its step was made again
    assert kinds(harness.push(0, 2, b"\5", request=14)) == ["Staged"]


# ── keys ──


def test_a_repeated_init_brings_its_own_values() -> None:
    harness = Server()
    spec = uint8(2 * SLICE)
    old, new = b"\1" * SLICE, b"\2" * SLICE
    harness.say(0, init_of(11, "w", spec, 0), old)  # slice 1 does not get through, and the call is given up
    harness.say(0, init_of(21, "w", spec, 0), new)
    harness.say(0, init_of(22, "w", spec, 1), new)
    assert said(harness.say(0, init_of(11, "w", spec, 0), old)) == [Done(11)]  # a late copy changes nothing
    assert harness.value("w", 0) + harness.value("w", 1) == new + new


def test_an_init_whose_publish_was_not_answered_cannot_be_repeated_with_other_values() -> None:
    harness = Worker()
    item = requests.Item("w", uint8(1), b"\1")
    first = harness.call(requests.InitKeys((item,)), timeout_s=1.0)
    harness.reply(harness.take(Init), Done)
    harness.take(Publish)
    harness.wait(1.0)
    assert isinstance(harness.error(first), RequestTimeout)
    again = harness.call(requests.InitKeys((item._replace(source=b"\2"),)))
    assert not harness.waiting(Init)
    harness.reply(harness.take(Publish), Done)
    assert isinstance(harness.error(again), KeyExists)
    harness.push("w")
    assert harness.clocks() == [("w", 0, 1)]


def test_an_init_whose_publish_was_refused_can_be_repeated() -> None:
    harness = Worker()
    item = requests.Item("w", uint8(1), b"\1")
    harness.call(requests.InitKeys((item,)), timeout_s=1.0)
    harness.reply(harness.take(Init), Done)
    harness.take(Publish)
    harness.wait(1.0)
    again = harness.call(requests.InitKeys((item,)))
    harness.refuse(Publish, ErrorCode.NOT_ALLOWED)  # the server was restarted
    harness.reply(harness.take(Init), Done)
    harness.reply(harness.take(Publish), Done)
    assert harness.result(again) is None


def test_a_key_that_does_not_fit_takes_no_room() -> None:
    harness = Server(memory=10 * 7 * SLICE)  # (3 + 2 rounds ahead × 2 workers) × ten slices
    big = uint8(11 * SLICE)
    assert refusal(harness.say(0, init_of(11, "big", big, 0), bytes(SLICE))).error is ErrorCode.NOT_ALLOWED
    harness.init("fits", bytes(10 * SLICE), uint8(10 * SLICE))
    assert harness.value("fits", 9) == bytes(SLICE)


@pytest.mark.parametrize("role", ["observer", "worker"])
def test_a_server_that_was_gone_at_the_join_is_asked_when_it_is_back(role: str) -> None:
    harness = Worker(joined=False, role=role)
    harness.members["server", 0] = member("server", 0, "dead")
    harness.step(from_scheduler(Welcome(1, -1 if role == "observer" else 0, None), (1, 0)))
    harness.look()
    early = harness.call(requests.DescribeKey("w"))
    assert isinstance(harness.error(early), NodeLost)
    harness.look(member("server", 0, life=1))
    late = harness.call(requests.DescribeKey("w"))
    send = harness.take(Lookup)
    harness.say(send.peer, Refused(send.message.request, ErrorCode.KEY_NOT_FOUND, "no", "w"))  # type: ignore[union-attr]
    assert isinstance(harness.error(late), KeyNotFound)


# ── what the program takes back ──


def test_a_push_that_was_given_up_is_sent_again_from_a_copy() -> None:
    harness = worker()
    source: Any = bytearray(b"\1")
    move = requests.Transfer((requests.Item("w", uint8(1), source, "target"),), push=True, pull=True)
    call = harness.call(move)
    sent = harness.take(Push)
    assert one(sent.payload) == Span(source, 0, 1)
    done = harness.call(requests.TakeBack(((source, b"copy"),)))
    assert harness.result(done) is None
    assert isinstance(harness.error(call), RequestTimeout)
    harness.wait(3.0)
    probe = harness.take(Push)
    assert not probe.payload
    harness.say(probe.peer, NotYet(probe.message.request, NotYetReason.OUT_OF_TURN, "", "w", 1))  # type: ignore[union-attr]
    harness.wait(1.0)
    assert one(harness.take(Push).payload) == Span(b"copy", 0, 1)


def test_a_push_that_never_began_is_not_sent_after_it_is_given_up() -> None:
    harness = worker()
    for _ in range(2):
        harness.push("w")
    source: Any = bytearray(b"\1")
    call = harness.call(requests.Transfer((requests.Item("w", uint8(1), source, None),), push=True, pull=False))
    harness.call(requests.TakeBack(((source, b"copy"),)))
    assert harness.error(call).outcome == "not_sent"
    harness.settle()
    assert [clock for _, _, clock in harness.clocks()] == [2]
