"""Overlap of the arrays that a call writes to: arrays that share memory, and elements of one array at the same place.

Memory is described by a NumPy array of that address, shape and strides. For an array on a GPU it is only an address
(`device_memory`), which the CPU must not read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np

from kvd.compute.tensors import has_address, is_torch

Array: TypeAlias = np.ndarray[Any, Any]
Integers: TypeAlias = np.ndarray[Any, np.dtype[np.intp]]

_MOST_WORK = 100_000  # solutions to try for two strided arrays in the same stretch of memory
_is_contiguous, _nbytes = attrgetter("flags.c_contiguous"), attrgetter("nbytes")
_WORD = np.dtype(np.intp).itemsize


def device_memory(target: Any) -> Array:
    """Return the memory of a torch or CuPy array. Do not read or write its elements. Empty for a device without plain
    addresses."""
    if is_torch(target):
        if not has_address(target):
            return np.empty(0)
        address, itemsize = target.data_ptr(), target.element_size()
        strides = tuple([step * itemsize for step in target.stride()])
    else:
        address, itemsize, strides = target.data.ptr, target.dtype.itemsize, target.strides
    return np.asarray(_Address(address, itemsize, tuple(target.shape), strides))


def overlaps_itself(memory: Array) -> bool:
    """Return whether several elements of an array share a place, as in an expanded tensor."""
    if memory.flags.forc or memory.size <= 1:
        return False
    axes = sorted((abs(step), count) for step, count in zip(memory.strides, memory.shape, strict=True) if count > 1)
    end = memory.itemsize
    for step, count in axes:
        if step < end:
            break
        end += step * (count - 1)
    else:
        return False
    return axes[0][0] == 0 or _some_coincide(axes, memory.itemsize)


def are_apart(targets: Sequence[Array], sizes: Integers, sources: Sequence[Array] | None = None) -> bool:
    """Return whether writing to each target leaves other targets and foreign sources unchanged. By loops in C.

    Args:
        targets: contiguous arrays.
        sizes: their sizes in bytes.
        sources: contiguous arrays of the same sizes. That at the place of a target may be the same memory, but not a
            part of it.
    """
    count = len(targets)
    addresses = _addresses(targets if sources is None else [*targets, *sources])
    own = addresses[:count]
    order = own.argsort()
    begins, ends = own[order], (own + sizes)[order]
    if True in (ends[:-1] > begins[1:]):
        return False
    if sources is None:
        return True
    read = addresses[count:]
    changed = begins.searchsorted(read + sizes, "left") - ends.searchsorted(read, "right")
    return True not in (changed > (read == own))


def first_overlap(memories: Sequence[Array]) -> tuple[int, int] | None:
    """Return the places of two arrays that share memory, the smaller place first; None if all are apart."""
    if all(map(_is_contiguous, memories)) and are_apart(memories, np.array(list(map(_nbytes, memories)), np.intp)):
        return None
    spans = [_span(memory) for memory in memories]
    earlier: list[int] = []  # that reach behind the beginning of the next one
    for place in sorted(range(len(spans)), key=spans.__getitem__):
        begin, end = spans[place]
        earlier = [other for other in earlier if spans[other][1] > begin]
        for other in earlier:
            if _share_memory(memories[place], memories[other]):
                return min(place, other), max(place, other)
        if end > begin:
            earlier.append(place)
    return None


class _Address:
    """Memory as NumPy's array interface describes it."""

    def __init__(
        self, address: int, itemsize: int, shape: tuple[int, ...], strides: tuple[int, ...], typestr: str = ""
    ) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, True),
            "typestr": typestr or f"|V{itemsize}",
            "shape": shape,
            "strides": strides,
        }


def _span(memory: Array) -> tuple[int, int]:
    """Return the addresses of the first byte of an array, and behind its last one."""
    address = _address(memory)
    if memory.flags.c_contiguous:
        return address, address + memory.nbytes
    if memory.size == 0:
        return address, address
    steps = [step * (count - 1) for step, count in zip(memory.strides, memory.shape, strict=True)]
    return address + sum(s for s in steps if s < 0), address + sum(s for s in steps if s > 0) + memory.itemsize


def _addresses(arrays: Sequence[Array]) -> Integers:
    """Return the addresses of the first elements of NumPy arrays."""
    if _READS_OBJECTS:
        return _objects[np.fromiter(map(id, arrays), np.intp, len(arrays)) // _WORD]
    return np.array([_address(array) for array in arrays], np.intp)


def _address(memory: Array) -> int:
    """Return the address of the first element."""
    address: int = memory.__array_interface__["data"][0]
    return address


def _share_memory(one: Array, other: Array) -> bool:
    try:
        return np.shares_memory(one, other, max_work=_MOST_WORK)  # type: ignore[arg-type]  # any number
    except np.exceptions.TooHardError:  # as torch, which does not refuse what it cannot tell
        return False


def _some_coincide(axes: Sequence[tuple[int, int]], itemsize: int) -> bool:
    """Return whether two elements of an array share a byte.

    Args:
        axes: step in bytes and number of elements of each axis.
    """
    offsets = np.zeros((), np.int64)
    for step, count in axes:
        offsets = np.add.outer(offsets, step * np.arange(count))
    return bool((np.diff(np.sort(offsets, axis=None)) < itemsize).any())


# In CPython the id of a NumPy array is the address of its object, which holds, behind the head of every object, the
# address of its elements. `_objects` reads that word of many objects at once; to ask each array takes 2 µs.
_objects: Integers = np.asarray(
    _Address(object.__basicsize__, _WORD, (1 << 50,), (_WORD,), np.dtype(np.intp).str)  # all memory, in words
)
_READS_OBJECTS = sys.implementation.name == "cpython" and int(_objects[id(_objects) // _WORD]) == _address(_objects)
