"""Encoding by the servers: the merged gradient of a round, with its own error feedback (as in BytePS).

::

    p = m + r       m: what the round has merged; r starts at 0
    c = encode(p)
    v = decode(c)   the new value
    r = p − v       without feedback 0

Where that is no finite number, r is 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvd.compute.codecs.base import Codec
from kvd.compute.codecs.feedback import encode_keeping
from kvd.compute.quiet import quietly

Floats = NDArray[np.float32]


def encode_merged(
    codec: Codec, merged: Floats, residual: Floats | None, out: NDArray[np.uint8], value: NDArray[Any], nonce: int
) -> int:
    """Encode what was merged, and return the number of bytes. An error of the codec changes ``merged`` only.

    Args:
        merged: shape (n,); becomes what is left over.
        residual: what the round before has left over, shape (n,); only read.
        out: has room for ``codec.max_nbytes(n)`` bytes.
        value: receives what the bytes decode into, shape (n,), of the dtype of the key.
    """
    return quietly(_encode_merged, codec, merged, residual, out, value, nonce)


def _encode_merged(
    codec: Codec, merged: Floats, residual: Floats | None, out: NDArray[np.uint8], value: NDArray[Any], nonce: int
) -> int:
    if residual is not None:
        merged += residual
    sent = value if value.dtype == np.float32 else np.empty(value.size, np.float32)
    nbytes = encode_keeping(codec, merged, out, nonce, sent)
    if sent is not value:
        np.copyto(value, sent, casting="unsafe")
    return nbytes


def add_left_over(value: NDArray[Any], residual: Floats) -> None:
    """Add what was left over to a value that is not encoded. ``value`` is of the dtype of a key."""
    quietly(_add, value, residual)


def _add(value: NDArray[Any], residual: Floats) -> None:
    np.add(value, residual, out=value, casting="unsafe")
