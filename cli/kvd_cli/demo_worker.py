"""One worker of ``kvd demo``: trains a network on handwritten digits, and reports in JSON lines on stdout.

A worker that was killed and is restarted under its node id continues with the step in which it died: a step depends on
the seed and its number only, and the store knows the number.
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
from kvd.data import digits
from kvd.optimizer import SGD, schedule
from kvd.parallel import Conv2D, DataBatch, DataDesc, DataParallelExecutorGroup, Sequential, SoftmaxCrossEntropy
from kvd.parallel.models.numpy.layers import Dense, Flatten, ReLU

REPORT_INTERVAL_S: Final = 0.1
LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.05, 0.9, 5e-4

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """What all workers of one demo do together.

    Attributes:
        seed: of the weights, of the order of the images, and of which of them are for testing.
        epochs: how often each image is seen.
        batch: images per step, of all workers together.
    """

    seed: int
    epochs: int
    batch: int


def make_model() -> Sequential:
    """Two convolutions and two dense layers: 38 000 parameters."""
    return Sequential(
        Conv2D(16, 3, padding=1), ReLU(),
        Conv2D(32, 3, stride=2, padding=1), ReLU(),
        Flatten(), Dense(64), ReLU(), Dense(10), SoftmaxCrossEntropy(),
    )  # fmt: skip


class Training:
    """The group of one worker, its share of the data, and the store that all share."""

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
        self._group = DataParallelExecutorGroup(
            model, ["cpu"], [DataDesc("data", shape)], [DataDesc("label", (size,), "int64", layout="N")]
        )
        self.weights = model.initialize(shape, plan.seed)
        self._group.set_params(self.weights, {})
        self._tester = model.bind(
            "cpu", [DataDesc("data", self._test_images.shape)], for_training=False, params=self.weights
        )
        self.bytes_per_step = 2 * sum(weight.nbytes for weight in self.weights.values())

    def enter(self) -> int:
        """Bind the group to the store: weights come from there, and gradients go there. Returns the next step."""
        rate = schedule.Cosine(LEARNING_RATE, steps=self.steps)
        pipeline = self._group.bind_to(self._store, optimizer=SGD(rate, momentum=MOMENTUM, wd=WEIGHT_DECAY))
        return pipeline.clock

    def do(self, step: int) -> float:
        """One step: gradients of this worker's share, merged with the others', new weights. The mean loss."""
        images, labels = self._batch(step)
        self._group.forward_backward(DataBatch([images], [labels]))
        (predicted,) = self._group.get_outputs_merged()
        return float(-np.log(np.maximum(predicted[np.arange(len(labels)), labels], 1e-12)).mean())

    def accuracy(self) -> float:
        """The part of the test images that the model reads correctly."""
        self._group.get_params(self.weights, {})
        (predicted,) = self._tester.forward({"data": self._test_images}, is_train=False)
        return float((predicted.argmax(axis=1) == self._test_labels).mean())

    def digest(self) -> str:
        """16 hex digits that stand for all bits of all weights, in the order of the keys."""
        self._group.get_params(self.weights, {})
        digest = hashlib.sha256()
        for key in sorted(self.weights):
            digest.update(np.ascontiguousarray(self.weights[key]).tobytes())
        return digest.hexdigest()[:16]

    def _batch(self, step: int) -> tuple[Array, Array]:
        """This worker's images and labels of a step."""
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
    """One JSON line."""
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
