"""Some elements, each with its index: ``topk`` and ``randomk``. All others are 0.

A pair is the index as uint32 and the value as float32; the pairs are in the order of their indices.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from kvd.compute.codecs.draws import draws
from kvd.errors import ProtocolError

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Indices = NDArray[np.intp]

_PAIR = np.dtype([("index", "<u4"), ("value", "<f4")])
_SAMPLE = 4096  # elements that tell about where the k-th largest lies


class PairsCodec(ABC):
    """A subclass chooses the elements.

    Args:
        k: how many; below 1, which part of them.
    """

    tile = 0

    def __init__(self, k: float) -> None:
        self._k = k

    @abstractmethod
    def _chosen(self, values: Floats, k: int, nonce: int) -> Indices:
        """Return at most k indices, ascending."""

    def max_nbytes(self, size: int) -> int:
        return _PAIR.itemsize * self._count(size)

    def encode(self, values: Floats, out: Bytes, nonce: int) -> int:
        k = self._count(values.size)
        if k == 0:
            return 0
        indices = self._chosen(values, k, nonce)
        nbytes = _PAIR.itemsize * indices.size
        pairs = out[:nbytes].view(_PAIR)
        pairs["index"] = indices
        pairs["value"] = values[indices]
        return nbytes

    def check(self, data: Bytes, size: int) -> None:
        if data.size % _PAIR.itemsize or data.size > self.max_nbytes(size):
            text = f"of {size} elements at most {self._count(size)} are sent, with {_PAIR.itemsize} bytes each"
            raise ProtocolError(f"{text}, not {data.size} bytes")
        indices = data.view(_PAIR)["index"]
        if indices.size and (indices[-1] >= size or not (indices[1:] > indices[:-1]).all()):
            raise ProtocolError(f"the indices of elements grow and stay below {size}")

    def decode(self, data: Bytes, out: Floats) -> None:
        pairs = data.view(_PAIR)
        out.fill(0)
        out[pairs["index"]] = pairs["value"]

    def _count(self, size: int) -> int:
        return min(max(int(self._k * size), 1) if self._k < 1 else int(self._k), size)


class TopKCodec(PairsCodec):
    """The elements of the largest magnitude, NaN before all; of equal ones those that come first."""

    def _chosen(self, values: Floats, k: int, nonce: int) -> Indices:
        magnitudes = values.view(np.uint32) & np.uint32(0x7FFFFFFF)  # in the order of the magnitudes, and NaN on top
        candidates = self._candidates(magnitudes, k)
        if candidates is not None and candidates.size < k:
            return _with_zeros(magnitudes, k - candidates.size)
        found = magnitudes if candidates is None else magnitudes.take(candidates)
        least = found.min()
        above = found[found > least]  # often many are the least: with them, a partition would take long
        if above.size >= k:
            least = np.partition(above, above.size - k)[above.size - k]
        kept = found >= least
        surplus = np.count_nonzero(kept) - k
        if surplus:
            kept[np.flatnonzero(found == least)[-surplus:]] = False
        places = np.flatnonzero(kept)
        return places if candidates is None else candidates.take(places)

    @staticmethod
    def _candidates(magnitudes: NDArray[np.uint32], k: int) -> Indices | None:
        """Indices, growing, among which are those of the k largest; None: all. A sample says which ones need not be
        looked at: those below the element of the sample that lies four standard deviations behind the k-th largest. If
        that one is 0, as in what servers merge of such pushes, they are those that are not 0, perhaps fewer than k."""
        step = magnitudes.size // _SAMPLE | 1  # odd: values often repeat a pattern whose length is even
        if step == 1:
            return None
        sample = np.sort(magnitudes[::step])
        expected = k / step
        kept = int(expected + 4 * math.sqrt(expected)) + 16
        if kept >= sample.size:
            return None
        least = sample[-kept]
        candidates = np.flatnonzero(magnitudes >= max(least, 1))
        return candidates if candidates.size >= k or least == 0 else None


def _with_zeros(magnitudes: NDArray[np.uint32], count: int) -> Indices:
    """Return the indices of all that are not 0, and of the first that are."""
    chosen = magnitudes != 0
    chosen[np.flatnonzero(~chosen)[:count]] = True
    return np.flatnonzero(chosen)


class RandomKCodec(PairsCodec):
    """Elements drawn at random, with replacement: one that is drawn twice is sent once. They are not scaled up."""

    def __init__(self, k: float, seed: int) -> None:
        super().__init__(k)
        self._seed = seed

    def _chosen(self, values: Floats, k: int, nonce: int) -> Indices:
        drawn = draws(self._seed, nonce, 0, k).astype(np.uint64)
        drawn *= np.uint64(values.size)
        drawn >>= np.uint64(32)
        marks = np.zeros(values.size, np.bool_)
        marks[drawn] = True
        return np.flatnonzero(marks)
