"""Memory for intermediate results: one set of tiles per thread, kept, so that a tile allocates nothing."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

_local = threading.local()


@dataclass(frozen=True, slots=True)
class Scratch:
    """Three arrays of one length and dtype whose content nobody relies on between two tiles.

    Attributes:
        gradient: the merged gradient of the tile while an optimizer updates it.
        first, second: free for whoever calculates.
    """

    gradient: np.ndarray[Any, Any]
    first: np.ndarray[Any, Any]
    second: np.ndarray[Any, Any]

    @staticmethod
    def of_thread(dtype: np.dtype[Any], size: int) -> Scratch:
        """Return this thread's arrays of ``dtype``, cut to ``size`` elements; each call may return the same memory."""
        kept: dict[np.dtype[Any], Scratch] = _local.__dict__.setdefault("kept", {})
        scratch = kept.get(dtype)
        if scratch is None or scratch.gradient.size < size:
            scratch = Scratch(*(np.empty(size, dtype) for _ in range(3)))
            kept[dtype] = scratch
        return scratch.cut(size)

    def cut(self, size: int) -> Scratch:
        """Return the first ``size`` elements of each array, as views."""
        if self.gradient.size == size:
            return self
        return Scratch(self.gradient[:size], self.first[:size], self.second[:size])
