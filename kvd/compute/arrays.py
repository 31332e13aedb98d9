"""Arrays on devices: which module calculates with an array, and the sum of one array per device."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from kvd.compute.merge import merge
from kvd.compute.tensors import as_array, is_cupy, is_torch
from kvd.errors import DtypeMismatch, NotAllowed, ShapeMismatch


def namespace(value: object) -> ModuleType:
    """Return the module that calculates with ``value``: ``cupy`` for a CuPy array, else ``numpy``."""
    return sys.modules["cupy"] if is_cupy(value) else np


def sum_devices(values: Sequence[object], out: np.ndarray[Any, Any] | None = None) -> Any:
    """Return the sum of one array per device, ``((v0 + v1) + v2) + …``, in the order of the list.

    float16 and bfloat16 are accumulated in float32 and cast once at the end.

    Args:
        values: at least one array, all of one shape and dtype. If `summed_on_gpu`, the sum is formed on the device of
            the first one, to which the others are copied.
        out: C-contiguous, of their shape and dtype, on the host: receives the sum and is returned. A sum on the host
            is calculated right there, so it shares no memory with a value, except that it may be the first one itself.

    Returns:
        An array of the same shape and dtype: CuPy or torch on the first device, else NumPy on the host. A single
        value is returned as it is, or as a view of it, not as a copy.

    Raises:
        ShapeMismatch, DtypeMismatch: the arrays disagree, or their dtype is not supported, or ``out`` does not fit.
        NotAllowed: the list is empty, or ``out`` is not C-contiguous.
    """
    if not values:
        raise NotAllowed("there is no array to sum: pass at least one, one per device")
    if not summed_on_gpu(values):
        return _sum_host([as_array(value) for value in values], out)
    total = _sum_cupy(values) if is_cupy(values[0]) else _sum_torch(values)
    return total if out is None else _sum_host([as_array(total)], out)


def summed_on_gpu(values: Sequence[object]) -> bool:
    """Return whether these are summed on a GPU: all are CuPy arrays, or all are torch tensors on GPUs."""
    return all(map(is_cupy, values)) or all(
        is_torch(value) and value.is_cuda  # type: ignore[attr-defined]
        for value in values
    )


def _sum_host(arrays: Sequence[np.ndarray[Any, Any]], out: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any]:
    _check_alike(arrays)
    if out is None and len(arrays) == 1:
        return arrays[0]
    total = np.empty(arrays[0].shape, arrays[0].dtype) if out is None else out
    if total.shape != arrays[0].shape:
        raise ShapeMismatch(f"out has the shape {total.shape}, the arrays have {arrays[0].shape}")
    if not total.flags.c_contiguous:
        raise NotAllowed("out is not C-contiguous: the sum could not be written in place")
    merge([array.reshape(-1) for array in arrays], total.reshape(-1), "sum")
    return total


def _sum_cupy(arrays: Sequence[Any]) -> Any:
    cupy = sys.modules["cupy"]
    _check_alike(arrays)
    first = arrays[0]
    if len(arrays) == 1:
        return first
    for array in arrays[1:]:
        with array.device:  # what was queued there must have happened before the peer copy reads it
            cupy.cuda.get_current_stream().synchronize()
    wide = cupy.float32 if first.dtype.itemsize == 2 else first.dtype
    with first.device:
        total = first.astype(wide)
        for array in arrays[1:]:
            total += cupy.asarray(array).astype(wide, copy=False)
        return total.astype(first.dtype, copy=False)


def _sum_torch(tensors: Sequence[Any]) -> Any:
    torch = sys.modules["torch"]
    _check_alike(tensors)
    first = tensors[0].detach()
    if len(tensors) == 1:
        return first
    wide = torch.float32 if first.dtype in (torch.float16, torch.bfloat16) else first.dtype
    total = first.to(wide, copy=True)
    for tensor in tensors[1:]:
        total += tensor.detach().to(first.device).to(wide)
    return total.to(first.dtype)


def _check_alike(arrays: Sequence[Any]) -> None:
    first = arrays[0]
    for index, array in enumerate(arrays):
        if tuple(array.shape) != tuple(first.shape):
            raise ShapeMismatch(f"device {index} has the shape {tuple(array.shape)}, device 0 has {tuple(first.shape)}")
        if array.dtype != first.dtype:
            raise DtypeMismatch(f"device {index} has the dtype {array.dtype}, device 0 has {first.dtype}")
