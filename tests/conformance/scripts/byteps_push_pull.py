"""What BytePS's test programs check of push_pull and broadcast, after its documentation.

Sums and averages over all workers, for arrays of one to three dimensions and each dtype, many at the same time, and
again and again; parameters from rank 0.
"""

from __future__ import annotations

import itertools

import numpy as np

import kvd as bps

DTYPES = ["float16", "float32", "float64", "int32", "int64", "uint8", "int8"]
DIMENSIONS = [1, 2, 3]
SIZE = 17

kv = bps.create("byteps")
rank, workers = kv.rank, kv.num_workers


def value_of(worker: int, dtype: str, dimensions: int, step: int = 0) -> np.ndarray:
    return np.random.default_rng([worker, dimensions, step]).integers(0, 10, (SIZE,) * dimensions).astype(dtype)


def total(dtype: str, dimensions: int, step: int = 0) -> np.ndarray:
    return np.sum([value_of(worker, dtype, dimensions, step) for worker in range(workers)], axis=0).astype(dtype)


def test_push_pull_gives_the_sum() -> None:
    for dtype, dimensions in itertools.product(DTYPES, DIMENSIONS):
        name, value = f"sum.{dtype}.{dimensions}", value_of(rank, dtype, dimensions)
        for step in range(2):
            value = value_of(rank, dtype, dimensions, step)
            kv.pushpull(name, value)
            assert np.array_equal(value, total(dtype, dimensions, step)), (rank, name, step)


def test_the_average_is_the_sum_divided_by_the_workers() -> None:
    value = value_of(rank, "float32", 2)
    kv.pushpull("average", value)
    assert np.allclose(value / workers, total("float32", 2) / workers)


def test_many_at_the_same_time() -> None:
    names = [f"grad.{number}" for number in range(30)]
    values = [value_of(rank, "float32", 1 + number % 3, number) for number in range(30)]
    handles = [
        kv.pushpull_async(name, value, out=value, priority=-number)
        for number, (name, value) in enumerate(zip(names, values, strict=True))
    ]
    for number, handle in reversed(list(enumerate(handles))):  # in another order than they were begun
        assert np.array_equal(handle.wait(), total("float32", 1 + number % 3, number)), (rank, number)
        assert handle.done()


def test_broadcast_of_each_dtype() -> None:
    for dtype, dimensions in itertools.product(DTYPES, DIMENSIONS):
        value, root = value_of(rank, dtype, dimensions), value_of(0, dtype, dimensions)
        kv.broadcast(f"broadcast.{dtype}.{dimensions}", value, out=value)
        assert np.array_equal(value, root), (rank, dtype, dimensions)


def test_parameters_train_to_the_same_everywhere() -> None:
    """Optimizers run in the workers; gradients are summed. After each step all have the same parameters."""
    weights = value_of(rank, "float32", 1)
    kv.broadcast("parameters", weights, out=weights)
    expected = value_of(0, "float32", 1)
    for step in range(4):
        gradient = value_of(rank, "float32", 1, step)
        kv.pushpull("gradient", gradient)
        weights -= np.float32(0.125) * gradient / np.float32(workers)
        expected -= np.float32(0.125) * total("float32", 1, step) / np.float32(workers)
        assert np.array_equal(weights, expected), (rank, step)


if __name__ == "__main__":
    for name, test in sorted(globals().items()):
        if name.startswith("test_"):
            test()
    print(f"worker {rank} of {workers} is done", flush=True)
    kv.close()
