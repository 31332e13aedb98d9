"""The compressors: their parameters, their formulas, and where these come from.

In every formula ``x`` is an element of what is compressed, in float32: the gradient, or with error feedback the
gradient plus what earlier pushes have left over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvd.optimizer.fields import normalise, require


class Compressor:
    """The base of all compressors; not one itself.

    To make your own, derive a frozen dataclass with fields of the types ``float``, ``int``, ``bool`` or ``str`` (or
    None), each with a default, and define ``codec()``: it returns the arithmetic, an object as
    ``kvd.compute.codecs.Codec`` describes it. Install it on workers and servers as an entry point of the group
    ``kvd.compressors``, whose name is the ``"type"`` that programs give. Further rules go into ``check``.
    """

    __slots__ = ()

    feeds_back: ClassVar[bool] = True
    """Whether a program that says nothing about ``ef`` gets error feedback."""

    def __post_init__(self) -> None:
        normalise(self)
        self.check()

    def check(self) -> None:
        """Raise ConfigError if a field of this compressor is out of its range."""

    def of_merged(self, count: int) -> Compressor | None:
        """Return the compressor for the sum of ``count`` pushed values, or None to send it plain.

        ``count`` is 1 if the values are averaged.

        Raises:
            ConfigError: a field of that compressor is out of its range.
        """
        return self


@dataclass(frozen=True, slots=True)
class FP16(Compressor):
    """IEEE half precision, rounded to nearest: 2 bytes per element. From 65520 on, x becomes infinite."""

    feeds_back: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class BF16(Compressor):
    """bfloat16, rounded to nearest: 2 bytes per element, with the range of float32."""

    feeds_back: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class TwoBit(Compressor):
    """MXNet's ``2bit``: 2 bits per element.

    ::

        x ≥ threshold:   threshold, bits 11
        x ≤ −threshold:  −threshold, bits 10
        else             0, bits 00

    Four elements make a byte, the first in its upper bits.

    Without a threshold, that of each slice follows from its elements, and what is sent is nearest to them (Li, Zhang
    and Liu, "Ternary Weight Networks", 2016)::

        threshold = 0.7 · mean of |x| over the slice
        sent:       mean of those |x| that reach it, instead of the threshold

    Args:
        threshold: > 0, in MXNet 0.5 if it is not given; None: by the elements of each slice.

    Raises:
        ConfigError: a field is out of its range; ``setting`` names it.
    """

    threshold: float | None = None

    def check(self) -> None:
        """Raise ConfigError if a field of this compressor is out of its range."""
        if self.threshold is not None:
            require("threshold", 2.0**-126 <= self.threshold < 2.0**127, "> 0 in float32", self.threshold)

    def of_merged(self, count: int) -> TwoBit:
        """Scale the threshold with the largest possible sum, which bounds the residual in every round."""
        return self if self.threshold is None else TwoBit(self.threshold * count)


@dataclass(frozen=True, slots=True)
class OneBit(Compressor):
    """MXNet's ``1bit``: 1 bit per element.

    ::

        x > threshold:  1, bit 1
        else            −1, bit 0

    Eight elements make a byte, the first in its uppermost bit.

    Args:
        threshold: any finite number.

    Raises:
        ConfigError: a field is out of its range; ``setting`` names it.
    """

    threshold: float = 0.5

    def check(self) -> None:
        """Raise ConfigError if a field of this compressor is out of its range."""
        require("threshold", abs(self.threshold) < 2.0**127, "a number of float32", self.threshold)

    def of_merged(self, count: int) -> OneBit | None:
        """Compress a mean only: 1 and −1 cannot express a sum, and residuals would grow from round to round."""
        return self if count == 1 else None


@dataclass(frozen=True, slots=True)
class Int8(Compressor):
    """One byte per element, scaled block by block.

    ::

        scale = largest |x| of the block / 127
        sent:   scale · round(x / scale)

    Args:
        block: elements that share a scale, 8 to 65536.

    Raises:
        ConfigError: a field is out of its range; ``setting`` names it.
    """

    feeds_back: ClassVar[bool] = False

    block: int = 256

    def check(self) -> None:
        """Raise ConfigError if a field of this compressor is out of its range."""
        _check_block(self.block)


@dataclass(frozen=True, slots=True)
class FP8(Compressor):
    """One byte per element: an e4m3 number (Micikevicius et al., "FP8 Formats for Deep Learning", 2022), scaled block
    by block.

    ::

        scale = largest |x| of the block / 448
        sent:   scale · e4m3(x / scale)             rounded to nearest

    Args:
        block: elements that share a scale, 8 to 65536.

    Raises:
        ConfigError: a field is out of its range; ``setting`` names it.
    """

    feeds_back: ClassVar[bool] = False

    block: int = 256

    def check(self) -> None:
        """Raise ConfigError if a field of this compressor is out of its range."""
        _check_block(self.block)


@dataclass(frozen=True, slots=True)
class Signs(Compressor):
    """BytePS's ``onebit``: 1 bit per element, and one magnitude per slice.

    ::

        scale = mean of |x| over the slice          without scaling: 1
        x < 0:  −scale, bit 1
        else    scale, bit 0

    Args:
        scaling: send the mean magnitude.

    Raises:
        ConfigError: a field is out of its range; ``setting`` names it.
    """

    scaling: bool = True

    def of_merged(self, count: int) -> Signs | None:
        """Without scaling, compress the mean only: 1 and −1 cannot express a sum."""
        return self if self.scaling or count == 1 else None


@dataclass(frozen=True, slots=True)
class TopK(Compressor):
    """BytePS's ``topk``: the k elements of each slice with the largest magnitude, with their indices. All others are 0.

    Args:
        k: how many, ≥ 1; or which part of them, > 0 and < 1, and at least one.

    Raises:
        ConfigError: a field is out of its range; ``setting`` names it.
    """

    k: float = 0.01

    def check(self) -> None:
        """Raise ConfigError if a field of this compressor is out of its range."""
        _check_k(self.k)


@dataclass(frozen=True, slots=True)
class RandomK(Compressor):
    """BytePS's ``randomk``: k elements of each slice that are drawn at random, with replacement. All others are 0.

    They are not scaled up, so without error feedback the mean is k / n of what it should be; with it, what is left over
    of an element waits for 1 / k pushes on average, so a part smaller than the default wants a smaller learning rate.

    Args:
        k: how many, ≥ 1; or which part of them, > 0 and < 1, and at least one.
        seed: ≥ 0; the same seed draws the same elements in every run.

    Raises:
        ConfigError: a field is out of its range; ``setting`` names it.
    """

    k: float = 0.25
    seed: int = 0

    def check(self) -> None:
        """Raise ConfigError if a field of this compressor is out of its range."""
        _check_k(self.k)
        require("seed", self.seed >= 0, "≥ 0", self.seed)


@dataclass(frozen=True, slots=True)
class Dithering(Compressor):
    """BytePS's ``dithering``: magnitudes rounded to one of k + 1 levels, at random, so that the mean is x.

    ::

        scale  = largest |x| of the slice           normalize = "l2": the Euclidean norm of the slice
        levels = 0, 1/k, 2/k, …, 1                  partition = "natural": 0, 2^(1−k), …, 1/4, 1/2, 1

    |x| / scale becomes the level above it with the probability ``(|x|/scale − below) / (above − below)``, else the one
    below. Elements have 2, 4 or 8 bits (k up to 1, 7, 127), where BytePS has codes of variable length.

    Args:
        k: 1 to 127; with "natural", to 31.
        partition: "linear" or "natural".
        normalize: "max" or "l2".
        seed: ≥ 0; the same seed rounds in the same way in every run.

    Raises:
        ConfigError: a field is out of its range; ``setting`` names it.
    """

    feeds_back: ClassVar[bool] = False

    k: int = 7
    partition: str = "linear"
    normalize: str = "max"
    seed: int = 0

    def check(self) -> None:
        """Raise ConfigError if a field of this compressor is out of its range."""
        require("partition", self.partition in ("linear", "natural"), '"linear" or "natural"', self.partition)
        require("normalize", self.normalize in ("max", "l2"), '"max" or "l2"', self.normalize)
        most = 127 if self.partition == "linear" else 31
        require("k", 1 <= self.k <= most, f"from 1 to {most}", self.k)
        require("seed", self.seed >= 0, "≥ 0", self.seed)


@dataclass(frozen=True, slots=True)
class PowerSGD(Compressor):
    """PowerSGD (Vogels, Karimireddy and Jaggi, 2019): matrices as products of two thin ones.

    ::

        M = the slice, as rows of the value's matrix: its first dimension by all others
        P = M · Q, its columns made orthonormal     Q: of the last push of the slice, at first drawn at random
        Q = Mᵀ · P
        sent: P · Qᵀ

    Each worker sends its own P and Q, and the servers add the products. Values of one dimension are sent plain.

    Args:
        rank: columns of P and Q, 1 to 1024.
        seed: ≥ 0; of the first Q.

    Raises:
        ConfigError: a field is out of its range; ``setting`` names it.
    """

    rank: int = 4
    seed: int = 0

    def check(self) -> None:
        """Raise ConfigError if a field of this compressor is out of its range."""
        require("rank", 1 <= self.rank <= 1024, "from 1 to 1024", self.rank)
        require("seed", self.seed >= 0, "≥ 0", self.seed)

    def of_merged(self, count: int) -> None:
        """Send sums plain: a server has slices of values without their shapes."""
        return


def _check_block(block: int) -> None:
    require("block", 8 <= block <= 1 << 16, "from 8 to 65536", block)


def _check_k(k: float) -> None:
    require("k", 0 < k < 2**32 and (k < 1 or k.is_integer()), "a whole number ≥ 1, or a part > 0 and < 1", k)
