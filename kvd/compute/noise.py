"""Normal noise that is the same on every machine: nothing but hashes of whole numbers, and + − × ÷ √ in float64."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np

from kvd.compute.kernels import Array

_STEP = 0x9E3779B97F4A7C15  # of SplitMix64 (Steele, Lea and Flood 2014), as the shifts and factors below
_LN2 = 0.6931471805599453

# The coefficients of algorithm AS 241, PPND7 (Wichura 1988): numerator and denominator of the three approximations.
_CENTRE = ((3.3871327179, 50.434271938, 159.29113202, 59.109374720), (1.0, 17.895169469, 78.757757664, 67.187563600))
_NEAR = ((1.4234372777, 2.7568153900, 1.3067284816, 0.17023821103), (1.0, 0.73700164250, 0.12021132975))
_FAR = ((6.6579051150, 3.0812263860, 0.42868294337, 0.017337203997), (1.0, 0.24197894225, 0.012258202635))


class Noise:
    """Standard normal numbers for the elements of one update of one slice.

    Args:
        seed, key, index, step: what it is a function of, besides the place of an element.
    """

    def __init__(self, seed: int, key: str, index: int, step: int) -> None:
        name = f"{seed} {index} {step} {key}".encode(errors="surrogatepass")
        self._base = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")

    def normal(self, start: int, count: int) -> Array:
        """Return the numbers of the elements ``start`` to ``start + count``, float64, shape (count,)."""
        return quantiles(self._uniform(start, count))

    def _uniform(self, start: int, count: int) -> Array:
        """Multiples of 2⁻⁵² from 0 to 1, plus 2⁻⁵³: neither 0 nor 1."""
        bits = np.arange(start, start + count, dtype=np.uint64)
        np.multiply(bits, np.uint64(_STEP), out=bits)
        np.add(bits, np.uint64((self._base + _STEP) % 2**64), out=bits)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            np.bitwise_xor(bits, bits >> np.uint64(shift), out=bits)
            np.multiply(bits, np.uint64(factor), out=bits)
        np.bitwise_xor(bits, bits >> np.uint64(31), out=bits)
        uniform = (bits >> np.uint64(12)).astype(np.float64)
        np.add(uniform, 0.5, out=uniform)
        return np.multiply(uniform, 2.0**-52, out=uniform)


def quantiles(uniform: Array) -> Array:
    """Return the quantiles of the standard normal distribution for probabilities between 0 and 1."""
    offset = uniform - 0.5
    found = offset * _quotient(_CENTRE, 0.180625 - offset * offset)
    outer = np.flatnonzero(np.absolute(offset) > 0.425)
    tail = uniform[outer]
    root = np.sqrt(-_logarithm(np.minimum(tail, 1.0 - tail)))
    sizes = np.where(root <= 5.0, _quotient(_NEAR, root - 1.6), _quotient(_FAR, root - 5.0))
    found[outer] = np.copysign(sizes, offset[outer])
    return found


def _quotient(coefficients: tuple[Sequence[float], Sequence[float]], values: Array) -> Array:
    above, below = coefficients
    return _polynomial(above, values) / _polynomial(below, values)


def _polynomial(coefficients: Sequence[float], values: Array) -> Array:
    result = np.full_like(values, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        np.multiply(result, values, out=result)
        np.add(result, coefficient, out=result)
    return result


def _logarithm(values: Array) -> Array:
    """Natural logarithms, right to twelve digits: those of C libraries differ in the last ones."""
    mantissa, exponent = np.frexp(values)
    small = mantissa < math.sqrt(0.5)
    mantissa = np.where(small, mantissa + mantissa, mantissa)
    exponent = exponent - small
    # ln m = 2·artanh((m − 1) / (m + 1)), where the quotient is at most 0.172.
    quotient = (mantissa - 1.0) / (mantissa + 1.0)
    series = _polynomial([1.0 / odd for odd in range(1, 17, 2)], quotient * quotient)
    return exponent * _LN2 + 2.0 * quotient * series
