"""Whether the arrays given to a group fit what was bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from kvd.compute.tensors import check_unmasked
from kvd.errors import ConfigError, DtypeMismatch, InputMismatch, KeyNotFound, ShapeMismatch
from kvd.parallel.batch import DataBatch, DataDesc
from kvd.parallel.device import Array, HostArray, Shape
from kvd.parallel.group.binding import Binding

#: A description, or what one is made from: (name, shape), (name, shape, dtype) or (name, shape, dtype, layout).
DescLike: TypeAlias = "DataDesc | tuple[Any, ...]"


def as_descs(shapes: Sequence[DescLike]) -> tuple[DataDesc, ...]:
    """Each as a description."""
    return tuple(desc if isinstance(desc, DataDesc) else DataDesc(*desc) for desc in shapes)


def as_array(value: Any) -> Array:
    """``value`` as an array, without a copy if it is one already: an array of a GPU stays where it is. Raises
    NotAllowed for a masked array."""
    check_unmasked(value)
    return value if type(value).__module__.partition(".")[0] == "cupy" else np.asarray(value)


def fitting(name: str, value: Any, shape: Shape) -> Array:
    """``value`` as an array, which must have this shape."""
    array = as_array(value)
    if array.shape != tuple(shape):
        raise ShapeMismatch(f"{name} has shape {array.shape}, not {tuple(shape)}", key=name)
    return array


def fit_batch(
    batch: DataBatch, binding: Binding, needs_labels: bool, may_resize: bool
) -> tuple[list[tuple[DataDesc, Array]], int]:
    """The arrays of a batch with their descriptions, and the number of samples to bind to before they can be used.

    Arguments:
        may_resize: take a batch of another size than bound, with the descriptions for that size.

    Raises:
        InputMismatch: the number of arrays differs from the bound one, or labels are needed and missing.
        ShapeMismatch, DtypeMismatch: an array does not have the bound shape, or no dtype that can become the bound one.
    """
    descs, arrays = batch_arrays(batch, binding, needs_labels)
    size = common_size(descs, arrays) if may_resize else None
    if size is None:
        size = binding.batch_size
    if size != binding.batch_size:
        descs = [desc.with_batch_size(size) for desc in descs]
    for desc, array in zip(descs, arrays, strict=True):
        _check_input(desc, array)
    return list(zip(descs, arrays, strict=True)), size


def _check_input(desc: DataDesc, array: Array) -> None:
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


def batch_arrays(batch: DataBatch, binding: Binding, needs_labels: bool) -> tuple[list[DataDesc], list[Array]]:
    """The arrays of a batch with their bound descriptions; labels only if both sides have them.

    Raises:
        InputMismatch: the number of arrays differs from the bound one, or labels are needed and missing.
    """
    if len(batch.data) != len(binding.data):
        raise InputMismatch(f"the batch has {len(batch.data)} data arrays, {len(binding.data)} are bound")
    arrays, descs = list(batch.data), list(binding.data)
    labels = [] if batch.label is None else list(batch.label)
    if binding.labels and labels:
        if len(labels) != len(binding.labels):
            raise InputMismatch(f"the batch has {len(labels)} labels, {len(binding.labels)} are bound")
        arrays, descs = arrays + labels, [*descs, *binding.labels]
    elif binding.labels and needs_labels:
        raise InputMismatch("labels are bound, and training needs those of the batch")
    return descs, [as_array(array) for array in arrays]


def common_size(descs: Sequence[DataDesc], arrays: Sequence[Array]) -> int | None:
    """How many samples all arrays with a batch axis have; None if they disagree or lack that axis."""
    sizes = {
        array.shape[desc.batch_axis]
        for desc, array in zip(descs, arrays, strict=True)
        if -1 < desc.batch_axis < array.ndim
    }
    return sizes.pop() if len(sizes) == 1 else None


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
