"""Whether arrays that somebody gives to a group fit what was bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from kvd.errors import ConfigError, DtypeMismatch, KeyNotFound, ShapeMismatch
from kvd.parallel.batch import DataDesc
from kvd.parallel.device import Array, HostArray, Shape

#: A description, or what one is made from: (name, shape), (name, shape, dtype) or (name, shape, dtype, layout).
DescLike: TypeAlias = "DataDesc | tuple[Any, ...]"


def as_descs(shapes: Sequence[DescLike]) -> tuple[DataDesc, ...]:
    """The descriptions that are meant."""
    return tuple(desc if isinstance(desc, DataDesc) else DataDesc(*desc) for desc in shapes)


def as_array(value: Any) -> Array:
    """``value`` as an array, without a copy if it is one of any kind: an array of a GPU stays where it is."""
    return value if type(value).__module__.partition(".")[0] == "cupy" else np.asarray(value)


def fitting(name: str, value: Any, shape: Shape) -> Array:
    """``value`` as an array, which must have this shape."""
    array = as_array(value)
    if array.shape != tuple(shape):
        raise ShapeMismatch(f"{name} has shape {array.shape}, not {tuple(shape)}", key=name)
    return array


def checked_input(desc: DataDesc, array: Array) -> Array:
    """``array``, which must have the shape that was bound and a dtype that can become the bound one."""
    axis = desc.batch_axis
    if array.shape != desc.shape:
        others_agree = array.ndim == len(desc.shape) and all(
            got == bound for i, (got, bound) in enumerate(zip(array.shape, desc.shape, strict=True)) if i != axis
        )
        hint = ': reshape the group, or make it with reshape="auto"' if others_agree and axis >= 0 else ""
        raise ShapeMismatch(
            f"{desc.name} has shape {array.shape}, but was bound with {desc.shape}{hint}", key=desc.name
        )
    if not np.can_cast(array.dtype, np.dtype(desc.dtype), casting="same_kind"):
        raise DtypeMismatch(f"{desc.name} has dtype {array.dtype}, but was bound with {desc.dtype}", key=desc.name)
    return array


def part_of(array: Array, axis: int, samples: slice) -> Array:
    """The view of these samples; the whole array if it has no batch axis."""
    return array if axis < 0 else array[(slice(None),) * axis + (samples,)]


def writable_target(name: str, targets: Mapping[str, HostArray], shape: Shape) -> HostArray:
    """The array of this name to write to."""
    if name not in targets:
        raise KeyNotFound(f"no array to write {name} to", key=name)
    target = targets[name]
    if not isinstance(target, np.ndarray) or not target.flags.writeable:
        raise ConfigError(f"{name}: the target must be a NumPy array that can be written", setting=name)
    if target.shape != tuple(shape):
        raise ShapeMismatch(f"{name}: the target has shape {target.shape}, not {tuple(shape)}", key=name)
    return target
