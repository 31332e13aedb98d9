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

    Args:
        threshold: > 0.

    Raises:
        ConfigError: a field is out of its range; ``setting`` names it.
    """

    threshold: float = 0.5

    def check(self) -> None:
        """Raise ConfigError if a field of this compressor is out of its range."""
        require("threshold", 2.0**-126 <= self.threshold < 2.0**127, "> 0 in float32", self.threshold)


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
