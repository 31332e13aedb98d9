"""The digits that are shipped, and a small network that learns them."""

from __future__ import annotations

from importlib import resources
from typing import Any

import numpy as np
import pytest

from kvd.data import digits
from kvd.errors import ConfigError
from kvd.parallel import Accuracy, DataDesc, Dense, Flatten, ReLU, Sequential, SoftmaxCrossEntropy

#: Of optdigits.tes, as the description of the data set at UCI gives it.
HISTOGRAM = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_contents() -> None:
    data = digits.load()
    assert (data.train_images.shape, data.test_images.shape) == ((1438, 8, 8), (359, 8, 8))
    assert (data.train_labels.shape, data.test_labels.shape) == ((1438,), (359,))
    images = np.concatenate([data.train_images, data.test_images])
    labels = np.concatenate([data.train_labels, data.test_labels])
    assert [images.dtype.name, labels.dtype.name] == ["float32", "int64"]
    assert (images.min(), images.max()) == (0.0, 1.0)
    assert np.array_equal(images * 16, np.round(images * 16))
    assert np.bincount(labels).tolist() == HISTOGRAM
    assert np.bincount(data.test_labels, minlength=10).min() > 20


def test_shuffled_by_the_seed_alone() -> None:
    first, again, other = digits.load(seed=1), digits.load(seed=1), digits.load(seed=2)
    assert np.array_equal(first.train_images, again.train_images)
    assert np.array_equal(first.test_labels, again.test_labels)
    assert not np.array_equal(first.train_labels, other.train_labels)
    assert not np.shares_memory(first.train_images, again.train_images)
    assert digits.load().train_labels[:12].tolist() == [0, 6, 3, 8, 1, 8, 4, 1, 5, 8, 9, 7]


def test_image_and_label_stay_together() -> None:
    first, other = digits.load(seed=1), digits.load(seed=2)
    by_image = dict(zip((image.tobytes() for image in first.train_images), first.train_labels, strict=True))
    known = [(image.tobytes(), label) for image, label in zip(other.train_images, other.train_labels, strict=True)]
    assert all(by_image.get(image, label) == label for image, label in known)


@pytest.mark.parametrize(("fraction", "test"), [(0.0, 0), (0.5, 898), (1.0, 1797)])
def test_fractions(fraction: float, test: int) -> None:
    data = digits.load(test_fraction=fraction)
    assert (len(data.train_labels), len(data.test_labels)) == (1797 - test, test)


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_invalid_fractions(fraction: float) -> None:
    with pytest.raises(ConfigError, match="test_fraction must be in"):
        digits.load(test_fraction=fraction)


def test_licence_is_shipped_and_the_file_is_small() -> None:
    folder = resources.files("kvd.data")
    assert "CC BY 4.0" in folder.joinpath("LICENSE-digits.txt").read_text(encoding="utf-8")
    assert len(folder.joinpath("digits.npz").read_bytes()) < 100_000


def test_a_small_network_learns_them() -> None:
    data = digits.load()
    model = Sequential(Flatten(), Dense(64), ReLU(), Dense(10, initializer="glorot"), SoftmaxCrossEntropy())
    descs = [DataDesc("data", (64, 8, 8))], [DataDesc("label", (64,), "int64")]
    executor = model.bind("cpu", *descs, params=model.initialize((64, 8, 8), seed=0))
    momentum: dict[str, Any] = {name: np.zeros_like(value) for name, value in executor.params.items()}
    generator = np.random.default_rng(0)
    for _ in range(20):
        order = generator.permutation(len(data.train_labels))
        for start in range(0, len(order) - 63, 64):
            part = order[start : start + 64]
            executor.forward({"data": data.train_images[part], "label": data.train_labels[part]}, is_train=True)
            executor.backward()
            for name, gradient in executor.grads.items():
                momentum[name] = 0.9 * momentum[name] + gradient
                executor.params[name][...] -= 0.1 * momentum[name]
    tester = model.bind("cpu", [DataDesc("data", data.test_images.shape)], params=executor.params, for_training=False)
    metric = Accuracy()
    metric.update(data.test_labels, tester.forward({"data": data.test_images}, is_train=False))
    assert metric.get()[1] >= 0.96
