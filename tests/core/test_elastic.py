"""Workers that join when the job is under way: their seats, what they are told, who waits for them, what they set."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvd.core.machine import CallerPeer
from kvd.core.membership import ViewState
from kvd.core.places import PlaceKind, place_of
from kvd.core.scheduler.barriers.barriers import Barriers, Entrant
from kvd.core.scheduler.membership.roster import MemberEvent, Roster, Seat
from kvd.core.server.optimizer_agreement import OptimizerAgreement
from kvd.core.server.participants import Participants
from kvd.errors import NotAllowed
from kvd.optimizer import SGD
from kvd.protocol.messages import (
    Departure,
    Done,
    Enter,
    Epoch,
    ErrorCode,
    Heartbeat,
    Join,
    Leave,
    MemberState,
    Refused,
    Settings,
    TakePart,
    Taking,
    View,
    Welcome,
)
from tests.core.fakes import OPEN, cluster, member, said, server_id, worker_id
from tests.core.scheduler_harness import Harness, answer

PEER = CallerPeer(b"peer")
ACTIVE, LEFT, DEAD, LOST, BACK = (MemberState(name) for name in ("active", "left", "dead", "lost", "back"))


def roster(*states: str, needed: int = 2, most: int = 5) -> Roster:
    """Worker 0, 1, … in these states; one that is "-" has not come."""
    seats = [Seat(member("worker", rank, state), "host", 77) for rank, state in enumerate(states) if state != "-"]
    return Roster(1, needed, seats, most_workers=most)


def join(node_id: str = "new", rank: int = -1) -> Join:
    return Join(1, "worker", node_id, "", "host", 78, rank, OPEN)


# ── seats ──


@pytest.mark.parametrize(
    ("states", "wanted", "rank"),
    [
        ((), 4, 0),  # those that the job needs come first
        (("active",), -1, 1),
        (("-", "active"), 3, 0),
        (("active", "active"), -1, 2),
        (("active", "active"), 3, 3),
        (("active", "active"), 9, 2),  # no such rank
        (("left", "active", "active"), -1, 0),  # a seat of one that left is free again
        (("active", "dead", "left", "active"), -1, 2),
        (("active", "dead", "active", "active"), -1, 4),  # a dead one may come back
        (("active", "dead", "active", "active", "lost"), -1, 1),
        (("active", "done", "active", "back", "returning"), -1, None),
    ],
)
def test_a_newcomer_gets_a_seat_that_nobody_has(states: tuple[str, ...], wanted: int, rank: int | None) -> None:
    assert roster(*states).rank_for(join(rank=wanted)) == rank


def test_a_process_that_had_its_rank_gets_it_back_before_all_others_are_there() -> None:
    assert roster().rank_for(join(rank=3), had_it=True) == 3


@pytest.mark.parametrize(
    ("states", "rank", "state", "told"),
    [
        (("active",), 1, ACTIVE, None),  # the job waits for it
        (("active", "active"), 2, BACK, BACK),
        (("left", "active"), 0, BACK, BACK),
        (("active", "done"), 1, BACK, BACK),
        (("active", "dead"), 1, ACTIVE, DEAD),  # the rounds wait for its place
        (("active", "active", "active"), 2, ACTIVE, DEAD),  # it replaces one that takes part
        (("active", "active", "lost"), 2, BACK, LOST),
        (("active", "active", "back"), 2, BACK, LOST),
        (("active",), 3, BACK, BACK),  # it had the rank before the scheduler lost its record
    ],
)
def test_who_comes_when_the_job_is_under_way_takes_no_part_yet(
    states: tuple[str, ...], rank: int, state: MemberState, told: MemberState | None
) -> None:
    seat, _ = roster(*states).take_seat(join(), rank, 42, PEER)
    assert (seat.member.state, seat.told_predecessor) == (state, told)


def test_a_successor_takes_part_from_where_its_predecessor_came_in() -> None:
    there = roster("active", "active", "active")
    for came_in, told in ((0, 0), (28, 28)):
        seat = next(seat for seat in there.seats() if seat.place == ("worker", 2))
        seat.came_in = came_in
        assert there.take_seat(join(), 2, 40 + came_in, PEER)[0].came_in == told
    there.transition(seat := there.take_seat(join(), 2, 90, PEER)[0], MemberEvent.LEFT)
    assert (seat.came_in, there.take_seat(join(), 2, 91, PEER)[0].came_in) == (28, 0)


def test_without_max_workers_a_place_that_was_left_is_taken_as_ever() -> None:
    seat, _ = roster("left", "active", most=0).take_seat(join(), 0, 42, PEER)
    assert (seat.member.state, seat.told_predecessor) == (ACTIVE, LEFT)


def test_only_the_workers_that_the_job_needs_are_missing_or_awaited_before_they_come() -> None:
    there = roster("active")
    assert there.missing() == ["server 0", "worker 1"]
    assert there.barrier_ranks() == [0, 1]
    assert roster("active", "active", "back", "active", "returning").barrier_ranks() == [0, 1, 3, 4]
    assert roster("left", "active", "active").barrier_ranks() == [1, 2]


# ── barriers ──


def test_a_barrier_waits_for_nobody_who_came_in_at_a_later_place() -> None:
    step_3, step_4 = place_of(PlaceKind.STEP, 3), place_of(PlaceKind.STEP, 4)
    came_in = {2: place_of(PlaceKind.OUTSIDE, 4)}
    for place, is_awaited in ((step_3, False), (step_4, True), (0, True)):
        barriers = Barriers()
        for rank in (0, 1):
            barriers.enter("b", 0, Entrant(rank, 10 + rank, PEER, 1, place))
        assert barriers.missing([0, 1, 2], came_in) == {"b": [2] if is_awaited else []}
        assert bool(barriers.settle([0, 1, 2], [], came_in)) is not is_awaited


# ── the scheduler ──


def running(**more: Any) -> Harness:
    """Two workers are there, and four may be."""
    harness = Harness(cluster(workers=2, max_workers=4, mode="sync", merge=""), **more)
    harness.join("server", server_id(0), "server-0")
    for rank in range(2):
        harness.worker(rank)
    return harness


def test_a_newcomer_is_told_that_the_rounds_go_on_without_it_until_it_takes_part() -> None:
    harness = running()
    assert answer(harness.worker(2), Welcome) == Welcome(1, 2, BACK)
    assert answer(harness.worker(2), Welcome) == Welcome(1, 2, BACK)  # the answer was lost
    assert harness.states()["worker 2"] == "back"
    assert Done(5) in said(harness.say(worker_id(2), TakePart(5, Taking.IN)))
    assert harness.states()["worker 2"] == "returning"
    harness.say(worker_id(2), TakePart(6, Taking.ARRIVED, place_of(PlaceKind.OUTSIDE, 7)))
    assert harness.states()["worker 2"] == "active"


def test_what_it_said_earlier_and_comes_late_changes_nothing() -> None:
    harness = running()
    harness.worker(2)
    harness.say(worker_id(2), TakePart(7, Taking.IN))
    assert Done(6) in said(harness.say(worker_id(2), TakePart(6, Taking.OUT)))  # sent before, and overtaken
    assert harness.states()["worker 2"] == "returning"


def test_one_that_gives_up_joining_leaves_its_seat_as_it_was() -> None:
    harness = running()
    harness.worker(2)
    harness.say(worker_id(2), Leave(5, Departure.WITHDRAWN))
    assert "worker 2" not in harness.states()
    harness.say(worker_id(1), Leave(5, Departure.LEFT))
    harness.join("worker", worker_id(3), "another", rank=1)
    assert harness.states()["worker 1"] == "back"
    harness.say(worker_id(3), Leave(6, Departure.WITHDRAWN))
    assert harness.states()["worker 1"] == "left"


def test_a_worker_too_many_is_told_of_max_workers() -> None:
    harness = running()
    for rank in (2, 3):
        harness.worker(rank)
    refused = answer(harness.worker(4), Refused)
    assert refused.error is ErrorCode.NOT_ALLOWED
    assert "all 4 workers are there" in refused.text
    assert "--max-workers" in refused.text


def test_in_async_mode_a_newcomer_takes_part_at_once() -> None:
    harness = Harness(cluster(workers=1, max_workers=2, mode="async", merge=""))
    harness.join("server", server_id(0), "server-0")
    harness.worker(0)
    assert answer(harness.worker(1), Welcome) == Welcome(1, 1, None)
    assert harness.states()["worker 1"] == "active"


def test_a_restarted_scheduler_knows_who_came_in_where() -> None:
    harness = running()
    harness.worker(2)
    harness.worker(3)
    harness.say(worker_id(2), TakePart(5, Taking.IN))
    harness.say(worker_id(2), TakePart(6, Taking.ARRIVED, place_of(PlaceKind.OUTSIDE, 7)))
    again = Harness(
        cluster(workers=2, max_workers=4, mode="sync", merge=""),
        saved=json.loads(json.dumps(harness.disk)),
        generation=2,
    )
    again.say(server_id(0), Heartbeat("server", 0), view=harness.machine.epoch)
    assert answer(again.worker(3), Welcome) == Welcome(1, 3, BACK)
    assert answer(again.worker(2), Welcome) == Welcome(1, 2, None)  # it has taken part
    place = place_of(PlaceKind.STEP, 6)
    again.say(worker_id(0), Enter(7, "user 1.6:b", 0, place))
    assert Done(7) in said(again.say(worker_id(1), Enter(7, "user 1.6:b", 0, place)))
    again.say(worker_id(0), Enter(8, "user:b", 0))
    assert Done(8) not in said(again.say(worker_id(1), Enter(8, "user:b", 0)))


def test_a_scheduler_without_its_record_takes_a_worker_back_that_came_late() -> None:
    """It takes no part until it says so: the rounds may have gone on without it."""
    harness = Harness(cluster(workers=2, max_workers=4, mode="sync", merge=""), generation=2)
    harness.join("server", server_id(0), "server-0")
    who = Join(1, "worker", "worker-3", "", "host", 78, 3, OPEN)
    assert answer(harness.say(worker_id(3), who, view=(1, 9)), Welcome) == Welcome(1, 3, BACK)


# ── who takes part ──


def view_of(*states: str, settings: Settings) -> ViewState:
    view = ViewState()
    members = tuple(member("worker", rank, state) for rank, state in enumerate(states) if state != "-")
    view.update(Epoch(1, 1), View(settings, members, ()))
    return view


def test_the_ranks_that_take_part_are_those_that_rounds_wait_for() -> None:
    view = view_of("active", "-", "back", "returning", "left", "dead", settings=cluster(workers=2, max_workers=8))
    assert view.required_ranks() == [0, 1, 3, 5]  # worker 1 has yet to come
    assert view.ranks_taking_part() == [0, 1, 3, 5]
    assert view.missing_workers() == [1]
    assert view.all_worker_ranks() == [0, 1, 2, 3, 4, 5]


def test_without_max_workers_those_that_have_left_still_count_as_workers_of_the_job() -> None:
    view = view_of("active", "left", "lost", settings=cluster(workers=3))
    assert view.ranks_taking_part() == [0, 1]
    assert view.required_ranks() == [0]


def test_a_server_counts_no_push_of_a_rank_that_its_view_does_not_know() -> None:
    participants = Participants(None, fail_on_loss=False)  # type: ignore[arg-type]
    participants.update(view_of("active", "active", settings=cluster(workers=2, max_workers=4)))
    assert [participants.leaves_out(rank) for rank in (0, 1, 2)] == [False, False, True]


def test_a_bounded_staleness_waits_for_no_newcomer_until_it_has_caught_up() -> None:
    settings = cluster(workers=2, max_workers=4, mode="async", staleness=1)
    participants = Participants(None, fail_on_loss=False)  # type: ignore[arg-type]
    participants.update(view_of("active", "active", settings=settings))
    participants.update(view_of("active", "active", "active", settings=settings))
    assert (participants.required, participants.awaited) == ([0, 1, 2], [0, 1])


# ── what it sets ──


def test_a_newcomer_sets_what_the_others_have_set_and_changes_nothing() -> None:
    agreement = OptimizerAgreement()
    assert not agreement.set_apart(2, 300, SGD(1.0))  # nobody has set one
    for rank in (0, 1):
        agreement.set(rank, 100 * rank, SGD(1.0))
    for rank in (0, 1):
        agreement.set(rank, 100 * rank, SGD(2.0))
    assert agreement.set_apart(2, 300, SGD(1.0))
    with pytest.raises(NotAllowed, match="worker 2 sets"):
        agreement.set_apart(2, 300, SGD(3.0))
    assert not agreement.dispute
    agreement.comes_in(2)  # in a round of the later optimizer
    assert not agreement.late(2)
    agreement.validate()


def test_a_worker_that_sets_none_takes_part_in_no_agreement() -> None:
    agreement = OptimizerAgreement()
    agreement.set(0, 100, SGD(1.0))
    agreement.comes_in(2)
    agreement.set(0, 100, SGD(2.0))
    assert not agreement.late(2)
