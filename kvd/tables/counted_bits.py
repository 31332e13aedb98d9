"""Random bits by number: what SplitMix64 draws, without the draws before it.

G. Steele, D. Lea and C. Flood, "Fast splittable pseudorandom number generators" (2014): draw ``k`` of the generator
that starts at ``s`` is ``mix(s + k · GOLDEN)``. All is calculated modulo 2⁶⁴.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Bits = np.ndarray[Any, np.dtype[np.uint64]]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = tuple(np.uint64(shift) for shift in (30, 27, 31))


def mix(bits: Bits) -> Bits:
    """Return the finalizer: every bit of the result depends on all bits; different numbers have different results."""
    first, second, third = _SHIFTS
    mixed: Bits = (bits ^ (bits >> first)) * _FIRST
    mixed ^= mixed >> second
    mixed *= _SECOND
    mixed ^= mixed >> third
    return mixed


def draws(starts: Bits, numbers: Bits) -> Bits:
    """Draw ``numbers[j]``, counted from 1, of the generator that starts at ``starts[i]``, at ``[i, j]``."""
    return mix(starts[:, None] + numbers[None, :] * GOLDEN)
