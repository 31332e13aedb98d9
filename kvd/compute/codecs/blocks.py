"""Elements in one byte each, scaled block by block: ``int8`` and ``fp8``.

The scales of all blocks come first, as float32, then a byte for each element.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kvd.compute.codecs.lengths import TILE, check_length
from kvd.compute.codecs.magnitudes import largest

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_SMALLEST = np.finfo(np.float32).tiny  # of a scale: smaller ones have fewer digits
_NAN = -128


class BlockCodec(ABC):
    """Each block is divided by its largest magnitude over ``top``; a subclass makes bytes of the quotients."""

    tile = 0
    top: float

    def __init__(self, block: int) -> None:
        self._block = block

    @abstractmethod
    def _to_codes(self, quotients: Floats, codes: Bytes) -> None:
        """Convert quotients from −top to top, or not finite, to bytes. May change the quotients."""

    @abstractmethod
    def _from_codes(self, codes: Bytes, out: Floats) -> None:
        """Convert bytes back to quotients."""

    def max_nbytes(self, size: int) -> int:
        return 4 * -(-size // self._block) + size

    def encode(self, values: Floats, out: Bytes, nonce: int) -> int:
        scales, codes = self._split(out, values.size)
        for start, stop, width in self._tiles(values.size):
            rows = values[start:stop].reshape(-1, width)
            scale = np.maximum(largest(rows) / np.float32(self.top), _SMALLEST)
            first = start // self._block
            scales[first : first + scale.size] = scale
            self._to_codes(rows / scale[:, np.newaxis], codes[start:stop].reshape(-1, width))
        return self.max_nbytes(values.size)

    def check(self, data: Bytes, size: int) -> None:
        check_length(data, self.max_nbytes(size), size)

    def decode(self, data: Bytes, out: Floats) -> None:
        scales, codes = self._split(data, out.size)
        for start, stop, width in self._tiles(out.size):
            rows, first = out[start:stop].reshape(-1, width), start // self._block
            self._from_codes(codes[start:stop].reshape(-1, width), rows)
            rows *= scales[first : first + rows.shape[0], np.newaxis]

    def _split(self, data: Bytes, size: int) -> tuple[Floats, Bytes]:
        blocks = -(-size // self._block)
        return data[: 4 * blocks].view("<f4"), data[4 * blocks : 4 * blocks + size]

    def _tiles(self, size: int) -> list[tuple[int, int, int]]:
        """Return ranges of whole blocks with their size; a shorter last block is a range of its own."""
        whole = size // self._block * self._block
        step = max(TILE // self._block, 1) * self._block
        tiles = [(start, min(start + step, whole), self._block) for start in range(0, whole, step)]
        return tiles if whole == size else [*tiles, (whole, size, size - whole)]


class Int8Codec(BlockCodec):
    """Rounding of quotients to whole numbers from −127 to 127; −128 stands for values that are not finite."""

    top = 127.0

    def _to_codes(self, quotients: Floats, codes: Bytes) -> None:
        np.rint(quotients, out=quotients)
        if not np.isfinite(np.add.reduce(quotients, axis=None)):
            quotients[~np.isfinite(quotients)] = _NAN
        np.copyto(codes.view(np.int8), quotients, casting="unsafe")

    def _from_codes(self, codes: Bytes, out: Floats) -> None:
        signed = codes.view(np.int8)
        np.copyto(out, signed)
        if signed.min(initial=0) == _NAN:
            out[signed == _NAN] = np.nan


class FP8Codec(BlockCodec):
    """Rounding of quotients to the nearest e4m3 number, which has NaN but no infinity."""

    top = 448.0

    def _to_codes(self, quotients: Floats, codes: Bytes) -> None:
        """By the upper half of each float32, whose last bit is set if anything is set in the lower half: the half has
        four bits more than an e4m3 number, so it is rounded to the same as the whole would be."""
        bits = quotients.view(np.uint32)
        lower = bits & np.uint32(0xFFFF)
        bits >>= np.uint32(16)
        np.bitwise_or(bits, lower != 0, out=bits)
        _e4m3_codes().take(bits, out=codes, mode="clip")

    def _from_codes(self, codes: Bytes, out: Floats) -> None:
        _e4m3_values().take(codes, out=out, mode="clip")


@cache
def _e4m3_codes() -> Bytes:
    """Return the e4m3 number nearest to each float32 whose lower half is 0."""
    upper = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    with np.errstate(invalid="ignore"):
        codes: Bytes = upper.view(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return codes


@cache
def _e4m3_values() -> Floats:
    values: Floats = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return values
