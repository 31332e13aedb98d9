"""Signs, and one magnitude for all: BytePS's ``onebit``."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvd.compute.codecs.bits import bits_of_bytes, look_up
from kvd.compute.codecs.lengths import check_length
from kvd.compute.codecs.magnitudes import mean


class SignCodec:
    """A bit for each element, 1 for those below 0, in words of 32 whose first element is the uppermost bit; then the
    magnitude of all, as float32."""

    tile = 0

    def __init__(self, *, scaling: bool) -> None:
        self._scaling = scaling
        self._signs = np.where(bits_of_bytes() == 1, np.float32(-1), np.float32(1))

    def max_nbytes(self, size: int) -> int:
        return 4 * -(-size // 32) + 4

    def encode(self, values: NDArray[np.float32], out: NDArray[np.uint8], nonce: int) -> int:
        nbytes = self.max_nbytes(values.size)
        packed = np.zeros(nbytes - 4, np.uint8)
        packed[: -(-values.size // 8)] = np.packbits(values < 0)
        out[: nbytes - 4].view("<u4")[:] = packed.view(">u4")
        out[nbytes - 4 : nbytes].view("<f4")[0] = mean(values) if self._scaling else 1
        return nbytes

    def check(self, data: NDArray[np.uint8], size: int) -> None:
        check_length(data, self.max_nbytes(size), size)

    def decode(self, data: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        packed = data[:-4].view("<u4").astype(">u4").view(np.uint8)
        look_up(self._signs * data[-4:].view("<f4")[0], packed, out)
