"""Training that can be stopped at any time and started again: it saves the weights and the state of the optimizer.

Run it, stop it, and run it again with the same folder: it goes on after the last step that was saved, and ends with the
same bits as a training that was never stopped, also with another number of servers. A single worker that dies needs no
checkpoint, only to be started again: ::

    kvd launch -n 2 -s 2 -- python examples/checkpoint.py /tmp/checkpoints
"""

from __future__ import annotations

import argparse
import os
import shutil
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


def save(kv: kvd.KVStore, folder: Path, step: int) -> None:
    """Saves the store after `step` steps. For one worker of a synchronous store, between two of its pushes: the others
    cannot close a round without it, so all that it reads is of one step."""
    saved = folder / f"step-{step:06d}"
    if saved.exists():  # this worker was restarted, and had saved before
        return
    unfinished = folder / "unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    np.savez(unfinished / "weights.npz", **dict(zip(KEYS, kv.pull(KEYS), strict=True)))
    kv.save_optimizer_states(unfinished / "optimizer.safetensors")
    unfinished.rename(saved)  # complete, or not there


def load(kv: kvd.KVStore, folder: Path, first: list[Array], optimizer: kvd.optimizer.Optimizer) -> int:
    """Gives the store the newest checkpoint, or the first values. Returns how many steps that checkpoint has.

    All workers call it; only rank 0 reads the folder, so the others need not see it.
    """
    newest = max(folder.glob("step-??????"), default=None) if kv.rank == 0 else None
    done = np.array([int(newest.name.removeprefix("step-")) if newest else 0])
    kv.broadcast("steps done", done)
    if newest:
        with np.load(newest / "weights.npz") as weights:
            first = [weights[key] for key in KEYS]
    kv.init(KEYS, first)
    kv.set_optimizer(optimizer)
    if newest and kv.clock(KEYS[0]) == 0:  # otherwise this worker was restarted, and the job is further
        kv.load_optimizer_states(newest / "optimizer.safetensors")
    kv.barrier("loaded")
    return int(done[0])


def gradients(values: list[Array], images: Array, labels: Array) -> list[Array]:
    """Of the cross-entropy, summed over these images, by weight (pixels, classes) and bias (classes,)."""
    weight, bias = values
    scores = images @ weight + bias
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    errors = scores / scores.sum(axis=1, keepdims=True)
    errors[np.arange(len(labels)), labels] -= 1
    return [images.T @ errors, errors.sum(axis=0)]


def train(kv: kvd.KVStore, folder: Path, steps: int, every: int, batch: int) -> tuple[int, list[Array]]:
    """Trains to step `steps`, which may be some steps only of a longer training. `batch` is that of all workers."""
    data = digits.load()
    images = data.train_images.reshape(-1, PIXELS)
    values = [np.zeros((PIXELS, CLASSES), np.float32), np.zeros(CLASSES, np.float32)]
    optimizer = SGD(Cosine(0.5, steps=200), momentum=0.9, rescale_grad=1 / batch)
    begun = load(kv, folder, values, optimizer)
    kv.pull(KEYS, out=values)
    for taken in kv.steps(steps - begun):
        step = begun + taken
        mine = np.random.default_rng(step).permutation(len(images))[:batch][kv.rank :: kv.num_workers]
        kv.pushpull(KEYS, gradients(values, images[mine], data.train_labels[mine]), out=values)
        if kv.rank == 0 and (step + 1) % every == 0:
            save(kv, folder, step + 1)
    return begun, values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where rank 0 keeps the checkpoints")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--batch", type=int, default=96, help="images per step, of all workers together")
    given = parser.parse_args()
    with kvd.create("dist_sync" if "KVD_SCHEDULER" in os.environ else "local") as kv:
        begun, values = train(kv, given.folder, given.steps, given.every, given.batch)
        digest = sha256(b"".join(value.tobytes() for value in values)).hexdigest()[:16]
        print(f"worker {kv.rank} of {kv.num_workers}: from step {begun} to {given.steps}, digest {digest}", flush=True)


if __name__ == "__main__":
    main()
