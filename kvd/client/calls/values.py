"""Values as programs write them, made ready for the wire and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kvd.client.calls.keys import KeyList
from kvd.compute.arrays import sum_devices, summed_on_gpu
from kvd.compute.tensors import (
    as_array,
    contiguous_bytes,
    dtype_name,
    is_cupy,
    is_torch,
    named_dtype,
    writable_view,
    write_back,
)
from kvd.errors import DtypeMismatch, NotAllowed, ShapeMismatch
from kvd.protocol.specs import MAX_DIMENSIONS, MAX_KEY_NBYTES, KeySpec

Array: TypeAlias = np.ndarray[Any, Any]

BYTE: np.dtype[np.uint8] = np.dtype(np.uint8)
SPECS_KEPT = 4096  # a call on a list asks for one per key: keys of the same shape share it, and `is` compares it


class Source(NamedTuple):
    """A value to send: its bytes, in C order."""

    data: Array
    spec: KeySpec


class Target(NamedTuple):
    """Where a pulled value goes: memory for its bytes, and what to do when they have arrived."""

    data: Array
    spec: KeySpec
    finish: Callable[[], Any]


def paired(keys: KeyList, values: Any, what: str) -> list[Any]:
    """The values of a call as a list, one per entry of the keys. Raises NotAllowed if their number differs."""
    if not keys.many:
        return [values]
    if not isinstance(values, list | tuple) or len(values) != keys.size:
        count = len(values) if isinstance(values, list | tuple) else f"a {type(values).__name__}, not a list"
        raise NotAllowed(f"a list of keys needs as many {what} in a list: {keys.size}, got {count}")
    return list(values)


def values_by_name(keys: KeyList, value: Any) -> list[Any]:
    """The value of each key, one per name: those of a key that is in the list twice are as those of two devices."""
    values = paired(keys, value, "values")
    if keys.places is None:
        return values
    return [entries[0] if len(entries) == 1 else on_devices(entries) for entries in keys.by_name(values)]


def targets_by_name(keys: KeyList, out: Any, slice_bytes: int) -> list[Target]:
    """The memory to write each key to, one per name. Each `out` of a key that is in the list twice gets its value."""
    outs = paired(keys, out, "outs")
    if keys.places is None:
        return [target_of(entry, slice_bytes) for entry in outs]
    return [
        target_of(entries[0], slice_bytes) if len(entries) == 1 else target_of(on_devices(entries), slice_bytes)
        for entries in keys.by_name(outs)
    ]


def pulled_values(keys: KeyList, targets: Sequence[Target], out: Any) -> Any:
    """The result of a call, whose bytes have arrived in the targets: `out` as the program gave it; None: new arrays."""
    arrays = [target.finish() for target in targets]
    if out is not None:
        return list(out) if keys.many else out
    return in_places(keys, arrays)


def in_places(keys: KeyList, arrays: Sequence[Array], *, shared: bool = False) -> Any:
    """The new arrays of the keys as a call gives them. A key that is in the list twice gets two: of `shared` ones, the
    same twice."""
    if keys.places is not None:
        if shared:
            return [arrays[place] for place in keys.places]
        counts = [keys.places.count(index) for index in range(len(arrays))]
        return keys.by_place(
            [[array, *(array.copy() for _ in range(count - 1))] for array, count in zip(arrays, counts, strict=True)]
        )
    return list(arrays) if keys.many else arrays[0]


def check_alike(keys: KeyList, sources: Sequence[Source], targets: Sequence[Target]) -> None:
    """Raises ShapeMismatch or DtypeMismatch unless what is pulled goes into what is pushed."""
    for name, source, target in zip(keys.names, sources, targets, strict=True):
        source.spec.check_same(target.spec, keys.written.get(name, name))


def on_devices(entries: Sequence[Any]) -> list[Any]:
    """The arrays of several values, each of which is an array or has one per device."""
    return [
        array
        for entry in entries
        for array in (entry if isinstance(entry, list | tuple) and _is_device_list(entry) else [_array_like(entry)])
    ]


def _array_like(value: Any) -> Any:
    return value if hasattr(value, "shape") and not isinstance(value, np.generic) else as_array(value)


def new_memory(nbytes: int) -> Array:
    """Memory for a copy of `nbytes` bytes, as uint8."""
    return np.empty(nbytes, np.uint8)


def source_of(value: Any, slice_bytes: int, *, copy: bool, memory: Callable[[int], Array] = new_memory) -> Source:
    """The bytes of a value. A list holds one array per device: they are summed first.

    Args:
        copy: copy the bytes if the program could still write to them.
        memory: gives the memory for the copy, or for the sum: that many bytes, as uint8.

    Raises:
        DtypeMismatch, NotAllowed: no key can have such a value.
        ShapeMismatch: the arrays of the devices disagree.
    """
    if type(value) is np.ndarray and value.flags.c_contiguous and value.dtype.isnative:  # by far the most common
        spec = spec_of(value.dtype, value.shape, slice_bytes)
        data: Array = value.ravel().view(BYTE)
        return Source(copy_of(data, memory) if copy else data, spec)
    if isinstance(value, list | tuple) and _is_device_list(value):
        if len(value) == 1:
            return source_of(value[0], slice_bytes, copy=copy, memory=memory)
        return _sum_of(value, slice_bytes, memory)
    array = as_array(value)
    spec = spec_of(array.dtype, array.shape, slice_bytes)
    data = contiguous_bytes(array)
    if copy and np.may_share_memory(data, array):
        data = copy_of(data, memory)
    return Source(data, spec)


def _sum_of(values: Sequence[Any], slice_bytes: int, memory: Callable[[int], Array]) -> Source:
    """The sum of one array per device, in memory of its own."""
    if summed_on_gpu(values):
        total = as_array(sum_devices(values))
        return Source(contiguous_bytes(total), spec_of(total.dtype, total.shape, slice_bytes))
    arrays = [as_array(value) for value in values]
    first = arrays[0]
    spec = spec_of(first.dtype, first.shape, slice_bytes)
    data = memory(first.nbytes)
    sum_devices(arrays, out=data.view(first.dtype).reshape(first.shape))
    return Source(data, spec)


def copy_of(data: Array, memory: Callable[[int], Array]) -> Array:
    """A copy of these bytes in memory that `memory` gives."""
    copy = memory(data.nbytes)
    copy[:] = data
    return copy


@lru_cache(SPECS_KEPT)
def spec_of(dtype: np.dtype[Any], shape: tuple[int, ...], slice_bytes: int) -> KeySpec:
    """The spec of such arrays; equal specs are the same object while they are cached.

    Raises:
        DtypeMismatch: no key can have the dtype.
        NotAllowed: the array is larger than a message can say.
    """
    if len(shape) > MAX_DIMENSIONS:
        raise NotAllowed(f"an array has at most {MAX_DIMENSIONS} dimensions, not {len(shape)}: reshape it")
    spec = KeySpec(dtype_name(dtype), shape, slice_bytes)
    if max(spec.nbytes, *shape, 0) > MAX_KEY_NBYTES:
        text = f"a key has at most {MAX_KEY_NBYTES >> 40} TiB and as many rows: split the array of shape {shape} up"
        raise NotAllowed(text)
    return spec


def target_of(out: Any, slice_bytes: int) -> Target:
    """The memory to pull into: the array's own if that is contiguous memory of this host, otherwise a buffer that is
    written back.

    A list holds one array per device: each gets the value.

    Raises:
        NotAllowed: an array cannot be written to.
        ShapeMismatch, DtypeMismatch: they disagree, or no key can have their dtype.
    """
    if type(out) is np.ndarray and out.flags.carray and out.dtype.isnative:  # by far the most common
        spec = spec_of(out.dtype, out.shape, slice_bytes)
        return Target(out.ravel().view(BYTE), spec, lambda: out)
    outs = list(out) if isinstance(out, list | tuple) and _is_device_list(out) else [out]
    views = [checked_out(entry) for entry in outs]  # before anything is sent
    array = views[0]
    for device, other in enumerate(views):
        if other.shape != array.shape:
            raise ShapeMismatch(f"the out of device {device} has shape {other.shape}, that of device 0 {array.shape}")
        if other.dtype != array.dtype:
            raise DtypeMismatch(f"the out of device {device} has dtype {other.dtype}, that of device 0 {array.dtype}")
    spec = spec_of(array.dtype, array.shape, slice_bytes)
    direct = not _is_foreign(outs[0]) and writable_view(outs[0]) is not None and array.flags.c_contiguous
    value = array if direct else np.empty(array.shape, array.dtype)
    rest = outs[1:] if direct else outs

    def finish() -> Any:
        for other in rest:
            fill(other, value)
        return out

    return Target(value.reshape(-1).view(BYTE), spec, finish)


def _is_foreign(out: Any) -> bool:
    """Whether an array has the byte order of other machines."""
    return isinstance(out, np.ndarray) and not out.dtype.isnative


def fill(out: Any, value: Array) -> None:
    """Writes the value, of the same shape and dtype, into an array of the program."""
    if _is_foreign(out):  # no cast: the same numbers in the other byte order
        np.copyto(out, value)
    else:
        write_back(out, value)


def checked_out(out: Any) -> Array:
    """The memory of an `out`, or an array of the same shape and dtype. Raises NotAllowed if it is read-only."""
    if isinstance(out, np.generic | int | float | list | tuple):
        kind = "a list of numbers" if isinstance(out, list | tuple) else f"a number ({type(out).__name__})"
        raise NotAllowed(f"out is {kind}, into which no value can be written: pass an array, or a list of arrays")
    if _is_foreign(out) and out.flags.writeable:
        return as_array(out)
    view = None if _is_foreign(out) else writable_view(out)
    if view is None:
        view = as_array(out)
        if _is_foreign(out):
            raise NotAllowed("out is an array that is read-only: pass one that can be written to, or out=None")
        if not (is_torch(out) or is_cupy(out)):
            write_back(out, view)  # raises
    return view


def fresh_target(spec: KeySpec) -> Target:
    """A new private array of the key's shape and dtype."""
    array = np.empty(spec.shape, named_dtype(spec.dtype))
    return Target(array.reshape(-1).view(BYTE), spec, lambda: array)


def read_only(array: Array) -> Array:
    """The same array, which cannot be written to."""
    array.flags.writeable = False
    return array


def _is_device_list(value: Sequence[Any]) -> bool:
    """Whether a list holds arrays, one per device, not numbers."""
    return len(value) > 0 and all(hasattr(entry, "shape") and not isinstance(entry, np.generic) for entry in value)
