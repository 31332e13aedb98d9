"""A convolutional network on Fashion-MNIST: 70 000 pictures of clothes, 28 × 28 pixels, 10 kinds.

Where the four files (idx format, gzip) come from:

- Debian and Ubuntu: ``apt install dataset-fashion-mnist`` puts them into /usr/share/datasets/fashion-mnist.
- Elsewhere: https://github.com/zalandoresearch/fashion-mnist, under "Get the Data"; put them into one folder.

Then: ::

    kvd launch -n 2 -s 1 -- python examples/fashion_mnist.py /usr/share/datasets/fashion-mnist
    python examples/fashion_mnist.py FOLDER --devices cuda:0 --epochs 5       # in one process, on a GPU
"""

from __future__ import annotations

import argparse
import gzip
import os
import sys
from pathlib import Path
from struct import unpack
from typing import Any

import numpy as np
import numpy.typing as npt

import kvd
from kvd.optimizer import SGD
from kvd.parallel import (
    Accuracy,
    Conv2D,
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
FOLDER = Path("/usr/share/datasets/fashion-mnist")
PARTS = {"train": "train", "test": "t10k"}


def read_idx(path: Path) -> Array:
    """An array of bytes in the idx format: 0, 0, 8 (for uint8), the number of axes, their lengths, the elements."""
    with gzip.open(path) as file:
        zeros, kind, axes = unpack(">HBB", file.read(4))
        if (zeros, kind) != (0, 8) or axes == 0:
            raise ValueError(f"{path} is not an idx file of bytes")
        shape = unpack(f">{axes}I", file.read(4 * axes))
        return np.frombuffer(file.read(), np.uint8).reshape(shape)


def read_part(folder: Path, part: str) -> tuple[Array, Array]:
    """Images of "train" or "test", (n, 1, rows, columns) float32 in [0, 1], and labels, (n,) int64."""
    images = read_idx(folder / f"{PARTS[part]}-images-idx3-ubyte.gz")
    labels = read_idx(folder / f"{PARTS[part]}-labels-idx1-ubyte.gz")
    if len(images) != len(labels):
        raise ValueError(f"{folder}: {len(images)} images and {len(labels)} labels")
    return images[:, None].astype(np.float32) / 255, labels.astype(np.int64)


def make_group(devices: list[str], shape: tuple[int, ...]) -> DataParallelExecutorGroup:
    """Two convolutions and two dense layers, on these devices, for batches of this shape."""
    model = Sequential(
        Conv2D(16, 3, stride=2, padding=1), ReLU(),
        Conv2D(32, 3, stride=2, padding=1), ReLU(),
        Flatten(), Dense(64), ReLU(), Dense(10), SoftmaxCrossEntropy(),
    )  # fmt: skip
    group = DataParallelExecutorGroup(
        model, devices, [DataDesc("data", shape)], [DataDesc("label", shape[:1], "int64", layout="N")]
    )
    group.set_params(model.initialize(shape, seed=0))
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


def train(kv: kvd.KVStore, folder: Path, epochs: int, batch: int, devices: list[str], limit: int | None) -> float:
    """Trains, and returns the accuracy on the test images. `batch` is that of one worker."""
    images, labels = (array[:limit] for array in read_part(folder, "train"))
    test_images, test_labels = (array[:limit] for array in read_part(folder, "test"))
    group = make_group(devices, (batch, *images.shape[1:]))
    # Worker 0 says how many steps an epoch has: workers that join or return later may see another number of workers.
    steps = int(kv.broadcast("steps", np.array([len(labels) // (batch * kv.num_workers)]))[0])
    group.bind_to(kv, optimizer=SGD(0.05, momentum=0.9, wd=1e-4))
    for step in kv.steps(epochs * steps):  # a restarted worker goes on with the step in which its predecessor died
        epoch, number = divmod(step, steps)
        order = np.random.default_rng(epoch).permutation(len(labels))
        part = samples_of(kv, order, number, batch)
        group.forward_backward(DataBatch([images[part]], [labels[part]]))
        if kv.rank == 0 and number == steps - 1:
            print(f"epoch {epoch + 1}: accuracy {accuracy(group, test_images, test_labels):.3f}", flush=True)
    return accuracy(group, test_images, test_labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER, help=f"where the files are ({FOLDER})")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64, help="images per step and worker")
    parser.add_argument("--devices", nargs="+", default=["cpu"], metavar="DEVICE", help="such as cpu cpu, or cuda:0")
    parser.add_argument("--limit", type=int, metavar="N", help="use the first N images only")
    given = parser.parse_args()
    if not (given.folder / "train-images-idx3-ubyte.gz").exists():
        sys.exit(f"there is no Fashion-MNIST in {given.folder}: apt install dataset-fashion-mnist, or see --help")
    with kvd.create("dist_sync" if "KVD_SCHEDULER" in os.environ else "local") as kv:
        result = train(kv, given.folder, given.epochs, given.batch, given.devices, given.limit)
        print(f"worker {kv.rank} of {kv.num_workers}: accuracy {result:.3f}", flush=True)


if __name__ == "__main__":
    main()
