"""Metrics, accumulated over batches and devices.

Every metric here is a sum over samples divided by their count, both kept exactly, so that batches and devices count by
their size: the value does not depend on how the samples were split. (Some of MXNet's average the means of batches.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvd.errors import ConfigError, ShapeMismatch
from kvd.parallel.device import HostArray
from kvd.parallel.group.monitoring import Arrays, Metric
from kvd.parallel.models.numpy.ids import whole_numbers


class Mean:
    """The base of the metrics below: a sum over elements, and their count.

    Attributes:
        name: as shown.
        total: the sum so far.
        count: of elements so far.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.total = 0.0
        self.count = 0

    def update(self, labels: Arrays, outputs: Arrays) -> None:
        """Take in labels and outputs: one array each, or two lists of equal length.

        Raises:
            ShapeMismatch: lists of different lengths, or a label that does not fit its output.
            ValueError: a label that is not a class.
        """
        for label, output in _pairs(labels, outputs):
            total, count = self._measure(label, output)
            self.total += total
            self.count += count

    def get(self) -> tuple[str, float]:
        """(name, value); the value is NaN before the first element."""
        return self.name, self._value()

    def reset(self) -> None:
        """Start from zero."""
        self.total, self.count = 0.0, 0

    def _value(self) -> float:
        return self.total / self.count if self.count else math.nan

    def _measure(self, label: HostArray, output: HostArray) -> tuple[float, int]:
        """Sum and count of one pair of arrays."""
        raise NotImplementedError


class Accuracy(Mean):
    """The share of labels (batch, …) that equal the class with the highest score in outputs (batch, …, classes).

    Of equal scores the first class wins. Outputs of the labels' shape are read as classes, not scores.
    """

    def __init__(self, name: str = "accuracy") -> None:
        super().__init__(name)

    def _measure(self, label: HostArray, output: HostArray) -> tuple[float, int]:
        if label.shape == output.shape:
            return float(np.count_nonzero(label == output)), label.size
        scores, classes = _scores_and_classes(label, output)
        return float(np.count_nonzero(np.argmax(scores, axis=1) == classes)), len(classes)


class TopK(Mean):
    """The share of labels among the ``k`` classes with the highest scores; ``k=1`` is `Accuracy`.

    Of equal scores the first class counts as higher; a NaN is never below another score, and a label whose own score
    is NaN is never among the highest.

    Raises:
        ConfigError: ``k`` is below 1, or in update above the number of classes.
    """

    def __init__(self, k: int, name: str | None = None) -> None:
        if k < 1:
            raise ConfigError(f"k must be above 0, not {k}", setting="k")
        super().__init__(name or f"top_{k}_accuracy")
        self.k = k

    def _measure(self, label: HostArray, output: HostArray) -> tuple[float, int]:
        scores, classes = _scores_and_classes(label, output)
        if self.k > scores.shape[1]:
            raise ConfigError(f"the {self.k} highest of {scores.shape[1]} classes", setting="k")
        own = np.take_along_axis(scores, classes[:, None], axis=1)
        is_later = np.arange(scores.shape[1]) >= classes[:, None]
        is_ahead = ~((scores < own) | ((scores == own) & is_later))
        return float(np.count_nonzero(is_ahead.sum(axis=1) < self.k)), len(classes)


class CrossEntropy(Mean):
    """The mean of -log(p[label]) for probabilities (batch, …, classes), natural logarithm.

    Arguments:
        epsilon: smaller probabilities count as this one, so that a 0 gives a large value instead of infinity.
        ignore_label: labels of this value (such as the padding of sequences) do not count.
    """

    def __init__(self, epsilon: float = 1e-12, ignore_label: int | None = None, name: str = "cross_entropy") -> None:
        super().__init__(name)
        self.epsilon = epsilon
        self.ignore_label = ignore_label

    def _measure(self, label: HostArray, output: HostArray) -> tuple[float, int]:
        if self.ignore_label is not None:
            label, output = _flat(label, output)
            kept = label != self.ignore_label
            label, output = label[kept], output[kept]
        scores, classes = _scores_and_classes(label, output)
        p = np.take_along_axis(scores, classes[:, None], axis=1).astype(np.float64)
        return float(-np.log(np.maximum(p, self.epsilon)).sum()), len(classes)


class Perplexity(CrossEntropy):
    """exp of the cross entropy over everything so far."""

    def __init__(self, epsilon: float = 1e-12, ignore_label: int | None = None, name: str = "perplexity") -> None:
        super().__init__(epsilon, ignore_label, name)

    def _value(self) -> float:
        return float(np.exp(super()._value()))  # NumPy's gives infinity where Python's raises


class MSE(Mean):
    """The mean over all elements of (label - output)², in float64; (batch,) and (batch, 1) fit each other."""

    def __init__(self, name: str = "mse") -> None:
        super().__init__(name)

    def _measure(self, label: HostArray, output: HostArray) -> tuple[float, int]:
        if [n for n in label.shape if n != 1] != [n for n in output.shape if n != 1]:
            raise ShapeMismatch(f"labels of shape {label.shape} do not fit outputs of shape {output.shape}")
        difference = label.reshape(-1).astype(np.float64) - output.reshape(-1).astype(np.float64)
        return float(np.square(difference).sum()), difference.size


class Composite:
    """Several metrics at once.

    Attributes:
        metrics: in the order in which they are shown.
    """

    def __init__(self, *metrics: Metric) -> None:
        self.metrics = list(metrics)

    def update(self, labels: Arrays, outputs: Arrays) -> None:
        """Update each of them."""
        for metric in self.metrics:
            metric.update(labels, outputs)

    def get(self) -> tuple[list[str], list[float]]:
        """(names, values), with those of an inner composite in place of it."""
        names: list[str] = []
        values: list[float] = []
        for metric in self.metrics:
            name, value = metric.get()
            names.extend([name] if isinstance(name, str) else name)
            values.extend([value] if isinstance(name, str) else value)
        return names, values

    def reset(self) -> None:
        """Reset each of them that can be reset."""
        for metric in self.metrics:
            reset = getattr(metric, "reset", None)
            if reset is not None:
                reset()


def _pairs(labels: Arrays, outputs: Arrays) -> Iterator[tuple[HostArray, HostArray]]:
    """Label and output of each output, in host memory."""
    label_list: Sequence[Any] = labels if isinstance(labels, list | tuple) else [labels]
    output_list: Sequence[Any] = outputs if isinstance(outputs, list | tuple) else [outputs]
    if len(label_list) != len(output_list):
        raise ShapeMismatch(f"{len(label_list)} label arrays for {len(output_list)} outputs")
    for label, output in zip(label_list, output_list, strict=True):
        yield _host(label), _host(output)


def _host(array: Any) -> HostArray:
    """``array`` as a NumPy array, fetched from the device if it is on one."""
    if hasattr(array, "detach"):  # torch
        array = array.detach().cpu()
    elif type(array).__module__.partition(".")[0] == "cupy":
        array = array.get()
    return np.asarray(array)


def _flat(label: HostArray, output: HostArray) -> tuple[HostArray, HostArray]:
    """(labels,) and (labels, classes) of labels (batch, …) and outputs (batch, …, classes)."""
    if output.ndim < 2 or label.size * output.shape[-1] != output.size or len(label) != len(output):
        raise ShapeMismatch(f"labels of shape {label.shape} do not fit outputs of shape {output.shape}")
    return label.reshape(-1), output.reshape(-1, output.shape[-1])


def _scores_and_classes(label: HostArray, output: HostArray) -> tuple[HostArray, HostArray]:
    """Outputs as (labels, classes), and labels as int64 in [0, classes)."""
    flat_label, scores = _flat(label, output)
    return scores, whole_numbers(np, flat_label, scores.shape[1], "label")
