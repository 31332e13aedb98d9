"""What the tests of `fit` and their workers' programs share: data, a model, and the expected weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import kvd
from kvd.optimizer import SGD
from kvd.parallel import DataBatch, Dense, Sequential, SoftmaxCrossEntropy, Tanh
from kvd.testing.cluster import LocalCluster
from tests.parallel.group_harness import Groups, torch_weights

GENERATOR = np.random.default_rng(3)
SAMPLES = 54
X = GENERATOR.normal(size=(SAMPLES, 5)).astype(np.float32)
Y = (X @ GENERATOR.normal(size=(5, 3))).argmax(1)
MODEL = Sequential(Dense(12), Tanh(), Dense(3), SoftmaxCrossEntropy())
PARAMS = MODEL.initialize((8, 5), seed=1)
RULE = SGD(0.3, momentum=0.9)
group_of = Groups(MODEL, (5,), PARAMS)


def batches(size: int, x: Any = X, y: Any = Y) -> list[DataBatch]:
    """The last batch is smaller if the size does not divide the data."""
    return [DataBatch([x[i : i + size]], [y[i : i + size]]) for i in range(0, len(x), size)]


def parts(given: list[DataBatch]) -> list[tuple[Any, Any]]:
    """(data, labels) of each batch."""
    return [(batch.data[0], batch.label[0]) for batch in given if batch.label]


def expected(steps: Sequence[Sequence[tuple[Any, Any]]]) -> list[Any]:
    """The weights after these steps, each of which is the mean over the samples of all its parts."""
    whole = [[np.concatenate([part[i] for part in step]) for i in range(2)] for step in steps]
    return torch_weights(PARAMS, [(x, y) for x, y in whole], RULE)


def run_two(program: Callable[[kvd.KVStore], Any], merge: str = "weighted", **settings: Any) -> list[Any]:
    """The result of the program for each of two workers on a cluster of two servers."""
    with LocalCluster(2, 2, merge=merge, **settings) as cluster:
        return cluster.run(program)
