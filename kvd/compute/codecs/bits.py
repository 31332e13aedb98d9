"""Elements in one or two bits: MXNet's ``1bit`` and ``2bit``."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from kvd.compute.codecs.lengths import TILE, check_length
from kvd.compute.codecs.magnitudes import mean, mean_from
from kvd.compute.compiled import codec_loop

_NOWHERE = np.empty(0, np.float32)
_SMALLEST = np.finfo(np.float32).tiny


class TwoBitCodec:
    """Four elements per byte, the first in the upper bits: 11 is the threshold, 10 its negative, all else 0."""

    tile = TILE

    def __init__(self, threshold: float) -> None:
        self._threshold = np.float32(threshold)
        self._table = _signs_of_pairs() * self._threshold

    def max_nbytes(self, size: int) -> int:
        return -(-size // 4)

    def encode(self, values: NDArray[np.float32], out: NDArray[np.uint8], nonce: int) -> int:
        return _write_pairs(values, self._threshold, out)

    def encode_keeping(
        self, kept: NDArray[np.float32], out: NDArray[np.uint8], nonce: int, sent: NDArray[np.float32] | None
    ) -> int | None:
        loop = codec_loop("two_bit").ready(kept.size)
        if loop is None:
            return None
        loop(kept, out, self._threshold, self._threshold, _NOWHERE if sent is None else sent)
        return self.max_nbytes(kept.size)

    def check(self, data: NDArray[np.uint8], size: int) -> None:
        check_length(data, self.max_nbytes(size), size)

    def decode(self, data: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        look_up(self._table, data, out)


class ScaledTwoBitCodec:
    """Two-bit codec with a threshold from the magnitudes of the slice. The value of 11 comes first, as float32."""

    tile = 0

    def max_nbytes(self, size: int) -> int:
        return 4 + -(-size // 4)

    def encode(self, values: NDArray[np.float32], out: NDArray[np.uint8], nonce: int) -> int:
        threshold, _ = _write_scale(values, out)
        return 4 + _write_pairs(values, threshold, out[4:])

    def encode_keeping(
        self, kept: NDArray[np.float32], out: NDArray[np.uint8], nonce: int, sent: NDArray[np.float32] | None
    ) -> int | None:
        loop = codec_loop("two_bit").ready(kept.size)
        if loop is None:
            return None
        loop(kept, out[4:], *_write_scale(kept, out), _NOWHERE if sent is None else sent)
        return self.max_nbytes(kept.size)

    def check(self, data: NDArray[np.uint8], size: int) -> None:
        check_length(data, self.max_nbytes(size), size)

    def decode(self, data: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        look_up(_signs_of_pairs() * data[:4].view("<f4")[0], data[4:], out)


def _write_scale(values: NDArray[np.float32], out: NDArray[np.uint8]) -> tuple[np.float32, np.float32]:
    """Write the scale. Return the threshold from which elements are sent, and the scale."""
    threshold = np.maximum(np.float32(0.7) * mean(values), _SMALLEST)  # so 0 stays 0
    sent = out[:4].view("<f4")[0] = mean_from(values, threshold)
    return threshold, sent


def _write_pairs(values: NDArray[np.float32], threshold: np.float32, out: NDArray[np.uint8]) -> int:
    """Write two bits per element, and return the number of bytes."""
    for start in range(0, values.size, TILE):
        tile = values[start : start + TILE]
        lower, upper = tile >= threshold, tile <= -threshold
        upper |= lower
        pairs = _spread().take(np.packbits(upper)) << np.uint16(1)
        pairs |= _spread().take(np.packbits(lower))
        nbytes = -(-tile.size // 4)
        out[start // 4 : start // 4 + nbytes] = pairs.astype(">u2").view(np.uint8)[:nbytes]
    return -(-values.size // 4)


@cache
def _spread() -> NDArray[np.uint16]:
    """Return the eight bits of each byte, with a 0 ahead of each."""
    return bits_of_bytes().astype(np.uint16) @ (np.uint16(1) << np.arange(14, -2, -2, dtype=np.uint16))


@cache
def _signs_of_pairs() -> NDArray[np.float32]:
    """Return the values of the four pairs of bits of each byte: 1, −1 or 0."""
    upper, lower = bits_of_bytes()[:, 0::2], bits_of_bytes()[:, 1::2]
    signs = np.where(lower == 1, np.float32(1), np.float32(-1))
    return np.where(upper == 1, signs, np.float32(0))


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
    """Return the bits of each byte, from the uppermost on."""
    return np.unpackbits(np.arange(256, dtype=np.uint8)[:, np.newaxis], axis=1)


def look_up(table: NDArray[np.float32], data: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
    """Write the row of the table for each byte; the last one may stand for fewer elements."""
    width = table.shape[1]
    whole = out.size // width
    table.take(data[:whole], axis=0, out=out[: whole * width].reshape(whole, width), mode="clip")
    if out.size % width:
        out[whole * width :] = table[data[whole], : out.size % width]
