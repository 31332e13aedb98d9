"""The scheduler: deaths, and the barriers that they break."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core.machine import LogEntry, PeerLost, Persisted, Send, ServerPeer, Tick, Unsaved
from kvd.protocol.messages import Departure, Done, Enter, ErrorCode, Leave, NodeName, Refused, View
from tests.core.fakes import of, one, said, server_id, worker_id
from tests.core.scheduler_harness import BARE, Harness


def two_workers(**more: Any) -> Harness:
    harness = Harness(**more)
    harness.worker(0)
    harness.worker(1)
    return harness


def run(harness: Harness, until: float, *alive: int) -> list[Any]:
    """Lets time pass in steps of 0.1 s; the workers in `alive` send a heartbeat every second."""
    effects: list[Any] = []
    ticks = round((until - harness.now) * 10)
    for tick in range(1, ticks + 1):
        harness.now += 0.1
        if tick % 10 == 0:
            for rank in alive:
                effects += harness.beat(rank)
        effects += harness.step(Tick())
    return effects


def test_a_silent_member_is_dead_after_the_timeout_of_its_role() -> None:
    harness = two_workers()
    harness.join("server", server_id(0), "s")
    run(harness, 4.9, 0)
    assert harness.states()["server 0"] == "active"
    run(harness, 5.2, 0)
    assert harness.states() == {"server 0": "dead", "worker 0": "active", "worker 1": "active"}
    run(harness, 19.8, 0)
    assert harness.states()["worker 1"] == "active"
    effects = run(harness, 20.2, 0)
    assert harness.states()["worker 1"] == "dead"
    view = [message for message in said(effects, worker_id(0)) if isinstance(message, View)][-1]
    dead = one([member for member in view.members if member.rank == 1 and member.role == "worker"])
    assert dead.reason == "no heartbeat for 20 s"
    assert 20.0 <= dead.last_seen_s < 20.3


def test_it_asks_to_be_woken_when_the_next_member_may_be_dead() -> None:
    harness = Harness()
    assert harness.machine.next_deadline() == 20.0  # until the first worker must have come
    harness.now = 2.0
    harness.worker(0)
    assert harness.machine.next_deadline() == 22.0
    harness.now = 3.0
    harness.join("server", server_id(0), "s")
    assert harness.machine.next_deadline() == 8.0
    harness.say(worker_id(0), Leave(9, Departure.LEFT))
    harness.step(PeerLost(server_id(0), "exit 0"))
    assert harness.machine.next_deadline() is None


def test_a_server_whose_process_ended_is_dead_at_once() -> None:
    harness = two_workers()
    harness.join("server", server_id(0), "s")
    harness.now = 1.5
    effects = harness.step(PeerLost(server_id(0), "killed by signal 9 " + "x" * 100))
    view = next(message for message in said(effects) if isinstance(message, View))
    dead = one([member for member in view.members if member.role == "server"])
    assert (dead.state, dead.last_seen_s) == ("dead", 1.5)
    assert dead.reason == ("killed by signal 9 " + "x" * 100)[:80]
    assert harness.step(PeerLost(server_id(0), "again")) == []


def test_a_worker_whose_process_ended_may_be_started_again_until_its_timeout() -> None:
    harness = two_workers()
    effects = harness.step(PeerLost(worker_id(1), "exit 9"))
    assert said(effects) == []
    assert any("it can be started again within 20.0 s" in note.text for note in of(LogEntry, effects))
    assert harness.states()["worker 1"] == "active"
    shown: Any = harness.machine.explain(harness.now)["members"]
    assert [(member["process_ended"], member["reason"]) for member in shown] == [(False, ""), (True, "exit 9")]
    harness.kill(worker_id(1), "exit 9")
    assert harness.states() == {"worker 0": "active", "worker 1": "dead"}
    members: Any = harness.machine.explain(harness.now)["members"]
    assert members[1]["reason"] == "exit 9"
    assert not members[1]["process_ended"], "its death says more"


def test_a_death_is_not_announced_before_it_is_persisted() -> None:
    harness = two_workers()
    harness.hold = True
    effects = harness.kill(worker_id(1))
    told = [message for message in said(effects) if isinstance(message, View)]
    assert all(member.state == "active" for view in told for member in view.members)
    token = one(of(Unsaved, effects)).token
    assert {send.peer for send in of(Send, harness.step(Persisted(token)))} == {worker_id(0), worker_id(1)}


def test_a_dead_member_that_is_heard_is_back() -> None:
    harness = two_workers()
    harness.kill(worker_id(1))
    assert harness.states()["worker 1"] == "dead"
    effects = harness.beat(1)
    assert harness.states()["worker 1"] == "active"
    assert any("is back" in note.text for note in of(LogEntry, effects))


def test_a_worker_that_left_the_rounds_and_died_has_still_left_them() -> None:
    harness = two_workers()
    harness.say(worker_id(1), Leave(9, Departure.DONE))
    harness.kill(worker_id(1))
    assert harness.states()["worker 1"] == "gone"
    harness.beat(1)
    assert harness.states()["worker 1"] == "done"


def test_a_scheduler_that_was_paused_gives_everyone_a_full_timeout() -> None:
    harness = two_workers()
    harness.now = 60.0
    effects = harness.step(Tick())
    assert any("was paused" in note.text for note in of(LogEntry, effects))
    assert set(harness.states().values()) == {"active"}
    harness.now = 61.0
    harness.step(Tick())
    assert harness.machine.next_deadline() == 80.0
    run(harness, 80.2, 0)
    assert harness.states() == {"worker 0": "active", "worker 1": "dead"}


def test_a_deadline_met_in_time_is_no_pause() -> None:
    harness = two_workers()
    harness.now = 20.0  # nothing happened in between: the shell woke it when it asked to be
    harness.step(Tick())
    assert set(harness.states().values()) == {"dead"}


# ── barriers ──


def enter(harness: Harness, rank: int, request: int, generation: int = 0, life: int = 0) -> list[Any]:
    who = worker_id(rank, life)
    return [
        send
        for send in of(Send, harness.say(who, Enter(request, "b", generation)))
        if not isinstance(send.message, View)
    ]


def test_all_workers_at_a_barrier_are_told_of_its_release() -> None:
    harness = two_workers()
    assert enter(harness, 0, 11) == []
    assert harness.machine.explain(0.0)["barriers"] == {"b": [0]}
    assert enter(harness, 1, 22) == [Send(ServerPeer(worker_id(0)), Done(11)), Send(ServerPeer(worker_id(1)), Done(22))]
    assert enter(harness, 0, 12) == [Send(ServerPeer(worker_id(0)), Done(12))]  # settled: the same answer for ever
    assert enter(harness, 0, 13, generation=1) == []


def test_a_release_is_persisted_before_it_is_answered_and_outlives_the_scheduler() -> None:
    harness = two_workers()
    enter(harness, 0, 11)
    harness.hold = True
    effects = harness.say(worker_id(1), Enter(22, "b", 0))
    assert said(effects) == []
    assert enter(harness, 0, 11) == []  # asked again in between: not yet
    again = Harness(saved=harness.machine.record(), generation=2)
    assert enter(again, 0, 11) == [Send(ServerPeer(worker_id(0)), Done(11))]
    told = said(harness.step(Persisted(one(of(Unsaved, effects)).token)))
    assert told.count(Done(11)) >= 1
    assert told.count(Done(22)) == 1


def test_a_barrier_waits_for_workers_not_yet_joined_and_not_for_those_that_left() -> None:
    harness = Harness(BARE._replace(num_workers=3))
    harness.worker(0)
    harness.worker(1)
    enter(harness, 0, 11)
    assert enter(harness, 1, 22) == []
    harness.worker(2)
    effects = harness.say(worker_id(2), Leave(9, Departure.DONE))
    assert Done(11) not in said(effects)  # done: left the rounds, not the barriers
    assert Done(11) in said(harness.say(worker_id(2), Leave(10, Departure.LEFT)))


@pytest.mark.parametrize("dies_first", [True, False])
def test_a_death_breaks_the_barriers_that_the_dead_worker_is_missing_from(dies_first: bool) -> None:
    harness = two_workers()
    if dies_first:
        harness.kill(worker_id(1))
        effects = harness.say(worker_id(0), Enter(11, "b", 0))
    else:
        enter(harness, 0, 11)
        effects = harness.kill(worker_id(1))
    refused = one([message for message in said(effects) if isinstance(message, Refused)])
    assert (refused.request, refused.error, refused.nodes) == (11, ErrorCode.BARRIER_BROKEN, (NodeName("worker", 1),))
    assert any("broke" in note.text for note in of(LogEntry, effects))
    (copy,) = enter(harness, 0, 11)
    assert copy.message == refused
    harness.worker(1, life=1)
    assert enter(harness, 1, 5, life=1) == []  # the verdict does not bind the successor
    assert [send.message for send in enter(harness, 0, 12)] == [Done(5), Done(12)]


def test_all_programs_are_restarted_after_a_barrier_broke() -> None:
    """The first that comes does not take the other, who is still dead, for one that never comes."""
    harness = two_workers()
    enter(harness, 0, 11)
    harness.kill(worker_id(1))
    harness.worker(0, life=1)
    assert enter(harness, 0, 3, life=1) == []
    harness.now += 4.0
    harness.worker(1, life=1)
    assert [send.message for send in enter(harness, 1, 3, life=1)] == [Done(3), Done(3)]


def test_a_restarted_program_waits_for_the_dead_for_one_timeout() -> None:
    harness = two_workers()
    harness.kill(worker_id(1))
    harness.worker(0, life=1)
    begun = harness.now
    assert enter(harness, 0, 3, life=1) == []
    for _ in range(19):
        harness.now += 1.0
        harness.beat(0, life=1)
    assert harness.machine.explain(harness.now)["barriers"] == {"b": [0]}
    harness.now = harness.machine.next_deadline()  # type: ignore[assignment]
    assert harness.now == begun + 20.0
    refused = one([message for message in said(harness.step(Tick())) if isinstance(message, Refused)])
    assert (refused.request, refused.nodes) == (3, (NodeName("worker", 1),))


def test_a_worker_that_dies_after_the_others_have_come_is_not_awaited_twice() -> None:
    harness = two_workers()
    enter(harness, 0, 11)
    harness.worker(1, life=1)
    effects = harness.kill(worker_id(1, 1))
    assert one([message for message in said(effects) if isinstance(message, Refused)]).request == 11


def test_without_break_on_loss_the_successor_completes_the_barrier() -> None:
    harness = two_workers(break_on_loss=False)
    enter(harness, 0, 11)
    harness.kill(worker_id(1))
    harness.worker(1, life=1)
    assert [send.message for send in enter(harness, 1, 5, life=1)] == [Done(11), Done(5)]


def test_a_replaced_worker_is_no_longer_at_the_barrier() -> None:
    harness = two_workers()
    enter(harness, 1, 22)
    harness.worker(1, life=1)
    assert enter(harness, 0, 11) == []


def test_a_server_cannot_enter_a_barrier() -> None:
    harness = two_workers()
    harness.join("server", server_id(0), "s")
    refused = one(
        [message for message in said(harness.say(server_id(0), Enter(3, "b", 0))) if isinstance(message, Refused)]
    )
    assert (refused.error, refused.request) == (ErrorCode.NOT_ALLOWED, 3)


def test_barriers_beyond_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.core.scheduler.barriers.barriers.MAX_NAMES", 1)
    harness = two_workers()
    enter(harness, 0, 1)
    refused = one(
        [message for message in said(harness.say(worker_id(0), Enter(2, "c", 0))) if isinstance(message, Refused)]
    )
    assert (refused.error, refused.request) == (ErrorCode.NOT_ALLOWED, 2)


def test_a_program_that_failed_is_waited_for_like_one_that_was_killed() -> None:
    harness = two_workers()
    assert said(harness.say(worker_id(1), Leave(9, Departure.FAILED))) == [Done(9)]
    assert harness.states()["worker 1"] == "active"
    harness.kill(worker_id(1), "exit 1")
    assert harness.states()["worker 1"] == "dead"
