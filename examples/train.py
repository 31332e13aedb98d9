"""Training with nothing but the store: a whole data-parallel program.

The servers have the weights and the optimizer. Every worker pushes the gradients of its own samples and gets the new
weights; nothing here knows how many workers there are, or whether there is a cluster at all: ::

    python examples/train.py
    kvd launch -n 3 -s 2 -- python examples/train.py
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np
import numpy.typing as npt

import kvd
from kvd.data import digits
from kvd.optimizer import SGD

Array = npt.NDArray[Any]
CLASSES = 10


def softmax_gradients(weight: Array, bias: Array, images: Array, labels: Array) -> list[Array]:
    """The gradients of the cross-entropy, summed over these images, by weight (pixels, classes) and bias (classes,)."""
    scores = images @ weight + bias
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    errors = scores / scores.sum(axis=1, keepdims=True)
    errors[np.arange(len(labels)), labels] -= 1
    return [images.T @ errors, errors.sum(axis=0)]


def train(kv: kvd.KVStore, epochs: int, batch: int, rate: float) -> float:
    """Trains, and returns the accuracy on the test images. `batch` is that of all workers."""
    data = digits.load()
    images, test_images = (part.reshape(len(part), -1) for part in (data.train_images, data.test_images))
    weight = np.zeros((images.shape[1], CLASSES), np.float32)
    bias = np.zeros(CLASSES, np.float32)
    keys, values = ["weight", "bias"], [weight, bias]

    kv.init(keys, values)
    kv.set_optimizer(SGD(rate, momentum=0.9, rescale_grad=1 / batch))
    kv.pull(keys, out=values)
    steps = len(images) // batch  # of one epoch
    for step in kv.steps(
        epochs * steps, keys
    ):  # a restarted worker goes on with the step in which its predecessor died
        order = np.random.default_rng(step // steps).permutation(len(images))
        start = step % steps * batch
        place = sum(rank < kv.rank for rank in kv.ranks)  # among those who take part now
        mine = order[start : start + batch][place :: kv.num_workers]
        gradients = softmax_gradients(weight, bias, images[mine], data.train_labels[mine])
        kv.pushpull(keys, gradients, out=values)  # their sum over all workers, as one process would have it
    predicted = (test_images @ weight + bias).argmax(axis=1)
    return float((predicted == data.test_labels).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=96, help="images per step, of all workers together")
    parser.add_argument("--rate", type=float, default=0.5)
    parser.add_argument("--type", help="of the store; without it dist_sync in a cluster, else local")
    given = parser.parse_args()
    with kvd.create(given.type or ("dist_sync" if "KVD_SCHEDULER" in os.environ else "local")) as kv:
        accuracy = train(kv, given.epochs, given.batch, given.rate)
        print(f"worker {kv.rank} of {kv.num_workers}: accuracy {accuracy:.3f}", flush=True)


if __name__ == "__main__":
    main()
