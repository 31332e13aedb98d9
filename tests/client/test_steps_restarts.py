"""`kv.steps` in workers that are restarted: they go on by themselves, and every push counts once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.errors import KvdError, NotAllowed, NotResumed
from kvd.testing.cluster import LocalCluster
from tests.client.harness import SLOW_TO_JUDGE, each, ones

Floats = np.ndarray[Any, np.dtype[np.float32]]


# ── a restarted worker goes on ──


class Killed(Exception):
    """The program dies here."""


RATE, MOMENTUM = np.float32(0.1), np.float32(0.9)
SIZES = {"a": 300, "b": 40, "c": 7}
Crash = Callable[[str], None]


def gradient(key: str, weights: Floats, rank: int, step: int) -> Floats:
    noise = np.random.default_rng((ord(key), rank, step)).normal(size=weights.size).astype(np.float32)
    return weights * np.float32(0.3) + noise


def training(kv: kvd.KVStore, crash: Crash) -> dict[str, Floats]:
    """Two loops with a broadcast before and between them, and keys that only one of them pushes."""
    kv.set_optimizer(kvd.optimizer.SGD(float(RATE), momentum=float(MOMENTUM)))
    kv.broadcast(["a", "b", "c"], [np.full(size, kv.rank, np.float32) for size in SIZES.values()])
    crash("before the loop")
    for step in kv.steps(3):
        weights = dict(zip("ab", kv.pull(["a", "b"]), strict=True))
        crash(f"1.{step} before")
        kv.push("b", gradient("b", weights["b"], kv.rank, step))
        crash(f"1.{step} half")
        kv.push("a", gradient("a", weights["a"], kv.rank, step))
        crash(f"1.{step} after")
        if step == 1:
            kv.broadcast("c", np.full(SIZES["c"], 5 + kv.rank, np.float32))
            crash("1.1 broadcast")
            kv.barrier("in the loop")
            crash("1.1 barrier")
    kv.broadcast("b", np.full(SIZES["b"], 9 + kv.rank, np.float32))
    crash("between")
    weights = dict(zip("ac", kv.pull(["a", "c"]), strict=True))
    for step in kv.steps(4, keys=["a", "c"]):
        gradients = [gradient(key, weights[key], kv.rank, 10 + step) for key in "ac"]
        crash(f"2.{step} before")
        if step == 3:
            break
        kv.pushpull(["a", "c"], gradients, list(weights.values()))
        crash(f"2.{step} after")
    kv.broadcast("c", weights["c"])
    crash("at the end")
    return dict(zip("abc", kv.pull(["a", "b", "c"]), strict=True))


def expected() -> dict[str, Floats]:
    """What `training` ends with, calculated here: sums in rank order, and SGD with momentum."""
    weights = {key: np.zeros(size, np.float32) for key, size in SIZES.items()}
    velocity = {key: np.zeros(size, np.float32) for key, size in SIZES.items()}

    def step_of(keys: str, step: int) -> None:
        for key in keys:
            merged = gradient(key, weights[key], 0, step) + gradient(key, weights[key], 1, step)
            velocity[key] = MOMENTUM * velocity[key] + merged
            weights[key] = weights[key] - RATE * velocity[key]

    for step in range(3):
        step_of("ab", step)
        if step == 1:
            weights["c"][:] = 5
            velocity["c"][:] = 0
    weights["b"][:] = 9
    for step in range(3):
        step_of("ac", 10 + step)
    return weights


def points() -> list[str]:
    """Where `training` may die."""
    seen: list[str] = []
    with kvd.create("local") as kv:
        training(kv, seen.append)
    return seen


def run_with_a_death(cluster: LocalCluster, kind: str, program: Callable[..., Any], rank: int, point: str) -> list[Any]:
    """The results of two workers, one of which dies at a point of the program and is started again."""

    def crash(seen: str) -> None:
        if seen == point:
            raise Killed

    with ThreadPoolExecutor(2) as pool:
        begun = [pool.submit(cluster.store, kind, node_id=f"worker-{number}") for number in range(2)]
        by_rank = {future.result().rank: number for number, future in enumerate(begun)}
        stores = {future.result().rank: future.result() for future in begun}
        other: Future[Any] = pool.submit(program, stores[1 - rank], lambda seen: None)
        with pytest.raises(Killed):
            program(stores[rank], crash)
        stores[rank].__exit__(Killed, None, None)
        successor = cluster.store(kind, node_id=f"worker-{by_rank[rank]}")
        assert successor.rank == rank
        results = {rank: program(successor, lambda seen: None), 1 - rank: other.result()}
        return [results[0], results[1]]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("point", points())
def test_a_restarted_worker_goes_on_by_itself_and_ends_with_the_same_bits(point: str, rank: int) -> None:
    with LocalCluster(2, 2, **SLOW_TO_JUDGE) as cluster:
        for result in run_with_a_death(cluster, "dist_sync", training, rank, point):
            for key, weights in expected().items():
                np.testing.assert_allclose(result[key], weights, rtol=2e-5, err_msg=key)


def test_a_worker_that_dies_again_and_again_ends_with_the_same_bits() -> None:
    deaths = ["1.0 half", "1.0 half", "1.2 before", "between", "2.0 after", "2.2 after", "2.2 after"]
    with ThreadPoolExecutor(2) as pool, LocalCluster(2, 2, **SLOW_TO_JUDGE) as cluster:
        begun = [pool.submit(cluster.store, "dist_sync", node_id=f"worker-{number}") for number in range(2)]
        numbers = {future.result().rank: number for number, future in enumerate(begun)}
        stores = {future.result().rank: future.result() for future in begun}
        other = pool.submit(training, stores[0], lambda seen: None)
        mortal = stores[1]
        for death in deaths:

            def crash(seen: str, death: str = death) -> None:
                if seen == death:
                    raise Killed

            with pytest.raises(Killed):
                training(mortal, crash)
            mortal.__exit__(Killed, None, None)
            mortal = cluster.store(node_id=f"worker-{numbers[1]}")
        results = [training(mortal, lambda seen: None), other.result()]
        for result in results:
            for key, weights in expected().items():
                np.testing.assert_allclose(result[key], weights, rtol=2e-5, err_msg=key)


def counting(kv: kvd.KVStore, crash: Crash) -> dict[str, float]:
    """Pushes before the first loop and after it; every push adds 1."""
    kv.set_optimizer(kvd.optimizer.SGD(1.0))
    kv.init(["a", "b"], [np.zeros(4, np.float32)] * 2)
    kv.push("a", -ones())
    for step in kv.steps(5, keys=["a", "b"]):
        crash(f"{step} before")
        kv.pushpull("b", -ones())
        crash(f"{step} half")
        kv.pushpull("a", -ones())
    kv.pushpull("b", -ones())
    for step in kv.steps(2):
        crash(f"again {step}")
        kv.pushpull("b", -ones())
    kv.flush()
    kv.barrier("all have pushed")
    return {key: float(kv.pull(key)[0]) for key in "ab"}


@pytest.mark.parametrize("settings", [{}, {"staleness": 0}, {"staleness": 2}])
@pytest.mark.parametrize("point", ["0 before", "0 half", "3 before", "3 half", "again 0", "again 1"])
def test_asynchronous_pushes_count_once_each(point: str, settings: dict[str, Any]) -> None:
    with LocalCluster(2, 2, **SLOW_TO_JUDGE, **settings) as cluster:
        results = run_with_a_death(cluster, "dist_async", counting, 1, point)
        assert results == [{"a": 12.0, "b": 16.0}] * 2


@pytest.mark.parametrize("point", ["0 before", "0 half", "3 before", "again 0", "again 1"])
def test_pushes_outside_of_loops_count_once_each(point: str) -> None:
    with LocalCluster(2, 2, **SLOW_TO_JUDGE) as cluster:
        results = run_with_a_death(cluster, "dist_sync", counting, 1, point)
        assert results == [{"a": 12.0, "b": 16.0}] * 2


# ── a restarted worker that has not said where it goes on ──


@pytest.fixture
def orphaned() -> Iterator[Callable[..., kvd.KVStore]]:
    """Lets the only worker of a cluster run a program and die; gives its successor."""
    with LocalCluster(1, 2, **SLOW_TO_JUDGE) as cluster:

        def successor(program: Callable[[kvd.KVStore], object], kind: str = "dist_sync") -> kvd.KVStore:
            first = cluster.store(kind, node_id="worker-0")
            first.init(["a", "b"], [np.zeros(4, np.float32)] * 2)
            program(first)
            first.flush()
            first.__exit__(Killed, None, None)
            second = cluster.store(kind, node_id="worker-0")
            second.init(["a", "b"], [np.zeros(4, np.float32)] * 2)
            assert second.restarted
            return second

        yield successor


@pytest.mark.parametrize("push", ["push", "pushpull"])
def test_a_program_without_steps_is_not_resumed_in_silence(orphaned: Any, push: str) -> None:
    kv = orphaned(lambda first: [first.push("a", ones()) for _ in range(3)])
    assert kv.pull("a").tolist() == [1, 1, 1, 1]
    with pytest.raises(NotResumed, match="this worker was restarted, and pushes 'a' again") as raised:
        getattr(kv, push)("a", ones())
    assert isinstance(raised.value, KvdError)
    assert raised.value.key == "a"
    for line in ("for step in kv.steps(total):", "kv.rewind(step)", "kv.resume()"):
        assert line in str(raised.value)
    kv.resume()
    kv.push("a", ones())
    kv.flush()
    assert kv.clock("a") == 4


def test_rewind_says_where_a_program_goes_on(orphaned: Any) -> None:
    kv = orphaned(lambda first: [first.push("a", ones()) for _ in range(3)])
    kv.rewind(kv.clock("a") - 1)
    kv.push("a", ones())
    kv.push("a", ones())
    kv.flush()
    assert kv.version("a") == 4


def test_nothing_has_to_be_resumed_where_nothing_was_trained(orphaned: Any) -> None:
    kv = orphaned(lambda first: [first.broadcast("a", ones()) for _ in range(2)])
    kv.broadcast("a", ones())
    kv.push("a", ones())
    kv.flush()
    assert kv.clock("a") == 3


def test_asynchronous_programs_need_not_say_where_they_go_on(orphaned: Any) -> None:
    kv = orphaned(lambda first: [first.push("a", ones()) for _ in range(3)], "dist_async")
    kv.push("a", ones())
    kv.flush()
    assert kv.clock("a") == 4


def step_through(kv: kvd.KVStore, total: int, keys: list[str], stop: int | None = None) -> list[int]:
    seen = []
    for step in kv.steps(total, restored=True):
        if step == stop:
            break
        kv.push(keys, [ones() for _ in keys])
        seen.append(step)
    return seen


def test_a_program_with_a_checkpoint_of_its_own_begins_its_loops_anew(orphaned: Any) -> None:
    kv = orphaned(lambda first: step_through(first, 9, ["a", "b"], 6))
    assert kv.clock("a") == 5  # the step in which the predecessor made its last push would be made again
    kv.resume()
    assert kv.clock("a") == 6
    assert step_through(kv, 3, ["a"]) == [0, 1, 2]
    kv.flush()
    assert (kv.clock("a"), kv.clock("b"), kv.version("a")) == (9, 6, 9)


def test_what_a_predecessor_resumed_is_what_its_successor_goes_on_from() -> None:
    with LocalCluster(1, 2, **SLOW_TO_JUDGE) as cluster:
        for life, (stop, seen) in enumerate(((6, [0, 1, 2, 3, 4, 5]), (2, [0, 1]), (None, [1, 2]))):
            kv = cluster.store(node_id="worker-0")
            kv.init(["a", "b"], [np.zeros(4, np.float32)] * 2)
            if life == 1:
                kv.resume()
            assert step_through(kv, 9 if life == 0 else 3, ["a", "b"], stop) == seen
            kv.flush()
            assert kv.version("b") == (6, 8, 9)[life]
            kv.__exit__(Killed, None, None)


def test_keys_at_different_clocks_are_named_at_once(orphaned: Any) -> None:
    def pushes(first: kvd.KVStore) -> None:
        for _ in range(5):
            first.push("a", ones())
        for _ in range(3):
            first.push("b", ones())

    kv = orphaned(pushes)
    with pytest.raises(NotAllowed, match=r"different clocks: .* of its pushes there count 5 of 'a', 3 of 'b'"):
        next(kv.steps(9, keys=["a", "b"]))
    kv.resume()
    assert step_through(kv, 2, ["a", "b"]) == [0, 1]
    kv.flush()
    assert (kv.clock("a"), kv.clock("b")) == (7, 5)


@pytest.mark.parametrize("keys", [["a", "b"], None])
def test_another_program_does_not_go_on_where_its_predecessor_stopped(orphaned: Any, keys: list[str] | None) -> None:
    kv = orphaned(lambda first: step_through(first, 9, ["a"], 6))
    with pytest.raises(NotAllowed, match=r"the keys are at different clocks: .* last push of 'b' \(0 count\)"):
        each(kv, 9, lambda step: kv.push(["a", "b"], [ones(), ones()]), keys, restored=True)


# ── what a module has besides its parameters ──


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("point", ["0 after", "2 before", "2 pushed", "2 after", "over"])
def test_buffers_travel_as_keys_that_each_step_broadcasts(point: str, rank: int) -> None:
    """As docs/consistency.md shows it: BatchNorm's running statistics continue, too."""
    torch = pytest.importorskip("torch")

    def program(kv: kvd.KVStore, crash: Crash) -> bytes:
        module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
        for number, parameter in enumerate(module.parameters()):
            torch.nn.init.constant_(parameter, 0.1 * (number + 1))
        params, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        kv.broadcast([*params, *buffers], [*params.values(), *buffers.values()])
        kv.set_optimizer(kvd.optimizer.SGD(0.1, momentum=0.9))
        kv.pull([*params, *buffers], out=[*params.values(), *buffers.values()])
        for step in kv.steps(4, list(params)):
            crash(f"{step} before")
            data = torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + kv.rank))
            module.zero_grad()
            (module(data) ** 2).mean().backward()
            kv.pushpull(list(params), [p.grad for p in params.values()], out=list(params.values()))
            crash(f"{step} pushed")
            kv.broadcast(list(buffers), list(buffers.values()))
            crash(f"{step} after")
        crash("over")
        return b"".join(tensor.detach().numpy().tobytes() for tensor in (*params.values(), *buffers.values()))

    with LocalCluster(2, 2, **SLOW_TO_JUDGE) as cluster:
        expected, other = cluster.run(lambda kv: program(kv, lambda seen: None))
        assert expected == other
    with LocalCluster(2, 2, **SLOW_TO_JUDGE) as cluster:
        assert run_with_a_death(cluster, "dist_sync", program, rank, point) == [expected] * 2


# ── steps were made without this process, and the servers have no optimizer ──


def pushes_in_steps(total: int, **how: Any) -> Callable[[kvd.KVStore], object]:
    """Makes so many steps of a loop over nine."""

    def program(kv: kvd.KVStore) -> list[int]:
        seen = []
        for step in kv.steps(9, **how):
            if step == total:
                break
            kv.push(["a", "b"], [ones(), ones()])
            seen.append(step)
        return seen

    return program


@pytest.mark.parametrize(
    ("kind", "how"), [("dist_sync", {}), ("dist_sync", {"keys": ["a", "b"]}), ("dist_async", {"shared": True})]
)
def test_a_loop_does_not_skip_steps_that_only_its_predecessor_knows(orphaned: Any, kind: str, how: Any) -> None:
    """Without an optimizer the servers have the merged gradients, and what became of them died with the process."""
    kv = orphaned(pushes_in_steps(6, **how), kind)
    with pytest.raises(NotResumed, match=r"this worker was restarted, and kv.steps skips") as raised:
        pushes_in_steps(9, **how)(kv)
    for advice in ("kv.set_optimizer", "kv.steps(total, restored=True)", "kv.resume()"):
        assert advice in str(raised.value)
    assert raised.value.key == ""


def test_a_loop_that_is_over_is_not_skipped_either(orphaned: Any) -> None:
    kv = orphaned(lambda first: [pushes_in_steps(9)(first), first.push("a", ones())])
    with pytest.raises(NotResumed, match="this worker was restarted"):
        pushes_in_steps(9)(kv)


def test_a_program_may_say_that_it_has_restored_its_state(orphaned: Any) -> None:
    kv = orphaned(pushes_in_steps(6))
    assert pushes_in_steps(9, restored=True)(kv) == [5, 6, 7, 8]
    assert pushes_in_steps(9)(kv) == list(range(9))  # whatever this process did itself needs no word
    with pytest.raises(NotAllowed, match="restored is True or False, not 1"):
        kv.steps(9, restored=1)


@pytest.mark.parametrize("point", ["0 before", "2 before", "2 half", "4 after", "over"])
def test_an_optimizer_in_the_worker_goes_on_from_files_of_the_program(point: str) -> None:
    """As docs/consistency.md shows it: the state before the first step that the loop gives is loaded."""
    saved: dict[tuple[int, int], Floats] = {}
    clean: dict[tuple[int, int], Floats] = {}

    def program(files: dict[tuple[int, int], Floats], kv: kvd.KVStore, crash: Crash) -> bytes:
        kv.init("g", np.zeros(40, np.float32))
        weights, has_step = np.zeros(40, np.float32), 0
        for step in kv.steps(5, restored=True):
            if step != has_step:
                weights = files[kv.rank, step].copy()
            crash(f"{step} before")
            merged = kv.pushpull("g", gradient("g", weights, kv.rank, step))
            crash(f"{step} half")
            weights -= RATE * merged
            has_step = step + 1
            files[kv.rank, has_step] = weights.copy()
            crash(f"{step} after")
        if has_step != 5:
            weights = files[kv.rank, 5].copy()
        crash("over")
        return weights.tobytes()

    with LocalCluster(2, 2, **SLOW_TO_JUDGE) as cluster:
        expected, _ = cluster.run(lambda kv: program(clean, kv, lambda seen: None))
    with LocalCluster(2, 2, **SLOW_TO_JUDGE) as cluster:
        assert run_with_a_death(cluster, "dist_sync", partial(program, saved), 1, point) == [expected] * 2


def test_a_program_may_begin_again(orphaned: Any) -> None:
    kv = orphaned(pushes_in_steps(6))
    kv.resume()
    assert pushes_in_steps(9)(kv) == list(range(9))


def test_the_first_step_is_made_again_without_a_word(orphaned: Any) -> None:
    assert pushes_in_steps(9)(orphaned(pushes_in_steps(1))) == list(range(9))


def test_an_optimizer_that_one_worker_has_set_is_enough(orphaned: Any) -> None:
    kv = orphaned(lambda first: [first.set_optimizer(kvd.optimizer.SGD(1.0)), pushes_in_steps(6)(first)])
    assert pushes_in_steps(9)(kv) == [5, 6, 7, 8]


def test_an_event_loop_gets_the_same_error() -> None:
    async def life(cluster: LocalCluster, total: int, **how: Any) -> list[int]:
        settings = {"scheduler": cluster.address, "run": cluster.settings["run"], "node_id": "worker-0"}
        kv = await kvd.aio.create("dist_sync", **settings)
        try:
            await kv.init("a", np.zeros(4, np.float32))
            seen = []
            async for step in kv.steps(9, **how):
                if step == total:
                    break
                await kv.push("a", ones())
                seen.append(step)
            await kv.flush()
            return seen
        finally:
            await kv.__aexit__(Killed, None, None)

    with LocalCluster(1, 2, **SLOW_TO_JUDGE) as cluster:
        assert asyncio.run(life(cluster, 6)) == list(range(6))
        with pytest.raises(NotResumed, match="this worker was restarted"):
            asyncio.run(life(cluster, 9))
        assert asyncio.run(life(cluster, 9, restored=True)) == [5, 6, 7, 8]


def test_a_worker_that_takes_the_rank_of_one_that_left_begins_its_loops_anew() -> None:
    """Asynchronous, so that the worker that stays, and keeps the run alive, need not push."""
    with ThreadPoolExecutor(2) as pool, LocalCluster(2, 2, **SLOW_TO_JUDGE) as cluster:
        kv, other = pool.map(lambda number: cluster.store("dist_async", node_id=f"worker-{number}"), range(2))
        list(pool.map(lambda store: store.init(["a", "b"], [np.zeros(4, np.float32)] * 2), (kv, other)))
        for _ in range(2):
            assert step_through(kv, 3, ["a", "b"]) == [0, 1, 2]
            kv.set_barrier_before_exit(False)
            kv.close()
            kv = cluster.store("dist_async", node_id="worker-0")
        assert step_through(kv, 3, ["a"], 1) == [0]
        kv.flush()
        kv.__exit__(Killed, None, None)
        kv = cluster.store("dist_async", node_id="worker-0")
        assert step_through(kv, 3, ["a"]) == [0, 1, 2]
        kv.flush()
        assert kv.version("a") == 9
