"""Error feedback: what compression leaves of a value is added to the next one.

::

    p = x + e       e starts at 0
    c = encode(p)
    e = p − decode(c)

Where that is no finite number, e is 0: a NaN or an infinity is sent as far as the compressor can say it, once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvd.compute.quiet import quietly
from kvd.compute.scratch import Scratch

if TYPE_CHECKING:
    from kvd.compute.codecs.base import Codec

_FLOAT32 = np.dtype(np.float32)


def encode(codec: Codec, values: NDArray[np.float32], out: NDArray[np.uint8], nonce: int) -> int:
    """Encode ``values`` into ``out``, and return the number of bytes."""
    return quietly(codec.encode, values, out, nonce)


def encode_fed_back(
    codec: Codec, values: NDArray[np.float32], residual: NDArray[np.float32], out: NDArray[np.uint8], nonce: int
) -> int:
    """The same for ``values + residual``; ``residual`` becomes what was left over."""
    return quietly(_encode_fed_back, codec, values, residual, out, nonce)


def _encode_fed_back(
    codec: Codec, values: NDArray[np.float32], residual: NDArray[np.float32], out: NDArray[np.uint8], nonce: int
) -> int:
    residual += values
    nbytes = codec.encode(residual, out, nonce)
    sent = Scratch.of_thread(_FLOAT32, residual.size).first
    codec.decode(out[:nbytes], sent)
    residual -= sent
    drop_what_is_not_finite(residual)
    return nbytes


def drop_what_is_not_finite(kept: NDArray[np.float32]) -> None:
    """Set what is not finite to 0."""
    if not np.isfinite(np.add.reduce(kept)):  # in one pass, and wrong only in that it may look twice
        kept[~np.isfinite(kept)] = 0
