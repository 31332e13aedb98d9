"""The server: rounds that a quorum is in, and that wait for others, are told to the scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core.machine import Effect, Send, Tick
from kvd.core.server.late import RETRY_S
from kvd.protocol.messages import ABSENT, ASSIGN, Activate, Done, Late, Uncounted
from tests.core.fakes import cluster, member, of, said, uint8, worker_id
from tests.core.server_harness import Harness, kinds

GRACE_S = 5.0


def ready(workers: int = 3, quorum: int = 2, *keys: str, **more: Any) -> Harness:
    harness = Harness(cluster(workers, quorum=quorum, quorum_grace_s=GRACE_S), workers=workers, **more)
    for key in ("w", *keys):
        harness.init(key, b"\0")
    return harness


def late(effects: list[Effect]) -> list[tuple[int, ...]]:
    """Of whom the scheduler is told that they are late."""
    return [send.message.ranks for send in of(Send, effects) if isinstance(send.message, Late)]


def after(harness: Harness, seconds: float) -> list[tuple[int, ...]]:
    """Of whom the scheduler is told while so much time passes."""
    told: list[tuple[int, ...]] = []
    end = harness.now + seconds
    while (deadline := harness.machine._pushes.late.next_deadline()) is not None and deadline <= end:
        harness.now = max(harness.now, deadline)
        told += late(harness.step(Tick()))
    harness.now = end
    return list(dict.fromkeys(told))


def after_a_pause(harness: Harness, seconds: float) -> list[tuple[int, ...]]:
    """Of whom the scheduler is told by a server that was stopped for so long."""
    harness.now += seconds
    return late(harness.step(Tick()))


def test_after_the_time_of_grace_the_scheduler_is_told_again_and_again() -> None:
    harness = ready()
    harness.push(0, 1)
    assert after(harness, 100.0) == []  # one is no quorum
    harness.push(1, 1)
    assert harness.machine.next_deadline() is not None
    assert after(harness, GRACE_S - 0.1) == []
    assert after(harness, 0.1) == [(2,)]
    assert after(harness, RETRY_S - 0.1) == []
    assert after(harness, 0.1) == [(2,)]
    effects = harness.look(member("worker", 2, "back"))
    assert harness.value("w") == b"\2"
    assert late(effects) == []
    assert after(harness, 100.0) == []
    harness.push(0, 2)
    harness.push(1, 2)
    assert harness.value("w") == b"\2"
    assert after(harness, 100.0) == []


def test_who_comes_within_the_time_of_grace_is_in_the_round() -> None:
    harness = ready()
    harness.push(0, 1)
    harness.push(1, 1)
    assert after(harness, GRACE_S / 2) == []
    harness.push(2, 1)
    assert harness.value("w") == b"\3"
    harness.push(0, 2)
    harness.now += GRACE_S / 4
    harness.push(1, 2)  # this round has its own time
    assert after(harness, GRACE_S - 0.1) == []
    assert after(harness, 0.1) == [(2,)]


def test_a_server_that_was_paused_reads_what_has_come_before_it_calls_anyone_late() -> None:
    harness = ready()
    harness.push(0, 1)
    harness.push(1, 1)
    assert after_a_pause(harness, GRACE_S * 3) == []
    harness.push(2, 1)
    assert harness.value("w") == b"\3"
    assert after(harness, GRACE_S) == []
    harness.push(0, 2)
    harness.push(1, 2)
    assert after_a_pause(harness, GRACE_S * 3) == []
    assert after_a_pause(harness, GRACE_S * 3) == [(2,)]  # it is slow for good, and looks all the same


def test_rounds_that_wait_for_others_are_told_by_themselves() -> None:
    """The scheduler may find some of them late and not the others."""
    harness = ready(2, 1, "v")
    harness.push(0, 1)
    harness.push(1, 1, key="v")
    assert after(harness, GRACE_S) == [(1,), (0,)]


def test_rounds_that_wait_for_the_same_are_told_once() -> None:
    harness = ready(3, 2, "v", "u")
    for key in ("w", "v", "u"):
        harness.push(0, 1, key=key)
        harness.push(2, 1, key=key)
    assert after(harness, GRACE_S) == [(1,)]


def test_a_worker_that_is_back_has_its_own_time_of_grace() -> None:
    """The round that it is to be in has waited before it came."""
    harness = ready(4, 2)
    harness.look(member("worker", 2, "back"))
    harness.push(0, 1)
    harness.push(1, 1)
    assert after(harness, GRACE_S) == [(3,)]
    harness.look(member("worker", 2, "returning"))
    assert after(harness, GRACE_S - 0.1) == [(3,)]
    assert after(harness, RETRY_S) == [(2, 3)]


def test_who_came_in_after_a_round_waits_for_it_as_those_do_who_are_in_it() -> None:
    """Worker 0 is in round 1, and worker 2 came back into round 2: neither has a quorum, and both wait for worker 1."""
    harness = ready()
    harness.look(member("worker", 2, "back"))
    harness.push(0, 1)
    assert after(harness, 10 * GRACE_S) == []
    harness.look(member("worker", 2, "returning"))
    harness.say(2, Activate(harness.request(), "w", 1))
    harness.push(2, 2)
    assert after(harness, GRACE_S - 0.1) == []
    assert after(harness, 0.1) == [(1,)]
    harness.look(member("worker", 1, "back"))
    assert harness.value("w") == b"\1"


def test_a_round_that_was_complete_waits_for_a_worker_that_comes_back() -> None:
    """While a round is applied the next one may be complete, and then be incomplete for a view: nobody pushes again."""
    harness = ready()
    harness.look(member("worker", 2, "back"))
    harness.hold = True
    for clock in (1, 2):
        for rank in (0, 1):
            harness.push(rank, clock)
    harness.look(member("worker", 2, "returning"))
    harness.hold = False
    harness.finish(harness.jobs[0])
    assert harness.value("w") == b"\2"
    assert after(harness, GRACE_S) == [(2,)]


@pytest.mark.parametrize(("first", "second"), [(ASSIGN, ABSENT), (ABSENT, ABSENT)])
def test_a_broadcast_waits_for_all(first: int, second: int) -> None:
    """Without worker 0 it would have no value."""
    harness = ready()
    for rank, how in ((1, first), (2, second)):
        harness.push(rank, 1, None if how == ABSENT else b"\1", how=how)
    assert after(harness, 100 * GRACE_S) == []


def test_what_a_late_worker_had_staged_counts_in_no_round() -> None:
    harness = ready(3, 1)
    harness.push(0, 1)
    pushed = harness.push(1, 1)
    assert kinds(pushed, worker_id(1)) == ["Staged"]
    effects = harness.look(member("worker", 1, "back"), member("worker", 2, "back"))
    assert harness.value("w") == b"\1"
    assert isinstance(said(effects, worker_id(1))[-1], Uncounted)
    assert isinstance(said(effects, worker_id(0))[-1], Done)
    assert late(harness.push(1, 2)) == []


def test_slices_that_are_parted_are_not_forgotten() -> None:
    harness = ready(3, 2, "v")
    harness.declare(0, 1, "w", "v")
    harness.declare(1, 1, "w", "v")
    harness.push_batch(0, 1, b"\1", b"\1")
    harness.push_batch(1, 1, b"\1", b"\1")
    harness.now += GRACE_S - 0.1
    harness.push(2, 1, key="w")  # from now on the two go alone
    assert len(harness.groups) == 2
    assert after(harness, 0.1) == []
    assert after(harness, GRACE_S) == [(2,)]  # for the other one


def test_without_a_quorum_nothing_is_noted() -> None:
    harness = Harness(cluster(3), workers=3)
    harness.init("w", b"\0", uint8(1))
    harness.push(0, 1)
    harness.push(1, 1)
    assert after(harness, 1e6) == []
    assert not harness.machine._pushes.late.is_on
