"""`kv.join(until=…)`: workers with uneven data wait for each other at the end of each epoch, and the rounds go on."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.errors import NotAllowed, NotResumed, RequestTimeout
from kvd.optimizer import SGD
from kvd.testing.cluster import LocalCluster, engine_of, wait_until
from tests.client.harness import ones

SIZE = 2000
STEPS = (5, 7, 9)  # of an epoch, by rank
EPOCHS = 3
IMPATIENT: dict[str, Any] = {
    "server_timeout_s": 2.0,
    "worker_timeout_s": 2.0,
    "request_timeout_s": 4.0,
    "round_timeout_s": 4.0,
}
RATE, MOMENTUM = np.float32(0.25), np.float32(0.5)


def gradient(rank: int, epoch: int, step: int) -> Any:
    return np.arange(SIZE, dtype=np.float32) % 7 + np.float32(10 * rank + 3 * epoch + step)


def expected(merge: str) -> Any:
    """What NumPy makes of the same pushes, in float32 and in the order of the ranks."""
    weight, momentum = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)
    for epoch in range(EPOCHS):
        for step in range(max(STEPS)):
            ranks = [rank for rank in range(3) if step < STEPS[rank]]
            total = gradient(ranks[0], epoch, step)
            for rank in ranks[1:]:
                total = total + gradient(rank, epoch, step)
            if merge == "mean":
                total = total / np.float32(len(ranks))
            momentum = MOMENTUM * momentum + total
            weight = weight - RATE * momentum
    return weight


@pytest.mark.parametrize("merge", ["sum", "mean"])
def test_uneven_epochs_are_rounds_of_those_who_have_data(merge: str) -> None:
    def program(kv: kvd.KVStore) -> Any:
        kv.set_optimizer(SGD(float(RATE), momentum=float(MOMENTUM)))
        kv.init("w", np.zeros(SIZE, np.float32))
        for epoch in range(EPOCHS):
            for step in kv.steps(STEPS[kv.rank]):
                kv.pushpull("w", gradient(kv.rank, epoch, step))
                if step == max(STEPS) - 1:
                    wait_until(lambda: kv.num_workers == 1, "the others have come to the end of their data")
            kv.join(until=f"epoch {epoch}")
            assert kv.num_workers == 3
        kv.barrier("end")
        return kv.pull("w"), kv.clock("w")

    with LocalCluster(3, 2, slice_bytes=4096, merge=merge) as cluster:
        results = cluster.run(program)
        with cluster.observer() as observer:
            assert observer.version() == EPOCHS * max(STEPS)
    for weight, clock in results:
        np.testing.assert_array_equal(weight, expected(merge))
        assert clock == EPOCHS * max(STEPS)


def test_no_round_after_the_point_closes_without_one_of_them() -> None:
    """The same name again is the next point. No loops here: all push once more after each."""

    def program(kv: kvd.KVStore) -> list[float]:
        kv.init("w", np.zeros(SIZE, np.float32))
        seen = []
        for turn in range(4):
            for _ in range((kv.rank + turn) % 3):
                kv.push("w", ones(SIZE))
            kv.join(until="turn")
            seen.append(float(kv.pushpull("w", ones(SIZE))[0]))
        return seen

    with LocalCluster(3, 2, slice_bytes=4096) as cluster:
        assert cluster.run(program) == [[3.0] * 4] * 3


def test_a_key_that_is_found_late_is_at_the_clock_of_the_others() -> None:
    found = threading.Event()

    def program(kv: kvd.KVStore) -> Any:
        if kv.rank == 1:
            kv.join(until="a")
            kv.init("w", np.zeros(4, np.float32))
        else:
            kv.init("w", np.zeros(4, np.float32))
            for _ in range(3):
                kv.pushpull("w", ones())
            found.set()
            kv.join(until="a")
        return float(kv.pushpull("w", ones())[0])

    with LocalCluster(2, 1) as cluster:
        assert cluster.run(program) == [2.0, 2.0]
    assert found.is_set()


def test_one_that_waits_pushes_nothing_and_comes_again_after_a_timeout() -> None:
    with LocalCluster(2, 1, **IMPATIENT) as cluster:
        one, other = cluster.open_stores()
        made = [store.init_async("w", np.zeros(4, np.float32)) for store in (one, other)]
        for handle in made:
            handle.wait()
        with pytest.raises(RequestTimeout, match=r"join\(until='a'\).*worker") as caught:
            one.join(until="a")
        assert caught.value.waiting_for == (f"worker {other.rank}",)
        with pytest.raises(NotAllowed, match=r"call kv.join\(until='a'\) again"):
            one.push("w", ones()).wait()
        assert other.pushpull("w", ones())[0] == 1
        assert other.num_workers == 1
        wait_until(lambda: one.num_workers == 1, "the worker knows that it is left out")
        assert one.pull("w")[0] == 1
        threads = [threading.Thread(target=store.join, args=("a",)) for store in (one, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        both = [store.pushpull_async("w", ones()) for store in (one, other)]
        assert [handle.wait(20)[0] for handle in both] == [2, 2]


def test_one_that_waits_may_leave_for_good() -> None:
    with LocalCluster(2, 1, **IMPATIENT) as cluster:
        one, other = cluster.open_stores()
        with pytest.raises(RequestTimeout):
            one.join(until="a")
        one.join()
        other.join(until="a")  # for nobody
        states = {member.state for member in engine_of(other).machine.view.members.values() if member.role == "worker"}
        assert states == {"active", "done"}
        with pytest.raises(NotAllowed, match="for good"):
            one.join(until="b")


@pytest.mark.parametrize("staleness", [None, 1])
def test_asynchronous_workers_hold_nobody_up_and_go_on_level(staleness: int | None) -> None:
    def program(kv: kvd.KVStore) -> Any:
        kv.init("w", np.zeros(SIZE, np.float32))
        for epoch in range(2):
            for _ in kv.steps(STEPS[kv.rank]):
                kv.push("w", ones(SIZE))
            kv.join(until=f"epoch {epoch}")
        return kv.clock("w")

    settings = {} if staleness is None else {"staleness": staleness}
    with LocalCluster(3, 2, slice_bytes=4096, rounds_ahead=4) as cluster:
        clocks = cluster.run(program, "dist_async", **settings)
    assert clocks == ([10, 14, 18] if staleness is None else [18] * 3)


def test_a_worker_does_not_miss_steps_in_silence_where_the_servers_have_no_optimizer() -> None:
    """The steps that the others made while it waited at the point have changed their weights, and not its own."""

    def program(kv: kvd.KVStore) -> str:
        kv.init("w", np.zeros(4, np.float32))
        for _ in kv.steps(1 + kv.rank):
            kv.pushpull("w", ones())
        kv.join(until="epoch 0")
        error = ""
        try:
            for _ in kv.steps(1):
                break
        except NotResumed as raised:
            error = str(raised)
        assert list(kv.steps(0, restored=True)) == []
        for _ in kv.steps(1):
            kv.pushpull("w", ones())
        return error

    with LocalCluster(2, 1) as cluster:
        fewer, more = cluster.run(program)
    assert "the other workers made more steps than this one" in fewer
    assert more == ""


def test_in_the_async_facade() -> None:
    async def program(settings: dict[str, Any]) -> float:
        async with await kvd.aio.create("dist_sync", **settings) as kv:
            await kv.init("w", np.zeros(4, np.float32))
            async for _ in kv.steps(1 + kv.rank):
                await kv.pushpull("w", ones())
            await kv.join(until="a")
            await kv.join(until=7)
            return float((await kv.pushpull("w", ones()))[0])

    async def both(settings: dict[str, Any]) -> list[float]:
        return list(await asyncio.gather(program(settings), program(settings)))

    with LocalCluster(2, 1) as cluster:
        assert asyncio.run(both({"scheduler": cluster.address, "run": cluster.settings["run"]})) == [2.0, 2.0]


def test_without_a_cluster_it_returns_at_once() -> None:
    with kvd.create("local") as kv:
        kv.init("w", np.zeros(4, np.float32))
        kv.join(until="a")
        kv.push("w", ones())
        for _ in kv.steps(1):
            kv.push("w", ones())
            with pytest.raises(NotAllowed, match="not in it"):
                kv.join(until="b")
        with pytest.raises(NotAllowed, match="the point until which join waits is a str or an int, not float"):
            kv.join(until=1.5)  # type: ignore[arg-type]


def test_in_a_loop_it_is_refused() -> None:
    with LocalCluster(1, 1) as cluster:
        kv = cluster.store()
        kv.init("w", np.zeros(4, np.float32))
        for _ in kv.steps(1):
            with pytest.raises(NotAllowed, match=r"join\(until=…\) comes after a loop"):
                kv.join(until="a")
            kv.push("w", ones())
        kv.join(until="a")
        kv.push("w", ones()).wait()
