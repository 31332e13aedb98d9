"""Elements in one or two bits: MXNet's ``1bit`` and ``2bit``."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvd.compute.codecs.lengths import TILE, check_length


class TwoBitCodec:
    """Four elements per byte, the first in the upper bits: 11 is the threshold, 10 its negative, all else 0."""

    tile = TILE

    def __init__(self, threshold: float) -> None:
        self._threshold = np.float32(threshold)
        upper, lower = bits_of_bytes()[:, 0::2], bits_of_bytes()[:, 1::2]
        signs = np.where(lower == 1, np.float32(1), np.float32(-1))
        self._table = np.where(upper == 1, signs * self._threshold, np.float32(0))

    def max_nbytes(self, size: int) -> int:
        return -(-size // 4)

    def encode(self, values: NDArray[np.float32], out: NDArray[np.uint8], nonce: int) -> int:
        bits = np.empty((min(TILE, values.size), 2), np.bool_)
        for start in range(0, values.size, TILE):
            tile = values[start : start + TILE]
            upper, lower = bits[: tile.size, 0], bits[: tile.size, 1]
            np.greater_equal(tile, self._threshold, out=lower)
            np.less_equal(tile, -self._threshold, out=upper)
            upper |= lower
            packed = np.packbits(bits[: tile.size].reshape(-1))
            out[start // 4 : start // 4 + packed.size] = packed
        return self.max_nbytes(values.size)

    def check(self, data: NDArray[np.uint8], size: int) -> None:
        check_length(data, self.max_nbytes(size), size)

    def decode(self, data: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        look_up(self._table, data, out)


class OneBitCodec:
    """Eight elements per byte, the first in the uppermost bit: 1 for those above the threshold, 0 is −1."""

    tile = TILE

    def __init__(self, threshold: float) -> None:
        self._threshold = np.float32(threshold)
        self._table = np.where(bits_of_bytes() == 1, np.float32(1), np.float32(-1))

    def max_nbytes(self, size: int) -> int:
        return -(-size // 8)

    def encode(self, values: NDArray[np.float32], out: NDArray[np.uint8], nonce: int) -> int:
        for start in range(0, values.size, TILE):
            packed = np.packbits(values[start : start + TILE] > self._threshold)
            out[start // 8 : start // 8 + packed.size] = packed
        return self.max_nbytes(values.size)

    def check(self, data: NDArray[np.uint8], size: int) -> None:
        check_length(data, self.max_nbytes(size), size)

    def decode(self, data: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        look_up(self._table, data, out)


def bits_of_bytes() -> NDArray[np.uint8]:
    """The bits of each byte, from the uppermost on."""
    return np.unpackbits(np.arange(256, dtype=np.uint8)[:, np.newaxis], axis=1)


def look_up(table: NDArray[np.float32], data: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
    """Write the row of the table for each byte; the last one may stand for fewer elements."""
    width = table.shape[1]
    whole = out.size // width
    table.take(data[:whole], axis=0, out=out[: whole * width].reshape(whole, width), mode="clip")
    if out.size % width:
        out[whole * width :] = table[data[whole], : out.size % width]
