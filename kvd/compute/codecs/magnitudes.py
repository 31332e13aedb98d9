"""Magnitudes of the elements that are finite: others must not change how these are scaled."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

_LARGEST = float(np.finfo(np.float32).max)


def largest(rows: Floats) -> Floats:
    """The largest magnitude of each row; 0 if no element is finite."""
    tops: Floats = np.maximum(np.abs(rows.max(axis=1)), np.abs(rows.min(axis=1)))
    bad = ~np.isfinite(tops)
    if bad.any():
        magnitudes = np.abs(rows[bad])
        tops[bad] = np.where(np.isfinite(magnitudes), magnitudes, np.float32(0)).max(axis=1)
    return tops


def mean(values: Floats) -> np.float32:
    """The mean magnitude, summed in float64; 0 if no element is finite."""
    total, size = float(np.add.reduce(np.abs(values), dtype=np.float64)), values.size
    if not math.isfinite(total):
        finite = np.abs(values[np.isfinite(values)])
        total, size = float(np.add.reduce(finite, dtype=np.float64)), finite.size
    return np.float32(total / size) if size else np.float32(0)


def norm(values: Floats) -> np.float32:
    """The Euclidean norm, summed in float64; at most the largest float32."""
    squares = float(np.add.reduce(np.square(values, dtype=np.float64)))
    if not math.isfinite(squares):
        squares = float(np.add.reduce(np.square(values[np.isfinite(values)], dtype=np.float64)))
    return np.float32(min(math.sqrt(squares), _LARGEST))
