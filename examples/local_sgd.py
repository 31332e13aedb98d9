"""Local SGD, as in DiLoCo: workers train by themselves, and talk once in 50 steps.

Each worker makes 50 steps on its own part of the images, with weights of its own. Then it pushes how far it has come:
the weights before minus the weights after. The servers take the mean of all workers for a gradient, make one step with
Nesterov's momentum, and everyone goes on from there: a fiftieth of the traffic. ::

    python examples/local_sgd.py
    kvd launch -n 3 -s 2 -- python examples/local_sgd.py
    kvd launch -n 3 -s 2 -- python examples/local_sgd.py --type dist_async

In ``dist_async`` nobody waits for the others; there the momentum is that of DelayedNesterov.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np
import numpy.typing as npt

import kvd
from kvd.data import digits
from kvd.optimizer import SGD, DelayedNesterov

Array = npt.NDArray[Any]
CLASSES = 10
KEYS = ["weight", "bias"]
INNER_RATE = 0.1
INNER_BATCH = 16


def train_alone(values: list[Array], images: Array, labels: Array, steps: int, seed: tuple[int, int]) -> None:
    """Makes so many steps of plain SGD on the weight (pixels, classes) and bias (classes,), in place."""
    weight, bias = values
    chance = np.random.default_rng(seed)
    for _ in range(steps):
        chosen = chance.integers(0, len(images), INNER_BATCH)
        scores = images[chosen] @ weight + bias
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        errors = scores / scores.sum(axis=1, keepdims=True)
        errors[np.arange(INNER_BATCH), labels[chosen]] -= 1
        weight -= INNER_RATE / INNER_BATCH * (images[chosen].T @ errors)
        bias -= INNER_RATE / INNER_BATCH * errors.sum(axis=0)


def train(kv: kvd.KVStore, rounds: int, steps: int, rate: float) -> float:
    """Trains, and returns the accuracy on the test images."""
    data = digits.load()
    images, test_images = (part.reshape(len(part), -1) for part in (data.train_images, data.test_images))
    values = [np.zeros((images.shape[1], CLASSES), np.float32), np.zeros(CLASSES, np.float32)]

    kv.init(KEYS, values, merge="mean")
    if kv.type.endswith("async"):
        # Worker 0 says how many there are: all need the same optimizer, also those that join or return later.
        workers = int(kv.broadcast("workers", np.array([kv.num_workers]))[0])
        kv.set_optimizer(DelayedNesterov(rate, buffer_size=workers))
    else:
        kv.set_optimizer(SGD(rate, momentum=0.9, nesterov=True))
    kv.pull(KEYS, out=values)
    for number in kv.steps(rounds, KEYS):  # a restarted worker makes the round again in which its predecessor died
        mine = slice(sum(rank < kv.rank for rank in kv.ranks), None, kv.num_workers)
        before = [value.copy() for value in values]
        train_alone(values, images[mine], data.train_labels[mine], steps, (number, kv.rank))
        differences = [start - end for start, end in zip(before, values, strict=True)]
        kv.pushpull(KEYS, differences, out=values)
    kv.barrier("trained")  # in dist_async the others may still push
    kv.pull(KEYS, out=values)
    weight, bias = values
    predicted = (test_images @ weight + bias).argmax(axis=1)
    return float((predicted == data.test_labels).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="how often the workers talk")
    parser.add_argument("--steps", type=int, default=50, help="that each worker makes in a round")
    parser.add_argument("--rate", type=float, default=0.7, help="the learning rate of the outer step")
    parser.add_argument("--type", help="of the store; without it dist_sync in a cluster, else local")
    given = parser.parse_args()
    with kvd.create(given.type or ("dist_sync" if "KVD_SCHEDULER" in os.environ else "local")) as kv:
        accuracy = train(kv, given.rounds, given.steps, given.rate)
        print(f"worker {kv.rank} of {kv.num_workers}: accuracy {accuracy:.3f}", flush=True)


if __name__ == "__main__":
    main()
