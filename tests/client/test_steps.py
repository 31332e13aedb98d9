"""`kv.steps`: what a step may push, and how a loop ends."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.errors import NotAllowed, RemoteError
from kvd.testing.cluster import LocalCluster, engine_of, wait_until
from tests.client.harness import each, ones


@pytest.fixture(params=["local", "dist_sync", "dist_async"])
def kv(request: pytest.FixtureRequest) -> Iterator[kvd.KVStore]:
    """A store of one worker, with the keys "a", "b" and "c" of four zeros."""
    with LocalCluster(1, 2) as cluster:
        store = kvd.create("local") if request.param == "local" else cluster.store(request.param)
        store.init(["a", "b", "c"], [np.zeros(4, np.float32)] * 3)
        yield store


# ── what a step may push ──


def test_a_loop_is_a_range_that_checks_its_pushes(kv: kvd.KVStore) -> None:
    seen = []
    for step in kv.steps(4):
        kv.push(["a", "b"], [ones(), ones()])
        seen.append(step)
    assert seen == [0, 1, 2, 3]
    assert list(kv.steps(0)) == []
    kv.push("a", ones())
    kv.flush()
    assert kv.clock("a") == 5
    assert [kv.pushpull("b", ones()).tolist() for _ in kv.steps(1)] == [[1, 1, 1, 1]]


@pytest.mark.parametrize("push", ["push", "pushpull", "push_async", "pushpull_async"])
def test_a_step_pushes_each_key_once(kv: kvd.KVStore, push: str) -> None:
    with pytest.raises(NotAllowed, match="key 'a' is pushed twice in one step") as raised:
        each(kv, 2, lambda step: [getattr(kv, push)("a", ones()) for _ in range(2)])
    assert raised.value.key == "a"
    kv.flush()
    assert kv.clock("a") == 1  # the second push did not leave


def test_a_step_pushes_every_key_that_the_first_one_pushed(kv: kvd.KVStore) -> None:
    with pytest.raises(NotAllowed, match=r"step 1 of kv.steps has not pushed 'b'") as raised:
        each(kv, 3, lambda step: [kv.push(key, ones()) for key in ("ab" if step == 0 else "a")])
    assert raised.value.key == "b"
    with pytest.raises(NotAllowed, match=r"key 'b' is not one of the keys of this loop over kv.steps \('a'\)"):
        each(kv, 3, lambda step: [kv.push(key, ones()) for key in ("ab" if step == 1 else "a")])


def test_the_listed_keys_count_from_the_first_step_on(kv: kvd.KVStore) -> None:
    with pytest.raises(NotAllowed, match="key 'c' is not one of the keys"):
        each(kv, 3, lambda step: kv.push("c", ones()), ["a", "b"])
    with pytest.raises(NotAllowed, match=r"step 0 of kv.steps has not pushed 'b'"):
        each(kv, 3, lambda step: kv.push("a", ones()), ["a", "b"])
    for _ in kv.steps(2, keys="a"):
        kv.push("a", ones())


def test_broadcasts_are_not_counted(kv: kvd.KVStore) -> None:
    for step in kv.steps(3, keys=["a"]):
        kv.push("a", ones())
        kv.broadcast("b", np.full(4, step, np.float32))
    assert kv.pull("b").tolist() == [2, 2, 2, 2]
    for calls in ((kv.push, kv.broadcast), (kv.broadcast, kv.push), (kv.broadcast, kv.broadcast)):
        with pytest.raises(NotAllowed, match=r"in one step of kv.steps: a restarted worker could not make"):
            each(kv, 3, lambda step, calls=calls: [call("a", ones()) for call in calls])  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"total": -1}, "the number of steps is a whole number from 0"),
        ({"total": 2.5}, "the number of steps is a whole number"),
        ({"total": True}, "the number of steps is a whole number"),
        ({"total": 1 << 61}, "the loops of a program have at most"),
        ({"total": 1, "keys": []}, "keys is empty"),
        ({"total": 1, "keys": [1.5]}, "a key is a str or an int"),
        ({"total": 1, "keys": ["a", "a"]}, "more than once"),
        ({"total": 1, "shared": "yes"}, "shared is True or False"),
    ],
)
def test_wrong_arguments_are_named(kv: kvd.KVStore, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(NotAllowed, match=text):
        next(kv.steps(**arguments))
    assert list(kv.steps(0)) == []  # no loop was left open


# ── the end of a loop ──


def test_break_and_errors_end_a_loop(kv: kvd.KVStore) -> None:
    for _ in kv.steps(5, keys=["a", "b"]):
        kv.push("a", ones())
        break
    with pytest.raises(ZeroDivisionError):
        each(kv, 5, lambda step: 1 // 0)
    kv.push("a", ones())
    kv.push("a", ones())
    kv.flush()
    assert kv.clock("a") == 3


def test_one_loop_at_a_time(kv: kvd.KVStore) -> None:
    held = kv.steps(5)
    assert next(held) == 0
    with pytest.raises(NotAllowed, match=r"a loop over kv.steps is open"):
        next(kv.steps(2))
    for call in (kv.resume, lambda: kv.rewind(0)):
        with pytest.raises(NotAllowed):
            call()
    held.close()
    assert list(held) == []
    kv.resume()
    assert next(iter(kv.steps(2))) == 0


def test_steps_that_are_never_iterated_open_no_loop(kv: kvd.KVStore) -> None:
    unused = kv.steps(5)
    kv.push("a", ones())
    kv.push("a", ones())
    assert next(unused) == 0


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
@pytest.mark.asyncio
async def test_the_async_iterator(kind: str) -> None:
    with LocalCluster(1, 1) as cluster:
        async with await kvd.aio.create(kind, **({} if kind == "local" else {"scheduler": cluster.address})) as kv:
            await kv.init(["a", "b"], [np.zeros(4, np.float32)] * 2)
            seen = []
            async for step in kv.steps(3):
                await kv.push("a", ones())
                kv.broadcast_async("b", np.full(4, step, np.float32))
                seen.append(step)
            assert seen == [0, 1, 2]
            async for _ in kv.steps(3):
                await kv.pushpull("a", ones())
                with pytest.raises(NotAllowed, match="pushed twice"):
                    await kv.pushpull("a", ones())
                break
            async for _ in kv.steps(3):
                break
            await kv.resume()
            await kv.flush()
            assert await kv.clock("a") == 4
            assert (await kv.pull("b")).tolist() == [2, 2, 2, 2]


# ── no key runs ahead ──


def test_no_key_runs_more_than_one_step_ahead_of_the_slowest() -> None:
    """Worker 0 pushes ten steps without waiting; worker 1 pushes "a" alone, so the rounds of "b" stay open."""
    with ThreadPoolExecutor(2) as pool, LocalCluster(2, 1) as cluster:
        zero, one = pool.map(lambda number: cluster.store(node_id=f"worker-{number}"), range(2))
        for future in [pool.submit(kv.init, ["a", "b"], [np.zeros(4, np.float32)] * 2) for kv in (zero, one)]:
            future.result()
        for _ in zero.steps(10):
            zero.push("a", ones())
            zero.push("b", ones())
        assert clocks_of(zero) == {"a": 1, "b": 1}  # rounds_ahead would allow 2
        for _ in range(3):
            one.push("a", ones())
        wait_until(lambda: one.version("a") == 1, "the first round of a is closed")
        assert clocks_of(zero) == {"a": 1, "b": 1}
        one.push("b", ones())
        wait_until(lambda: clocks_of(zero) == {"a": 2, "b": 2}, "the second step has begun")
        for _ in range(7):
            one.push("a", ones())
        for _ in range(9):
            one.push("b", ones())
        assert [one.pull(key).tolist() for key in "ab"] == [[2, 2, 2, 2]] * 2


def clocks_of(store: kvd.KVStore) -> Any:
    return engine_of(store).machine.explain(0.0)["clocks"]


def test_a_value_that_does_not_fit_is_still_refused_in_a_loop(kv: kvd.KVStore) -> None:
    with pytest.raises(RemoteError):
        each(kv, 2, lambda step: kv.pushpull("a", np.ones(5, np.float32)))
