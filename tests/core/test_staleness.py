"""How stale the pushes of asynchronous workers are: what a server counts."""

from __future__ import annotations

from typing import Any

from kvd.protocol.messages import ASSIGN
from tests.core.fakes import cluster, member, uint8
from tests.core.server_harness import Harness, packed, ready


def started(**more: Any) -> Harness:
    return ready(settings=cluster(2, mode="async"), **more)


def seen(harness: Harness, rank: int) -> Any:
    return harness.explain()["staleness"].get(f"worker {rank}")


def test_it_is_what_a_slice_got_between_the_pull_and_the_push_of_a_worker() -> None:
    harness = started()
    harness.pull(0, 0)
    harness.pull(1, 0)
    harness.push(0, 1)  # nobody came between
    harness.push(0, 2)  # its own push came between: it has not pulled it
    harness.push(1, 1)  # those two
    harness.pull(0, 2)
    harness.push(1, 2)  # all three
    harness.push(0, 3)  # one of worker 1
    assert seen(harness, 0) == {"pushes": 3, "mean": 2 / 3, "max": 1, "histogram": {"0": 1, "1": 2}}
    assert seen(harness, 1) == {"pushes": 2, "mean": 2.5, "max": 3, "histogram": {"2-3": 2}}


def test_a_push_that_pulls_takes_the_version_that_it_makes() -> None:
    harness = started()
    harness.push(0, 1, pull=True)
    for clock in (2, 3):
        harness.push(0, clock, pull=True)
    assert seen(harness, 0) == {"pushes": 2, "mean": 0.0, "max": 0, "histogram": {"0": 2}}


def test_who_has_not_pulled_is_not_counted_and_observers_are_nobody() -> None:
    harness = started()
    harness.push(0, 1)
    harness.pull(0, -1, peer=None)
    assert seen(harness, 0) is None
    harness.push(0, 2, how=ASSIGN)
    assert seen(harness, 0) is None  # a broadcast is no gradient


def test_the_histogram_has_a_bound() -> None:
    harness = started()
    harness.pull(1, 0)
    log = harness.machine.table.slices["w", 0].log
    for clock, version in enumerate((5, 8, 100_000), 1):
        log.version = log.closed = log.step = version
        harness.push(1, clock)
    assert seen(harness, 1)["histogram"] == {"4-7": 1, "8-15": 1, "16384+": 1}
    assert seen(harness, 1)["max"] == 100_000


def test_the_slices_of_a_group_count_one_by_one() -> None:
    harness = packed("a", "b", "c", settings=cluster(2, mode="async"))
    harness.push_batch(0, 1, b"\1", b"\1", b"\1", pull=True)
    harness.push_batch(0, 2, b"\1", b"\1", b"\1")
    assert len(harness.groups) == 1
    assert seen(harness, 0)["pushes"] == 3


def test_of_slices_that_are_fused_the_oldest_pull_counts() -> None:
    harness = Harness(cluster(2, mode="async"))
    for name in ("a", "b"):
        harness.init(name, b"\0", uint8(1))
        harness.push(0, 1, key=name)
    harness.pull(0, 1, key="a")
    harness.push(0, 2, key="a")
    harness.push(0, 2, key="b")
    harness.pull(0, 2, key="b")
    harness.declare(0, 1, "a", "b")
    harness.push_batch(0, 3, b"\1", b"\1")
    assert len(harness.groups) == 1
    assert seen(harness, 0) == {"pushes": 3, "mean": 2 / 3, "max": 1, "histogram": {"0": 1, "1": 2}}


def test_a_successor_has_pulled_nothing() -> None:
    harness = started()
    harness.pull(0, 0)
    harness.look(member("worker", 0, life=1))
    harness.attach(0, life=1)
    harness.push(0, 1, life=1)
    assert seen(harness, 0) is None


def test_in_sync_mode_nothing_is_measured() -> None:
    harness = ready()
    for rank in (0, 1):
        harness.push(rank, 1, pull=True)
    assert harness.explain()["staleness"] == {}


def test_slices_of_a_group_that_are_pulled_one_by_one_are_as_stale_as_the_oldest() -> None:
    harness = started()
    harness.init("v", b"\0")
    for rank in (0, 1):
        harness.declare(rank, 1, "w", "v")
    both = [b"\1"] * 2
    harness.push_batch(0, 1, *both, pull=True)
    for clock in (1, 2, 3):
        harness.push_batch(1, clock, *both)
    harness.pull(0, 1, key="w")
    harness.push_batch(0, 2, *both)  # it has the first version of "v"
    assert seen(harness, 0) == {"pushes": 2, "mean": 3.0, "max": 3, "histogram": {"2-3": 2}}
    harness.pull(0, 2, key="v")
    harness.push_batch(1, 4, *both)
    harness.push_batch(0, 3, *both)  # "w" as it was before the push of worker 0: two ago
    assert seen(harness, 0)["histogram"] == {"2-3": 4}
    harness.pull(0, 3, key="w")
    harness.push(0, 4, key="v")  # they are parted: "v" has missed its own two pushes and one of worker 1
    assert seen(harness, 0)["histogram"] == {"2-3": 5}
    harness.push(0, 4, key="w")
    assert seen(harness, 0)["histogram"] == {"0": 1, "2-3": 5}
