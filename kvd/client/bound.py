"""Arrays that a program keeps for a key: the gradient lies where the servers of this host read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

import numpy as np

from kvd.compute.tensors import contiguous_bytes, named_dtype
from kvd.protocol.specs import KeySpec, padded

Array: TypeAlias = np.ndarray[Any, Any]


class Bound(NamedTuple):
    """The arrays of one key, of its shape and dtype.

    Attributes:
        gradient: what a push of it sends without a copy.
        weight: what a program pulls into.
        gradient_bytes: the memory of the gradient, uint8.
    """

    gradient: Array
    weight: Array
    gradient_bytes: Array

    @classmethod
    def of(cls, spec: KeySpec, memory: Array) -> Bound:
        """Arrays for a key; the gradient, zeros at first, in this memory of as many bytes."""
        memory.fill(0)
        dtype = named_dtype(spec.dtype)
        return cls(memory.view(dtype).reshape(spec.shape), np.empty(spec.shape, dtype), memory)

    def owns(self, data: Array) -> bool:
        """Whether these bytes are the memory of the gradient, by whatever view they were given."""
        own = self.gradient_bytes
        return data.nbytes == own.nbytes and data.ctypes.data == own.ctypes.data

    def digest(self) -> int:
        """A checksum of the gradient, to tell whether it was written to."""
        return crc32(contiguous_bytes(self.gradient).tobytes())


def bound_together(specs: Mapping[str, KeySpec], memory: Callable[[int], Array]) -> dict[str, Bound]:
    """Arrays for several keys, their gradients side by side as in a message: what is pushed together then goes out in
    one stretch.

    Args:
        memory: gives so many bytes, as uint8.
    """
    starts, end = [], 0
    for spec in specs.values():
        starts.append(padded(end))
        end = starts[-1] + spec.nbytes
    whole = memory(end)
    return {
        name: Bound.of(spec, whole[start : start + spec.nbytes])
        for (name, spec), start in zip(specs.items(), starts, strict=True)
    }
