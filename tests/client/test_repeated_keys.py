"""A key that is in one list twice: its values are summed as those of several devices, and each `out` is filled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import kvd
from kvd.errors import DtypeMismatch, NotAllowed, ShapeMismatch
from kvd.optimizer import SGD
from kvd.testing.cluster import LocalCluster

KEYS = ["w", 3, "v", "3", "w", "w"]
PLACES = {"w": [0, 4, 5], "3": [1, 3], "v": [2]}
SHAPES = {"w": (2, 3), "3": (5,), "v": ()}
RATE = np.float32(0.5)


def run(store_type: str, program: Callable[[kvd.KVStore], Any]) -> list[Any]:
    """The results of the program in each worker of a store of this type."""
    if store_type.startswith("dist"):
        with LocalCluster(2, 2) as cluster:
            return cluster.run(program, store_type)
    with kvd.create(store_type) as kv:
        return [program(kv)]


def name_at(place: int) -> str:
    return str(KEYS[place])


def values(rank: int, step: int, dtype: str = "float32") -> list[Any]:
    """One value per place. The exact sums of the test need small whole numbers."""
    generator = np.random.default_rng([rank, step])
    return [generator.integers(-9, 9, SHAPES[name_at(place)]).astype(dtype) for place in range(len(KEYS))]


def init(kv: kvd.KVStore, dtype: str = "float32") -> None:
    kv.init(list(PLACES), [np.zeros(SHAPES[name], dtype) for name in PLACES])


def outs(dtype: str = "float32") -> list[Any]:
    return [np.full(SHAPES[name_at(place)], 99, dtype) for place in range(len(KEYS))]


def expected(workers: int, steps: int) -> dict[str, np.ndarray[Any, Any]]:
    """The weights after the steps of SGD, calculated here."""
    weights = {name: np.zeros(SHAPES[name], np.float32) for name in PLACES}
    for step in range(steps):
        for name, places in PLACES.items():
            gradient = sum(values(rank, step)[place] for rank in range(workers) for place in places)
            weights[name] = weights[name] - RATE * gradient
    return weights


@pytest.mark.parametrize("call", ["push and pull", "pushpull", "in place", "async"])
@pytest.mark.parametrize("store_type", ["local", "device", "dist_sync", "dist_device_sync"])
def test_training_with_keys_in_several_places(store_type: str, call: str) -> None:
    def program(kv: kvd.KVStore) -> Any:
        init(kv)
        kv.set_optimizer(SGD(float(RATE)))
        for step in range(3):
            given, result = values(kv.rank, step), outs()
            if call == "push and pull":
                kv.push(KEYS, given)
                assert kv.pull(KEYS, out=result)[5] is result[5]
            elif call == "pushpull":
                back = kv.pushpull(KEYS, given, out=result)
                assert all(one is other for one, other in zip(back, result, strict=True))
            elif call == "in place":
                result = kv.pushpull(KEYS, given)
                assert all(one is other for one, other in zip(given, result, strict=True))
            else:
                kv.pushpull_async(KEYS, given, out=result).wait()
        return result, kv.pull(KEYS), kv.clock("w"), kv.num_workers

    for result, fresh, clock, workers in run(store_type, program):
        weights = expected(workers, 3)
        for place in range(len(KEYS)):
            np.testing.assert_array_equal(result[place], weights[name_at(place)])
            np.testing.assert_array_equal(fresh[place], weights[name_at(place)])
        assert not any(np.shares_memory(fresh[4], fresh[place]) for place in range(len(KEYS)) if place != 4)
        assert clock == 3  # one push of the key per call


@pytest.mark.parametrize("store_type", ["local", "dist_sync"])
def test_every_place_may_have_an_array_per_device(store_type: str) -> None:
    def program(kv: kvd.KVStore) -> Any:
        kv.init("w", np.zeros(3, np.float32))
        pushed: list[Any] = [
            [np.full(3, 1, np.float32), torch.full((3,), 10.0)],
            np.full(3, 100, np.float32),
            [1000, 2000, 3000.0],
        ]
        pushed[2] = np.asarray(pushed[2], np.float32)
        result: list[Any] = [
            [np.empty(3, np.float32), torch.empty(3)],
            np.empty((3,), np.float32),
            [np.empty(3, np.float32)],
        ]
        assert kv.pushpull(["w"] * 3, pushed, out=result)[0] is result[0]
        return [*result[0], result[1], *result[2]], kv.num_workers

    for arrays, workers in run(store_type, program):
        for array in arrays:
            np.testing.assert_array_equal(np.asarray(array), np.array([1111, 2111, 3111], np.float32) * workers)


def test_the_program_may_write_to_the_values_of_a_push_at_once() -> None:
    def program(kv: kvd.KVStore) -> Any:
        init(kv)
        given = values(kv.rank, 0)
        handle = kv.push(KEYS, given)
        for value in given:
            value[...] = 1000
        handle.wait()
        return kv.pull(list(PLACES))

    for pulled in run("dist_sync", program):
        for value, places in zip(pulled, PLACES.values(), strict=True):
            np.testing.assert_array_equal(value, sum(values(rank, 0)[place] for rank in (0, 1) for place in places))


def test_without_waiting_and_in_an_event_loop() -> None:
    async def program() -> Any:
        async with await kvd.aio.create("local") as kv:
            await kv.init("w", np.zeros(2, np.float32))
            await kv.push(["w", "w"], [np.ones(2, np.float32)] * 2)
            return await kv.pull(["w", "w"], out=[np.empty(2, np.float32), np.empty(2, np.float32)])

    one, other = asyncio.run(program())
    assert one.tolist() == other.tolist() == [2, 2]
    assert one is not other


@pytest.mark.parametrize("store_type", ["local", "dist_sync"])
def test_what_cannot_be_summed(store_type: str) -> None:
    def program(kv: kvd.KVStore) -> Any:
        init(kv)
        one, two = np.ones((2, 3), np.float32), np.ones((3, 2), np.float32)
        with pytest.raises(ShapeMismatch):
            kv.push(["w", "w"], [one, two])
        with pytest.raises(DtypeMismatch):
            kv.push(["w", "w"], [one, one.astype(np.float64)])
        with pytest.raises(ShapeMismatch):
            kv.pull(["w", "w"], out=[one, two])
        with pytest.raises(NotAllowed, match="a list of keys needs as many values in a list: 3, got 2"):
            kv.push(["w", "w", "v"], [one, one])
        for call in (kv.init, kv.broadcast):
            with pytest.raises(NotAllowed, match="the list names 'w' more than once"):
                call(["w", "v", "w"], [one, np.float32(1), one])
        kv.flush()
        return kv.clock("w")

    assert set(run(store_type, program)) == {0}


@pytest.mark.parametrize("store_type", ["local", "dist_sync"])
def test_bind_gives_the_same_arrays_for_each_place(store_type: str) -> None:
    def program(kv: kvd.KVStore) -> Any:
        init(kv)
        (first, second, third), weights = kv.bind(["w", "v", "w"])
        return first is third, first is second, weights[0] is weights[2]

    assert set(run(store_type, program)) == {(True, False, True)}
