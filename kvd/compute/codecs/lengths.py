"""Tile size of encoders, and the check of a tile's length by decoders."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvd.errors import ProtocolError

TILE = 1 << 15
"""Elements, so that what lies in between stays in the cache; a multiple of 8."""


def check_length(data: NDArray[np.uint8], nbytes: int, size: int) -> None:
    """Raise ProtocolError unless there are ``nbytes`` bytes for ``size`` elements."""
    if data.size != nbytes:
        raise ProtocolError(f"{size} elements are encoded in {nbytes} bytes, not in {data.size}")
