"""Training that can be stopped at any time and started again: it takes a snapshot of the store every few steps.

Run it, stop it, and run it again with the same folder: it goes on after the newest snapshot, and ends with the same
bits as a training that was never stopped, also with another number of servers. A single worker that dies needs no
snapshot, only to be started again: ::

    kvd launch -n 2 -s 2 -- python examples/checkpoint.py /tmp/checkpoints
"""

from __future__ import annotations

import argparse
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import kvd
from kvd.data import digits
from kvd.optimizer import SGD
from kvd.optimizer.schedule import Cosine

Array = npt.NDArray[Any]
KEYS = ["weight", "bias"]
PIXELS, CLASSES = 64, 10


def begin(kv: kvd.KVStore, folder: Path, first: list[Array], optimizer: kvd.optimizer.Optimizer) -> int:
    """Gives the store the newest snapshot, or the first values. Returns how many steps were made before.

    All workers call it; only worker 0 reads the folder, so the others need not see it.
    """
    newest = max(folder.glob("step-??????"), default=folder / "none")
    begun = kv.restore(newest, missing_ok=True)
    if begun is None:
        kv.init(KEYS, first)
        kv.set_optimizer(optimizer)
    return begun or 0


def gradients(values: list[Array], images: Array, labels: Array) -> list[Array]:
    """Of the cross-entropy, summed over these images, by weight (pixels, classes) and bias (classes,)."""
    weight, bias = values
    scores = images @ weight + bias
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    errors = scores / scores.sum(axis=1, keepdims=True)
    errors[np.arange(len(labels)), labels] -= 1
    return [images.T @ errors, errors.sum(axis=0)]


def train(kv: kvd.KVStore, folder: Path, steps: int, every: int, batch: int) -> tuple[int, list[Array]]:
    """Trains to step `steps`, and takes a snapshot after `every` steps. `batch` is that of all workers."""
    data = digits.load()
    images = data.train_images.reshape(-1, PIXELS)
    values = [np.zeros((PIXELS, CLASSES), np.float32), np.zeros(CLASSES, np.float32)]
    begun = begin(kv, folder, values, SGD(Cosine(0.5, steps=200), momentum=0.9, rescale_grad=1 / batch))
    kv.pull(KEYS, out=values)
    for step in kv.steps(steps):
        place = sum(rank < kv.rank for rank in kv.ranks)  # among those who take part now
        mine = np.random.default_rng(step).permutation(len(images))[:batch][place :: kv.num_workers]
        kv.pushpull(KEYS, gradients(values, images[mine], data.train_labels[mine]), out=values)
        if (step + 1) % every == 0:
            kv.snapshot(folder / f"step-{step + 1:06d}")
    return begun, values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where worker 0 keeps the snapshots")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="steps between two snapshots")
    parser.add_argument("--batch", type=int, default=96, help="images per step, of all workers together")
    given = parser.parse_args()
    with kvd.create("dist_sync" if "KVD_SCHEDULER" in os.environ else "local") as kv:
        if kv.rank == 0:
            given.folder.mkdir(parents=True, exist_ok=True)
        begun, values = train(kv, given.folder, given.steps, given.every, given.batch)
        digest = sha256(b"".join(value.tobytes() for value in values)).hexdigest()[:16]
        print(f"worker {kv.rank} of {kv.num_workers}: from step {begun} to {given.steps}, digest {digest}", flush=True)


if __name__ == "__main__":
    main()
