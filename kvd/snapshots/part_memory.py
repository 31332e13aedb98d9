"""Memory for the parts of a snapshot that is read: used again and again, since new memory costs as much as reading."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]


class PartMemory:
    """Memory of parts, reused once no part of it is in use.

    One thread takes memory, another one may give it back.

    Args:
        nbytes: of the largest part.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._free: list[Array] = []
        self._lent: dict[int, list[Array]] = {}  # a part that is read twice has two

    def take(self, part: int, nbytes: int) -> Array:
        """Return memory of so many bytes for a part."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = np.empty(self._nbytes, np.uint8)  # the system gives pages where they are first written
        self._lent.setdefault(part, []).append(memory)
        return memory[:nbytes]

    def give_back(self, parts: Iterable[int]) -> None:
        """Release the memory of these parts."""
        for part in parts:
            self._free.extend(self._lent.pop(part, ()))
