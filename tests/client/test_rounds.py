"""Where workers meet: barriers, flush, join, and bounded staleness."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.client.facades.blocking import backend_of
from kvd.errors import (
    NodeLost,
    NotAllowed,
    RequestTimeout,
)
from kvd.testing.cluster import LocalCluster
from tests.client.harness import Pair, ones

QUICK: dict[str, Any] = {"server_timeout_s": 1.0, "worker_timeout_s": 1.0, "heartbeat_interval_s": 0.1}


def test_barriers_have_names_and_generations() -> None:
    passed: list[tuple[int, str]] = []

    def program(kv: kvd.KVStore) -> None:
        for step in range(3):
            kv.barrier("a")
            passed.append((step, "a"))
            kv.barrier()
            kv.barrier(name="x" * 500 + str(step % 2))
            passed.append((step, "x"))
            kv.barrier("end of step")

    with LocalCluster(3, 1) as cluster:
        cluster.run(program)
    assert passed == [(step, name) for step in range(3) for name in "ax" for _ in range(3)]


def test_a_barrier_times_out_and_can_be_entered_again() -> None:
    with LocalCluster(2, 1) as cluster:
        one, other = cluster.open_stores()
        begun = time.monotonic()
        for _ in range(2):
            with pytest.raises(RequestTimeout) as caught:
                one.barrier("b", timeout=0.2)
            assert caught.value.outcome == "unknown"
        assert time.monotonic() - begun < 3
        thread = threading.Thread(target=lambda: other.barrier("b", timeout=20))
        thread.start()
        one.barrier("b", timeout=20)
        thread.join(20)
        with pytest.raises(RequestTimeout):
            one.barrier("b", timeout=0.1)  # the next generation: nobody is there yet


def test_two_barriers_with_long_names_are_two() -> None:
    with LocalCluster(2, 1) as cluster:
        one, other = cluster.open_stores()
        handle = backend_of(one).rounds.barrier("n" * 300 + "1", 30)
        with pytest.raises(RequestTimeout):
            other.barrier("n" * 300 + "2", timeout=0.3)
        assert not handle.done()


def test_flush_times_out_and_the_push_goes_on(pair: Pair) -> None:
    one, other = pair
    one.push("w", ones())
    with pytest.raises(RequestTimeout):
        one.flush(timeout=0.2)
    other.push("w", ones())
    one.flush()
    assert one.pull("w").tolist() == [2] * 4


@pytest.mark.parametrize("end", ["flush", "join", "close"])
def test_who_waits_for_a_worker_that_died_is_told(end: str) -> None:
    """The push is kept in case it comes back, and nobody waits longer than it takes to be declared dead."""
    with LocalCluster(2, 1, **QUICK) as cluster:
        one, other = cluster.open_stores()
        made = [store.init_async("w", np.zeros(4, np.float32)) for store in (one, other)]
        for handle in made:
            handle.wait()
        one.push("w", ones())
        with pytest.raises(ValueError, match="its end"), other:
            raise ValueError("its end")
        with pytest.raises(NodeLost, match=f"worker {other.rank}") as raised:
            getattr(one, end)()
        assert raised.value.node == f"worker {other.rank}"


def test_a_worker_that_joins_out_of_the_rounds_is_not_waited_for() -> None:
    """Uneven data: rank 0 has five batches, rank 1 has three."""

    def program(kv: kvd.KVStore) -> Any:
        kv.init("w", np.zeros(2000, np.float32))
        values = [np.full(2000, kv.rank + 1 + 10 * step, np.float32) for step in range(5 if kv.rank == 0 else 3)]
        seen = [float(kv.pushpull("w", value)[0]) for value in values]
        if kv.rank == 1:
            kv.push("w", np.zeros(2000, np.float32)).wait()  # takes part in round 4 with zeros, then leaves
            kv.join()
            with pytest.raises(NotAllowed, match="left the rounds"):
                kv.pushpull("w", ones(2000))
        kv.barrier("after")
        seen.append(float(kv.pull("w")[0]))
        return seen

    with LocalCluster(2, 2) as cluster:
        one, other = cluster.run(program)
    assert one == [3, 23, 43, 31, 41, 41]
    assert other == [3, 23, 43, 41]


@pytest.mark.parametrize("staleness", [0, 2])
def test_the_staleness_bounds_how_far_a_worker_runs_ahead(staleness: int) -> None:
    with LocalCluster(2, 1, rounds_ahead=8) as cluster:
        fast, slow = cluster.open_stores("dist_async", staleness=staleness)
        made = [store.init_async("w", np.zeros(2, np.float32)) for store in (fast, slow)]
        for handle in made:
            handle.wait()
        handles = [fast.push("w", ones(2)) for _ in range(staleness + 2)]
        for handle in handles[:staleness]:
            handle.wait(10)
        time.sleep(0.2)  # time itself: no more are answered
        assert [handle.done() for handle in handles] == [True] * staleness + [False] * 2
        slow.push("w", ones(2)).wait(10)
        handles[staleness].wait(10)
        assert not handles[staleness + 1].done()
