"""The rows that an initializer says: a function of its seed, the key and the row id alone.

The generator of a row starts at ``mix(mix(seed + hash(key)) + (id + 1) · GOLDEN)``; the hash is the first 8 bytes,
little-endian, of BLAKE2b of the key's name in UTF-8. Element ``j`` of a row takes draw ``j + 1``, or for a normal one
the draws ``3j + 1`` to ``3j + 3``.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from kvd.initializer import Constant, Initializer, Normal, Uniform, Zeros
from kvd.tables.counted_bits import GOLDEN, Bits, draws, mix

Array = np.ndarray[Any, Any]
Ids = np.ndarray[Any, np.dtype[np.int64]]

TILE = 8192  # elements that are calculated at a time, so that they stay in the cache

# Teichroew's polynomial, from the highest power of r² on.
_COEFFICIENTS = (0.029899776, 0.008355968, 0.076542912, 0.252408784, 3.949846138)
_LANE, _WORD = np.uint64(0x0000FFFF0000FFFF), np.uint64(0xFFFFFFFF)
_16, _32 = np.uint64(16), np.uint64(32)
_53_BITS = np.uint64(11)


class InitialRows:
    """The initial rows of one table.

    Args:
        key: its name.
        width: the elements of a row.
        dtype: float32 or float64.
    """

    def __init__(self, initializer: Initializer, key: str, width: int, dtype: np.dtype[Any]) -> None:
        self._initializer = initializer
        self._width = width
        self._dtype = dtype
        seed = getattr(initializer, "seed", 0)
        named = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
        self._start: Bits = mix(np.array([(seed + named) % (1 << 64)], np.uint64))

    @property
    def are_zeros(self) -> bool:
        """Return whether all initial values are zeros."""
        return isinstance(self._initializer, Zeros)

    def rows(self, ids: Ids) -> Array | None:
        """Return the rows of these ids, shape (ids, width), or None if they are zeros or there are none."""
        if not len(ids) or self.are_zeros:
            return None
        rows = np.empty((len(ids), self._width), self._dtype)
        self.fill(ids, rows)
        return rows

    def fill(self, ids: Ids, out: Array) -> None:
        """Write the rows of these ids into ``out``, of shape (ids, width)."""
        match self._initializer:
            case Zeros():
                out[...] = 0
            case Constant(value=value):
                out[...] = value
            case _:
                self._fill_drawn(ids, out)

    def _fill_drawn(self, ids: Ids, out: Array) -> None:
        rows = max(1, TILE // max(1, self._width))
        for first in range(0, len(ids), rows):
            tile = slice(first, first + rows)
            starts = mix(self._start + (ids[tile].view(np.uint64) + np.uint64(1)) * GOLDEN)
            out[tile] = self._drawn(starts)

    def _drawn(self, starts: Bits) -> Array:
        """Draw in float64, so that an element of float32 is the rounded one of float64."""
        rule = self._initializer
        numbers = np.arange(self._width, dtype=np.uint64)
        if isinstance(rule, Uniform):
            part = (draws(starts, numbers + np.uint64(1)) >> _53_BITS).astype(np.float64)
            part *= 2.0**-53
            part *= rule.high - rule.low
            part += rule.low
            return part
        assert isinstance(rule, Normal)
        total = np.zeros((len(starts), self._width), np.uint64)
        for number in range(1, 4):
            total += _sum_of_lanes(draws(starts, numbers * np.uint64(3) + np.uint64(number)))
        return _bent(total) * rule.std


def _sum_of_lanes(bits: Bits) -> Bits:
    """Return the sum of the four 16-bit numbers in each."""
    pairs: Bits = (bits & _LANE) + ((bits >> _16) & _LANE)
    return (pairs + (pairs >> _32)) & _WORD


def _bent(total: Bits) -> Array:
    """Convert sums of twelve 16-bit numbers to nearly normal numbers."""
    r = total.astype(np.float64)
    r -= 12 * 32767.5  # the mean: the distribution is symmetric, to the bit
    r /= 4 * 65536.0
    square = r * r
    bent = np.full_like(r, _COEFFICIENTS[0])
    for coefficient in _COEFFICIENTS[1:]:
        bent *= square
        bent += coefficient
    bent *= r
    return bent
