"""Asynchronous keys in a cluster: what MXNet's nightly program of this name checks, after its documentation."""

from __future__ import annotations

import sys

import numpy as np

import kvd as mx

REPEATS = 5
SHAPES = {"3": (2, 3), "99": (1200, 1200), 7: (1211, 3)}

kv = mx.create(sys.argv[1] if len(sys.argv) > 1 else "dist_async")
rank, workers = kv.rank, kv.num_workers


def pushed_by(number: int) -> float:
    """What a worker has added to every key when it has pushed so often."""
    return (rank + 1) * number


def test_pushes_are_added_one_by_one() -> None:
    for step in range(1, REPEATS + 1):
        for key, shape in SHAPES.items():
            kv.push(key, -np.ones(shape, np.float32) * (rank + 1))
            value = np.zeros(shape, np.float32)
            kv.pull(key, out=value)
            most = REPEATS * workers * (workers + 1) / 2
            assert pushed_by(step) <= value.min(), (rank, key, step, value.min())  # at least its own
            assert value.max() <= most, (rank, key, step, value.max())


def test_in_the_end_all_are_in() -> None:
    kv.flush()
    kv.barrier("all have pushed")
    for key, shape in SHAPES.items():
        value = np.zeros(shape, np.float32)
        kv.pull(key, out=value)
        assert np.all(value == REPEATS * workers * (workers + 1) / 2), (rank, key, value.ravel()[:3])


if __name__ == "__main__":
    kv.set_optimizer(mx.optimizer.SGD(1.0))
    for key, shape in SHAPES.items():
        kv.init(key, np.zeros(shape, np.float32))
    test_pushes_are_added_one_by_one()
    test_in_the_end_all_are_in()
    print(f"worker {rank} of {workers} is done", flush=True)
    kv.close()
