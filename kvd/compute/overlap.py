"""Overlap of the arrays that a call writes to: arrays that share memory, and elements of one array at the same place.

Memory is described by a NumPy array of that address, shape and strides. For an array on a GPU it is only an address
(`device_memory`), which the CPU must not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from ctypes import addressof, c_char
from operator import itemgetter
from typing import Any

import numpy as np

from kvd.compute.tensors import is_torch

Array = np.ndarray[Any, Any]

_MOST_WORK = 100_000  # solutions to try for two strided arrays in the same stretch of memory
_from_buffer: Callable[[Any], c_char] = c_char.from_buffer


def device_memory(target: Any) -> Array:
    """Return the memory of a torch or CuPy array, on whatever device. Do not read or write its elements."""
    if is_torch(target):
        address, itemsize = target.data_ptr(), target.element_size()
        strides = tuple([step * itemsize for step in target.stride()])
    else:
        address, itemsize, strides = target.data.ptr, target.dtype.itemsize, target.strides
    return np.asarray(_Address(address, itemsize, tuple(target.shape), strides))


def overlaps_itself(memory: Array) -> bool:
    """Whether several elements of an array lie at the same place, as those of an expanded tensor do."""
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


def first_overlap(memories: Sequence[Array]) -> tuple[int, int] | None:
    """Return the places of two arrays that share memory, the smaller place first; None if all are apart."""
    if len(memories) < 2:
        return None
    addresses, sizes = addresses_of(memories), [memory.nbytes for memory in memories]
    if not all(memory.flags.c_contiguous for memory in memories):
        spans = [_span(memory) for memory in memories]
        addresses, sizes = [first for first, _ in spans], [end - first for first, end in spans]
    if are_apart(addresses, sizes):
        return None
    open_places: list[int] = []
    for place in sorted(range(len(memories)), key=addresses.__getitem__):
        open_places = [other for other in open_places if addresses[other] + sizes[other] > addresses[place]]
        for other in open_places:
            if _share_memory(memories[place], memories[other]):
                return min(place, other), max(place, other)
        if sizes[place]:
            open_places.append(place)
    return None


def addresses_of(memories: Iterable[Array]) -> list[int]:
    """Return the address of the first element of each array, by loops in C where the arrays allow it."""
    memories = list(memories)
    try:
        return list(map(addressof, map(_from_buffer, memories)))
    except (TypeError, ValueError, BufferError):  # empty, strided, or of a dtype without a buffer, such as bfloat16
        return [memory.__array_interface__["data"][0] for memory in memories]


def are_apart(addresses: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether no two of these stretches of memory, of so many bytes from each address on, overlap."""
    spans = sorted(zip(addresses, sizes, strict=True))
    ends = [address + size for address, size in spans]
    return all(map(int.__le__, ends, map(itemgetter(0), spans[1:])))


class _Address:
    """Memory as NumPy's array interface describes it."""

    def __init__(self, address: int, itemsize: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, True),
            "typestr": f"|V{itemsize}",
            "shape": shape,
            "strides": strides,
        }


def _span(memory: Array) -> tuple[int, int]:
    """The addresses of the first byte of an array, and behind its last one."""
    address = memory.__array_interface__["data"][0]
    if memory.size == 0:
        return address, address
    steps = [step * (count - 1) for step, count in zip(memory.strides, memory.shape, strict=True)]
    return address + sum(s for s in steps if s < 0), address + sum(s for s in steps if s > 0) + memory.itemsize


def _share_memory(one: Array, other: Array) -> bool:
    try:
        return np.shares_memory(one, other, max_work=_MOST_WORK)
    except np.exceptions.TooHardError:  # as torch, which does not refuse what it cannot tell
        return False


def _some_coincide(axes: Sequence[tuple[int, int]], itemsize: int) -> bool:
    """Whether two elements of an array share a byte.

    Args:
        axes: step in bytes and number of elements of each axis.
    """
    offsets = np.zeros((), np.int64)
    for step, count in axes:
        offsets = np.add.outer(offsets, step * np.arange(count))
    return bool((np.diff(np.sort(offsets, axis=None)) < itemsize).any())
