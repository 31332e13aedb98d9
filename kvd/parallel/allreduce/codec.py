"""The codecs of `AllReduceParameter`: float32 vectors as the bytes that travel, and back.

``"fp16"`` is BigDL's name, though it is not IEEE half precision: it keeps the upper 16 bits of a
float32 (sign, 8 bits of exponent, 7 of the mantissa: a bfloat16 rounded towards zero) and writes them most significant
byte first. So 1.111111 becomes 1.109375, at most 2⁻⁷ of a number is lost, and the range stays that of float32.
``"none"`` is float32 itself, least significant byte first.

One difference to BigDL: there a NaN whose payload is only in the lower 16 bits loses it and becomes an infinity. Here
every NaN stays a NaN.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvd.errors import ConfigError, ShapeMismatch

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_UPPER = 1 if sys.byteorder == "little" else 0  # which of the two 16-bit halves of a float32 in memory
_QUIET_NAN = np.uint16(0x0040)  # the highest bit of the mantissa


class Codec(Protocol):
    """How a vector of n float32 travels, as n · `itemsize` bytes."""

    itemsize: int

    def compress(self, values: Floats, out: Bytes) -> None:
        """Write ``values``, shape (n,), into ``out``, shape (n · itemsize,)."""

    def decompress(self, data: Bytes, out: Floats) -> None:
        """Write the values of ``data``, shape (n · itemsize,), into ``out``, shape (n,)."""

    def round(self, values: Floats) -> None:
        """Replace ``values`` by what `compress` and `decompress` make of them."""


class Truncated:
    """``"fp16"``."""

    itemsize = 2

    def compress(self, values: Floats, out: Bytes) -> None:
        _check_lengths(values, out, self.itemsize)
        halves = out.view(">u2")
        halves[...] = _upper_halves(values)
        lost = _lost_nans(values)
        if lost is not None:
            halves[lost] |= _QUIET_NAN

    def decompress(self, data: Bytes, out: Floats) -> None:
        _check_lengths(out, data, self.itemsize)
        halves = out.view(np.uint16)
        halves[_UPPER::2] = data.view(">u2")
        halves[1 - _UPPER :: 2] = 0

    def round(self, values: Floats) -> None:
        lost = _lost_nans(values)
        if lost is not None:
            _upper_halves(values)[lost] |= _QUIET_NAN
        values.view(np.uint16)[1 - _UPPER :: 2] = 0


class Plain:
    """``"none"``."""

    itemsize = 4

    def compress(self, values: Floats, out: Bytes) -> None:
        _check_lengths(values, out, self.itemsize)
        out.view("<f4")[...] = values

    def decompress(self, data: Bytes, out: Floats) -> None:
        _check_lengths(out, data, self.itemsize)
        out[...] = data.view("<f4")

    def round(self, values: Floats) -> None:
        """Nothing is lost."""


_CODECS: dict[str, Codec] = {"fp16": Truncated(), "none": Plain()}


def codec_named(name: str) -> Codec:
    """The codec ``"fp16"`` or ``"none"``; ConfigError for any other name."""
    codec = _CODECS.get(name)
    if codec is None:
        known = " or ".join(map(repr, _CODECS))
        raise ConfigError(f"compress={name!r:.40}: it must be {known}", setting="compress")
    return codec


def fold(codec: Codec, blocks: Sequence[Bytes], out: Floats, *, truncating: bool) -> None:
    """Add up compressed vectors, ``((b0 + b1) + b2) + …``, in float32.

    Arguments:
        blocks: at least one, each of shape (n · itemsize,); only read.
        out: shape (n,); receives the sum.
        truncating: round with the codec after every addition, as BigDL does. With ``"fp16"`` small terms then vanish
            beside a large sum: 1000 ones give 256, where 256 + 1 is cut back to 256 for ever.
    """
    codec.decompress(blocks[0], out)
    term = np.empty_like(out)
    with np.errstate(over="ignore", invalid="ignore"):
        for block in blocks[1:]:
            codec.decompress(block, term)
            np.add(out, term, out=out)
            if truncating:
                codec.round(out)


def _upper_halves(values: Floats) -> npt.NDArray[np.uint16]:
    """The upper 16 bits of each value: a view, shape (n,)."""
    return values.view(np.uint16)[_UPPER::2]


def _lost_nans(values: Floats) -> npt.NDArray[np.bool_] | None:
    """The NaNs whose upper 16 bits are those of an infinity, as a mask; None if there are none."""
    nans = np.isnan(values)
    if not nans.any():
        return None
    lost: npt.NDArray[np.bool_] = nans & ((_upper_halves(values) & 0x007F) == 0)
    return lost


def _check_lengths(values: npt.NDArray[Any], data: npt.NDArray[Any], itemsize: int) -> None:
    if values.size * itemsize != data.size:
        raise ShapeMismatch(f"{values.size} values take {values.size * itemsize} bytes, not {data.size}")
