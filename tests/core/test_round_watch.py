"""What a server reports of its rounds: steps, their pace, and which round has been open for how long."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core.machine import Tick
from kvd.protocol.messages import Lookup
from tests.core.fakes import cluster
from tests.core.server_harness import Harness, packed


def passes(harness: Harness, seconds: float) -> None:
    """Time with heartbeats."""
    for _ in range(round(seconds)):
        harness.now += 1.0
        harness.step(Tick())


def trained(harness: Harness, clocks: range, *, every_s: float, workers: int = 2, key: str = "w") -> None:
    for clock in clocks:
        for rank in range(workers):
            harness.push(rank, clock, key=key)
        passes(harness, every_s)


def explained(harness: Harness) -> Any:
    return harness.machine.explain(harness.now)


@pytest.fixture
def harness() -> Harness:
    harness = Harness(small=64)
    harness.init("w", b"\0")
    passes(harness, 2)
    return harness


def test_steps_and_their_pace(harness: Harness) -> None:
    assert explained(harness)["usual_step_s"] is None
    trained(harness, range(1, 11), every_s=2)
    report = explained(harness)
    assert (report["step"], report["rounds"]) == (10, 10)
    assert report["steps_per_s"] == pytest.approx(0.5)
    assert report["usual_step_s"] == pytest.approx(2.0)
    assert report["open_rounds"] == []


def test_a_round_that_stays_open_has_an_age_and_names_for_whom_it_waits(harness: Harness) -> None:
    trained(harness, range(1, 6), every_s=1)
    harness.push(0, 6)
    passes(harness, 15)
    [open_round] = explained(harness)["open_rounds"]
    assert 13.9 <= open_round.pop("age_s") <= 15.0
    assert open_round == {
        "key": "w",
        "round": 6,
        "usual_s": 1.0,
        "standstill_s": 10.0,
        "waits_for": ["worker 1"],
    }
    assert explained(harness)["steps_per_s"] == 0.0
    harness.push(1, 6)
    harness.push(0, 7)
    assert explained(harness)["open_rounds"] == []  # the next round has been open for no time
    harness.push(1, 7)
    passes(harness, 1)
    assert explained(harness)["open_rounds"] == []


def test_a_round_that_goes_on_is_never_old(harness: Harness) -> None:
    for clock in range(1, 30):
        harness.push(0, clock)
        passes(harness, 1)
        assert all(entry["age_s"] <= 1 for entry in explained(harness)["open_rounds"])
        harness.push(1, clock)


def test_steps_of_a_minute(harness: Harness) -> None:
    trained(harness, range(1, 4), every_s=60)
    harness.push(0, 4)
    passes(harness, 30)
    [open_round] = explained(harness)["open_rounds"]
    assert open_round["standstill_s"] == pytest.approx(600.0, rel=0.05)


def test_a_job_that_has_never_made_a_step(harness: Harness) -> None:
    harness.push(1, 1)
    passes(harness, 15)
    [open_round] = explained(harness)["open_rounds"]
    assert (open_round["waits_for"], open_round["usual_s"], open_round["standstill_s"]) == (["worker 0"], None, 120.0)


def test_a_key_that_worker_0_has_yet_to_make() -> None:
    harness = Harness()
    passes(harness, 1)
    harness.say(1, Lookup(50, ("w",), True))
    passes(harness, 12)
    [open_round] = explained(harness)["open_rounds"]
    assert (open_round["key"], open_round["round"], open_round["waits_for"]) == ("w", 0, ["worker 0"])
    assert open_round["age_s"] >= 11


def test_keys_that_wait_for_different_workers_are_shown_once_for_each() -> None:
    harness = Harness(workers=2)
    for key in "abcd":
        harness.init(key, b"\0")
    passes(harness, 2)
    for key in "ab":
        harness.push(0, 1, key=key)
    for key in "cd":
        harness.push(1, 1, key=key)
    passes(harness, 3)
    assert sorted(entry["waits_for"] for entry in explained(harness)["open_rounds"]) == [["worker 0"], ["worker 1"]]


def test_keys_keep_their_pace_when_they_are_fused_and_parted() -> None:
    harness = packed("a", "b")
    passes(harness, 2)
    for clock in range(1, 4):
        for rank in range(2):
            harness.push_batch(rank, clock, b"\1", b"\2")
        passes(harness, 30)
    assert harness.groups == [["a", "b"]]
    harness.push(0, 4, key="a")
    assert harness.groups == [["a"], ["b"]]
    passes(harness, 2)
    [open_round] = explained(harness)["open_rounds"]
    assert (open_round["key"], open_round["usual_s"]) == ("a", pytest.approx(30.0, rel=0.1))


# ── asynchronous mode ──


def test_a_worker_that_stopped_pushing_while_others_go_on() -> None:
    harness = Harness(cluster(2, mode="async"))
    harness.init("w", b"\0")
    passes(harness, 1)
    trained(harness, range(1, 6), every_s=1)
    trained(harness, range(6, 26), every_s=1, workers=1)
    latest = explained(harness)["last_pushes"]
    assert latest["worker 0"]["ago_s"] <= 1
    assert latest["worker 1"]["ago_s"] >= 19
    assert latest["worker 1"]["usual_s"] == pytest.approx(1.0)
    assert latest["worker 1"]["standstill_s"] == 10.0
    assert explained(harness)["open_rounds"] == []


def test_a_bounded_staleness_waits_for_the_slowest() -> None:
    harness = Harness(cluster(2, mode="async", staleness=1))
    harness.init("w", b"\0")
    passes(harness, 1)
    trained(harness, range(1, 4), every_s=1)
    for clock in (4, 5):
        harness.push(0, clock)
    passes(harness, 12)
    [open_round] = explained(harness)["open_rounds"]
    assert open_round["waits_for"] == ["worker 1"]
    assert open_round["age_s"] >= 11


def test_memory_of_the_limit() -> None:
    harness = Harness(memory=1 << 20)
    harness.init("w", bytes(100))
    report = explained(harness)
    assert report["memory_limit_bytes"] == 1 << 20
    assert 100 < report["memory_used_bytes"] < 10_000
    assert report["memory_of_other_runs_bytes"] == 0
