"""Metrics against tables worked by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from kvd.errors import ConfigError, ShapeMismatch
from kvd.parallel import MSE, Accuracy, Composite, CrossEntropy, Metric, Perplexity, TopK
from kvd.parallel.training.metric import Mean

SCORES = np.array(
    [
        [0.1, 0.7, 0.2, 0.0],  # order 1 2 0 3
        [0.4, 0.3, 0.2, 0.1],  # order 0 1 2 3
        [0.25, 0.25, 0.25, 0.25],  # equal: the first class is the highest
        [0.0, 0.5, 0.0, 0.5],  # order 1 3 0 2
    ]
)
LABELS = np.array([1, 2, 0, 3])


@pytest.mark.parametrize(
    ("metric", "name", "value"),
    [
        (Accuracy(), "accuracy", 2 / 4),
        (TopK(1), "top_1_accuracy", 2 / 4),
        (TopK(2), "top_2_accuracy", 3 / 4),
        (TopK(3), "top_3_accuracy", 4 / 4),
        (TopK(4), "top_4_accuracy", 4 / 4),
        (CrossEntropy(), "cross_entropy", -math.log(0.7 * 0.2 * 0.25 * 0.5) / 4),
        (Perplexity(), "perplexity", (0.7 * 0.2 * 0.25 * 0.5) ** -0.25),
    ],
)
def test_table(metric: Mean, name: str, value: float) -> None:
    assert math.isnan(metric.get()[1])
    for labels, scores in ((LABELS, SCORES), (LABELS.astype(np.float32), SCORES.astype(np.float32))):
        metric.reset()
        metric.update(labels, scores)
        assert metric.get()[0] == name
        assert metric.get()[1] == pytest.approx(value, rel=1e-6)
    metric.reset()
    metric.update([LABELS[:1]], [SCORES[:1]])  # unequal parts count by their size
    metric.update((LABELS[1:],), (SCORES[1:],))
    assert metric.get()[1] == pytest.approx(value, rel=1e-12)
    metric.reset()
    assert math.isnan(metric.get()[1])


@pytest.mark.parametrize(
    ("labels", "outputs", "value"),
    [
        ([1.0, 2.0, 3.0], [1.0, 4.0, 0.0], 13 / 3),
        ([1.0, 2.0], [[1.0], [4.0]], 2.0),
        ([[1.0, 0.0]], [[0.0, 2.0]], 2.5),
    ],
)
def test_mse(labels: Any, outputs: Any, value: float) -> None:
    metric = MSE()
    metric.update(np.array(labels), np.array(outputs))
    assert metric.get() == ("mse", value)


def test_mse_counts_elements_not_batches() -> None:
    metric = MSE()
    metric.update(np.zeros(3), np.full(3, 2.0))
    metric.update(np.zeros(1), np.zeros(1))
    assert metric.get()[1] == 3.0


def test_accuracy_of_classes() -> None:
    metric = Accuracy("right")
    metric.update(np.array([1, 2, 3]), np.array([1.0, 0.0, 3.0]))
    name, value = metric.get()
    assert name == "right"
    assert value == pytest.approx(2 / 3)


def test_sequences() -> None:
    labels, scores = LABELS.reshape(2, 2), SCORES.reshape(2, 2, 4)
    for metric in (Accuracy(), TopK(2), CrossEntropy()):
        metric.update(labels, scores)
        flat = type(metric)(2) if isinstance(metric, TopK) else type(metric)()
        flat.update(LABELS, SCORES)
        assert metric.get() == flat.get()
        assert metric.count == 4


def test_ignored_labels() -> None:
    metric = Perplexity(ignore_label=-1)
    metric.update(np.array([[1, -1], [-1, 3]]), SCORES.reshape(2, 2, 4))
    assert metric.get()[1] == pytest.approx((0.7 * 0.5) ** -0.5)


def test_impossible_label_gives_a_large_value_not_infinity() -> None:
    metric = CrossEntropy()
    metric.update(np.array([3]), SCORES[:1])
    assert metric.get()[1] == pytest.approx(-math.log(1e-12))
    exact = Perplexity(epsilon=0.0)
    with np.errstate(divide="ignore"):
        exact.update(np.array([3]), SCORES[:1])
    assert exact.get()[1] == math.inf


def test_top_k_and_nan() -> None:
    metric = TopK(2)
    metric.update(np.array([0]), np.array([[np.nan, 0.1, 0.2]]))
    assert metric.get()[1] == 0.0
    metric.reset()
    metric.update(np.array([2]), np.array([[np.nan, 0.1, 0.2]]))
    assert metric.get()[1] == 1.0


def test_torch_tensors() -> None:
    metric = Accuracy()
    metric.update(torch.from_numpy(LABELS), torch.from_numpy(SCORES).requires_grad_())
    assert metric.get()[1] == 0.5


def test_several_outputs() -> None:
    metric = MSE()
    metric.update([np.zeros(2), np.zeros(2)], [np.ones(2), np.full(2, 3.0)])
    assert metric.get()[1] == 5.0


def test_composite() -> None:
    class Foreign:
        """Anything with update and get."""

        def update(self, labels: Any, outputs: Any) -> None:
            self.seen = len(labels)

        def get(self) -> tuple[str, float]:
            return "seen", float(self.seen)

    assert isinstance(Foreign(), Metric)
    metric = Composite(Accuracy(), Composite(TopK(2), Foreign()))
    metric.update(LABELS, SCORES)
    assert metric.get() == (["accuracy", "top_2_accuracy", "seen"], [0.5, 0.75, 4.0])
    metric.reset()
    names, values = metric.get()
    assert names == ["accuracy", "top_2_accuracy", "seen"]
    assert math.isnan(values[0])
    assert values[2] == 4.0


@pytest.mark.parametrize("metric", [Accuracy(), TopK(1), CrossEntropy(), Perplexity(ignore_label=0), MSE()])
def test_shapes_that_do_not_fit(metric: Any) -> None:
    with pytest.raises(ShapeMismatch, match="do not fit"):
        metric.update(np.array([1, 2, 3]), SCORES)
    with pytest.raises(ShapeMismatch, match="1 label arrays for 2 outputs"):
        metric.update([LABELS], [SCORES, SCORES])
    assert math.isnan(metric.get()[1])


@pytest.mark.parametrize("label", [-1, 4, 0.5])
def test_labels_that_are_no_class(label: float) -> None:
    with pytest.raises(ValueError, match=r"label .* is not a whole number in \[0, 4\)"):
        Accuracy().update(np.array([label]), SCORES[:1])


def test_bad_k() -> None:
    with pytest.raises(ConfigError, match="k must be above 0"):
        TopK(0)
    with pytest.raises(ConfigError, match="the 5 highest of 4 classes"):
        TopK(5).update(LABELS, SCORES)
