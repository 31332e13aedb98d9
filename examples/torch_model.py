"""A torch model, trained by several workers: a small convolutional network for the digits.

The module stays what it is; `TorchModel` lets a group run copies of it on several devices, and the store has the
weights and the optimizer: ::

    kvd launch -n 2 -s 1 -- python examples/torch_model.py
    python examples/torch_model.py --devices cuda:0               # in one process, on a GPU
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import kvd
from kvd.data import digits
from kvd.optimizer import Adam
from kvd.parallel import Accuracy, DataBatch, DataDesc, DataParallelExecutorGroup, TorchModel

Array = npt.NDArray[Any]


def make_module() -> torch.nn.Module:
    """The same first weights in every worker."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(16, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * 4 * 4, 10),
    )


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


def train(kv: kvd.KVStore, epochs: int, batch: int, devices: list[str]) -> float:
    """Trains, and returns the accuracy on the test images. `batch` is that of one worker."""
    data = digits.load()
    images, test_images = data.train_images[:, None], data.test_images[:, None]
    group = DataParallelExecutorGroup(
        TorchModel(make_module(), torch.nn.CrossEntropyLoss()),
        devices,
        [DataDesc("data", (batch, 1, 8, 8))],
        [DataDesc("label", (batch,), "int64", layout="N")],
    )
    # Worker 0 says how many steps an epoch has: workers that join or return later may see another number of workers.
    steps = int(kv.broadcast("steps", np.array([len(images) // (batch * kv.num_workers)]))[0])
    group.bind_to(kv, optimizer=Adam(0.003))
    for step in kv.steps(epochs * steps):  # a restarted worker goes on with the step in which its predecessor died
        epoch, number = divmod(step, steps)
        order = np.random.default_rng(epoch).permutation(len(images))
        part = samples_of(kv, order, number, batch)
        group.forward_backward(DataBatch([images[part]], [data.train_labels[part]]))
        if kv.rank == 0 and number == steps - 1:
            print(f"epoch {epoch + 1}: accuracy {accuracy(group, test_images, data.test_labels):.3f}", flush=True)
    return accuracy(group, test_images, data.test_labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32, help="images per step and worker")
    parser.add_argument("--devices", nargs="+", default=["cpu"], metavar="DEVICE", help="such as cpu cpu, or cuda:0")
    given = parser.parse_args()
    with kvd.create("dist_sync" if "KVD_SCHEDULER" in os.environ else "local") as kv:
        result = train(kv, given.epochs, given.batch, given.devices)
        print(f"worker {kv.rank} of {kv.num_workers}: accuracy {result:.3f}", flush=True)


if __name__ == "__main__":
    main()
