"""Looking into a group: monitors and metrics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvd.parallel import (
    Accuracy,
    DataBatch,
    DataDesc,
    DataParallelExecutorGroup,
    Dense,
    Flatten,
    MeanSquaredError,
    Sequential,
)
from tests.parallel.group_harness import BATCH, MODEL, X, Y, descs, group_of

GENERATOR = np.random.default_rng(1)


def test_monitor_names_the_device() -> None:
    group, seen = DataParallelExecutorGroup(MODEL, ["cpu:4", "cpu:4"], *descs()), []
    group.install_monitor(lambda index, device, name, array: seen.append((index, str(device), name, len(array))))
    group.forward(BATCH, is_train=False)
    assert sorted(seen)[:4] == [
        (0, "cpu:4", "dense0_output", 6),
        (0, "cpu:4", "dense1_output", 6),
        (0, "cpu:4", "relu0_output", 6),
        (0, "cpu:4", "softmaxcrossentropy0_output", 6),
    ]
    assert [entry[0] for entry in sorted(seen)] == [0] * 4 + [1] * 4
    group.reshape(*descs(4))
    group.forward(DataBatch([X[:4]], [Y[:4]]), is_train=False)
    assert len(seen) == 16
    group.install_monitor(None)
    group.forward(DataBatch([X[:4]], [Y[:4]]), is_train=False)
    assert len(seen) == 16


@pytest.mark.parametrize("devices", [1, 4])
def test_update_metric(devices: int) -> None:
    group, metric = group_of(devices=devices), Accuracy()
    group.forward(BATCH, is_train=False)
    group.update_metric(metric, [Y])
    assert metric.get()[1] == np.mean(group.get_outputs_merged()[0].argmax(axis=1) == Y)
    assert metric.count == 11


def test_update_metric_with_labels_whose_batch_is_not_first() -> None:
    model = Sequential(Flatten(), Dense(2), MeanSquaredError())
    labels = GENERATOR.normal(size=(2, 11)).astype(np.float32)
    group = DataParallelExecutorGroup(model, ["cpu"] * 3, descs()[0], [DataDesc("label", (2, 11), layout="CN")])
    group.forward_backward(DataBatch([X], [labels]))

    class Seen:
        shapes: list[Any] = []  # noqa: RUF012

        def update(self, labels: Any, outputs: Any) -> None:
            self.shapes.append((labels[0].shape, outputs[0].shape))

        def get(self) -> Any:
            return "shapes", self.shapes

    group.update_metric(Seen(), [labels])
    assert Seen.shapes == [((4, 2), (4, 2)), ((4, 2), (4, 2)), ((3, 2), (3, 2))]
