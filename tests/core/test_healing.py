"""The states of programs that are passed on: which offers and wishes become pairs, and what becomes of the parts."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core.machine import Effect, Send
from kvd.protocol.messages import (
    NO_STATE,
    PARTS_AHEAD,
    Done,
    ErrorCode,
    FetchPart,
    GiveState,
    Gone,
    OfferState,
    Refused,
    StateGiven,
    StateGone,
    StatePart,
    WaitQuery,
    Waits,
    WantState,
)
from tests.core.fakes import NodePeer, cluster, member, of, one, read, said, worker_id
from tests.core.server_harness import Harness

HEAD = 3


class Passing(Harness):
    """Workers of a server that leads the first partition."""

    def __init__(self, workers: int = 3, **more: Any) -> None:
        super().__init__(cluster(workers), workers=workers, **more)

    def offer(self, rank: int, made: int, request: int = 0, **more: Any) -> list[Effect]:
        return self.say(rank, OfferState(request or self.request(), made), **more)

    def want(self, rank: int, made: int, request: int = 0, **more: Any) -> list[Effect]:
        return self.say(rank, WantState(request or self.request(), made), **more)

    def give(self, rank: int, transfer: int, part: int, parts: int = 6, value: bytes = b"", **more: Any) -> Any:
        message = StatePart(more.pop("request", 0) or self.request(), transfer, part, parts, HEAD, 7)
        return self.say(rank, message, value or bytes([part]), **more)

    def fetch(self, rank: int, transfer: int, part: int, have: int = 0, **more: Any) -> Any:
        return self.say(rank, FetchPart(self.request(), transfer, part, have), **more)

    def pair(self, donor: int = 0, taker: int = 2, made: int = 4) -> int:
        """The number of a transfer that has begun."""
        self.offer(donor, made)
        message = one(told(self.want(taker, made)))
        assert isinstance(message, GiveState)
        assert message.takers == (taker,)
        return message.transfer


def told(effects: list[Effect], to: Any = None) -> list[Any]:
    """The messages that are sent."""
    return list(said(effects, to))


def sends(effects: list[Effect]) -> list[Any]:
    return list(of(Send, effects))


def peer(rank: int, life: int = 0) -> NodePeer:
    return NodePeer(worker_id(rank, life))


def test_a_state_goes_to_those_who_want_exactly_it() -> None:
    harness = Passing()
    assert told(harness.offer(0, 4)) == []
    assert told(harness.offer(1, 5)) == []
    given = one(sends(harness.want(2, 5)))
    assert given.peer == peer(1)
    transfer = given.message.transfer
    assert given.message == GiveState(given.message.request, transfer, (2,))

    effects = harness.give(1, transfer, 0, 2)
    assert told(effects, peer(2)) == [StateGiven(sends(effects)[0].message.request, transfer, 1, 2, HEAD)]
    assert told(harness.fetch(2, transfer, 1)) == []  # it waits for the part
    sent = one(sends(harness.give(1, transfer, 1, 2, b"last")))
    assert (sent.peer, sent.message.part, sent.message.checksum, read(sent.payload[0])) == (peer(2), 1, 7, b"last")
    assert [read(send.payload[0]) for send in sends(harness.fetch(2, transfer, 0))] == [b"\0"]
    ended = harness.fetch(2, transfer, 2, 2)
    assert [type(message) for message in told(ended, peer(2))] == [Done]
    assert {type(message) for message in told(ended, peer(1))} == {StateGone}  # nobody wants more of it
    assert told(harness.fetch(2, transfer, 0)) == [StateGone(harness._request, Gone.AGAIN)]


def test_several_share_one_reading_and_a_part_stays_until_all_have_it() -> None:
    harness = Passing()
    harness.want(1, 4)
    harness.want(2, 4)
    transfer = one(told(harness.offer(0, 4))).transfer
    for part in range(PARTS_AHEAD):
        harness.give(0, transfer, part)
    too_far = one(told(harness.give(0, transfer, PARTS_AHEAD)))
    assert (type(too_far), too_far.error) == (Refused, ErrorCode.PROTOCOL_ERROR)
    assert told(harness.fetch(1, transfer, 1, 1), peer(0)) == []
    assert [type(message) for message in told(harness.fetch(2, transfer, 2, 2), peer(0))] == [Done]  # part 0
    harness.give(0, transfer, PARTS_AHEAD)
    effects = harness.fetch(1, transfer, 6, 6)  # it has all: the other one alone waits for part 1 no more
    assert [type(message) for message in told(effects, peer(0))] == [Done]


def test_the_lowest_rank_gives_and_the_next_one_if_it_dies() -> None:
    harness = Passing()
    harness.offer(1, 4)
    harness.offer(0, 4)
    wish = harness.request()
    given = one(sends(harness.want(2, 4, wish)))
    assert given.peer == peer(0)
    effects = harness.look(member("worker", 0, "dead"))
    again = one([send for send in sends(effects) if isinstance(send.message, GiveState)])
    assert again.peer == peer(1)  # the wish was not answered: it goes on
    assert again.message.transfer != given.message.transfer
    harness.give(1, again.message.transfer, 0)
    harness.fetch(2, again.message.transfer, 1)
    effects = harness.look(member("worker", 1, "dead"))
    assert [message.why for message in told(effects, peer(2))] == [Gone.AGAIN]  # and part 1 does not come any more
    assert one(told(harness.want(2, 4))).why is Gone.LOST


def test_a_newcomer_that_dies_ends_the_transfer() -> None:
    harness = Passing()
    transfer = harness.pair()
    harness.give(0, transfer, 0)
    effects = harness.look(member("worker", 2, "dead"))
    assert [message.why for message in told(effects, peer(0))] == [Gone.AGAIN]
    harness.offer(0, 4)
    harness.look(member("worker", 2, life=1))
    harness.attach(2, life=1)
    assert isinstance(one(told(harness.want(2, 4, life=1))), GiveState)


def test_late_copies_pair_nobody() -> None:
    harness = Passing()
    first, second = harness.request(), harness.request()
    harness.offer(0, 4, first)
    assert told(harness.offer(0, NO_STATE, second)) == [Done(first), Done(second)]
    assert told(harness.offer(0, 4, first)) == [Done(first)]
    assert told(harness.want(2, 4)) == []
    wish = harness._request
    assert told(harness.want(2, 4, wish)) == []  # a copy of what waits
    transfer = one(told(harness.offer(1, 4))).transfer
    assert told(harness.want(2, 4, wish)) == []  # it belongs to the transfer now
    harness.give(1, transfer, 0)
    assert told(harness.want(2, 4, wish)) == [StateGiven(wish, transfer, 1, 6, HEAD)]  # the answer was lost
    harness.fetch(2, transfer, 6, 6)
    assert told(harness.want(2, 4, wish)) == [StateGone(wish, Gone.AGAIN)]


def test_an_offer_that_is_withdrawn_gives_the_wish_to_the_next() -> None:
    harness = Passing()
    transfer = harness.pair()
    effects = harness.offer(0, NO_STATE)
    assert [type(message) for message in told(effects)] == [Done]
    assert one(sends(harness.offer(1, 4))).peer == peer(1)
    assert told(harness.give(0, transfer, 0)) == [StateGone(harness._request, Gone.AGAIN)]


# ── nobody has it ──


def test_before_the_first_step_that_of_worker_0_counts() -> None:
    harness = Passing()
    assert told(harness.want(1, 0)) == []
    assert told(harness.want(0, 0)) == []  # worker 2 lives and has said nothing
    effects = harness.want(2, 0)
    first = one(told(effects))
    assert (sends(effects)[0].peer, first.why, first.others) == (peer(0), Gone.FIRST, 2)
    given = one(sends(harness.offer(0, 0)))
    assert given.message.takers == (1, 2)


def test_others_wait_for_the_successor_of_worker_0_before_the_first_step() -> None:
    harness = Passing()
    harness.want(1, 0)
    harness.want(2, 0)
    assert told(harness.look(member("worker", 0, "dead"))) == []
    harness.look(member("worker", 0, life=1))
    harness.attach(0, life=1)
    assert one(told(harness.want(0, 0, life=1))).why is Gone.FIRST


def test_the_first_state_is_lost_once_rounds_may_count_that_were_pushed_for_it() -> None:
    harness = Passing()
    for rank in (0, 1):
        assert told(harness.say(rank, WantState(harness.request(), 0, True))) == []
    effects = harness.look(member("worker", 2, "dead"))
    assert told(effects) == []  # its successor may say that its rank has never pushed
    harness.look(member("worker", 2, life=1))
    harness.attach(2, life=1)
    answers = told(harness.say(2, WantState(harness.request(), 0, True), life=1))
    assert [message.why for message in answers] == [Gone.LOST] * 3

    harness = Passing()
    harness.say(0, WantState(harness.request(), 0, True))
    harness.say(1, WantState(harness.request(), 0, True))
    assert one(told(harness.want(2, 0))).why is Gone.FIRST


def test_worker_0_does_not_wait_for_one_that_takes_no_part_yet() -> None:
    """That one waits for the step of worker 0 which it comes into."""
    harness = Passing(1)
    harness.look(member("worker", 1, "back"))
    message = one(told(harness.want(0, 0)))
    assert (message.why, message.others) == (Gone.FIRST, 0)

    harness = Passing(1)
    harness.look(member("worker", 1, "back"))
    assert told(harness.want(0, 4)) == []  # it may have been late, and have this one


def test_a_run_that_began_with_a_snapshot_waits_for_worker_0() -> None:
    """It is the only one that has the state at first. If it dies, its successor reads the snapshot again."""
    harness = Passing()
    for rank in (1, 2):
        assert told(harness.say(rank, WantState(harness.request(), 4, restored=True))) == []
    assert told(harness.look(member("worker", 0, "dead"))) == []
    harness.look(member("worker", 0, life=1))
    harness.attach(0, life=1)
    message = one(told(harness.say(0, OfferState(harness.request(), 4), life=1)))
    assert isinstance(message, GiveState)
    assert message.takers == (1, 2)

    harness = Passing()
    for rank in (1, 2):
        harness.say(rank, WantState(harness.request(), 4, restored=True))
    answers = told(harness.say(0, WantState(harness.request(), 4, restored=True)))  # it cannot read it any more
    assert [message.why for message in answers] == [Gone.FIRST]


def test_worker_0_takes_the_state_that_others_have_already() -> None:
    harness = Passing()
    harness.offer(1, 0)
    harness.look(member("worker", 0, life=1))
    harness.attach(0, life=1)
    assert isinstance(one(told(harness.want(0, 0, life=1))), GiveState)


@pytest.mark.parametrize(("state", "why"), [("dead", Gone.LOST), ("left", Gone.OVER), ("lost", Gone.LOST)])
def test_all_are_told_when_nobody_can_have_it(state: str, why: Gone) -> None:
    harness = Passing()
    harness.want(1, 4)
    assert told(harness.want(2, 4)) == []
    effects = harness.look(member("worker", 0, state))
    assert [(send.peer, send.message.why) for send in sends(effects)] == [(peer(1), why), (peer(2), why)]
    assert one(told(harness.want(1, 4))).why is why  # the other was told as well, and has not got it since
    harness.offer(2, 4)
    assert isinstance(one(told(harness.want(1, 4))), GiveState)


def test_who_lives_and_says_nothing_may_have_it() -> None:
    harness = Passing()
    harness.want(1, 4)
    harness.want(2, 4)
    assert told(harness.look(member("worker", 0, "done"))) == []  # it waits in the exit barrier
    assert isinstance(one(told(harness.offer(0, 4))), GiveState)


def test_those_who_wait_for_a_state_are_told_for_whom() -> None:
    harness = Passing()
    harness.want(2, 4)
    waits = one(told(harness.say(2, WaitQuery(harness.request()))))
    assert isinstance(waits, Waits)
    assert [absent.rank for absent in waits.waits[0].absent] == [0, 1]
    assert waits.waits[0].key == "the state after 4 steps"


# ── bad input, and bounds ──


def test_what_does_not_fit_is_refused() -> None:
    harness = Passing()
    transfer = harness.pair()
    for part, parts, value in ((9, 6, b"x"), (6, 6, b"x"), (0, 6, bytes((4 << 20) + 1))):
        refused = one(told(harness.give(0, transfer, part, parts, value)))
        assert refused.error is ErrorCode.PROTOCOL_ERROR
    assert told(harness.give(1, transfer, 0)) == [StateGone(harness._request, Gone.AGAIN)]  # it was not asked for it
    harness.give(0, transfer, 0)
    assert one(told(harness.give(0, transfer, 1, 7))).error is ErrorCode.PROTOCOL_ERROR  # another size than before
    for part, have in ((5, 0), (0, 1), (7, 7)):
        assert one(told(harness.fetch(2, transfer, part, have))).error is ErrorCode.PROTOCOL_ERROR
    assert told(harness.fetch(1, transfer, 0)) == [StateGone(harness._request, Gone.AGAIN)]  # it takes no part
    assert told(harness.fetch(2, transfer + 1, 0)) == [StateGone(harness._request, Gone.AGAIN)]


def test_parts_count_against_the_memory_of_the_server() -> None:
    harness = Passing(memory=1 << 20)
    transfer = harness.pair()
    effects = harness.give(0, transfer, 0, 6, bytes(3 << 19))
    refused = one(told(effects, peer(2)))
    assert (refused.error, "no memory to pass on the state" in refused.text) == (ErrorCode.NOT_ALLOWED, True)
    assert [type(message) for message in told(effects, peer(0))] == [StateGone]
    harness.offer(0, 4)
    transfer = one(told(harness.want(2, 4))).transfer
    used = harness.explain()["memory_used_bytes"]
    harness.give(0, transfer, 0, 6, bytes(1 << 19))
    assert harness.explain()["memory_used_bytes"] - used == 1 << 19
    harness.fetch(2, transfer, 6, 6)
    assert harness.explain()["memory_used_bytes"] == used


def test_a_transfer_for_which_there_is_no_memory_makes_room_for_the_next() -> None:
    harness = Passing(4, memory=1 << 20)
    transfer = harness.pair(donor=0, taker=1, made=4)
    harness.offer(2, 5)
    assert told(harness.want(3, 5)) == []
    effects = harness.give(0, transfer, 0, value=bytes(1 << 21))
    assert [type(message) for message in told(effects, peer(1))] == [Refused]
    assert one(told(effects, peer(2))).takers == (3,)


def test_states_are_passed_on_in_synchronous_stores_only() -> None:
    harness = Harness(cluster(mode="async"))
    assert one(told(harness.say(0, WantState(30, 0)))).error is ErrorCode.NOT_ALLOWED


def test_a_worker_without_which_the_rounds_go_on_finds_out_where_they_are() -> None:
    harness = Passing()
    harness.look(member("worker", 2, "back"))
    assert one(told(harness.want(2, 4))).why is Gone.PASSED
    harness.offer(0, 4)
    assert isinstance(one(told(harness.want(2, 4))), GiveState)  # at the end of its loop somebody may still have it
    harness.fetch(2, 0, 0)
    harness.look(member("worker", 2))
    harness.offer(0, NO_STATE)
    harness.want(2, 5)
    effects = harness.look(member("worker", 2, "back"))
    assert [message.why for message in told(effects, peer(2))] == [Gone.PASSED]
