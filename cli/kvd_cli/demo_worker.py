"""One worker of ``kvd demo``: trains a network on handwritten digits and reports in JSON lines on stdout.

A killed worker that is restarted under its node id resumes at the step where it died: a step depends on the seed and
its number only, and the store has the number.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import kvd
from kvd import parallel
from kvd.data import digits
from kvd.optimizer import SGD, schedule

REPORT_INTERVAL_S: Final = 0.1
LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.05, 0.9, 5e-4

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of one demo, shared by its workers.

    Attributes:
        seed: of the weights, of the order of the images, and of which of them are for testing.
        epochs: how often each image is seen.
        batch: images per step, of all workers together.
    """

    seed: int
    epochs: int
    batch: int


def make_model() -> parallel.Sequential:
    """Return a model of two convolutions and two dense layers: 38 000 parameters."""
    return parallel.Sequential(
        parallel.Conv2D(16, 3, padding=1), parallel.ReLU(),
        parallel.Conv2D(32, 3, stride=2, padding=1), parallel.ReLU(),
        parallel.Flatten(), parallel.Dense(64), parallel.ReLU(), parallel.Dense(10), parallel.SoftmaxCrossEntropy(),
    )  # fmt: skip


class Training:
    """Group of one worker, its share of the data, and the shared store."""

    def __init__(self, plan: Plan, store: kvd.KVStore) -> None:
        self._plan = plan
        self._store = store
        data = digits.load(0.2, plan.seed)
        self._images, self._labels = data.train_images[:, None], data.train_labels  # one channel
        self._test_images, self._test_labels = data.test_images[:, None], data.test_labels
        self.steps_per_epoch = len(self._images) // plan.batch
        self.steps = self.steps_per_epoch * plan.epochs
        self._share = slice(store.rank, plan.batch, store.num_workers)
        size = len(range(plan.batch)[self._share])
        model = make_model()
        shape = (size, *self._images.shape[1:])
        self._group = parallel.DataParallelExecutorGroup(
            model,
            ["cpu"],
            [parallel.DataDesc("data", shape)],
            [parallel.DataDesc("label", (size,), "int64", layout="N")],
        )
        self.weights = model.initialize(shape, plan.seed)
        self._group.set_params(self.weights, {})
        self._tester = model.bind(
            "cpu", [parallel.DataDesc("data", self._test_images.shape)], for_training=False, params=self.weights
        )
        self.bytes_per_step = 2 * sum(weight.nbytes for weight in self.weights.values())

    def enter(self) -> int:
        """Bind the group to the store for weights and gradients. Return the next step."""
        rate = schedule.Cosine(LEARNING_RATE, steps=self.steps)
        pipeline = self._group.bind_to(self._store, optimizer=SGD(rate, momentum=MOMENTUM, wd=WEIGHT_DECAY))
        return pipeline.clock

    def do(self, step: int) -> float:
        """Make one step: push the gradients of this worker's share, and pull new weights. Return the mean loss."""
        images, labels = self._batch(step)
        self._group.forward_backward(parallel.DataBatch([images], [labels]))
        (predicted,) = self._group.get_outputs_merged()
        return float(-np.log(np.maximum(predicted[np.arange(len(labels)), labels], 1e-12)).mean())

    def accuracy(self) -> float:
        """Return the fraction of test images that the model classifies correctly."""
        self._group.get_params(self.weights, {})
        (predicted,) = self._tester.forward({"data": self._test_images}, is_train=False)
        return float((predicted.argmax(axis=1) == self._test_labels).mean())

    def digest(self) -> str:
        """Return a digest of all weights in the order of the keys, as 16 hex digits."""
        self._group.get_params(self.weights, {})
        digest = hashlib.sha256()
        for key in sorted(self.weights):
            digest.update(np.ascontiguousarray(self.weights[key]).tobytes())
        return digest.hexdigest()[:16]

    def _batch(self, step: int) -> tuple[Array, Array]:
        """Return this worker's images and labels of a step."""
        epoch, index = divmod(step, self.steps_per_epoch)
        # raw bits of a bit generator stay the same in all versions of NumPy; permutation() need not (NEP 19)
        order = np.argsort(np.random.PCG64([self._plan.seed, epoch]).random_raw(len(self._images)), kind="stable")
        chosen = order[index * self._plan.batch : (index + 1) * self._plan.batch][self._share]
        return self._images[chosen], self._labels[chosen]


def train(plan: Plan) -> None:
    """Train to the end, and report."""
    with kvd.create("dist_sync") as store:
        training = Training(plan, store)
        first = training.enter()
        report("start", store, step=first, steps=training.steps, steps_per_epoch=training.steps_per_epoch)
        started = reported = time.monotonic()
        losses: list[float] = []
        for step in range(first, training.steps):
            losses.append(training.do(step))
            now = time.monotonic()
            ends_epoch = (step + 1) % training.steps_per_epoch == 0
            if ends_epoch or now - reported >= REPORT_INTERVAL_S:
                sent = (step + 1 - first) * training.bytes_per_step
                figures = {"step": step + 1, "loss": sum(losses) / len(losses), "bytes": sent, "t": now - started}
                if ends_epoch and store.rank == 0:
                    figures["accuracy"] = training.accuracy()
                report("step", store, **figures)
                reported = now
                losses.clear()
        report("end", store, accuracy=training.accuracy(), digest=training.digest())


def report(event: str, store: kvd.KVStore, **figures: Any) -> None:
    """Write one JSON line."""
    fields: Mapping[str, Any] = {"event": event, "worker": store.rank, **figures}
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Read the plan from the command line, and carry it out."""
    parser = argparse.ArgumentParser(description="one worker of `kvd demo`")
    for name, default in (("seed", 0), ("epochs", 20), ("batch", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    try:
        train(Plan(given.seed, given.epochs, given.batch))
    except kvd.KvdError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
