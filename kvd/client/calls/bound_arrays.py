"""Arrays that a program keeps for a key: the gradient lies where the servers of this host read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

import numpy as np

from kvd.client.calls.promise import Promise
from kvd.client.calls.values import Source
from kvd.compute.tensors import named_dtype
from kvd.errors import NotAllowed
from kvd.protocol.specs import KeySpec, padded

Array: TypeAlias = np.ndarray[Any, Any]


class Bound(NamedTuple):
    """The arrays of one key, of its shape and dtype.

    Attributes:
        gradient: what a push of it sends without a copy.
        weight: what a program pulls into.
        source: the gradient as it is sent: its bytes, and the spec of the key.
        address: where the bytes are.
    """

    gradient: Array
    weight: Array
    source: Source
    address: int

    @classmethod
    def of(cls, spec: KeySpec, memory: Array) -> Bound:
        """Arrays for a key; the gradient, zeros at first, in this memory of as many bytes."""
        memory.fill(0)
        dtype = named_dtype(spec.dtype)
        gradient = memory.view(dtype).reshape(spec.shape)
        return cls(gradient, np.empty(spec.shape, dtype), Source(memory, spec), memory.ctypes.data)

    def owns(self, data: Array) -> bool:
        """Whether these bytes are the memory of the gradient, by whatever view they were given."""
        return data.nbytes == self.source.data.nbytes and data.ctypes.data == self.address

    def overlaps(self, data: Array | None) -> bool:
        """Whether these bytes, if there are any, lie in the memory of the gradient."""
        return data is not None and np.may_share_memory(data, self.source.data)

    def digest(self) -> int:
        """A checksum of the gradient, to tell whether it was written to."""
        return crc32(self.source.data.data)


class Seal:
    """The gradients of one push as they were when it was made, to tell at its end whether somebody wrote to them."""

    def __init__(self, pushed: Mapping[str, Bound]) -> None:
        self._pushed = {name: (bound, bound.digest()) for name, bound in pushed.items()}

    def checked(self, push: Promise) -> Promise:
        """Ends as the push does, or with NotAllowed."""
        checked = Promise()

        def ended(_: Promise) -> None:
            error = push.exception() or self._broken()
            if error is None:
                checked.set_result(push.result())
            else:
                checked.set_exception(error)

        push.on_end(ended)
        return checked

    def _broken(self) -> NotAllowed | None:
        for name, (bound, digest) in self._pushed.items():
            if bound.digest() != digest:
                text = (
                    f"the gradient of {name!r} was written to before its push was done, so nobody knows what was sent"
                )
                return NotAllowed(f"{text}: wait for the handle of the push first, or push a copy", key=name)
        return None


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
