"""`kv.steps(total, shared=True)`: all workers together make the steps, and each counts once, also if workers die."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.errors import NotAllowed
from kvd.testing.cluster import LocalCluster
from tests.client.harness import SLOW_TO_JUDGE, each, ones

TOTAL = 25
STALENESS: list[dict[str, Any]] = [{}, {"staleness": 0}, {"staleness": 1}, {"staleness": 3}]
Each = Callable[[kvd.KVStore, int], object]


class Killed(Exception):
    """The program dies here."""


def nothing(kv: kvd.KVStore, step: int) -> None:
    """What a worker does between the pushes of a step."""


def share(kv: kvd.KVStore, between: Each = nothing, total: int = TOTAL) -> list[int]:
    """Makes steps that add 1 to "a" and "b", and says which."""
    seen = []
    for step in kv.steps(total, shared=True):
        kv.push("a", -ones())
        between(kv, step)
        kv.pushpull("b", -ones())
        seen.append(step)
    return seen


def prepare(kv: kvd.KVStore) -> None:
    kv.set_optimizer(kvd.optimizer.SGD(1.0))
    kv.init(["a", "b"], [np.zeros(4, np.float32)] * 2)


def totals(kv: kvd.KVStore) -> tuple[float, float]:
    return float(kv.pull("a")[0]), float(kv.pull("b")[0])


@pytest.mark.parametrize("settings", STALENESS)
def test_every_step_is_made_once(settings: dict[str, Any]) -> None:
    def program(kv: kvd.KVStore) -> tuple[list[int], tuple[float, float], list[int]]:
        prepare(kv)
        first = share(kv)
        kv.barrier("between the loops")
        reached = totals(kv)
        kv.barrier("read")
        return first, reached, share(kv, total=7)

    with LocalCluster(3, 2, **settings) as cluster:
        results = cluster.run(program, "dist_async")
        assert sorted(step for first, _, _ in results for step in first) == list(range(TOTAL))
        assert {reached for _, reached, _ in results} == {(TOTAL, TOTAL)}
        assert sorted(step for _, _, second in results for step in second) == list(range(7))


def test_nobody_waits_for_a_straggler_beyond_its_own_step() -> None:
    """The straggler makes one step while the others make all that are left."""
    made: Counter[int] = Counter()
    straggler_has_begun, others_are_done = threading.Event(), threading.Event()

    def between(kv: kvd.KVStore, step: int) -> None:
        if kv.rank == 2 and not made[2]:
            straggler_has_begun.set()
            assert others_are_done.wait(30)
        made[kv.rank] += 1
        if made[0] + made[1] == TOTAL - 1:
            others_are_done.set()

    def program(kv: kvd.KVStore) -> int:
        prepare(kv)
        if kv.rank != 2:
            assert straggler_has_begun.wait(30)
        return len(share(kv, between))

    with LocalCluster(3, 2) as cluster:
        counts = cluster.run(program, "dist_async")
        assert counts[2] == 1
        assert sum(counts) == TOTAL


@pytest.mark.parametrize("kind", ["dist_sync", "local"])
def test_in_other_types_each_worker_makes_every_step(kind: str) -> None:
    def program(kv: kvd.KVStore) -> list[int]:
        kv.init(["a", "b"], [np.zeros(4, np.float32)] * 2)
        return share(kv)

    if kind == "local":
        assert program(kvd.create("local")) == list(range(TOTAL))
        return
    with LocalCluster(2, 1) as cluster:
        assert cluster.run(program, kind) == [list(range(TOTAL))] * 2


def run_with_a_death(cluster: LocalCluster, *, restart: bool) -> list[list[int]]:
    """Worker 2 dies in the middle of its second step. The steps of all who lived."""
    dead = threading.Event()

    def dies(kv: kvd.KVStore, step: int) -> None:
        kv.flush()  # half of the step has counted
        steps_of_victim.append(step)
        if len(steps_of_victim) == 2:
            raise Killed

    def slowly(kv: kvd.KVStore, step: int) -> None:
        if step >= TOTAL // 2:
            assert dead.wait(30)  # steps are left when the worker dies

    steps_of_victim: list[int] = []
    with ThreadPoolExecutor(3) as pool:
        begun = [pool.submit(cluster.store, "dist_async", node_id=f"worker-{number}") for number in range(3)]
        stores = sorted((future.result() for future in begun), key=lambda store: store.rank)
        node_ids = {future.result().rank: f"worker-{number}" for number, future in enumerate(begun)}
        for prepared in [pool.submit(prepare, store) for store in stores]:
            prepared.result()
        others = [pool.submit(share, store, slowly) for store in stores[:2]]
        with pytest.raises(Killed):
            share(stores[2], dies)
        stores[2].__exit__(Killed, None, None)
        results = [steps_of_victim[:1]]
        if restart:
            successor = cluster.store("dist_async", node_id=node_ids[2])
            assert successor.rank == 2
            prepare(successor)
            dead.set()
            results.append(share(successor))
        dead.set()
        results += [other.result() for other in others]
        assert totals(stores[0]) == (TOTAL, TOTAL)
    return results


@pytest.mark.parametrize("settings", STALENESS)
def test_a_successor_shares_the_steps_of_its_predecessor(settings: dict[str, Any]) -> None:
    with LocalCluster(3, 2, **SLOW_TO_JUDGE, **settings) as cluster:
        made = run_with_a_death(cluster, restart=True)
        assert sorted(step for steps in made for step in steps) == list(range(TOTAL))


def test_the_step_of_a_dead_worker_is_given_to_another() -> None:
    with LocalCluster(3, 2, **{**SLOW_TO_JUDGE, "worker_timeout_s": 12.0}) as cluster:  # it waits for that
        made = run_with_a_death(cluster, restart=False)
        assert sorted(step for steps in made for step in steps) == list(range(TOTAL))


def test_what_takes_all_workers_is_refused_in_a_shared_step() -> None:
    with LocalCluster(1, 1) as cluster:
        kv = cluster.store("dist_async")
        prepare(kv)
        for call in (lambda step: kv.broadcast("a", ones()), lambda step: kv.barrier()):
            with pytest.raises(NotAllowed, match=r"takes all workers, and a step of .* is made by one of them"):
                each(kv, 2, call, shared=True)


def test_workers_that_share_other_numbers_of_steps_are_told() -> None:
    with ThreadPoolExecutor(2) as pool, LocalCluster(2, 1) as cluster:
        stores = list(pool.map(lambda number: cluster.store("dist_async", node_id=f"worker-{number}"), range(2)))
        list(pool.map(prepare, stores))
        assert next(iter(stores[0].steps(9, shared=True))) == 0
        with pytest.raises(NotAllowed, match=f"worker {stores[1].rank} shares 8 steps, worker {stores[0].rank} 9"):
            each(stores[1], 8, lambda step: None, shared=True)
        assert list(stores[1].steps(0)) == []  # no loop was left open


@pytest.mark.asyncio
async def test_the_async_iterator_shares_too() -> None:
    with LocalCluster(1, 1) as cluster:
        async with await kvd.aio.create("dist_async", scheduler=cluster.address) as kv:
            await kv.init("a", np.zeros(4, np.float32))
            seen = []
            async for step in kv.steps(5, shared=True):
                await kv.push("a", ones())
                seen.append(step)
            assert seen == [0, 1, 2, 3, 4]
