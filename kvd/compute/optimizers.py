"""The fused apply: merge the contributions and update the weights, tile by tile, each byte crossing memory once.

A *slice* is the unit of an update: a 1-D range of a key. Its weights come in three forms: ``current`` is the
version that is being served and is only read, ``out`` receives the next version, and, for float16 and bfloat16 only,
a *master* in float32 carries the bits that the small dtype cannot hold.

Calculated is in the *compute dtype*: float64 for float64 weights, else float32. Every element's arithmetic is plain
IEEE + − × ÷ √ in this dtype, in the order written in ``kernels.py``. The scalars (learning rate, 1 − βᵗ …) are
calculated in Python floats once per update and cast to the compute dtype once, so a compiled kernel can equal the bits;
and since a power or a cosine may differ between two C libraries, a replica can be given the scalars of its primary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvd.compute.by_key import optimizer_for
from kvd.compute.catalogue import is_built_in, kernel_of, scalars
from kvd.compute.compiled import BITS, Function, are_contiguous, as_bits, loop_for
from kvd.compute.kernels import (
    KEEPING,
    Array,
    Kernel,
    Shared,
    loop_name,
    prepare_gradient,
    shared_scalars,
)
from kvd.compute.merge import (
    EVERYTHING,
    TILE,
    MergeMode,
    MergePlan,
    accumulator_dtype,
    is_half,
    is_integer,
    merge,
    merge_tile,
    plan_merge,
    plan_merged,
    tiles,
)
from kvd.compute.quiet import quietly
from kvd.compute.scratch import Scratch
from kvd.compute.slice_kernels import Place, SliceKernel
from kvd.compute.slice_state import SliceState
from kvd.compute.tensors import dtype_name
from kvd.errors import DtypeMismatch, NotAllowed, ShapeMismatch
from kvd.optimizer import Optimizer

__all__ = ["Kernel", "SliceState", "apply_update", "kernel_of", "scalars"]


def apply_update(
    optimizer: Optimizer | None,
    state: SliceState,
    current: Array,
    contributions: Sequence[Array],
    out: Array,
    mode: MergeMode = "sum",
    samples: Sequence[int] | None = None,
    tile: int = TILE,
    *,
    step_scalars: tuple[float, ...] | None = None,
    merged: Array | None = None,
    is_merged: bool = False,
    slice_id: tuple[str, int] | None = None,
) -> None:
    """Merge ``contributions`` and write the next version of a slice into ``out``.

    Without an optimizer the merged value is the next version, as in MXNet; ``state`` keeps its step and forgets its
    master, which would be of other weights. With one, ``state`` is updated in place and its step grows by one. If an
    error is raised, nothing was changed.

    Args:
        optimizer: the rule, or None.
        state: the slice's own.
        current: the version before, shape (n,); only read.
        contributions, mode, samples: as for :func:`kvd.compute.merge.merge`; of the dtype and length of ``current``.
        out: of the dtype and length of ``current``, in memory of its own.
        tile: elements to calculate at a time, ≥ 1; the bits do not depend on it.
        step_scalars: what ``scalars(optimizer, state.step + 1)`` returned on another server; None: calculated here.
        merged: receives the merged gradient as the optimizer gets it, shape (n,), in the accumulator's dtype; needs
            an optimizer. None: nobody wants it.
        is_merged: ``contributions`` is one array that an update elsewhere left in its ``merged``: the bits of weights
            and state are those of that update. Not looked at are then ``mode`` and ``samples``.
        slice_id: the key and the number of the slice; needed by an optimizer that ``differs_by_key`` or
            ``is_by_slice``.

    Raises:
        ShapeMismatch: lengths differ, or ``state`` belongs to a slice of another length.
        DtypeMismatch: dtypes differ, or an optimizer is to update integers.
        NotAllowed: as for ``merge``; or ``out`` shares memory with ``current``; or there are too few ``step_scalars``;
            or ``merged`` and ``is_merged`` come without an optimizer.
    """
    _check_weights(current, out)
    if optimizer is None:
        if merged is not None or is_merged:
            raise NotAllowed("without an optimizer, the merged gradient is the next version itself")
        merge(contributions, out, mode, samples, tile)
        state.master = None
        return
    if is_integer(current.dtype):
        raise DtypeMismatch(f"an optimizer cannot update {dtype_name(current.dtype)}: give the key a float dtype")
    plan = plan_merged(contributions, current) if is_merged else plan_merge(contributions, mode, samples, like=current)
    if optimizer.is_by_slice or optimizer.differs_by_key:
        if slice_id is None:
            raise NotAllowed(f"{type(optimizer).__name__} has to know the key that it updates")
        optimizer = optimizer_for(optimizer, slice_id[0])
    rule = _rule_of(optimizer, current.dtype)
    numbers = (*rule.shared, *rule.kernel.scalars(state.step + 1))
    if step_scalars is not None:
        if len(step_scalars) != len(numbers):
            raise NotAllowed(f"{type(optimizer).__name__} takes {len(numbers)} scalars, not {len(step_scalars)}")
        numbers = step_scalars
    cast = rule.cast if step_scalars is None else None
    _check_state(state, rule.slot_names, current)
    if merged is not None:
        _check_like("the merged gradient", merged, current)
    if rule.is_custom:
        _update_by_custom_kernel(rule, plan, numbers, state, current, out, tile, merged)
        return
    slots = _open_state(state, rule.slot_names, current)
    if slice_id is not None and optimizer.is_by_slice:
        place = Place(*slice_id, state.step + 1)
        quietly(_update_slice, plan, rule.kernel, numbers, state.master, slots, current, out, tile, merged, place)
        state.step += 1
        return
    function = rule.function(plan, current, out, slots, merged)
    if function is not None:
        quietly(_update_compiled, function, plan, numbers, state.master, slots, current, out, tile, merged)
    else:
        quietly(_update, plan, rule.kernel, numbers, cast, state.master, slots, current, out, tile, merged)
    state.step += 1


class _Rule:
    """An optimizer prepared for weights of one dtype: what stays the same from update to update.

    Attributes:
        optimizer, kernel: the optimizer and its arithmetic.
        shared: the numbers of the steps that all optimizers share.
        cast: the same in the compute dtype; None for a custom kernel.
        slot_names: what the kernel keeps.
        is_custom: the kernel is not ours.
    """

    __slots__ = ("_keeping", "_long", "_short", "cast", "is_custom", "kernel", "optimizer", "shared", "slot_names")

    kernel: Any  # a SliceKernel if the optimizer is_by_slice, else a Kernel

    def __init__(self, optimizer: Optimizer, dtype: np.dtype[Any]) -> None:
        self.optimizer = optimizer
        self.kernel = kernel_of(optimizer)
        self.shared = shared_scalars(optimizer)
        self.slot_names = tuple(self.kernel.slot_names)
        self.is_custom = not is_built_in(self.kernel)
        self.cast = None if self.is_custom else quietly(Shared.of, self.shared, accumulator_dtype(dtype))
        name = loop_name(self.kernel)
        self._short = None if name is None else loop_for(name, dtype, dtype)
        self._keeping = None if name is None else loop_for(name + KEEPING, dtype, dtype)
        self._long = None if name is None else loop_for(name, accumulator_dtype(dtype), dtype)

    def function(
        self, plan: MergePlan, current: Array, out: Array, slots: Sequence[Array], merged: Array | None
    ) -> Function | None:
        """Return the compiled loop that is ready for this update, if any."""
        if plan.is_short and plan.dtype == current.dtype:
            loop = self._short if merged is None else self._keeping
        else:
            loop = self._long
        arrays = (current, out) if merged is None else (current, out, merged)
        if loop is None or not are_contiguous(plan.contributions, arrays, slots):
            return None
        return loop.ready(current.size)


_MANY_RULES = 1024

# By identity, since hashing an optimizer with its schedule takes longer than it saves. An entry keeps its
# optimizer alive, so that no other object can have its id.
_rules: dict[tuple[int, np.dtype[Any]], _Rule] = {}


def _rule_of(optimizer: Optimizer, dtype: np.dtype[Any]) -> _Rule:
    rule = _rules.get((id(optimizer), dtype))
    if rule is None:
        rule = _Rule(optimizer, dtype)
        if rule.is_custom:
            return rule  # a custom kernel may have state: each update gets a new one
        if len(_rules) >= _MANY_RULES:
            _rules.clear()
        _rules[id(optimizer), dtype] = rule
    return rule


def _update(
    plan: MergePlan,
    kernel: Kernel,
    numbers: tuple[float, ...],
    shared: Shared | None,
    master: Array | None,
    slots: Sequence[Array],
    current: Array,
    out: Array,
    tile: int,
    merged: Array | None,
) -> None:
    compute = plan.accumulator
    shared, own = shared or Shared.of(numbers[:3], compute), _cast(numbers[3:], compute)
    whole = Scratch.of_thread(compute, min(tile, current.size))
    for part in _parts(current.size, tile):
        weight = _cut(current if master is None else master, part)
        target = _cut(out, part) if master is None else weight
        scratch = whole.cut(weight.size)
        gradient = prepare_gradient(_merged_tile(plan, part, merged, scratch), weight, shared, scratch)
        kernel.update_tile(weight, gradient, target, [_cut(slot, part) for slot in slots], own, scratch)
        if master is not None:
            np.copyto(_cut(out, part), weight, casting="unsafe")


def _update_slice(
    plan: MergePlan,
    kernel: SliceKernel,
    numbers: tuple[float, ...],
    master: Array | None,
    slots: Sequence[Array],
    current: Array,
    out: Array,
    tile: int,
    merged: Array | None,
    place: Place,
) -> None:
    shared = Shared.of(numbers[:3], plan.accumulator)
    weight, target = (current, out) if master is None else (master, master)
    gradient = np.empty(current.size, plan.accumulator)
    whole = Scratch.of_thread(plan.accumulator, min(tile, current.size))
    for part in tiles(current.size, tile):
        scratch = whole.cut(part.stop - part.start)
        prepared = prepare_gradient(_merged_tile(plan, part, merged, scratch), weight[part], shared, scratch)
        np.copyto(gradient[part], prepared)
    kernel.update_slice(weight, gradient, target, slots, numbers[3:], place)
    if master is not None:
        np.copyto(out, master, casting="unsafe")


def _merged_tile(plan: MergePlan, part: slice, merged: Array | None, scratch: Scratch) -> Array:
    """Return one tile of the merge: the single contribution itself, or the result in ``merged``."""
    if merged is None and plan.is_plain and plan.dtype == plan.accumulator:
        return _cut(plan.contributions[0], part)
    gradient = scratch.gradient if merged is None else _cut(merged, part)
    merge_tile(plan, part, gradient, scratch.first)
    return gradient


def _update_by_custom_kernel(
    rule: _Rule,
    plan: MergePlan,
    numbers: tuple[float, ...],
    state: SliceState,
    current: Array,
    out: Array,
    tile: int,
    merged: Array | None,
) -> None:
    """Update a copy of the state, because a custom kernel may fail after some tiles."""
    after = state.copy()
    slots = _open_state(after, rule.slot_names, current)
    with np.errstate(all="ignore"):  # the kernel is not ours
        _update(plan, rule.kernel, numbers, None, after.master, slots, current, out, tile, merged)
    state.step, state.master, state.slots = state.step + 1, after.master, after.slots


def _update_compiled(
    function: Function,
    plan: MergePlan,
    numbers: tuple[float, ...],
    master: Array | None,
    slots: Sequence[Array],
    current: Array,
    out: Array,
    tile: int,
    merged: Array | None,
) -> None:
    """Update by a compiled loop.

    One or two contributions take one pass; others are merged tile by tile and then applied.
    """
    rescale, clip, wd = numbers[:3]
    factors = plan.factors() if plan.is_short else (1.0, 1.0, 1.0)
    cast = np.array((*factors, rescale, -clip, clip, wd, *numbers[3:]), plan.accumulator)
    weight, target, decay = current if master is None else master, as_bits(out, BITS.get(out.dtype)), wd != 0.0
    if plan.is_short:
        bits = BITS.get(plan.dtype)
        first, second = as_bits(plan.contributions[0], bits), as_bits(plan.contributions[-1], bits)
        pair, divide = len(plan.contributions) == 2, plan.divisor is not None
        function(first, second, pair, weight, target, *slots, cast, divide, decay, merged)
        return
    whole = Scratch.of_thread(plan.accumulator, min(tile, current.size))
    for part in tiles(current.size, tile):
        scratch = whole.cut(part.stop - part.start)
        gradient = _merged_tile(plan, part, merged, scratch)
        cuts = [slot[part] for slot in slots]
        function(gradient, gradient, False, weight[part], target[part], *cuts, cast, False, decay, None)


def _parts(size: int, tile: int) -> Iterable[slice]:
    return (EVERYTHING,) if size <= tile else tiles(size, tile)


def _cut(array: Array, part: slice) -> Array:
    return array if part is EVERYTHING else array[part]


def _cast(numbers: Sequence[float], dtype: np.dtype[Any]) -> tuple[Array, ...]:
    # 0-d arrays: NumPy reads them faster than its own scalars, and never takes them for another dtype.
    return tuple([np.asarray(number, dtype) for number in numbers])


def _open_state(state: SliceState, names: Sequence[str], current: Array) -> list[Array]:
    """Create what the first update needs, and return the slots in the order of their names."""
    if state.master is None and is_half(current.dtype):
        state.master = current.astype(accumulator_dtype(current.dtype))
    for name in names:
        if name not in state.slots:
            state.slots[name] = np.zeros(current.size, accumulator_dtype(current.dtype))
    return [state.slots[name] for name in names]


def _check_weights(current: Array, out: Array) -> None:
    if current.ndim != 1 or out.shape != current.shape:
        raise ShapeMismatch(f"expected two arrays of one dimension and length, got {current.shape} and {out.shape}")
    if out.dtype is not current.dtype and out.dtype != current.dtype:
        raise DtypeMismatch(f"the weights are {dtype_name(current.dtype)}, their next version {dtype_name(out.dtype)}")
    if np.may_share_memory(current, out):
        raise NotAllowed("the next version needs memory of its own: the current one is still being served")


def _check_state(state: SliceState, names: Sequence[str], current: Array) -> None:
    if state.master is not None:
        if not is_half(current.dtype):
            raise DtypeMismatch(f"{dtype_name(current.dtype)} weights have no master: the state is of another key")
        _check_like("master", state.master, current)
    for name in names:
        slot = state.slots.get(name)
        if slot is not None:
            _check_like(name, slot, current)


def _check_like(name: str, array: Array, current: Array) -> None:
    compute = accumulator_dtype(current.dtype)
    if array.shape != current.shape:
        raise ShapeMismatch(f"{name} has the shape {array.shape}, the weights have {current.shape}")
    if array.dtype is not compute and array.dtype != compute:
        raise DtypeMismatch(f"{name} is {array.dtype}, but {dtype_name(current.dtype)} weights need {compute}")
