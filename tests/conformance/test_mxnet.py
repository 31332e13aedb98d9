"""What MXNet's KVStore calculates, in our store: values worked out by hand from its documented arithmetic."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.optimizer import SGD, Optimizer
from kvd.testing.cluster import LocalCluster

Program = Callable[[kvd.KVStore], Any]
SHAPES = [(2, 3), (1200, 1200), (1211, 1211)]  # small; one slice more than even; odd sizes that cut unevenly


@pytest.mark.parametrize("num_servers", [1, 3])
def test_the_value_of_rank_0_becomes_the_value(num_servers: int) -> None:
    def program(kv: kvd.KVStore) -> Any:
        kv.init("w", np.full((4, 5), kv.rank + 7, np.float32))
        return kv.pull("w")

    with LocalCluster(3, num_servers) as cluster:
        for value in cluster.run(program):
            np.testing.assert_array_equal(value, np.full((4, 5), 7, np.float32))


@pytest.mark.parametrize("shape", SHAPES)
def test_without_an_optimizer_the_sum_over_workers_and_devices_replaces_the_value(shape: tuple[int, ...]) -> None:
    workers, devices = 3, 2

    def program(kv: kvd.KVStore) -> Any:
        kv.init("w", np.ones(shape, np.float32))
        seen = []
        for step in range(3):
            kv.push("w", [np.full(shape, (kv.rank + 1) * (step + 1), np.float32)] * devices)
            seen.append(kv.pull("w"))
        return seen

    with LocalCluster(workers, 2) as cluster:
        for seen in cluster.run(program):
            for step, value in enumerate(seen):
                np.testing.assert_array_equal(value, np.full(shape, devices * 6 * (step + 1), np.float32))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_optimizer_on_the_servers_with_masters_for_float16(shape: tuple[int, ...], dtype: str) -> None:
    """The `test` rule of MXNet's nightly tests, w += rate · g, is SGD with a negative gradient."""
    workers, rate, steps = 2, 0.25, 4

    def program(kv: kvd.KVStore) -> Any:
        kv.set_optimizer(SGD(rate))
        kv.init(3, np.zeros(shape, dtype))
        for _ in range(steps):
            kv.push(3, np.full(shape, -(kv.rank + 1), dtype))
        return kv.pull(3)

    with LocalCluster(workers, 2) as cluster:
        for value in cluster.run(program):
            assert value.dtype == dtype
            np.testing.assert_array_equal(value, np.full(shape, rate * 3 * steps, dtype))


def test_push_and_pushpull_of_one_key_meet_in_one_round() -> None:
    """In MXNet the plain pushers of such a round are never answered."""

    def program(kv: kvd.KVStore) -> Any:
        kv.init("w", np.zeros(6, np.float32))
        out = np.empty(6, np.float32)
        for step in range(10):
            value = np.full(6, kv.rank + 1 + step, np.float32)
            if (kv.rank + step) % 2:
                kv.push("w", value).wait()
                kv.pull("w", out=out)
            else:
                kv.pushpull("w", value, out=out)
            np.testing.assert_array_equal(out, np.full(6, 6 + 3 * step, np.float32))
        return True

    with LocalCluster(3, 2) as cluster:
        assert cluster.run(program) == [True] * 3


def test_pushes_several_rounds_ahead_of_the_others() -> None:
    rounds = 12
    gate = threading.Event()

    def program(kv: kvd.KVStore) -> Any:
        kv.init("w", np.zeros(5, np.float32))
        kv.set_optimizer(SGD(1.0))
        if kv.rank:
            gate.wait(30)
        handles = [kv.push("w", np.full(5, -1.0, np.float32)) for _ in range(rounds)]
        gate.set()
        for handle in handles:
            handle.wait()
        return kv.pull("w")[0]

    with LocalCluster(2, 1) as cluster:
        assert cluster.run(program) == [2.0 * rounds] * 2


def test_workers_that_declare_their_keys_in_different_orders_agree() -> None:
    """In MXNet text keys become numbers in the order of declaration, and such workers mix their keys up in silence."""

    def program(kv: kvd.KVStore) -> Any:
        names = ["a", "b", "c"]
        for name in names if kv.rank == 0 else reversed(names):
            kv.init(name, np.full(3, ord(name), np.int64))
        return [int(kv.pull(name)[0]) for name in names]

    with LocalCluster(2, 2) as cluster:
        assert cluster.run(program) == [[97, 98, 99]] * 2


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "int32", "int64", "uint8"])
def test_the_sum_in_every_dtype(dtype: str) -> None:
    def program(kv: kvd.KVStore) -> Any:
        kv.init("w", np.zeros((7, 3), dtype))
        return kv.pushpull("w", np.full((7, 3), kv.rank + 20, dtype))

    with LocalCluster(3, 2) as cluster:
        for value in cluster.run(program):
            assert value.dtype == dtype
            np.testing.assert_array_equal(value, np.full((7, 3), 63, dtype))


def test_asynchronous_pushes_are_applied_one_by_one() -> None:
    def program(kv: kvd.KVStore) -> Any:
        kv.set_optimizer(SGD(1.0))
        kv.init("w", np.zeros(4, np.float32))
        for _ in range(10):
            kv.push("w", np.full(4, -(kv.rank + 1.0), np.float32))
            assert kv.pull("w")[0] >= kv.clock("w") * (kv.rank + 1)  # at least its own pushes are in it
        kv.flush()
        kv.barrier("pushed")
        return kv.pull("w")[0]

    with LocalCluster(3, 2) as cluster:
        assert cluster.run(program, "dist_async") == [60.0] * 3


@pytest.mark.parametrize("optimizer", [None, SGD(0.5, momentum=0.9)])
def test_one_program_gives_the_same_in_every_type(optimizer: Optimizer | None) -> None:
    def program(kv: kvd.KVStore) -> Any:
        kv.init("w", np.arange(6, dtype=np.float32))
        if optimizer is not None:
            kv.set_optimizer(optimizer)
        for step in range(5):
            kv.push("w", np.full(6, step + 1, np.float32))
        return kv.pull("w")

    with kvd.create("local") as kv:
        expected = program(kv)
    for kind in ("dist_sync", "dist_async", "dist_device_sync", "dist_device_async"):
        with LocalCluster(1, 2) as cluster:
            np.testing.assert_array_equal(cluster.run(program, kind)[0], expected)
    with kvd.create("device") as kv:
        np.testing.assert_array_equal(program(kv), expected)
