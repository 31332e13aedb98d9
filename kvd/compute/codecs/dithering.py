"""Magnitudes rounded to one of a few levels at random, so that the mean is right: BytePS's ``dithering``.

The scale comes first, as float32, then a code for each element: its sign, and the number of its level. A code has 2, 4
or 8 bits, the first one of a byte in the upper bits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvd.compute.codecs.bits import look_up
from kvd.compute.codecs.draws import draws
from kvd.compute.codecs.lengths import TILE, check_length
from kvd.compute.codecs.magnitudes import largest, norm

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Codes = NDArray[np.uint8]


class DitheringCodec:
    """Levels 0 to k of magnitude.

    Args:
        k: 1 to 127.
        natural: level j > 0 is 2^(j − k) of the scale; else it is j / k of it.
        by_norm: the scale is the Euclidean norm; else it is the largest magnitude.
    """

    tile = 0

    def __init__(self, k: int, *, natural: bool, by_norm: bool, seed: int) -> None:
        self._k = k
        self._by_norm = by_norm
        self._seed = seed
        self._bits = next(bits for bits in (2, 4, 8) if k < 1 << (bits - 1))
        self._unit = np.float32(2.0 ** (k - 1) if natural else k)  # the scale, in units of the first level
        self._level: Callable[[Floats, NDArray[np.uint32]], Codes] = self._natural if natural else self._linear
        values = np.arange(1 << (self._bits - 1), dtype=np.float64).clip(max=k)
        values = np.where(values == 0, 0, 2.0 ** (values - k)) if natural else values / k
        both = np.concatenate((values, -values)).astype(np.float32)
        codes = np.arange(256)[:, np.newaxis] >> np.arange(8 - self._bits, -1, -self._bits)
        self._table = both[codes & ((1 << self._bits) - 1)]

    def max_nbytes(self, size: int) -> int:
        return 4 + -(-size * self._bits // 8)

    def encode(self, values: Floats, out: Bytes, nonce: int) -> int:
        nbytes = self.max_nbytes(values.size)
        scale = self._scale(values)
        out[:4].view("<f4")[0] = scale
        packed, per_byte = out[4:nbytes], 8 // self._bits
        if scale == 0:
            packed[:] = 0
            return nbytes
        sign = np.uint8(1 << (self._bits - 1))
        for start in range(0, values.size, TILE):
            tile = values[start : start + TILE]
            random = draws(self._seed, nonce, start, tile.size)
            codes = self._level(self._quotients(tile, scale), random)
            codes |= np.signbit(tile).view(np.uint8) * sign
            first = start // per_byte
            packed[first : first + -(-tile.size // per_byte)] = self._packed(codes)
        return nbytes

    def check(self, data: Bytes, size: int) -> None:
        check_length(data, self.max_nbytes(size), size)

    def decode(self, data: Bytes, out: Floats) -> None:
        look_up(self._table * data[:4].view("<f4")[0], data[4:], out)

    def _scale(self, values: Floats) -> np.float32:
        if self._by_norm:
            return norm(values)
        return largest(values[np.newaxis])[0] if values.size else np.float32(0)

    def _quotients(self, tile: Floats, scale: np.float32) -> Floats:
        """Return the magnitudes in units of the first level; NaN becomes 0."""
        quotients = np.abs(tile)
        quotients /= scale
        quotients *= self._unit
        if not np.isfinite(np.add.reduce(quotients)):
            np.fmax(quotients, np.float32(0), out=quotients)
        return quotients

    def _linear(self, quotients: Floats, random: NDArray[np.uint32]) -> Codes:
        """Return the whole part, and one more with the probability of the rest."""
        random >>= np.uint32(8)
        chance = random.view(np.int32).astype(np.float32)
        chance *= np.float32(2**-24)
        quotients += chance
        np.minimum(quotients, self._unit + np.float32(0.5), out=quotients)
        levels: Codes = quotients.astype(np.uint8)
        return levels

    def _natural(self, quotients: Floats, random: NDArray[np.uint32]) -> Codes:
        """The power of two below, or the one above with the probability that makes the mean right: where the mantissa
        and as many random bits give a carry into the exponent. Below 1, 1 is added: the mantissa is the quotient."""
        np.minimum(quotients, self._unit, out=quotients)
        bits = np.maximum(quotients + np.float32(1), quotients + quotients).view(np.uint32)
        random >>= np.uint32(9)
        bits += random
        bits >>= np.uint32(23)
        bits -= np.uint32(127)
        levels: Codes = bits.astype(np.uint8)
        return levels

    def _packed(self, codes: Codes) -> Bytes:
        width = self._bits
        if codes.size % (8 // width):
            codes = np.concatenate((codes, np.zeros(-codes.size % (8 // width), np.uint8)))
        while width < 8:  # two neighbours at a time
            pairs = codes.view("<u2")
            codes = ((pairs << np.uint16(width)) | (pairs >> np.uint16(8))).astype(np.uint8)
            width *= 2
        return codes
