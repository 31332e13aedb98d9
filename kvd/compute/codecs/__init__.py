"""The arithmetic of compressors: values to bytes and back. ``kvd.compression`` has their parameters and formulas.

Everything here is NumPy in float32, vectorised, or a compiled loop with the same bits, which do not depend on the
machine. Numbers of several bytes are little-endian.
"""

from kvd.compute.codecs.base import Codec, KeepingCodec, RememberingCodec, ShapedCodec, codec_of
from kvd.compute.codecs.feedback import encode, encode_fed_back
from kvd.compute.codecs.merged import add_left_over, encode_merged
from kvd.compute.codecs.momentum import with_momentum

__all__ = [
    "Codec",
    "KeepingCodec",
    "RememberingCodec",
    "ShapedCodec",
    "codec_of",
    "encode",
    "encode_fed_back",
    "encode_merged",
    "add_left_over",
    "with_momentum",
]
