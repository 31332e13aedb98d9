"""Arrays that a program keeps for a key: the gradient lies where the servers of this host read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

import numpy as np

from kvd.client.calls.keys import KeyList, WrittenKeys
from kvd.client.calls.promise import Promise
from kvd.client.calls.values import Source
from kvd.compute.tensors import named_dtype
from kvd.errors import NotAllowed
from kvd.protocol.specs import KeySpec, padded

Array: TypeAlias = np.ndarray[Any, Any]


class BoundArrays(NamedTuple):
    """The arrays of one key, of its shape and dtype.

    Attributes:
        gradient: what a push of it sends without a copy.
        weight: what a program pulls into.
        source: the gradient as it is sent: its bytes, and the spec of the key.
        address: where the bytes are.
        block: memory of several keys, which these bytes are in.
    """

    gradient: Array
    weight: Array
    source: Source
    address: int
    block: Array

    @classmethod
    def of(cls, spec: KeySpec, memory: Array, block: Array | None = None) -> BoundArrays:
        """Arrays for a key; the gradient, zeros at first, is in `memory`, which has the key's size, as uint8.

        Args:
            block: memory that it is a part of; None: of none.
        """
        memory.fill(0)
        dtype = named_dtype(spec.dtype)
        gradient = memory.view(dtype).reshape(spec.shape)
        whole = memory if block is None else block
        return cls(gradient, np.empty(spec.shape, dtype), Source(memory, spec), memory.ctypes.data, whole)

    def owns(self, data: Array) -> bool:
        """Whether these bytes are the memory of the gradient, whatever view they came from."""
        return data.nbytes == self.source.data.nbytes and data.ctypes.data == self.address

    def overlaps(self, data: Array | None) -> bool:
        """Whether these bytes, if there are any, lie in the memory of the gradient."""
        return data is not None and np.may_share_memory(data, self.source.data)

    def checksum(self) -> int:
        """A checksum of the gradient, which shows whether it was written to."""
        return crc32(self.source.data.data)


class GradientChecksums:
    """The gradients of one push as they were when it began, to tell at its end whether they were written to.

    Args:
        pushed: by key.
        written: how the program writes the keys.
    """

    def __init__(self, pushed: Mapping[str, BoundArrays], written: WrittenKeys) -> None:
        self._written = written
        self._pushed = {name: (arrays, arrays.checksum()) for name, arrays in pushed.items()}

    def verified(self, push: Promise) -> Promise:
        """A promise that ends as the push does, or with NotAllowed."""
        verified = Promise()

        def ended(_: Promise) -> None:
            error = push.exception() or self._mismatch()
            if error is None:
                verified.set_result(push.result())
            else:
                verified.set_exception(self._written.restored(error))

        push.on_end(ended)
        return verified

    def _mismatch(self) -> NotAllowed | None:
        for name, (arrays, checksum) in self._pushed.items():
            if arrays.checksum() != checksum:
                text = (
                    f"the gradient of {name!r} was written to before its push was done, so it is unknown what was sent"
                )
                return NotAllowed(f"{text}: wait for the handle of the push first, or push a copy", key=name)
        return None


def adjacent_arrays(specs: Mapping[str, KeySpec], memory: Callable[[int], Array]) -> dict[str, BoundArrays]:
    """Arrays for several keys. Their gradients lie side by side as in a message, so that a push of all of them goes out
    as one stretch of memory.

    Args:
        memory: gives that many bytes, as uint8.
    """
    starts, end = [], 0
    for spec in specs.values():
        starts.append(padded(end))
        end = starts[-1] + spec.nbytes
    whole = memory(end)
    return {
        name: BoundArrays.of(spec, whole[start : start + spec.nbytes], whole)
        for (name, spec), start in zip(specs.items(), starts, strict=True)
    }


class BoundList(NamedTuple):
    """The bound gradients of a list of keys, for calls that push all of them.

    Attributes:
        keys: distinct ones.
        gradients: one per key.
        sources: the same as they are sent.
        whole: their memory, if they lie side by side in it as in a message.
    """

    keys: KeyList
    gradients: list[Array]
    sources: list[Source]
    whole: Array | None

    @classmethod
    def of(cls, keys: KeyList, bound: Sequence[BoundArrays]) -> BoundList:
        """The list of these arrays, one per key."""
        gradients = [arrays.gradient for arrays in bound]
        return cls(keys, gradients, [arrays.source for arrays in bound], _side_by_side(bound))


def _side_by_side(bound: Sequence[BoundArrays]) -> Array | None:
    block = bound[0].block
    first, end = block.ctypes.data, 0
    for arrays in bound:
        if arrays.block is not block or arrays.address != first + padded(end):
            return None
        end = padded(end) + arrays.source.data.nbytes
    return block[:end]


def bind_result(keys: KeyList, bound: Sequence[BoundArrays]) -> Any:
    """What `bind` returns: (gradient, weight) of one key; of a list of keys, a list of each."""
    if not keys.many:
        return bound[0].gradient, bound[0].weight
    if keys.places is not None:
        bound = [bound[place] for place in keys.places]
    return [arrays.gradient for arrays in bound], [arrays.weight for arrays in bound]
