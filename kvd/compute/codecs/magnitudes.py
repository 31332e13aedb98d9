"""Magnitudes of the elements that are finite: others must not change how these are scaled."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from kvd.compute.codecs.lengths import TILE
from kvd.compute.compiled import codec_loop

Floats = NDArray[np.float32]

LANES = 1 << 10

_LARGEST = float(np.finfo(np.float32).max)


def largest(rows: Floats) -> Floats:
    """Return the largest magnitude of each row; 0 if no element is finite."""
    tops: Floats = np.maximum(np.abs(rows.max(axis=1)), np.abs(rows.min(axis=1)))
    bad = ~np.isfinite(tops)
    if bad.any():
        magnitudes = np.abs(rows[bad])
        tops[bad] = np.where(np.isfinite(magnitudes), magnitudes, np.float32(0)).max(axis=1)
    return tops


def mean(values: Floats) -> np.float32:
    """Return the mean magnitude; 0 if no element is finite."""
    total, count = _sum_from(values, np.float32(0))
    return np.float32(total / count) if count else np.float32(0)


def mean_from(values: Floats, least: np.float32) -> np.float32:
    """Return the mean of the finite magnitudes that are ``least`` or more; 0 if there are none."""
    total, count = _sum_from(values, least)
    return np.float32(total / count) if count else np.float32(0)


def _sum_from(values: Floats, least: np.float32) -> tuple[float, int]:
    """Return the sum of the finite magnitudes that are ``least`` or more, and their number.

    Lane by lane, in which NumPy and a compiled loop give the same bits: the elements of a tile that are LANES apart are
    added up in float32, these sums and all lanes in float64.
    """
    sums = np.zeros(LANES)
    loop = codec_loop("magnitudes").ready(values.size)
    count = _add_lanes(values, least, sums) if loop is None else int(loop(values, least, sums))
    total = float(np.add.reduce(sums))
    if math.isfinite(total):
        return total, count
    magnitudes = np.abs(values[np.isfinite(values)])
    magnitudes = magnitudes[magnitudes >= least]
    return float(np.add.reduce(magnitudes, dtype=np.float64)), magnitudes.size


def _add_lanes(values: Floats, least: np.float32, sums: NDArray[np.float64]) -> int:
    count = 0
    for start in range(0, values.size, TILE):
        magnitudes = np.abs(values[start : start + TILE])
        if least > 0:
            chosen = magnitudes >= least
            magnitudes *= chosen
            count += int(np.count_nonzero(chosen))
        else:
            count += magnitudes.size
        whole = magnitudes.size - magnitudes.size % LANES
        lanes = np.add.reduce(magnitudes[:whole].reshape(-1, LANES), axis=0)
        lanes[: magnitudes.size - whole] += magnitudes[whole:]
        sums += lanes
    return count


def norm(values: Floats) -> np.float32:
    """Return the Euclidean norm, summed in float64; at most the largest float32."""
    squares = float(np.add.reduce(np.square(values, dtype=np.float64)))
    if not math.isfinite(squares):
        squares = float(np.add.reduce(np.square(values[np.isfinite(values)], dtype=np.float64)))
    return np.float32(min(math.sqrt(squares), _LARGEST))
