"""Values as programs write them, made ready for the wire and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MappingView, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from kvd.client.calls.keys import KeyList
from kvd.compute.arrays import sum_devices, summed_on_gpu
from kvd.compute.overlap import are_apart, device_memory, first_overlap, overlaps_itself
from kvd.compute.tensors import (
    as_array,
    contiguous_bytes,
    dtype_name,
    is_cupy,
    is_torch,
    kind_of_read_only,
    named_dtype,
    writable_view,
    write_back,
)
from kvd.errors import DtypeMismatch, NotAllowed, RemoteError, ShapeMismatch
from kvd.protocol.specs import MAX_DIMENSIONS, MAX_KEY_NBYTES, KeySpec

T = TypeVar("T")
Array: TypeAlias = np.ndarray[Any, Any]

BYTE: np.dtype[np.uint8] = np.dtype(np.uint8)
SPECS_KEPT = 4096  # a call on a list asks for one per key: keys of the same shape share it, and `is` compares it


class Source(NamedTuple):
    """A value to send: its bytes, in C order."""

    data: Array
    spec: KeySpec


class Target(NamedTuple):
    """Where a pulled value goes.

    Attributes:
        data: memory for its bytes.
        finish: what to do when they have arrived.
        memories: the memory of each array of the program that is written to.
    """

    data: Array
    spec: KeySpec
    finish: Callable[[], Any]
    memories: Sequence[Array] = ()


def paired(keys: KeyList, values: Any, what: str) -> list[Any]:
    """The values of a call as a list, one per entry of the keys. Raises NotAllowed if their number differs."""
    if not keys.many:
        return [values]
    if not isinstance(values, list | tuple) or len(values) != keys.size:
        raise _count_error(keys, values, what)
    return list(values)


def _count_error(keys: KeyList, values: Any, what: str) -> NotAllowed:
    """The error of a call with another number of values than keys. It names the first key that has none."""
    if not isinstance(values, list | tuple):
        kind, key = type(values).__name__, keys.at(0) if keys.size else ""
        is_lazy = isinstance(values, MappingView | Iterator)
        count = f"a {kind}, not a list" + (": pass list(…) of it" if is_lazy else "")
    elif len(values) < keys.size:
        key = keys.at(len(values))
        count = f"{len(values)}, none for {key!r}"
    else:
        count, key = str(len(values)), keys.at(-1) if keys.size else ""
        count += f", {len(values) - keys.size} more behind that of {key!r}" if keys.size else ""
    return NotAllowed(f"a list of keys needs as many {what} in a list: {keys.size}, got {count}", key=key)


def of_each(keys: KeyList, entries: Sequence[Any], work: Callable[[str, Any], T]) -> list[T]:
    """The results of `work` for the name and the entry of each key, one per name.

    Raises:
        What `work` raises; an error that has no key names this one.
    """
    results = []
    for name, entry in zip(keys.names, entries, strict=True):
        try:
            results.append(work(name, entry))
        except RemoteError as error:
            error.name_key(keys.key(name))
            raise
    return results


def values_by_name(keys: KeyList, value: Any) -> list[Any]:
    """The value of each key, one per name: those of a key that is in the list twice are as those of two devices."""
    values = paired(keys, value, "values")
    if keys.places is None:
        return values
    return of_each(keys, keys.by_name(values), lambda _, entries: _one_or_on_devices(entries))


def targets_by_name(keys: KeyList, out: Any, slice_bytes: int, *, in_place: str = "") -> list[Target]:
    """The memory to write each key to, one per name. Each `out` of a key that is in the list twice gets its value.

    Args:
        in_place: the name of a call that has no `out`, and writes into its values: those are `out` here.

    Raises:
        NotAllowed: an array cannot be written to, or shares memory with another one.
        ShapeMismatch, DtypeMismatch: the arrays of a key disagree, or no key can have their dtype.
    """
    outs: Sequence[Any] = paired(keys, out, "values" if in_place else "outs")
    if keys.places is not None:
        outs = of_each(keys, keys.by_name(outs), lambda _, entries: _one_or_on_devices(entries))
    targets = of_each(keys, outs, lambda _, entry: target_of(entry, slice_bytes, in_place=in_place))
    check_apart(keys, [target.memories for target in targets])
    return targets


def check_apart(keys: KeyList, memories: Sequence[Sequence[Array]]) -> None:
    """Raises NotAllowed if two arrays that a call writes to share memory: a value in one would destroy that in the
    other.

    Args:
        memories: those of each key's arrays, one list per name.
    """
    if len(memories) == 1 and len(memories[0]) == 1:
        return
    flat = [memory for entries in memories for memory in entries]
    overlap = first_overlap(flat)
    if overlap is None:
        return
    owners = [keys.key(name) for name, entries in zip(keys.names, memories, strict=True) for _ in entries]
    first, second = (owners[place] for place in overlap)
    if first == second:
        text = f"two of the arrays that the value of key {first!r} is to be written to share memory"
        raise NotAllowed(f"{text}: pass arrays that are apart, such as copies", key=first)
    raise NotAllowed(
        f"the arrays that the values of keys {first!r} and {second!r} are to be written to share memory, so one value "
        f"would destroy the other: give each key an array of its own; if the keys are two names of one tensor (tied "
        f"weights), leave {second!r} out",
        key=first,
    )


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


class Unlike(NamedTuple):
    """A value and an `out` of one key that cannot both be right. The spec of the key says which is wrong.

    Attributes:
        cast: another floating dtype fits.
    """

    name: str
    value: KeySpec
    out: KeySpec
    cast: bool = False

    def check(self, spec: KeySpec) -> None:
        """Raises ShapeMismatch or DtypeMismatch, about the value or about the `out`, unless both fit this spec."""
        spec.check_same(self.value, self.name, cast=self.cast)
        spec.check_same(self.out, self.name, cast=self.cast, what="out")


def first_unlike(keys: KeyList, sources: Sequence[Source], targets: Sequence[Target]) -> Unlike | None:
    """The first key of which what is pulled does not go into what is pushed; None: they all fit."""
    for name, source, target in zip(keys.names, sources, targets, strict=True):
        if source.spec.shape != target.spec.shape or source.spec.dtype != target.spec.dtype:
            return Unlike(name, source.spec, target.spec)
    return None


def are_sources_kept(sources: Sequence[Source], targets: Sequence[Target]) -> bool:
    """Whether values that arrive in the targets, which fit the sources, change no source but that of the same key."""
    sizes = np.array([source.data.nbytes for source in sources], np.intp)
    return are_apart([target.data for target in targets], sizes, [source.data for source in sources])


def on_devices(entries: Sequence[Any]) -> list[Any]:
    """The arrays of several values, each of which is an array or has one per device."""
    return [
        array
        for entry in entries
        for array in (entry if isinstance(entry, list | tuple) and _is_device_list(entry) else [_array_like(entry)])
    ]


def _one_or_on_devices(entries: Sequence[Any]) -> Any:
    """The value of a key that is in a list once, or its arrays if it is there several times."""
    return entries[0] if len(entries) == 1 else on_devices(entries)


def _array_like(value: Any) -> Any:
    return value if _has_shape(value) else as_array(value)


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


def target_of(out: Any, slice_bytes: int, *, in_place: str = "") -> Target:
    """The memory to pull into: the array's own if that is contiguous memory of this host, otherwise a buffer that is
    written back.

    A list holds one array per device: each gets the value.

    Args:
        in_place: as in `targets_by_name`.

    Raises:
        NotAllowed: an array cannot be written to, or several of its elements lie at the same place.
        ShapeMismatch, DtypeMismatch: they disagree, or no key can have their dtype.
    """
    if type(out) is np.ndarray and out.flags.carray and out.dtype.isnative:  # by far the most common
        spec = spec_of(out.dtype, out.shape, slice_bytes)
        data: Array = out.ravel().view(BYTE)
        return Target(data, spec, lambda: out, (data,))
    outs = list(out) if isinstance(out, list | tuple) and _is_device_list(out) else [out]
    checked = [checked_out(entry, in_place) for entry in outs]  # before anything is sent
    array, memory = checked[0]
    for device, (other, _) in enumerate(checked):
        if other.shape != array.shape:
            raise ShapeMismatch(f"the out of device {device} has shape {other.shape}, that of device 0 {array.shape}")
        if other.dtype != array.dtype:
            raise DtypeMismatch(f"the out of device {device} has dtype {other.dtype}, that of device 0 {array.dtype}")
    spec = spec_of(array.dtype, array.shape, slice_bytes)
    direct = array is memory and array.flags.c_contiguous
    value = array if direct else np.empty(array.shape, array.dtype)
    rest = outs[1:] if direct else outs

    def finish() -> Any:
        for other in rest:
            fill(other, value)
        return out

    return Target(value.reshape(-1).view(BYTE), spec, finish, [memory for _, memory in checked])


def _is_foreign(out: Any) -> bool:
    """Whether an array has the byte order of other machines."""
    return isinstance(out, np.ndarray) and not out.dtype.isnative


def fill(out: Any, value: Array) -> None:
    """Writes the value, of the same shape and dtype, into an array of the program."""
    if _is_foreign(out):  # no cast: the same numbers in the other byte order
        np.copyto(out, value)
    else:
        write_back(out, value)


class CheckedOut(NamedTuple):
    """An `out` of the program: on the host, and the memory that is written to, which is the same array if it lies
    there as it is."""

    array: Array
    memory: Array


def checked_out(out: Any, in_place: str = "") -> CheckedOut:
    """The memory of an `out`, and its elements on the host.

    Args:
        in_place: as in `targets_by_name`.

    Raises:
        NotAllowed: it cannot be written to, or several of its elements lie at the same place.
        DtypeMismatch: no key can have its dtype.
    """
    checked = _writable(out)
    if checked is None:
        raise _read_only_error(out, in_place)
    if overlaps_itself(checked.memory):
        what = f"the value, into which {in_place} writes," if in_place else "out"
        raise NotAllowed(
            f"{what} has several elements at the same place in memory, as an expanded or broadcast array has: pass a "
            f"copy, such as tensor.clone() or np.array(array)"
        )
    return checked


def _writable(out: Any) -> CheckedOut | None:
    """None: no value can be written into this."""
    if _is_foreign(out):
        return CheckedOut(as_array(out), out) if out.flags.writeable else None
    view = writable_view(out)
    if view is not None:
        return CheckedOut(view, view)
    is_array = not isinstance(out, np.generic | bool | int | float | list | tuple)
    array = as_array(out) if is_array else None  # raises if it is no array at all
    return CheckedOut(array, device_memory(out)) if array is not None and (is_torch(out) or is_cupy(out)) else None


def _read_only_error(out: Any, in_place: str) -> NotAllowed:
    """The error of an `out` that no value can be written into."""
    if isinstance(out, np.generic | bool | int | float):
        kind = f"a number ({type(out).__name__})"
    elif isinstance(out, list | tuple):
        kind = "a list of numbers"
    else:
        kind = kind_of_read_only(out)
    if in_place == "pushpull":
        return NotAllowed(
            f"without out=, pushpull writes the result into the value, and this is {kind}: pass out=, an array for the "
            f"result, or copy=False for a new one"
        )
    if in_place:
        text = f"without out=, {in_place} writes the result into the value, and this is {kind}"
        return NotAllowed(f"{text}: pass out=, an array for the result")
    return NotAllowed(f"out is {kind}: pass an array that can be written to, or out=None for a new one")


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
    return len(value) > 0 and all(map(_has_shape, value))


def _has_shape(value: Any) -> bool:
    """Whether a value is an array, not a number."""
    try:
        return hasattr(value, "shape") and not isinstance(value, np.generic)
    except Exception:  # noqa: BLE001  a shape that cannot be read, such as that of a lazy parameter or a nested tensor
        return True
