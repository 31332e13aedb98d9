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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import numpy as np

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
from kvd.compute.tensors import dtype_name
from kvd.errors import DtypeMismatch, NotAllowed, ProtocolError, ShapeMismatch
from kvd.optimizer import Optimizer

__all__ = ["Kernel", "SliceState", "apply_update", "kernel_of", "scalars"]

_SLOT_PREFIX = "slot/"


@dataclass(slots=True)
class SliceState:
    """What an optimizer remembers about one slice. A new optimizer starts with a new one.

    Attributes:
        step: the updates that an optimizer made.
        master: float32 weights, shape (n,), of a float16 or bfloat16 slice; None before the first update and for
            other dtypes.
        slots: momentum and the like by name, shape (n,), in the compute dtype; zeros when they are first needed.
    """

    step: int = 0
    master: Array | None = None
    slots: dict[str, Array] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The memory of the arrays, in bytes."""
        return sum(slot.nbytes for slot in self.slots.values()) + (0 if self.master is None else self.master.nbytes)

    def copy(self) -> SliceState:
        """Return the same in arrays of its own."""
        master = None if self.master is None else self.master.copy()
        return SliceState(self.step, master, {name: slot.copy() for name, slot in self.slots.items()})

    def export(self) -> dict[str, Array]:
        """Return copies of everything as arrays: ``step`` (0-d int64), ``master`` if there is one, ``slot/<name>``."""
        arrays: dict[str, Array] = {"step": np.asarray(self.step, np.int64)}
        if self.master is not None:
            arrays["master"] = self.master.copy()
        return arrays | {_SLOT_PREFIX + name: slot.copy() for name, slot in self.slots.items()}

    def checksum(self, before: int = 0) -> int:
        """A CRC-32 of everything, continued from that of what comes before it."""
        arrays = [("master", self.master)] if self.master is not None else []
        arrays += sorted(self.slots.items())
        for name, array in arrays:
            before = crc32(array.data, crc32(name.encode(), before))
        return crc32(str(self.step).encode(), before)

    @classmethod
    def load(cls, arrays: Mapping[str, Array]) -> SliceState:
        """Return a state with copies of the arrays that ``export`` returned.

        Raises:
            ProtocolError: the arrays are not such: a step is missing or negative, a name is unknown, or an array is
                not 1-D float32 or float64 of the length of the others.
        """
        state = cls(step=_loaded_step(arrays))
        sizes = set()
        for name, array in arrays.items():
            if name == "step":
                continue
            _check_loaded(name, array)
            sizes.add(array.size)
            if name == "master":
                state.master = array.copy()
            else:
                state.slots[name.removeprefix(_SLOT_PREFIX)] = array.copy()
        if len(sizes) > 1:
            raise ProtocolError(f"the arrays of one optimizer state have the lengths {sorted(sizes)}")
        return state


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
        """The compiled loop that is ready for this update, if any."""
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


def _merged_tile(plan: MergePlan, part: slice, merged: Array | None, scratch: Scratch) -> Array:
    """One tile of the merge, in ``merged`` if that is wanted: the one contribution itself, or else calculated."""
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
    """The same on a copy of the state, since the kernel may raise an error when it has updated some tiles."""
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
    """The same by a compiled loop: one or two contributions in one go, others merged tile by tile and then updated."""
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


def _loaded_step(arrays: Mapping[str, Array]) -> int:
    step = arrays.get("step")
    if step is None or step.ndim != 0 or not is_integer(step.dtype) or int(step) < 0:
        raise ProtocolError("an optimizer state needs a step: a whole number ≥ 0")
    return int(step)


def _check_loaded(name: str, array: Array) -> None:
    if name != "master" and not name.startswith(_SLOT_PREFIX):
        raise ProtocolError(f"{name!r:.60} is no part of an optimizer state")
    if array.ndim != 1 or array.dtype not in (np.float32, np.float64):
        raise ProtocolError(f"{name!r:.60} must be one dimension of float32 or float64")
    if name == "master" and array.dtype != np.float32:
        raise ProtocolError("the master weights must be float32")
