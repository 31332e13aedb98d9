"""Liveness: which nodes are declared dead for their silence, and when."""

from __future__ import annotations

import pytest

from kvd.core.scheduler.membership.liveness import Liveness
from kvd.core.scheduler.membership.roster import MemberEvent, Roster, Seat
from kvd.core.scheduler.placement.partitions import Entry, Holder, Partitions
from kvd.protocol.messages import MAX_QUIET, NO_VIEW, Quiet
from tests.core.fakes import member

INTERVAL_S, SERVER_TIMEOUT_S, WORKER_TIMEOUT_S = 1.0, 5.0, 20.0


def seated() -> tuple[Roster, Liveness, Seat, Seat]:
    """A server and a worker that were heard at 0."""
    server, worker = Seat(member("server", 0), "host", 1), Seat(member("worker", 0), "host", 2)
    roster = Roster(1, 1, [server, worker])
    return roster, Liveness(roster, Partitions(0), INTERVAL_S, SERVER_TIMEOUT_S, WORKER_TIMEOUT_S, 0.0), server, worker


def test_each_role_has_its_own_timeout() -> None:
    _, liveness, server, worker = seated()
    assert liveness.next_deadline() == SERVER_TIMEOUT_S
    assert liveness.overdue(4.99) == []
    assert liveness.overdue(5.0) == [(server, "no heartbeat for 5 s")]
    assert liveness.overdue(20.0) == [(server, "no heartbeat for 5 s"), (worker, "no heartbeat for 20 s")]


def test_a_deadline_is_met_at_its_very_time_whatever_the_rounding() -> None:
    _, liveness, server, _ = seated()
    for tenths in range(1, 100):
        liveness.heard(server, tenths / 10)
        deadline = liveness.next_deadline()
        assert deadline is not None
        assert [seat for seat, _ in liveness.overdue(deadline)] == [server]


def test_a_member_that_is_heard_has_a_full_timeout_again() -> None:
    _, liveness, server, _ = seated()
    liveness.heard(server, 3.0)
    assert liveness.next_deadline() == 8.0
    assert liveness.overdue(7.9) == []
    assert liveness.silence_s(server, 3.5) == 0.5


@pytest.mark.parametrize("event", [MemberEvent.LEFT, MemberEvent.DECLARED_DEAD])
def test_only_the_living_are_judged(event: MemberEvent) -> None:
    roster, liveness, server, worker = seated()
    roster.transition(server, event)
    assert liveness.next_deadline() == WORKER_TIMEOUT_S
    assert liveness.quiet(10.0) == (Quiet("worker", 0, 10.0),)
    roster.transition(worker, event)
    assert liveness.next_deadline() is None
    assert liveness.overdue(100.0) == []


def test_the_end_of_a_process_is_the_reason_of_its_death() -> None:
    _, liveness, _, worker = seated()
    assert liveness.known_end(worker) == ""
    assert liveness.process_ended(worker, "exit 9", 15.0) == 5.0
    assert liveness.process_ended(worker, "exit 9", 30.0) == 0.0
    assert liveness.known_end(worker) == "exit 9"
    assert (worker, "exit 9") in liveness.overdue(20.0)


def test_a_successor_starts_without_the_past_of_its_predecessor() -> None:
    _, liveness, _, worker = seated()
    liveness.process_ended(worker, "exit 9", 15.0)
    liveness.joined(worker, 16.0)
    assert (liveness.known_end(worker), liveness.silence_s(worker, 17.0)) == ("", 1.0)


def test_a_member_is_quiet_after_two_missed_heartbeats() -> None:
    _, liveness, server, _ = seated()
    liveness.heard(server, 1.0)
    assert liveness.quiet(2.0) == ()
    assert liveness.quiet(2.25) == (Quiet("worker", 0, 2.25),)


@pytest.mark.parametrize(
    ("steps", "forgives"),
    [
        ([60.0], True),  # nothing ran for a minute, and a deadline passed meanwhile
        ([5.0], False),  # woken at the deadline: nothing happened before, which is no pause
        ([5.1], False),  # late by a tenth of a heartbeat interval
        ([5.2], True),
        ([4.0], False),  # no deadline passed
        ([4.5, 6.1], False),  # it ran meanwhile
    ],
)
def test_a_scheduler_that_was_paused_forgives_silence(steps: list[float], forgives: bool) -> None:
    _, liveness, _, _ = seated()
    assert [liveness.forgive_after_pause(now) for now in steps][-1] is forgives
    assert (liveness.overdue(steps[-1]) == []) is (forgives or steps[-1] < SERVER_TIMEOUT_S)


def test_an_empty_cluster_has_nobody_to_forgive() -> None:
    assert not Liveness(Roster(1, 1), Partitions(0), 1.0, 5.0, 20.0, 0.0).forgive_after_pause(60.0)


def test_a_server_that_is_alone_is_spared_until_it_is_heard() -> None:
    server, worker = Seat(member("server", 0), "host", 1), Seat(member("worker", 0), "host", 2)
    roster = Roster(1, 1, [server, worker])
    partitions = Partitions(1)
    alone = Holder(0, server.member.incarnation)
    partitions.restore([(Entry(alone, None, None, alone.incarnation), NO_VIEW)])
    liveness = Liveness(roster, partitions, INTERVAL_S, SERVER_TIMEOUT_S, WORKER_TIMEOUT_S, 0.0)
    assert [seat for seat, _ in liveness.overdue(5.0)] == [server]
    assert liveness.spare(server)
    assert (liveness.overdue(6.0), liveness.next_deadline()) == ([], WORKER_TIMEOUT_S)
    assert [seat for seat, _ in liveness.overdue(20.0)] == [worker]
    assert not liveness.spare(worker)
    liveness.heard(server, 7.0)
    assert liveness.next_deadline() == 12.0
    assert [seat for seat, _ in liveness.overdue(12.0)] == [server]
    liveness.process_ended(server, "its process 7 ended", 12.0)
    assert not liveness.spare(server)
    assert liveness.overdue(12.0) == [(server, "its process 7 ended")]


def crowd(count: int) -> tuple[list[Seat], Liveness]:
    """Workers that were heard one after the other, the last one first."""
    seats = [Seat(member("worker", rank), "host", rank) for rank in range(count)]
    liveness = Liveness(Roster(0, count, seats), Partitions(0), INTERVAL_S, SERVER_TIMEOUT_S, WORKER_TIMEOUT_S, 0.0)
    for number, seat in enumerate(reversed(seats)):
        liveness.heard(seat, number / 1000)
    return seats, liveness


@pytest.mark.parametrize(
    ("count", "server_s", "worker_s"), [(2, 1.0, 1.0), (600, 1.2, 1.2), (1000, 1.25, 2.0), (4000, 1.25, 5.0)]
)
def test_the_more_members_there_are_the_less_often_they_say_that_they_live(
    count: int, server_s: float, worker_s: float
) -> None:
    """And at least four times within the timeout."""
    _, liveness = crowd(count)
    assert liveness.interval_s("server") == pytest.approx(server_s)
    assert liveness.interval_s("worker") == pytest.approx(worker_s)
    assert liveness.next_deadline() == WORKER_TIMEOUT_S  # which the number does not change


def test_of_many_quiet_nodes_those_are_told_that_were_silent_the_longest() -> None:
    seats, liveness = crowd(100)
    quiet = liveness.quiet(10.0)
    assert [entry.rank for entry in quiet] == [seat.member.rank for seat in reversed(seats)][:MAX_QUIET]
    assert quiet[0].age_s == 10.0


def test_who_was_heard_last_is_judged_last_also_if_others_are_gone() -> None:
    seats, liveness = crowd(3)
    roster = liveness._roster
    roster.transition(seats[2], MemberEvent.LEFT)
    assert liveness.next_deadline() == pytest.approx(WORKER_TIMEOUT_S + 0.001)
    liveness.heard(seats[1], 7.0)
    assert [seat for seat, _ in liveness.overdue(WORKER_TIMEOUT_S + 0.1)] == [seats[0]]
    liveness.heard(seats[0], 8.0)
    assert liveness.next_deadline() == 7.0 + WORKER_TIMEOUT_S
