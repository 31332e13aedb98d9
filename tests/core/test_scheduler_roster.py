"""The roster: seats, ranks, and the states of members."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core.machine import CallerPeer
from kvd.core.scheduler.membership import roster as module
from kvd.core.scheduler.membership.roster import AS_PREDECESSOR, LIVING, TRANSITIONS, MemberEvent, Roster, Seat
from kvd.protocol.messages import Join, MemberState
from tests.core.fakes import OPEN, member

ACTIVE, IDLE, DONE, LEFT, DEAD, GONE, LOST, BACK, RETURNING = MemberState
HEARD, LEFT_ROUNDS, LEAVES, DIES, DROPPED, RETURNED, ARRIVED, STEPPED_OUT, IDLED, RELEASED, LATE = MemberEvent

ROWS = [
    (ACTIVE, HEARD, ACTIVE),
    (ACTIVE, LEFT_ROUNDS, DONE),
    (ACTIVE, LEAVES, LEFT),
    (ACTIVE, DIES, DEAD),
    (ACTIVE, DROPPED, LOST),
    (ACTIVE, RETURNED, ACTIVE),
    (ACTIVE, ARRIVED, ACTIVE),
    (ACTIVE, STEPPED_OUT, BACK),
    (ACTIVE, IDLED, IDLE),
    (ACTIVE, LATE, BACK),
    (IDLE, HEARD, IDLE),
    (IDLE, IDLED, IDLE),
    (IDLE, RELEASED, ACTIVE),
    (IDLE, LEFT_ROUNDS, DONE),
    (IDLE, LEAVES, LEFT),
    (IDLE, DIES, DEAD),
    (IDLE, DROPPED, LOST),
    (DONE, HEARD, DONE),
    (DONE, LEFT_ROUNDS, DONE),
    (DONE, LEAVES, LEFT),
    (DONE, DIES, GONE),
    (LEFT, HEARD, LEFT),
    (LEFT, LEFT_ROUNDS, LEFT),
    (LEFT, LEAVES, LEFT),
    (DEAD, HEARD, ACTIVE),
    (DEAD, DROPPED, LOST),
    (GONE, HEARD, DONE),
    (LOST, HEARD, BACK),
    (BACK, HEARD, BACK),
    (BACK, RETURNED, RETURNING),
    (BACK, ARRIVED, BACK),
    (BACK, STEPPED_OUT, BACK),
    (BACK, LEFT_ROUNDS, DONE),
    (BACK, LEAVES, LEFT),
    (BACK, DROPPED, LOST),
    (RETURNING, HEARD, RETURNING),
    (RETURNING, RETURNED, RETURNING),
    (RETURNING, ARRIVED, ACTIVE),
    (RETURNING, STEPPED_OUT, BACK),
    (RETURNING, IDLED, IDLE),
    (RETURNING, LATE, BACK),
    (RETURNING, LEFT_ROUNDS, DONE),
    (RETURNING, LEAVES, LEFT),
    (RETURNING, DROPPED, LOST),
]
OUTSIDE = [
    (state, event) for state in MemberState for event in MemberEvent if (state, event) not in [row[:2] for row in ROWS]
]

PEER, NEW_PEER, NEWER_PEER = CallerPeer(b"peer"), CallerPeer(b"new"), CallerPeer(b"newer")


def seat(state: str = "active", rank: int = 0, role: str = "worker", **more: Any) -> Seat:
    return Seat(member(role, rank, state), "host", 77, **more)


def roster(*states: str, workers: int | None = None) -> Roster:
    """Worker 0, 1, … in these states."""
    size = len(states) if workers is None else workers
    return Roster(1, size, [seat(state, rank) for rank, state in enumerate(states)])


def join(node_id: str = "new", rank: int = -1, role: str = "worker") -> Join:
    return Join(1, role, node_id, "", "host", 78, rank, OPEN)


# ── states ──


@pytest.mark.parametrize(("before", "event", "after"), ROWS)
def test_each_event_leads_to_the_state_in_the_table(before: str, event: MemberEvent, after: str) -> None:
    there = seat(before)
    earlier = there.member
    assert Roster(1, 1, [there]).transition(there, event, "why", 1.5) is (before != after)
    assert there.member.state is after
    if before == after:
        assert there.member is earlier
    else:
        assert (there.member.reason, there.member.last_seen_s) == ("why", 1.5)


@pytest.mark.parametrize(("before", "event"), OUTSIDE)
def test_an_event_outside_the_table_is_refused_and_changes_nothing(before: str, event: MemberEvent) -> None:
    there = seat(before)
    earlier = there.member
    with pytest.raises(ValueError, match=f"worker 0 is {before}, and a member in this state never {event.value}"):
        Roster(1, 1, [there]).transition(there, event)
    assert there.member is earlier


def test_the_table_has_a_row_for_every_state() -> None:
    assert set(TRANSITIONS) == set(AS_PREDECESSOR) == set(MemberState)
    assert [(state, event, after) for state, row in TRANSITIONS.items() for event, after in row.items()] == ROWS


def test_only_the_living_can_die() -> None:
    assert tuple(state for state in MemberState if {DIES, DROPPED} & TRANSITIONS[state].keys() - {DEAD}) == (
        ACTIVE,
        IDLE,
        DONE,
        DEAD,
        BACK,
        RETURNING,
    )
    assert set(LIVING) == {ACTIVE, IDLE, DONE, BACK, RETURNING}
    states = ("active", "done", "left", "dead", "gone", "lost", "back", "idle")
    assert [there.member.rank for there in roster(*states).living()] == [0, 1, 6, 7]


def test_a_reason_is_cut_to_the_length_that_a_view_may_carry() -> None:
    there = seat()
    Roster(1, 1, [there]).transition(there, DIES, "x" * 100)
    assert there.member.reason == "x" * 80


def test_a_dead_member_that_is_heard_is_back_without_the_reason_of_its_death() -> None:
    there = seat("dead")
    assert Roster(1, 1, [there]).heard(there, NEW_PEER)
    assert (there.member.state, there.member.reason, there.peer) == (ACTIVE, "", NEW_PEER)
    assert not Roster(1, 1, [there]).heard(there, NEWER_PEER)
    assert there.peer == NEWER_PEER


def shrinking(*states: str) -> Roster:
    """The same as `roster`, where the rounds go on without the dead."""
    return Roster(1, len(states), [seat(state, rank) for rank, state in enumerate(states)], shrinks=True)


@pytest.mark.parametrize(
    ("states", "may"),
    [
        (("active", "active"), True),
        (("active", "back"), True),
        (("active", "lost"), False),
        (("active", "dead", "gone"), False),
        (("active", "done"), False),  # it pushes no more
        (("active", "left"), False),
        (("active",), False),
    ],
)
def test_a_worker_is_lost_only_if_another_one_can_go_on(states: tuple[str, ...], may: bool) -> None:
    there = shrinking(*states)
    first = next(iter(there.seats()))
    assert there.may_lose(first) is may
    assert not roster(*states).may_lose(first)


@pytest.mark.parametrize(
    ("states", "may"),
    [
        (("active", "active", "active"), True),
        (("dead", "active", "returning"), True),
        (("active", "active", "back"), False),  # it may never come
        (("active", "active", "done"), False),
        (("active", "active", "dead"), False),
    ],
)
def test_with_a_quorum_a_worker_is_lost_if_a_quorum_takes_part_without_it(states: tuple[str, ...], may: bool) -> None:
    there = Roster(1, 3, [seat(state, rank) for rank, state in enumerate(states)], quorum=2)
    assert there.may_lose(next(iter(there.seats()))) is may
    assert there.has_quorum_without([0]) is may
    assert not there.has_quorum_without([0, 1])
    assert not roster(*states).has_quorum_without([])


def test_barriers_do_not_wait_for_the_lost() -> None:
    states = ("active", "done", "left", "dead", "gone", "lost", "back")
    assert shrinking(*states).barrier_ranks() == [0, 1, 3]
    assert roster(*states).barrier_ranks() == [0, 1, 3, 4]


def test_the_successor_of_one_that_was_lost_is_back_and_takes_no_part_yet() -> None:
    there = shrinking("active", "lost")
    taken, replaced = there.take_seat(join("worker-1"), 1, 42, PEER)
    assert (taken.member.state, taken.predecessor) == (BACK, LOST)
    assert replaced is not None
    there.transition(taken, RETURNED)  # and dies before it knows where the rounds are
    again, _ = there.take_seat(join("worker-1"), 1, 43, PEER)
    assert (again.member.state, again.predecessor) == (BACK, LOST)


# ── seats ──


def test_a_node_id_that_is_known_gets_its_rank() -> None:
    assert roster("active", "active", workers=3).rank_for(join("worker-1", rank=2)) == 1


@pytest.mark.parametrize(
    ("states", "wanted", "rank"),
    [
        (["active"], 2, 2),  # free
        (["active", "left"], 1, 1),  # its holder left
        (["active", "dead"], 1, 2),  # its holder may come back
        (["active", "active"], 0, 2),  # taken
        (["active"], 7, 1),  # no such rank
        (["dead", "left", "active"], -1, 1),  # that of one that left before that of a dead one
        (["gone", "active", "dead"], -1, 0),
        (["active", "done", "active"], -1, None),  # every holder lives
    ],
)
def test_a_new_node_gets_the_rank_it_asks_for_or_the_first_free_one(
    states: list[str], wanted: int, rank: int | None
) -> None:
    assert roster(*states, workers=3).rank_for(join(rank=wanted)) == rank


@pytest.mark.parametrize(
    ("state", "told"), [("active", DEAD), ("done", DONE), ("left", LEFT), ("dead", DEAD), ("gone", DONE)]
)
def test_a_successor_is_told_how_its_predecessor_ended(state: str, told: MemberState) -> None:
    there = roster(state)
    before = there.seat_of(5000)
    seat, replaced = there.take_seat(join(), 0, 42, PEER)
    assert replaced is before
    assert (seat.predecessor, seat.member.state, seat.member.incarnation, seat.peer) == (told, ACTIVE, 42, PEER)
    assert (there.seat_of(42), there.seat_of(5000)) == (seat, None)
    assert (there.lost_place(5000), there.lost_place(42)) == ("worker 0", None)


def test_the_first_holder_of_a_rank_has_no_predecessor() -> None:
    seat, replaced = Roster(1, 1).take_seat(join(), 0, 42, PEER)
    assert (seat.predecessor, replaced) == (None, None)


def test_the_oldest_replaced_incarnations_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REPLACED", 2)
    there = Roster(1, 1)
    for incarnation in (1, 2, 3, 4):
        there.take_seat(join(), 0, incarnation, PEER)
    assert there.replaced() == [(2, "worker 0"), (3, "worker 0")]


def test_the_places_that_nobody_took_are_missing() -> None:
    there = Roster(2, 2, [seat(rank=1), seat(role="server")])
    assert there.missing() == ["server 1", "worker 0"]
    assert there.has_seat("worker", 1)
    assert not there.has_seat("worker", 0)


def test_seats_beyond_the_cluster_s_size_are_dropped() -> None:
    assert [there.name for there in Roster(1, 1, [seat(rank=1), seat(rank=0)]).seats()] == ["worker 0"]


def test_barriers_wait_for_all_workers_that_have_not_left() -> None:
    there = roster("active", "done", "left", "dead", "gone", workers=6)
    assert there.barrier_ranks() == [0, 1, 3, 4, 5]
    assert there.dead_ranks() == [3, 4]
