"""Interface of codecs, and the codec of each compressor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvd.compression import (
    BF16,
    FP8,
    FP16,
    Compressor,
    Dithering,
    Int8,
    OneBit,
    PowerSGD,
    RandomK,
    Signs,
    TopK,
    TwoBit,
)
from kvd.compute.codecs.bits import OneBitCodec, ScaledTwoBitCodec, TwoBitCodec
from kvd.compute.codecs.blocks import FP8Codec, Int8Codec
from kvd.compute.codecs.dithering import DitheringCodec
from kvd.compute.codecs.matrices import LowRankCodec
from kvd.compute.codecs.pairs import RandomKCodec, TopKCodec
from kvd.compute.codecs.rounded import RoundedCodec
from kvd.compute.codecs.signs import SignCodec
from kvd.compute.tensors import BFLOAT16

Floats: TypeAlias = NDArray[np.float32]
Bytes: TypeAlias = NDArray[np.uint8]


class Codec(Protocol):
    """Codec of slices of a value. It is stateless and shared by threads.

    Attributes:
        tile: so many elements, and whole multiples of them, are encoded apart from those behind them, whose bytes
            follow; 0: the bytes of a slice depend on all of it.
    """

    tile: int

    def max_nbytes(self, size: int) -> int:
        """Return the most bytes that ``size`` elements take."""

    def encode(self, values: Floats, out: Bytes, nonce: int) -> int:
        """Encode ``values``, which are not changed, into ``out``, which has room for ``max_nbytes`` of them.

        Args:
            nonce: a number that differs from one call to the next, for what is drawn at random.

        Returns:
            How many bytes were written.
        """

    def check(self, data: Bytes, size: int) -> None:
        """Raise ProtocolError unless ``data``, which a peer sent, decodes into ``size`` elements."""

    def decode(self, data: Bytes, out: Floats) -> None:
        """Decode what was checked."""


class KeepingCodec(Codec, Protocol):
    """Codec that encodes and updates the residual in one pass."""

    def encode_keeping(self, kept: Floats, out: Bytes, nonce: int, sent: Floats | None) -> int | None:
        """Encode and update the residual in one pass; return None if that is impossible now.

        ``kept`` becomes the residual, 0 where it is not finite, and ``sent`` the decoded values.
        """


@runtime_checkable
class RememberingCodec(Codec, Protocol):
    """Codec of one slice with a memory from push to push."""

    @property
    def memory_size(self) -> int:
        """Number of float32 in the memory."""

    def remembering(self, memory: Floats) -> Codec:
        """Return the codec with its memory, zeros at first. ``encode`` reads and changes it."""


@runtime_checkable
class ShapedCodec(Codec, Protocol):
    """A codec whose bytes depend on the shape of the value, and on the pushes before. It decodes what its codecs of
    slices have encoded."""

    def of_slice(self, shape: Sequence[int], start: int, size: int) -> RememberingCodec | None:
        """Return the codec for ``size`` elements from ``start`` on of such a value; None if they are sent plain."""


def _dithering(compressor: Dithering) -> Codec:
    natural, by_norm = compressor.partition == "natural", compressor.normalize == "l2"
    return DitheringCodec(compressor.k, natural=natural, by_norm=by_norm, seed=compressor.seed)


def _two_bit(compressor: TwoBit) -> Codec:
    return ScaledTwoBitCodec() if compressor.threshold is None else TwoBitCodec(compressor.threshold)


# Each maker gets an instance of its class.
_CODECS: dict[type[Compressor], Callable[[Any], Codec]] = {
    FP16: lambda _: RoundedCodec(np.dtype("<f2")),
    BF16: lambda _: RoundedCodec(BFLOAT16),
    TwoBit: _two_bit,
    OneBit: lambda compressor: OneBitCodec(compressor.threshold),
    FP8: lambda compressor: FP8Codec(compressor.block),
    Int8: lambda compressor: Int8Codec(compressor.block),
    Signs: lambda compressor: SignCodec(scaling=compressor.scaling),
    TopK: lambda compressor: TopKCodec(compressor.k),
    RandomK: lambda compressor: RandomKCodec(compressor.k, compressor.seed),
    Dithering: _dithering,
    PowerSGD: lambda compressor: LowRankCodec(compressor.rank, compressor.seed),
}


def keeping(codec: Codec) -> KeepingCodec | None:
    """Return the codec, if it is a KeepingCodec: to ask for each slice whether it follows a protocol takes long."""
    kept: Any = codec
    return kept if hasattr(codec, "encode_keeping") else None


@lru_cache(64)
def codec_of(compressor: Compressor) -> Codec:
    """Return the codec of a compressor: a built-in one, or what its ``codec()`` returns."""
    make = _CODECS.get(type(compressor))
    if make is not None:
        return make(compressor)
    own: Any = compressor
    codec: Codec = own.codec()
    return codec
