"""Adding up what the workers contributed, strictly in the order of the list: ``((c0 + c1) + c2) + …``.

Floating-point addition is not associative, so this order *is* the result: the caller lists the contributions in rank
order and gets the same bits in every run. Each element is calculated on its own, which makes the bits independent of
how an array is cut into tiles.

The arithmetic, for a contribution ``c`` of a worker that reported ``n`` samples, is done in the accumulator's dtype
(float32 for float16 and bfloat16, else the dtype of the contributions) and cast to theirs once, at the end:

=========  =====================================================================================
sum        ``Σ c``; integers wrap around
mean       ``(Σ c) / k`` for ``k`` contributions; integers are divided rounding down
weighted   ``(Σ n·c) / (Σ n)`` over those with ``n > 0``; zeros if there is none; no integers
=========  =====================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import Any, Literal, NamedTuple

import numpy as np

from kvd.compute.compiled import BITS, Function, are_contiguous, as_bits, loop_for
from kvd.compute.quiet import quietly
from kvd.compute.scratch import Scratch
from kvd.compute.tensors import DTYPES, dtype_name
from kvd.errors import DtypeMismatch, NotAllowed, ShapeMismatch

Array = np.ndarray[Any, Any]
MergeMode = Literal["sum", "mean", "weighted"]

TILE = 65536
"""Elements that are calculated at a time, so that everything about them stays in the cache."""


EVERYTHING = slice(None)
"""The part that is all elements."""

_KEY_DTYPES = frozenset(DTYPES.values())
_FLOAT32: np.dtype[Any] = np.dtype(np.float32)


class MergePlan(NamedTuple):
    """A merge that was checked and is ready to be calculated tile by tile.

    Attributes:
        contributions: 1-D arrays of one dtype and length, in order; those without samples are left out.
        dtype: the dtype of the contributions.
        accumulator: the dtype to calculate in.
        weights: a 0-d factor in the accumulator's dtype for each contribution; empty if none is multiplied.
        divisor: a 0-d divisor in the accumulator's dtype (int64 for integers); None if nothing is divided.
    """

    contributions: tuple[Array, ...]
    dtype: np.dtype[Any]
    accumulator: np.dtype[Any]
    weights: tuple[Array, ...] = ()
    divisor: Array | None = None

    @property
    def is_plain(self) -> bool:
        """True if the result is the single contribution itself, without arithmetic."""
        return len(self.contributions) == 1 and not self.weights and self.divisor is None

    @property
    def needs_no_scratch(self) -> bool:
        """True if the contributions are added unscaled, so that a tile needs only the result."""
        return self.accumulator == self.dtype and not self.weights

    @property
    def is_short(self) -> bool:
        """True if a compiled loop accepts the contributions at once: one or two, of floats."""
        return 1 <= len(self.contributions) <= 2 and self.dtype.kind not in "iu"

    def factors(self) -> tuple[float, float, float]:
        """Return the numbers of a short merge for compiled loops: a factor for each contribution, the divisor.

        What is multiplied or divided by 1 keeps its bits.
        """
        divisor = 1.0 if self.divisor is None else float(self.divisor)
        if not self.weights:
            return 1.0, 1.0, divisor
        return float(self.weights[0]), float(self.weights[-1]), divisor


def accumulator_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype for merging ``dtype``: float32 for float16 and bfloat16, else ``dtype`` itself."""
    return _FLOAT32 if is_half(dtype) else dtype


def is_half(dtype: np.dtype[Any]) -> bool:
    """Return whether ``dtype`` is float16 or bfloat16."""
    return dtype.itemsize == 2  # of the dtypes that a key can have, no other is that small


def is_integer(dtype: np.dtype[Any]) -> bool:
    """Return whether ``dtype`` is an integer dtype."""
    return dtype.kind in "iu"


def merge(
    contributions: Sequence[Array], out: Array, mode: MergeMode, samples: Sequence[int] | None = None, tile: int = TILE
) -> None:
    """Merge ``contributions`` into ``out``, in the order of the list.

    Args:
        contributions: at least one array, 1-D, all of the dtype and length of ``out``; only read.
        out: 1-D; shares no memory with a contribution, except that it may be the first one itself.
        mode: ``"sum"``, ``"mean"`` or ``"weighted"``: the table at the top of this file.
        samples: for ``"weighted"``, the samples behind each contribution, whole numbers ≥ 0. A contribution of 0
            samples does not count, whatever it holds. Not looked at in the other modes.
        tile: elements to calculate at a time, ≥ 1; the bits do not depend on it.

    Raises:
        ShapeMismatch: an array is not 1-D, or the lengths differ, or there are not as many samples as contributions.
        DtypeMismatch: the dtypes differ, or integers would be weighted.
        NotAllowed: no contribution, an unknown mode, or samples that are missing or negative.
    """
    plan = plan_merge(contributions, mode, samples, like=out)
    if plan.is_plain:
        np.copyto(out, plan.contributions[0])
    elif plan.needs_no_scratch and plan.divisor is None and (out.size <= tile or len(plan.contributions) <= 2):
        # each element is touched once: in tiles, a large slice would take a fifth longer
        quietly(merge_tile, plan, EVERYTHING, out, out)
    elif (loop := _loop(plan, out)) is not None:
        quietly(_run, loop, plan, out)
    else:
        quietly(_by_tiles, plan, out, tile)


def _loop(plan: MergePlan, out: Array) -> Function | None:
    """Return the compiled loop that is ready for this merge, if any."""
    if not plan.is_short or (plan.needs_no_scratch and plan.divisor is None):
        return None  # adding two arrays is all that NumPy's own loop does
    if not are_contiguous(plan.contributions, (out,)):
        return None
    return loop_for("merge", plan.dtype, plan.dtype).ready(out.size)


def _run(loop: Function, plan: MergePlan, out: Array) -> None:
    bits = BITS.get(plan.dtype)
    first, second = as_bits(plan.contributions[0], bits), as_bits(plan.contributions[-1], bits)
    numbers = np.array((*plan.factors(), 1.0, 0.0, 0.0, 0.0), plan.accumulator)
    loop(first, second, len(plan.contributions) == 2, as_bits(out, bits), numbers, plan.divisor is not None)


def _by_tiles(plan: MergePlan, out: Array, tile: int) -> None:
    whole = Scratch.of_thread(plan.accumulator, min(tile, out.size))
    for part in tiles(out.size, tile):
        target = out[part]
        scratch = whole.cut(target.size)
        sums = target if plan.accumulator == plan.dtype else scratch.gradient
        merge_tile(plan, part, sums, scratch.first)
        if sums is not target:
            np.copyto(target, sums, casting="unsafe")


def tiles(size: int, tile: int) -> Iterator[slice]:
    """Cut ``size`` elements into ranges of ``tile`` elements; the last one may be shorter."""
    return (slice(start, min(start + tile, size)) for start in range(0, size, tile))


def plan_merge(
    contributions: Sequence[Array], mode: MergeMode, samples: Sequence[int] | None, like: Array
) -> MergePlan:
    """Check a merge into an array such as ``like`` and return it as a plan. Raises what ``merge`` raises."""
    dtype = like.dtype
    wide = accumulator_dtype(dtype)
    _check_arrays(contributions, dtype, like.shape)
    if mode == "sum":
        return MergePlan(tuple(contributions), dtype, wide)
    if mode == "mean":
        return MergePlan(tuple(contributions), dtype, wide, divisor=_mean_divisor(len(contributions), wide))
    if mode != "weighted":
        raise NotAllowed(f"there is no merge {mode!r:.40}: it is sum, mean or weighted")
    if is_integer(dtype):
        raise DtypeMismatch(f"{dtype_name(dtype)} cannot be merged by weights: use sum or mean, or a float dtype")
    numbers = _checked_samples(samples, len(contributions))
    counted = [(array, number) for array, number in zip(contributions, numbers, strict=True) if number > 0]
    weights = tuple(np.asarray(number, wide) for _, number in counted)
    divisor = np.asarray(sum(numbers), wide)
    return MergePlan(tuple(array for array, _ in counted), dtype, wide, weights, divisor if counted else None)


def plan_merged(contributions: Sequence[Array], like: Array) -> MergePlan:
    """Check what another server has merged for an array such as ``like``: one array, in the accumulator's dtype.

    Raises:
        ShapeMismatch, DtypeMismatch: as ``merge``.
        NotAllowed: it is not one array.
    """
    wide = accumulator_dtype(like.dtype)
    _check_arrays(contributions, wide, like.shape)
    if len(contributions) > 1:
        raise NotAllowed(f"what was merged is one array, not {len(contributions)}")
    return MergePlan(tuple(contributions), wide, wide)


def add_up(contributions: Sequence[Array], out: Array) -> None:
    """The merge ``"sum"`` of few elements whose dtype is its own accumulator, of which nothing is checked: two
    contributions or more, of the dtype and length of ``out``."""
    np.add(contributions[0], contributions[1], out=out)
    for contribution in contributions[2:]:
        np.add(out, contribution, out=out)


def merge_tile(plan: MergePlan, part: slice, accumulator: Array, scratch: Array) -> None:
    """Calculate one tile of a merge.

    Args:
        plan: the merge.
        part: the range of elements, of n elements.
        accumulator: shape (n,), of the plan's accumulator dtype; receives the result.
        scratch: shape (n,), of the same dtype; its content is lost.
    """
    if not plan.contributions:
        accumulator.fill(0)
        return
    first = _term(plan, 0, part, accumulator)
    if len(plan.contributions) > 1:
        np.add(first, _term(plan, 1, part, scratch), out=accumulator)
        for index in range(2, len(plan.contributions)):
            np.add(accumulator, _term(plan, index, part, scratch), out=accumulator)
    elif first is not accumulator:
        np.copyto(accumulator, first)
    if plan.divisor is not None and is_integer(plan.accumulator):
        np.floor_divide(accumulator, plan.divisor, out=accumulator, casting="unsafe")
    elif plan.divisor is not None:
        np.divide(accumulator, plan.divisor, out=accumulator)


def _term(plan: MergePlan, index: int, part: slice, buffer: Array) -> Array:
    """Return one contribution as it is added: itself, or ``buffer`` filled with the converted values."""
    source = plan.contributions[index]
    if part is not EVERYTHING:
        source = source[part]
    if plan.accumulator != plan.dtype:
        np.copyto(buffer, source)
        source = buffer
    if plan.weights:
        np.multiply(source, plan.weights[index], out=buffer)
        source = buffer
    return source


def _mean_divisor(count: int, wide: np.dtype[Any]) -> Array | None:
    if count == 1:
        return None  # dividing by one changes no bits
    # int64, since the number of contributions need not fit in int8; the quotient does.
    return np.asarray(count, np.int64 if is_integer(wide) else wide)


def _check_arrays(contributions: Sequence[Array], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    if not contributions:
        raise NotAllowed("there is nothing to merge: a merge needs at least one contribution")
    if dtype not in _KEY_DTYPES:
        dtype_name(dtype)
    if len(shape) != 1:
        raise ShapeMismatch(f"expected one dimension, got the shape {shape}")
    for array in contributions:
        if array.shape != shape:
            raise ShapeMismatch(f"expected one dimension of {shape[0]} elements, got the shape {array.shape}")
        # Most are the very same object, which is quicker to see.
        if array.dtype is not dtype and array.dtype != dtype:
            raise DtypeMismatch(f"expected {dtype_name(dtype)}, got {dtype_name(array.dtype)}")


def _checked_samples(samples: Sequence[int] | None, count: int) -> list[int]:
    if samples is None:
        raise NotAllowed("a weighted merge needs the number of samples behind each contribution")
    if len(samples) != count:
        raise ShapeMismatch(f"{count} contributions came with {len(samples)} numbers of samples")
    for number in samples:
        if isinstance(number, bool) or not isinstance(number, Integral) or not 0 <= number <= 2**53:
            raise NotAllowed("a number of samples must be a whole number from 0 to 2**53")
    return [int(number) for number in samples]
