"""Memory for intermediate results: one set of tiles per thread, kept, so that a tile allocates nothing."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

_local = threading.local()

_MANY = 64  # sizes whose views are kept: keys have few, and odd ones shall not pile up


@dataclass(frozen=True, slots=True)
class Scratch:
    """Three arrays of one length and dtype. Their content is undefined between two tiles.

    Attributes:
        gradient: the merged gradient of the tile while an optimizer updates it.
        first, second: free for any computation.
    """

    gradient: np.ndarray[Any, Any]
    first: np.ndarray[Any, Any]
    second: np.ndarray[Any, Any]

    @staticmethod
    def of_thread(dtype: np.dtype[Any], size: int) -> Scratch:
        """Return this thread's arrays of ``dtype``, cut to ``size`` elements; each call may return the same memory."""
        kept: dict[tuple[np.dtype[Any], int], Scratch] | None = getattr(_local, "kept", None)
        if kept is None:
            kept = _local.kept = {}
        return kept.get((dtype, size)) or _make(kept, dtype, size)

    def cut(self, size: int) -> Scratch:
        """Return the first ``size`` elements of each array, as views."""
        if self.gradient.size == size:
            return self
        return Scratch(self.gradient[:size], self.first[:size], self.second[:size])


def _make(kept: dict[tuple[np.dtype[Any], int], Scratch], dtype: np.dtype[Any], size: int) -> Scratch:
    """Return arrays of a size that the thread asks for the first time: cut from its largest ones, or new ones."""
    sizes = [known for kind, known in kept if kind == dtype]
    largest = max(sizes, default=-1)
    if largest >= size:
        scratch = kept[dtype, largest].cut(size)
        dropped = [known for known in sizes if known != largest] if len(sizes) >= _MANY else []
    else:
        scratch = Scratch(*(np.empty(size, dtype) for _ in range(3)))
        dropped = sizes
    for known in dropped:
        del kept[dtype, known]
    kept[dtype, size] = scratch
    return scratch
