"""Gradient compression as pure data: which compressor, with which parameters, for which keys.

A compressor is a frozen dataclass. No code crosses the wire: a push names the compressor with its parameters, and a
server that gets it looks up the name and decodes (``kvd.compute.codecs``). A program names them in a dict::

    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})

A compressor of your own is a dataclass derived from :class:`Compressor` that is installed on workers and servers as an
entry point in the group ``kvd.compressors``; see :class:`Compressor` for what it has to define.
"""

from kvd.compression.options import DEFAULT_MIN_BYTES, Compression, parse
from kvd.compression.registry import ENTRY_POINT_GROUP, known_compressors, name_of
from kvd.compression.rules import (
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
from kvd.compression.wire import from_wire, to_wire

__all__ = [
    "Compressor",
    "FP16",
    "BF16",
    "TwoBit",
    "OneBit",
    "FP8",
    "Int8",
    "Signs",
    "TopK",
    "RandomK",
    "Dithering",
    "PowerSGD",
    "Compression",
    "DEFAULT_MIN_BYTES",
    "parse",
    "known_compressors",
    "name_of",
    "ENTRY_POINT_GROUP",
    "to_wire",
    "from_wire",
]
