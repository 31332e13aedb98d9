"""Random numbers that depend on nothing but a seed, the number of a call, and a place: the same on every machine.

They come from the last part of a hash function (two rounds of xor, shift and multiplication), so they can be calculated
side by side, which generators with a state do not allow.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_FIRST, _SECOND = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
_STEP = 0x9E3779B9  # odd, near 2³² divided by the golden ratio
_MASK = 0xFFFFFFFF


def draws(seed: int, nonce: int, start: int, size: int) -> NDArray[np.uint32]:
    """Draw whole numbers below 2³² for ``size`` places from ``start`` on."""
    stream = (_mixed(seed & _MASK, seed >> 32 & _MASK) ^ _mixed(nonce & _MASK, 1)) & _MASK
    return _mix(_places(size) + np.uint32((start * _STEP + stream) & _MASK))


@lru_cache(4)
def _places(size: int) -> NDArray[np.uint32]:
    places = np.arange(size, dtype=np.uint32)
    places *= np.uint32(_STEP)
    places.flags.writeable = False  # many share it
    return places


def _mixed(first: int, second: int) -> int:
    return int(_mix(np.array([(first * _STEP + second) & _MASK], np.uint32))[0])


def _mix(numbers: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Mix the bits of each number in place: every bit of the result depends on all bits."""
    numbers ^= numbers >> np.uint32(16)
    numbers *= _FIRST
    numbers ^= numbers >> np.uint32(15)
    numbers *= _SECOND
    numbers ^= numbers >> np.uint32(16)
    return numbers
