"""What the scheduler says about waits, and when it is certain that all workers wait for each other."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core.machine import Effect, LogEntry, PeerLost, Send
from kvd.protocol.messages import (
    EXIT_BARRIER,
    MAX_STUCK_LINES,
    BarrierWait,
    Departure,
    Enter,
    Leave,
    NodeName,
    WaitNews,
    WaitReport,
)
from tests.core.fakes import cluster, of, worker_id
from tests.core.scheduler_harness import BARE, Harness


def joined(workers: int = 2) -> Harness:
    harness = Harness(cluster(workers, mode="sync", merge="sum"))
    for rank in range(workers):
        harness.worker(rank)
    return harness


def report(
    harness: Harness,
    rank: int,
    *,
    stamp: int = 5,
    check: int = 0,
    blocked: bool = True,
    barriers: tuple[str, ...] = (),
    nodes: tuple[NodeName, ...] = (),
    view: Any = None,
) -> list[Effect]:
    message = WaitReport(90, nodes, barriers, blocked, stamp, check, (f"line {rank}",))
    return harness.say(worker_id(rank), message, view=view or harness.machine.epoch)


def unasked(effects: list[Effect]) -> dict[int, WaitNews]:
    """What is said unasked, by the incarnation that it goes to."""
    return {
        int(send.peer): send.message
        for send in of(Send, effects)
        if isinstance(send.message, WaitNews) and send.message.request == 0
    }


def answer(effects: list[Effect]) -> WaitNews:
    (found,) = [
        send.message for send in of(Send, effects) if isinstance(send.message, WaitNews) and send.message.request
    ]
    return found


def checked(harness: Harness, workers: int = 2) -> int:
    """All report that they are blocked, and are asked to look again. Returns the number of the check."""
    effects: list[Effect] = []
    for rank in range(workers):
        effects = report(harness, rank, stamp=10 + rank)
        assert (rank == workers - 1) == bool(unasked(effects))
    news = unasked(effects)
    assert set(news) == {worker_id(rank) for rank in range(workers)}
    (check,) = {entry.check for entry in news.values()}
    assert check > 0
    assert not any(entry.deadlock for entry in news.values())
    return check


# ── facts ──


def test_it_says_where_nodes_run_and_when_they_were_heard() -> None:
    harness = joined()
    harness.now = 3.5
    news = answer(report(harness, 0, nodes=(NodeName("worker", 1), NodeName("worker", 7)), blocked=False))
    (fact,) = news.nodes
    assert (fact.role, fact.rank, fact.heard_s, fact.ended) == ("worker", 1, 3.5, "")
    harness.step(PeerLost(worker_id(1), "exit code 1"))
    (fact,) = answer(report(harness, 0, nodes=(NodeName("worker", 1),), blocked=False)).nodes
    assert fact.ended == "exit code 1"


def test_it_says_who_is_missing_at_a_barrier_and_how_they_are() -> None:
    harness = joined(3)
    harness.say(worker_id(0), Enter(50, "x", 0))
    harness.say(worker_id(1), Enter(50, "x", 0))
    harness.say(worker_id(1), Enter(51, "y", 0))
    news = answer(report(harness, 0, blocked=False))
    assert news.barriers == (BarrierWait("x", (2,)),)
    assert [fact.rank for fact in news.nodes] == [2]
    assert {wait.name for wait in answer(report(harness, 1, blocked=False)).barriers} == {"x", "y"}
    assert answer(report(harness, 2, blocked=False)).barriers == ()


def test_its_report_says_for_how_long_workers_have_waited_at_a_barrier() -> None:
    harness = joined(3)
    harness.say(worker_id(0), Enter(50, "user:x", 0))
    harness.beat(0)
    harness.now = 15.0
    for rank in range(3):
        harness.beat(rank)
    [wait] = waits_in(harness)
    assert wait == {
        "name": "user:x",
        "entered": ["worker 0"],
        "waits_for": ["worker 1", "worker 2"],
        "age_s": 15.0,
        "standstill_s": 10.0,
    }
    for rank in (1, 2):
        harness.say(worker_id(rank), Enter(50, "user:x", 0))
    harness.now = 16.0
    harness.say(worker_id(0), Enter(51, "user:x", 1))
    harness.beat(0)
    assert waits_in(harness)[0]["age_s"] == 0.0


def test_at_the_end_of_the_programs_a_wait_may_last() -> None:
    harness = joined(2)
    harness.say(worker_id(0), Enter(50, EXIT_BARRIER, 0))
    harness.beat(0)
    [wait] = waits_in(harness)
    assert wait["standstill_s"] is None


def test_a_node_that_has_missed_heartbeats_is_silent() -> None:
    harness = joined(2)
    harness.now = 9.0
    harness.beat(0)
    harness.now = 11.0
    explained: Any = harness.machine.explain(harness.now)
    silent = {member["rank"]: member["is_silent"] for member in explained["members"] if member["role"] == "worker"}
    assert silent == {0: False, 1: True}


def waits_in(harness: Harness) -> Any:
    return harness.machine.explain(harness.now)["barrier_waits"]


# ── the proof ──


def test_all_blocked_twice_with_the_same_stamps_is_a_deadlock() -> None:
    harness = joined()
    check = checked(harness)
    assert unasked(report(harness, 0, stamp=10, check=check)) == {}
    effects = report(harness, 1, stamp=11, check=check)
    news = unasked(effects)
    assert {who: entry.stamp for who, entry in news.items()} == {worker_id(0): 10, worker_id(1): 11}
    (lines,) = {entry.deadlock for entry in news.values()}
    assert lines == (
        "worker 0 (node worker-0, pid 70): line 0",
        "worker 1 (node worker-1, pid 71): line 1",
    )
    assert any("wait for each other" in entry.text for entry in of(LogEntry, effects))


@pytest.mark.parametrize("why", ["stamp", "not blocked", "old check", "old view", "view changed", "process ended"])
def test_it_is_no_deadlock_if_anything_happened_in_between(why: str) -> None:
    harness = joined()
    check = checked(harness)
    old_view = harness.machine.epoch
    if why == "view changed":
        harness.say(worker_id(0), Leave(60, Departure.DONE))
    if why == "process ended":
        harness.step(PeerLost(worker_id(0), "killed"))
    report(harness, 0, stamp=10, check=check)
    if why == "old view":
        harness.say(worker_id(0), Leave(60, Departure.DONE))
    effects = report(
        harness,
        1,
        stamp=99 if why == "stamp" else 11,
        check=check - 1 if why == "old check" else check,
        blocked=why != "not blocked",
        view=old_view if why == "old view" else None,
    )
    assert not any(entry.deadlock for entry in unasked(effects).values())


def test_a_view_that_is_not_saved_yet_does_not_count() -> None:
    harness = joined()
    check = checked(harness)
    report(harness, 0, stamp=10, check=check)
    harness.hold = True
    harness.say(worker_id(0), Leave(60, Departure.DONE))
    assert unasked(report(harness, 1, stamp=11, check=check)) == {}


@pytest.mark.parametrize("who", ["missing", "dead"])
def test_a_worker_that_may_still_come_may_free_the_others(who: str) -> None:
    harness = Harness(BARE._replace(num_workers=2)) if who == "missing" else joined()
    if who == "missing":
        harness.worker(0)
    else:
        harness.kill(worker_id(1))
    for _ in range(3):
        assert unasked(report(harness, 0)) == {}


def test_workers_that_have_left_are_not_asked() -> None:
    harness = joined(3)
    harness.say(worker_id(2), Leave(60, Departure.LEFT))
    check = checked(harness, 2)
    report(harness, 0, stamp=10, check=check)
    assert len(unasked(report(harness, 1, stamp=11, check=check))) == 2


def test_a_worker_that_has_left_the_rounds_can_still_come_to_a_barrier() -> None:
    harness = joined()
    harness.say(worker_id(1), Leave(60, Departure.DONE))
    harness.say(worker_id(0), Enter(61, "x", 0))
    assert unasked(report(harness, 0, barriers=("x",))) == {}


def test_a_barrier_that_was_not_reached_here_is_under_way() -> None:
    harness = joined()
    report(harness, 0, barriers=("x",))
    assert unasked(report(harness, 1)) == {}
    harness.say(worker_id(0), Enter(61, "x", 0))
    (check,) = {news.check for news in unasked(report(harness, 1)).values()}
    report(harness, 0, barriers=("x",), check=check)
    lines = unasked(report(harness, 1, check=check))[worker_id(1)].deadlock
    assert lines[0].endswith("line 0 (missing at the barrier: worker 1)")


def test_a_successor_is_not_blocked_because_its_predecessor_was() -> None:
    harness = joined()
    report(harness, 1)
    harness.worker(1, life=1)
    assert unasked(report(harness, 0)) == {}


# ── news that get lost ──


def test_a_check_that_got_lost_is_repeated_at_the_next_report() -> None:
    harness = joined()
    check = checked(harness)
    assert unasked(report(harness, 0, stamp=10)) == {worker_id(0): WaitNews(0, check=check, stamp=10)}
    report(harness, 0, stamp=10, check=check)
    assert any(entry.deadlock for entry in unasked(report(harness, 1, stamp=11, check=check)).values())


def test_a_verdict_that_got_lost_is_repeated_at_the_next_report() -> None:
    harness = joined()
    check = checked(harness)
    report(harness, 0, stamp=10, check=check)
    report(harness, 1, stamp=11, check=check)
    again = unasked(report(harness, 0, stamp=10, check=check))
    assert set(again) == {worker_id(0)}
    assert again[worker_id(0)].deadlock


def test_a_verdict_ends_when_somebody_moves() -> None:
    harness = joined()
    check = checked(harness)
    report(harness, 0, stamp=10, check=check)
    report(harness, 1, stamp=11, check=check)
    report(harness, 0, stamp=12, blocked=False)
    assert unasked(report(harness, 1, stamp=11, check=check)) == {}


def test_a_restarted_scheduler_counts_other_checks() -> None:
    harness = joined()
    check = checked(harness)
    settings = cluster(2, mode="sync", merge="sum")
    restarted = Harness(settings, saved=harness.disk, generation=2, incarnation=1 << 40)
    for rank in range(2):
        restarted.worker(rank)
        assert not any(
            entry.deadlock for entry in unasked(report(restarted, rank, stamp=10 + rank, check=check)).values()
        )


def test_a_long_list_is_cut() -> None:
    count = MAX_STUCK_LINES + 10
    harness = joined(count)
    check = checked(harness, count)
    for rank in range(count):
        effects = report(harness, rank, stamp=10 + rank, check=check)
    lines = unasked(effects)[worker_id(0)].deadlock
    assert len(lines) == MAX_STUCK_LINES
    assert lines[-1] == "11 more workers wait, too"
