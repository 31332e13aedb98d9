"""Logistic regression with `AllReduceParameter`: every worker owns a third of the weights, and updates it itself.

The store carries gradients and weights; what an optimizer remembers (here the momentum) exists once in the whole job,
cut over its workers. So the job ends when one of them dies: ::

    kvd launch -n 3 -s 2 -- python examples/allreduce_logistic.py
    python examples/allreduce_logistic.py                          # the same in one process
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np
import numpy.typing as npt

import kvd
from kvd.parallel import AllReduceParameter

Array = npt.NDArray[Any]
SAMPLES, FEATURES = 1500, 40


def make_data() -> tuple[Array, Array]:
    """Points around two centres, (SAMPLES, FEATURES) with a column of ones, and which centre each is from."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, SAMPLES).astype(np.float32)
    centre = random.standard_normal(FEATURES - 1) * 0.5
    points = random.standard_normal((SAMPLES, FEATURES - 1)) + np.outer(labels - 0.5, centre)
    return np.column_stack([points, np.ones(SAMPLES)]).astype(np.float32), labels


def loss_and_gradient(weights: Array, points: Array, labels: Array) -> tuple[float, Array]:
    """The mean cross-entropy of these samples, and its gradient."""
    scores = points @ weights
    loss = float(np.mean(np.logaddexp(0, scores) - labels * scores))
    return loss, points.T @ (1 / (1 + np.exp(-scores)) - labels) / np.float32(len(labels))


def train(kv: kvd.KVStore, steps: int, rate: float, momentum: float) -> tuple[float, float, float]:
    """Trains; returns the loss over all samples before and after, and the fraction of them on the right side."""
    points, labels = make_data()
    mine = slice(kv.rank, None, kv.num_workers)
    parameter = AllReduceParameter(kv, "logistic", kv.num_workers, FEATURES)
    _, start, length = parameter.init(np.zeros(FEATURES))
    print(f"worker {kv.rank} owns the weights {start} to {start + length - 1}", flush=True)
    weights, velocity = np.empty(FEATURES, np.float32), np.zeros(length, np.float32)
    parameter.get_weights(weights).result()
    first, _ = loss_and_gradient(weights, points, labels)
    for _ in range(steps):
        _, gradient = loss_and_gradient(weights, points[mine], labels[mine])
        parameter.put_gradients(gradient)
        parameter.aggregate_gradient_partition(kv.num_workers)
        velocity = momentum * velocity + parameter.gradient_partition
        parameter.weight_partition -= rate * velocity
        parameter.send_weight_partition()
        parameter.get_weights(weights).result()
    last, _ = loss_and_gradient(weights, points, labels)
    return first, last, float(np.mean((points @ weights > 0) == (labels > 0.5)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rate", type=float, default=0.3)
    parser.add_argument("--momentum", type=float, default=0.9)
    given = parser.parse_args()
    with kvd.create("dist_sync" if "KVD_SCHEDULER" in os.environ else "local") as kv:
        first, last, right = train(kv, given.steps, given.rate, given.momentum)
        print(f"worker {kv.rank} of {kv.num_workers}: loss {first:.3f} -> {last:.3f}, accuracy {right:.3f}", flush=True)


if __name__ == "__main__":
    main()
