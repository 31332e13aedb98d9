"""A push that is refused where it was called takes no clock: the round waits for this worker, which may push again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.errors import KvdError, NotAllowed, ShapeMismatch
from kvd.optimizer import SGD
from kvd.testing.cluster import LocalCluster

FLOAT = np.float32
WAITING = "the other workers still wait for this call: repeat it with values that fit"
STEPS = 5


def gradient(rank: int, step: int, shape: tuple[int, ...] = (4,)) -> np.ndarray[Any, Any]:
    """Small whole numbers, so that sums are exact."""
    return np.random.default_rng([rank, step]).integers(-9, 9, shape).astype(FLOAT)


def trained(steps: int = STEPS) -> np.ndarray[Any, Any]:
    """The weights after so many steps of both workers, with a rate of 1, calculated here."""
    return np.zeros(4, FLOAT) - sum(gradient(rank, step) for rank in (0, 1) for step in range(steps))


REFUSED: dict[str, Callable[[kvd.KVStore, int], Any]] = {
    "push": lambda kv, step: kv.push("w", gradient(1, step, (5,))).wait(),
    "push of None": lambda kv, step: kv.push("w", None),
    "push of another dtype": lambda kv, step: kv.push("w", gradient(1, step).astype(np.int32)).wait(),
    "push of a list": lambda kv, step: kv.push(["v", "w"], [gradient(1, step), gradient(1, step, (5,))]).wait(),
    "pushpull": lambda kv, step: kv.pushpull("w", gradient(1, step, (5,))),
    "pushpull of another out": lambda kv, step: kv.pushpull("w", gradient(1, step), out=np.zeros(5, FLOAT)),
    "pushpull of the same out twice": lambda kv, step: kv.pushpull(["v", "w"], [gradient(1, step)] * 2),
    "pushpull_async": lambda kv, step: kv.pushpull_async("w", gradient(1, step, (5,))).wait(),
    "masked": lambda kv, step: kv.push("w", np.ma.array(gradient(1, step))),
}


def test_the_round_that_others_wait_for_takes_the_next_push_that_fits() -> None:
    def program(kv: kvd.KVStore) -> list[np.ndarray[Any, Any]]:
        kv.init(["v", "w"], [np.zeros(4, FLOAT)] * 2)
        kv.set_optimizer(SGD(1.0))
        found = []
        for step, refused in enumerate(REFUSED.values()):
            if kv.rank == 1:
                with pytest.raises(KvdError, match=WAITING) as caught:
                    refused(kv, step)
                assert caught.value.key in ("v", "w")  # type: ignore[attr-defined]
            assert (kv.clock("v"), kv.clock("w")) == (step, step)
            kv.push(["v", "w"], [gradient(kv.rank, step)] * 2)
            found.append(kv.pull("w"))
        return found

    with LocalCluster(2, 1) as cluster:
        for found in cluster.run(program):
            for step, weights in enumerate(found):
                np.testing.assert_array_equal(weights, trained(step + 1))


def test_a_step_may_push_again_what_was_refused() -> None:
    def program(kv: kvd.KVStore) -> np.ndarray[Any, Any]:
        kv.init(["v", "w"], [np.zeros(4, FLOAT)] * 2)
        kv.set_optimizer(SGD(1.0))
        refused = list(REFUSED.values())
        for step in kv.steps(len(refused)):
            if kv.rank == 1:
                with pytest.raises(KvdError):
                    refused[step](kv, step)
            kv.push(["v", "w"], [gradient(kv.rank, step)] * 2)
            out = np.zeros(4, FLOAT)
            kv.pull("w", out=out)
        return out

    with LocalCluster(2, 1) as cluster:
        for weights in cluster.run(program):
            np.testing.assert_array_equal(weights, trained(len(REFUSED)))


PUSHES: dict[str, Callable[[kvd.KVStore, Any], Any]] = {
    "push": lambda kv, value: kv.push("w", value).wait(),
    "pushpull": lambda kv, value: kv.pushpull("w", value),
    "pushpull out": lambda kv, value: kv.pushpull("w", value, value.copy()),
    "pushpull_async": lambda kv, value: kv.pushpull_async("w", value).wait(),
}


@pytest.mark.parametrize("store_type", ["local", "dist_sync"])
@pytest.mark.parametrize("call", PUSHES)
def test_a_step_that_leaves_out_what_was_refused_is_an_error(store_type: str, call: str) -> None:
    def train(kv: kvd.KVStore) -> None:
        for step in kv.steps(STEPS):
            with suppress(ShapeMismatch):  # as a program does that goes on after whatever is wrong with one batch
                PUSHES[call](kv, gradient(0, step, (5,) if step == 2 else (4,)))

    def program(kv: kvd.KVStore) -> None:
        kv.init("w", np.zeros(4, FLOAT))
        with pytest.raises(NotAllowed, match=r"step 2 of kv\.steps has not pushed 'w'"):
            train(kv)
        assert kv.clock("w") == 2
        kv.push("w", gradient(0, 2)).wait()
        assert kv.clock("w") == 3

    if store_type == "local":
        with kvd.create("local") as kv:
            program(kv)
    else:
        with LocalCluster(1, 1) as cluster:
            cluster.run(program)


def test_a_broadcast_that_was_refused_may_be_repeated() -> None:
    def program(kv: kvd.KVStore) -> Any:
        kv.init("w", np.zeros(4, FLOAT))
        if kv.rank == 0:
            for wrong, out in ((None, np.zeros(4, FLOAT)), (np.ones(4, FLOAT), np.zeros(5, FLOAT))):
                with pytest.raises(KvdError, match=WAITING):
                    kv.broadcast("w", wrong, out=out)
        value = np.full(4, 7 + kv.rank, FLOAT)
        kv.broadcast("w", value)
        return value.tolist(), kv.clock("w")

    with LocalCluster(2, 1) as cluster:
        assert cluster.run(program) == [([7] * 4, 1)] * 2


def test_a_step_may_broadcast_again_what_was_refused() -> None:
    def program(kv: kvd.KVStore) -> Any:
        out = np.zeros(4, FLOAT)
        for _ in kv.steps(1):
            with pytest.raises(ShapeMismatch, match="the given out"):
                kv.broadcast("w", gradient(0, 0), out=np.zeros(5, FLOAT))
            kv.broadcast("w", gradient(0, 0), out=out)
        return out.tolist()

    with LocalCluster(1, 1) as cluster:
        assert cluster.run(program) == [gradient(0, 0).tolist()]
    with kvd.create("local") as kv:
        assert program(kv) == gradient(0, 0).tolist()


def test_no_other_worker_waits_in_these() -> None:
    def program(kv: kvd.KVStore) -> None:
        kv.init("w", np.zeros(4, FLOAT))
        for value in (None, np.zeros(5, FLOAT)):
            with pytest.raises(KvdError) as caught:
                kv.push("w", value).wait()
            assert "other workers" not in str(caught.value)

    with kvd.create("local") as kv:
        program(kv)
    with LocalCluster(1, 1) as cluster:
        cluster.run(program)
    with LocalCluster(2, 1) as cluster:
        cluster.run(program, "dist_async")


def test_in_an_event_loop() -> None:
    async def program() -> None:
        async with await kvd.aio.create("local") as kv:
            await kv.init("w", np.zeros(4, FLOAT))
            async for step in kv.steps(3):
                with pytest.raises(ShapeMismatch):
                    await (await kv.push("w", gradient(0, step, (5,))))
                await kv.pushpull("w", gradient(0, step))
            assert await kv.clock("w") == 3

    asyncio.run(program())
