"""Handwritten digits: 1797 images of 8 × 8 pixels, the test set of UCI's "Optical Recognition of Handwritten Digits".

Source and licence stand in ``LICENSE-digits.txt`` beside this file.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from kvd.errors import ConfigError

#: The highest value of a pixel: each counts the dark ones among 4 × 4 of the original bitmap.
PIXEL_MAX = 16


@dataclass(frozen=True, eq=False)
class Digits:
    """The digits in two parts.

    Attributes:
        train_images, test_images: (samples, 8, 8) float32 in [0, 1], 1 being ink.
        train_labels, test_labels: (samples,) int64, 0 to 9.
    """

    train_images: npt.NDArray[np.float32]
    train_labels: npt.NDArray[np.int64]
    test_images: npt.NDArray[np.float32]
    test_labels: npt.NDArray[np.int64]


def load(test_fraction: float = 0.2, seed: int = 0) -> Digits:
    """All digits, shuffled by ``seed``, the last ``round(test_fraction · 1797)`` of them as the test part.

    The same arguments give the same arrays everywhere. New arrays at each call.

    Raises:
        ConfigError: ``test_fraction`` is not in [0, 1].
    """
    if not 0.0 <= test_fraction <= 1.0:
        raise ConfigError(f"test_fraction must be in [0, 1], not {test_fraction!r}", setting="test_fraction")
    pixels, classes = _read()
    # raw bits of a bit generator stay the same in all versions of NumPy; permutation() need not (NEP 19)
    order = np.argsort(np.random.PCG64(seed).random_raw(len(pixels)), kind="stable")
    images = pixels[order].astype(np.float32) / np.float32(PIXEL_MAX)
    labels = classes[order].astype(np.int64)
    train = len(images) - round(test_fraction * len(images))
    return Digits(images[:train], labels[:train], images[train:], labels[train:])


def _read() -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return images (1797, 8, 8) and labels (1797,), both uint8, in the order of the source."""
    file = resources.files("kvd.data").joinpath("digits.npz")
    with np.load(io.BytesIO(file.read_bytes()), allow_pickle=False) as arrays:
        return arrays["images"], arrays["labels"]
