"""Handwritten digits on several devices of several workers.

Each worker has a group of CPU devices, each of which computes a part of the worker's batch. Gradients go to the store
as soon as they are ready, and the weights of the next step come back from there: ::

    kvd launch -n 2 -s 1 -- python examples/digits_group.py
    python examples/digits_group.py                          # the same in one process
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
from kvd.parallel import (
    Accuracy,
    BatchNorm,
    DataBatch,
    DataDesc,
    DataParallelExecutorGroup,
    Dense,
    Flatten,
    ReLU,
    Sequential,
    SoftmaxCrossEntropy,
)

Array = npt.NDArray[Any]
IMAGE = (8, 8)


def make_group(devices: int, batch: int) -> DataParallelExecutorGroup:
    """A small network on this many CPU devices, with the same first weights in every worker."""
    model = Sequential(Flatten(), Dense(64), BatchNorm(), ReLU(), Dense(10), SoftmaxCrossEntropy())
    group = DataParallelExecutorGroup(
        model,
        ["cpu"] * devices,
        [DataDesc("data", (batch, *IMAGE), layout="NHW")],
        [DataDesc("label", (batch,), "int64", layout="N")],
    )
    group.set_params(model.initialize((batch, *IMAGE), seed=0))
    return group


def accuracy(group: DataParallelExecutorGroup, images: Array, labels: Array) -> float:
    """The fraction of the images that the group classifies correctly, by whole batches."""
    metric, size = Accuracy(), group.get_batch_size()
    for start in range(0, len(labels) - size + 1, size):
        part = slice(start, start + size)
        group.forward(DataBatch([images[part]]), is_train=False)
        group.update_metric(metric, [labels[part]])
    return metric.get()[1]


def samples_of(kv: kvd.KVStore, order: Array, number: int, batch: int) -> Array:
    """This worker's part of step `number` of an epoch. Whoever takes part now has a part, and no two have the same."""
    ranks = kv.ranks
    place = sum(rank < kv.rank for rank in ranks)
    start = (number * len(ranks) + place) * batch
    return order.take(range(start, start + batch), mode="wrap")


def train(kv: kvd.KVStore, epochs: int, batch: int, devices: int) -> float:
    """Trains, and returns the accuracy on the test images. `batch` is that of one worker."""
    data = digits.load()
    group = make_group(devices, batch)
    # Worker 0 says how many steps an epoch has: workers that join or return later may see another number of workers.
    steps = int(kv.broadcast("steps", np.array([len(data.train_labels) // (batch * kv.num_workers)]))[0])
    pipeline = group.bind_to(kv, optimizer=SGD(0.1, momentum=0.9))
    images, labels = data.train_images, data.train_labels
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(len(labels))
        for number in kv.steps(steps):  # a restarted worker continues with the step in which its predecessor died
            part = samples_of(kv, order, number, batch)
            group.forward_backward(DataBatch([images[part]], [labels[part]]))
        pipeline.share_states()  # BatchNorm's running means, which differ between workers
        if kv.rank == 0:
            reached = accuracy(group, data.test_images, data.test_labels)
            print(f"epoch {epoch + 1}: accuracy {reached:.3f}", flush=True)
    return accuracy(group, data.test_images, data.test_labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32, help="images per step and worker")
    parser.add_argument("--devices", type=int, default=4, help="CPU devices per worker")
    given = parser.parse_args()
    with kvd.create("dist_sync" if "KVD_SCHEDULER" in os.environ else "local") as kv:
        result = train(kv, given.epochs, given.batch, given.devices)
        print(f"worker {kv.rank} of {kv.num_workers}: accuracy {result:.3f}", flush=True)


if __name__ == "__main__":
    main()
