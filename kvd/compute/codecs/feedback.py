"""Error feedback: what compression leaves of a value is added to the next one.

::

    p = x + e       e starts at 0
    c = encode(p)
    e = p − decode(c)

Where that is no finite number, e is 0: a NaN or an infinity is sent as far as the compressor can say it, once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvd.compute.codecs.base import Codec, keeping
from kvd.compute.quiet import quietly
from kvd.compute.scratch import Scratch

_FLOAT32 = np.dtype(np.float32)


def encode(codec: Codec, values: NDArray[np.float32], out: NDArray[np.uint8], nonce: int) -> int:
    """Encode ``values`` into ``out``, and return the number of bytes."""
    return quietly(codec.encode, values, out, nonce)


def encode_fed_back(
    codec: Codec, values: NDArray[np.float32], residual: NDArray[np.float32], out: NDArray[np.uint8], nonce: int
) -> int:
    """Encode ``values + residual``; ``residual`` becomes the new residual."""
    return quietly(_encode_fed_back, codec, values, residual, out, nonce)


def _encode_fed_back(
    codec: Codec, values: NDArray[np.float32], residual: NDArray[np.float32], out: NDArray[np.uint8], nonce: int
) -> int:
    """Encode tile by tile if the codec allows it: each tile stays in the cache."""
    tile = codec.tile or max(values.size, 1)
    end = 0
    for start in range(0, values.size or 1, tile):
        kept = residual[start : start + tile]
        kept += values[start : start + tile]
        end += encode_keeping(codec, kept, out[end:], nonce)
    return end


def encode_keeping(
    codec: Codec, kept: NDArray[np.float32], out: NDArray[np.uint8], nonce: int, sent: NDArray[np.float32] | None = None
) -> int:
    """Encode ``kept``, which becomes what was left over, and return the number of bytes.

    Args:
        sent: shape (n,): receives what the bytes decode into; None: nobody wants it.
    """
    at_once = keeping(codec)
    nbytes = None if at_once is None else at_once.encode_keeping(kept, out, nonce, sent)
    if nbytes is not None:
        return nbytes
    nbytes = codec.encode(kept, out, nonce)
    if sent is None:
        sent = Scratch.of_thread(_FLOAT32, kept.size).first
    codec.decode(out[:nbytes], sent)
    kept -= sent
    drop_what_is_not_finite(kept)
    return nbytes


def drop_what_is_not_finite(kept: NDArray[np.float32]) -> None:
    """Set what is not finite to 0."""
    if not np.isfinite(np.add.reduce(kept)):  # in one pass, and wrong only in that it may look twice
        kept[~np.isfinite(kept)] = 0
