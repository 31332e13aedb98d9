"""merge="weighted": a push says how many samples its value is the mean of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.optimizer import SGD, Adam, Optimizer
from kvd.testing.cluster import LocalCluster

TYPES = ["local", "dist_sync"]
FEATURES = 5


def run_alone(kind: str, program: Callable[[kvd.KVStore], Any]) -> Any:
    """The result of the program as the only worker of a store with the weighted merge."""
    if kind == "local":
        with kvd.create("local", merge="weighted") as kv:
            return program(kv)
    with LocalCluster(1, 1, merge="weighted") as cluster:
        return cluster.run(program, kind)[0]


def test_the_mean_over_all_samples() -> None:
    counts = [1, 2, 5]

    def program(kv: kvd.KVStore) -> Any:
        kv.init("w", np.zeros(3))
        kv.push("w", np.full(3, kv.rank + 1.0), samples=counts[kv.rank])
        pushed = kv.pull("w").tolist()
        value = np.full(3, kv.rank + 1.0)
        kv.pushpull("w", value, samples=counts[kv.rank])
        return [pushed, value.tolist()]

    with LocalCluster(3, 2, merge="weighted") as cluster:
        assert cluster.run(program) == [[[(1 * 1 + 2 * 2 + 5 * 3) / 8] * 3] * 2] * 3


def gradient(weights: Any, samples: Any, targets: Any) -> Any:
    """Of the mean squared error of a linear model: the mean over the samples; NaN where there are none."""
    with np.errstate(invalid="ignore"):
        return samples.T @ (samples @ weights - targets) / np.float64(len(samples))


@pytest.mark.parametrize("optimizer", [SGD(0.1, momentum=0.9, wd=0.01), Adam(0.05)])
def test_unequal_batches_equal_one_process_on_the_whole_batch(optimizer: Optimizer) -> None:
    chance = np.random.default_rng(3)
    steps, workers = 12, 3
    data = chance.standard_normal((steps, 20, FEATURES))
    targets = data @ np.arange(FEATURES) + 0.1
    cuts = [np.sort(chance.integers(0, 21, 2)) for _ in range(steps)]
    cuts[4] = np.array([0, 20])  # two workers without any sample

    def parts(step: int, rank: int) -> slice:
        edges = [0, *cuts[step], 20]
        return slice(edges[rank], edges[rank + 1])

    def program(kv: kvd.KVStore) -> Any:
        kv.init("w", np.zeros(FEATURES))
        kv.set_optimizer(optimizer)
        weights = kv.pull("w")
        for step in range(steps):
            own = parts(step, kv.rank) if kv.num_workers > 1 else slice(0, 20)
            value = gradient(weights, data[step, own], targets[step, own])
            kv.pushpull("w", value, out=weights, samples=len(data[step, own]))
        return weights

    alone = run_alone("local", program)
    with kvd.create("local") as kv:  # the plain sum of one worker is the mean that it pushed
        np.testing.assert_allclose(program(kv), alone, rtol=1e-12)
    with LocalCluster(workers, 2, merge="weighted") as cluster:
        for weights in cluster.run(program):
            np.testing.assert_allclose(weights, alone, rtol=1e-9)


def test_no_samples_with_nan_do_not_count() -> None:
    def program(kv: kvd.KVStore) -> Any:
        kv.init("w", np.zeros(2, np.float32))
        value = np.full(2, np.nan if kv.rank == 1 else kv.rank + 1.0, np.float32)
        kv.push("w", value, samples=0 if kv.rank == 1 else 3)
        return kv.pull("w").tolist()

    with LocalCluster(3, 1, merge="weighted") as cluster:
        assert cluster.run(program) == [[2.0, 2.0]] * 3


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("optimizer", [None, SGD(1.0)])
def test_no_samples_at_all_are_a_gradient_of_zeros(kind: str, optimizer: Optimizer | None) -> None:
    def program(kv: kvd.KVStore) -> Any:
        kv.init("w", np.full(2, 5.0, np.float32))
        kv.set_optimizer(optimizer)
        kv.push("w", np.full(2, np.nan, np.float32), samples=0)
        return kv.pull("w").tolist()

    assert run_alone(kind, program) == ([0.0, 0.0] if optimizer is None else [5.0, 5.0])


@pytest.mark.parametrize("kind", TYPES)
def test_one_worker_gets_its_own_value(kind: str) -> None:
    def program(kv: kvd.KVStore) -> Any:
        kv.init("w", np.zeros(2, np.float32))
        return kv.pushpull("w", np.array([1.5, -2.0], np.float32), samples=7).tolist()

    assert run_alone(kind, program) == [1.5, -2.0]


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8"])
def test_integers_are_refused(kind: str, dtype: str) -> None:
    def program(kv: kvd.KVStore) -> Any:
        kv.init("n", np.ones(2, dtype))
        with pytest.raises(kvd.NotAllowed, match="float keys only"):
            kv.push("n", np.ones(2, dtype)).wait()
        return kv.pull("n").tolist()

    assert run_alone(kind, program) == [1, 1]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_half_precision_is_weighted_in_float32(dtype: str) -> None:
    """300 · 300 is more than float16 can hold."""

    def program(kv: kvd.KVStore) -> Any:
        kv.init("w", np.zeros(2, dtype))
        return kv.pushpull("w", np.full(2, 300 + 2 * kv.rank, dtype), samples=300).tolist()

    with LocalCluster(2, 1, merge="weighted") as cluster:
        assert cluster.run(program) == [[301.0, 301.0]] * 2


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("samples", [-1, 2.5, "many"])
def test_invalid_numbers_of_samples_are_refused(kind: str, samples: Any) -> None:
    def program(kv: kvd.KVStore) -> Any:
        kv.init("w", np.zeros(2, np.float32))
        with pytest.raises(kvd.NotAllowed, match="samples"):
            kv.push("w", np.ones(2, np.float32), samples=samples).wait(20)
        return kv.pushpull("w", np.full(2, 3.0, np.float32)).tolist()  # the store goes on

    assert run_alone(kind, program) == [3.0, 3.0]


def test_other_merges_do_not_look_at_samples() -> None:
    for merge, expected in (("sum", 3.0), ("mean", 1.5)):

        def program(kv: kvd.KVStore) -> Any:
            kv.init("w", np.zeros(1, np.float32))
            return kv.pushpull("w", np.full(1, kv.rank + 1.0, np.float32), samples=kv.rank * 10).tolist()

        with LocalCluster(2, 1, merge=merge) as cluster:
            assert cluster.run(program) == [[expected]] * 2
