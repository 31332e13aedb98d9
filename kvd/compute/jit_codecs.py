"""The loops of codecs that numba compiles: what :mod:`kvd.compute.codecs` does with NumPy, with the same bits.

Imported by `kvd.compute.jit` alone. The bodies of loops stand in functions of their own, which get parts of arrays:
LLVM knows then that no index is negative, and works on several elements at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba import types

_njit: Any = numba.njit
F = TypeVar("F", bound=Callable[..., Any])


def _inlined(function: F) -> F:
    """A part of the loops below."""
    return cast(F, _njit(nogil=True, error_model="numpy", fastmath=False)(function))


_TILE = 1 << 15  # of kvd.compute.codecs.lengths, LANES of kvd.compute.codecs.magnitudes: a loop needs them as constants
_LANES = 1 << 10
_ROW = 1 << 12  # elements whose codes lie in the cache
_LARGEST = np.float32(np.finfo(np.float32).max)
_NOTHING = np.float32(0)


@_inlined
def _add_magnitudes(lanes: Any, row: Any, least: Any) -> Any:
    count = 0
    for j in range(row.size):
        magnitude = abs(row[j])
        lanes[j] += _NOTHING if magnitude < least else magnitude
        count += magnitude >= least
    return count


def magnitudes(values: Any, least: Any, sums: Any) -> Any:
    """Add the magnitudes that are not below ``least`` up, lane by lane, and return how many there are.

    Args:
        values: shape (n,), float32.
        sums: shape (1024,), float64: receives them.
    """
    count = 0
    lanes = np.empty(_LANES, np.float32)
    for start in range(0, values.size, _TILE):
        stop = min(start + _TILE, values.size)
        lanes[:] = _NOTHING
        for row in range(start, stop, _LANES):
            count += _add_magnitudes(lanes, values[row : min(row + _LANES, stop)], least)
        for j in range(_LANES):
            sums[j] += lanes[j]
    return count


@_inlined
def _code(row: Any, codes: Any, threshold: Any, sent: Any) -> None:
    for j in range(row.size):
        value = row[j]
        codes[j] = np.uint8(3 * np.int32(value >= threshold) + 2 * np.int32(value <= -threshold))
        rest = value - (sent if value >= threshold else (-sent if value <= -threshold else _NOTHING))
        row[j] = rest if abs(rest) <= _LARGEST else _NOTHING


@_inlined
def _decode(row: Any, threshold: Any, sent: Any, decoded: Any) -> None:
    for j in range(row.size):
        value = row[j]
        decoded[j] = sent if value >= threshold else (-sent if value <= -threshold else _NOTHING)


@_inlined
def _pack(codes: Any, out: Any) -> None:
    """Four codes, of which the first is the lowest byte of a word, in one byte, the first in its upper bits."""
    for j in range(out.size):
        word = codes[j]
        out[j] = np.uint8((word & 3) << 6 | (word >> 8 & 3) << 4 | (word >> 16 & 3) << 2 | (word >> 24 & 3))


def two_bit(kept: Any, out: Any, threshold: Any, sent: Any, decoded: Any) -> None:
    """Write two bits for each element, and leave what they do not say.

    Args:
        kept: shape (n,), float32.
        out: shape (at least n / 4,), uint8.
        threshold, sent: float32: from where on an element is sent, and as what.
        decoded: shape (n,), float32: receives what is sent; or (0,): nobody wants it.
    """
    codes = np.zeros(_ROW, np.uint8)
    for start in range(0, kept.size, _ROW):
        size = min(_ROW, kept.size - start)
        if size < _ROW:
            codes[:] = np.uint8(0)
        if decoded.size:
            _decode(kept[start : start + size], threshold, sent, decoded[start : start + size])
        _code(kept[start : start + size], codes, threshold, sent)
        first = start // 4
        _pack(codes.view(np.uint32), out[first : first + (size + 3) // 4])


def _array(dtype: Any, readonly: bool) -> Any:
    return types.Array(dtype, 1, "C", readonly=readonly, aligned=False)


_FLOATS, _KEPT = _array(types.float32, readonly=True), _array(types.float32, readonly=False)
LOOPS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "magnitudes": (magnitudes, (_FLOATS, types.float32, _array(types.float64, readonly=False))),
    "two_bit": (two_bit, (_KEPT, _array(types.uint8, readonly=False), types.float32, types.float32, _KEPT)),
}
"""Each with the types of its arguments."""
