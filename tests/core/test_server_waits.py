"""What a server tells a worker whose calls wait: which requests wait for nothing but other workers, and for whom."""

from __future__ import annotations

from typing import Any

from kvd.errors import NotAllowed
from kvd.protocol.codec import encode
from kvd.protocol.messages import MAX_HELD, MAX_WAITS, Absent, Delete, Epoch, KeyId, Lookup, Wait, WaitQuery, Waits
from tests.core.fakes import cluster, member, said, worker_id
from tests.core.server_harness import Harness, kinds, ready, together


def waits(harness: Harness, rank: int, life: int = 0) -> Any:
    (answer,) = said(harness.say(rank, WaitQuery(harness.request()), life=life))
    assert isinstance(answer, Waits)
    return answer


def test_a_push_waits_for_the_worker_that_has_not_pushed() -> None:
    harness = ready(settings=cluster(3), workers=3)
    for clock in (1, 2):
        for rank in range(3):
            harness.push(rank, clock)
    harness.push(0, 3, request=700)
    answer = waits(harness, 0)
    assert answer.held == (700,)
    assert answer.waits == (Wait(700, "w", 3, (Absent(1, 2), Absent(2, 2))),)
    assert answer.is_all
    harness.push(1, 3)
    assert waits(harness, 0).waits[0].absent == (Absent(2, 2),)
    assert waits(harness, 2).held == ()


def test_a_pull_that_is_ahead_waits_for_others_too() -> None:
    harness = ready()
    harness.push(0, 1, request=700)
    harness.pull(0, 1, request=701)
    assert waits(harness, 0).held == (700, 701)


def test_a_request_that_is_being_worked_on_waits_for_nobody() -> None:
    harness = ready()
    harness.hold = True
    harness.push(0, 1, request=700)
    harness.push(1, 1)
    assert harness.jobs
    assert waits(harness, 0).held == ()
    harness.push(0, 2, request=710)  # it waits for worker 1, but the update before it may fail, and take it along
    assert waits(harness, 0).held == ()
    harness.finish(harness.jobs[0])
    assert waits(harness, 0).held == (710,)


def test_a_request_of_which_a_part_is_worked_on_waits_for_nobody_yet() -> None:
    harness = ready()
    harness.init("v", b"\0")
    harness.hold = True
    harness.push(1, 1, key="v")
    harness.push_all(0, [("w", 0, 1), ("v", 0, 1)], [b"\1", b"\1"])
    assert waits(harness, 0).held == ()
    harness.finish(harness.jobs[0])
    (wait,) = waits(harness, 0).waits
    assert (wait.key, wait.absent) == ("w", (Absent(1, 0),))


def test_a_worker_does_not_wait_for_itself() -> None:
    harness = ready()
    harness.push(1, 1)
    harness.pull(0, 1, request=700)  # its own push is still on its way
    assert waits(harness, 0).held == ()


def test_a_fused_group_is_one_wait() -> None:
    harness = together("a", "b", "c")
    harness.push_batch(0, 2, b"\1", b"\1", b"\1", request=700)
    (wait,) = waits(harness, 0).waits
    assert wait == Wait(700, "a", 2, (Absent(1, 1),))


def test_with_bounded_staleness_it_waits_for_the_slowest() -> None:
    harness = ready(settings=cluster(3, mode="async", staleness=1), workers=3)
    harness.push(1, 1)
    harness.push(0, 1)
    assert waits(harness, 0).held == ()
    harness.push(0, 2, request=700)
    (wait,) = waits(harness, 0).waits
    assert wait.absent == (Absent(2, 0),)


def test_without_a_bound_nothing_waits() -> None:
    harness = ready(settings=cluster(2, mode="async"))
    harness.hold = True
    harness.push(0, 1)
    assert waits(harness, 0).held == ()


def test_a_worker_that_left_the_rounds_is_not_waited_for() -> None:
    harness = ready(settings=cluster(3), workers=3)
    harness.look(member("worker", 2, "done"))
    harness.push(0, 1)
    assert waits(harness, 0).waits[0].absent == (Absent(1, 0),)


def test_a_look_up_waits_for_worker_0() -> None:
    harness = Harness()
    harness.say(1, Lookup(700, ("new",), True))
    assert waits(harness, 1).waits == (Wait(700, "new", 0, (Absent(0, 0),)),)
    harness.init("new", b"\0")
    assert waits(harness, 1).held == ()


def test_a_deletion_waits_for_those_who_have_not_deleted_the_key() -> None:
    harness = ready(settings=cluster(3), workers=3)
    for rank in (0, 2):
        harness.say(rank, Delete(700, (KeyId("w", 0),)))
    assert waits(harness, 0).waits == (Wait(700, "w", 1, (Absent(1, 0),)),)
    assert waits(harness, 1).held == ()
    harness.say(1, Delete(700, (KeyId("w", 0),)))
    assert waits(harness, 0).held == ()


def test_a_deletion_that_waits_for_an_update_waits_for_nobody() -> None:
    harness = ready()
    harness.hold = True
    for rank in (0, 1):
        harness.push(rank, 1)
    for rank in (0, 1):
        harness.say(rank, Delete(700, (KeyId("w", 0),)))
    assert harness.jobs
    assert waits(harness, 0).held == ()


def test_a_refused_push_waits_no_more() -> None:
    harness = ready()
    harness.push(0, 1)
    harness.error = NotAllowed("no")
    assert "Refused" in kinds(harness.push(1, 1))
    assert waits(harness, 0).held == ()


def test_a_stranger_and_a_replaced_worker_wait_for_nothing() -> None:
    harness = ready()
    harness.push(0, 1)
    harness.look(member("worker", 0, life=1))
    harness.attach(0, life=1)
    assert waits(harness, 0, life=1).held == ()
    assert waits(harness, 0).held == ()


def test_many_waits_are_bounded_and_the_oldest_come_first() -> None:
    harness = ready()
    with harness.validated_once():
        for number in range(MAX_HELD + 10):
            harness.pull(0, 1, request=1000 + number)
    harness.push(0, 1, request=9000)
    answer = waits(harness, 0)
    assert answer.held == tuple(range(1000, 1000 + MAX_HELD))
    assert [wait.request for wait in answer.waits] == list(range(1000, 1000 + MAX_WAITS))
    assert not answer.is_all


def test_long_names_leave_room_in_the_header() -> None:
    harness = Harness(settings=cluster(2))
    with harness.validated_once():
        for number in range(MAX_WAITS):
            name = f"{number:03d}" + "\U0010ffff" * 197
            harness.init(name, b"\0")
            harness.push(0, 1, key=name)
        for number in range(MAX_HELD):
            harness.pull(0, 1, key=name, request=(1 << 61) + number)
    answer = waits(harness, 0)
    assert len(answer.held) == MAX_HELD
    assert 1 <= len(answer.waits) < MAX_WAITS
    encode(answer, worker_id(0), Epoch(1, 1))
