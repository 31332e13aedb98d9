"""Magnitudes of the elements that are finite: others must not change how these are scaled."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from kvd.compute.codecs.lengths import TILE

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


def mean_from(values: Floats, least: np.float32) -> np.float32:
    """The mean of the finite magnitudes that are ``least`` or more, summed in float64; 0 if there are none."""
    total, count = 0.0, 0
    for start in range(0, values.size, TILE):
        magnitudes = np.abs(values[start : start + TILE])
        chosen = magnitudes >= least
        magnitudes *= chosen
        part = float(np.add.reduce(magnitudes, dtype=np.float64))
        if not math.isfinite(part):
            chosen &= np.isfinite(magnitudes)
            part = float(np.add.reduce(magnitudes[chosen], dtype=np.float64))
        total += part
        count += int(np.count_nonzero(chosen))
    return np.float32(total / count) if count else np.float32(0)


def norm(values: Floats) -> np.float32:
    """The Euclidean norm, summed in float64; at most the largest float32."""
    squares = float(np.add.reduce(np.square(values, dtype=np.float64)))
    if not math.isfinite(squares):
        squares = float(np.add.reduce(np.square(values[np.isfinite(values)], dtype=np.float64)))
    return np.float32(min(math.sqrt(squares), _LARGEST))
