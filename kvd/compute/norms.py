"""Euclidean norms whose bits do not depend on the machine, nor on how the work is cut up."""

from __future__ import annotations

import math

import numpy as np

from kvd.compute.kernels import Array

_CHUNK = 2**15
"""Elements at a time. The order of the sum follows from it: another number gives other bits."""


def norm(values: Array) -> float:
    """√(x₁² + x₂² + …) of a 1-D array of floats, calculated in float64.

    The squares of a chunk are added in pairs, again and again; the sums of the chunks one after the other.
    """
    total = 0.0
    buffer = np.empty(min(_CHUNK, values.size), np.float64)
    for start in range(0, values.size, _CHUNK):
        chunk = values[start : start + _CHUNK]
        squares = buffer[: chunk.size]
        np.copyto(squares, chunk)
        np.multiply(squares, squares, out=squares)
        total += folded_sum(squares)
    return math.sqrt(total)


def folded_sum(values: Array) -> float:
    """Return the sum of all elements by adding the latter half to the former repeatedly. Overwrites the elements."""
    count = values.size
    while count > 1:
        half = count // 2
        np.add(values[:half], values[count - half : count], out=values[:half])
        count -= half
    return float(values[0])
