"""Elements in a smaller floating dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvd.compute.codecs.lengths import TILE, check_length


class RoundedCodec:
    """Each element rounded to the nearest number of ``dtype``."""

    tile = TILE

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype

    def max_nbytes(self, size: int) -> int:
        return size * self._dtype.itemsize

    def encode(self, values: NDArray[np.float32], out: NDArray[np.uint8], nonce: int) -> int:
        nbytes = self.max_nbytes(values.size)
        np.copyto(out[:nbytes].view(self._dtype), values, casting="unsafe")
        return nbytes

    def check(self, data: NDArray[np.uint8], size: int) -> None:
        check_length(data, self.max_nbytes(size), size)

    def decode(self, data: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        np.copyto(out, data.view(self._dtype))
