"""The loops that numba compiles: merge, update and write-out of one element after the other, in one pass over memory.

This module, `jit_codecs`, `jit_ids` and `jit_prefetch` are all that import numba, and only
:mod:`kvd.compute.compiled` imports them, when a loop is worth its compilation. The formulas stand in
:mod:`kvd.optimizer.rules`; the order of the roundings is that of :mod:`kvd.compute.kernels` and
:mod:`kvd.compute.merge`, operation by operation, so that both give the same bits. LLVM keeps it: without fast-math
flags it neither reorders nor contracts to fused multiply-adds. (Which of two
NaNs survives an addition is left open, here as there: no promise is made about their payloads.)

Every loop but ``merge`` takes, in this order:

==================  ================================================================================================
first, second       shape (n,): the contributions, of one *source* dtype; ``second`` is only read if ``pair``
pair                whether there are two contributions
weight              shape (n,): the version before; for float16 and bfloat16 the float32 master, updated in place
out                 shape (n,): the version after; the *target* dtype
slots               shape (n,) each, none to three, in the compute dtype, updated in place
numbers             shape (7 + own,), in the compute dtype: factor of ``first``, factor of ``second``, divisor,
                    rescale_grad, −clip, clip, wd, then the scalars of the kernel
divide, decay       whether there is a divisor, and a coupled weight decay; what is multiplied by 1 or clipped at
                    infinity keeps its bits, but ``+ 0·w`` does not
kept                shape (n,), in the compute dtype: receives the merged gradient; None: nobody wants it
==================  ================================================================================================

float16 comes as its bits in int16, bfloat16 as its bits in uint16: numba knows neither. For an update, the source may
also be float32 where the target is a half: the sum of more than two contributions.

A loop and the functions that it inlines share one file: numba's cache on disk only notices changes of the file that
defines the loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba import types
from numba.extending import overload

from kvd.compute.jit_codecs import LOOPS as CODEC_LOOPS
from kvd.compute.jit_ids import LOOPS as ID_LOOPS
from kvd.compute.jit_prefetch import prefetch
from kvd.compute.kernels import KEEPING, ROWS

DISABLED: bool = bool(getattr(numba.config, "DISABLE_JIT", False))
"""Whether NUMBA_DISABLE_JIT asks for plain Python, which would be a thousand times slower than NumPy."""

_njit: Any = numba.njit  # with types in some versions, and without in others
_overload: Any = overload
_OPTIONS = {"nogil": True, "error_model": "numpy", "fastmath": False, "parallel": False}

F = TypeVar("F", bound=Callable[..., Any])


def _inlined(function: F) -> F:
    """A part of the loops below."""
    return cast(F, _njit(**_OPTIONS)(function))


def _implement(stub: Callable[..., Any], choose: Callable[..., Any], inline: str = "never") -> None:
    """Let numba ask ``choose`` for the function that stands for ``stub``, by the types of its arguments."""
    _overload(stub, inline=inline)(choose)


# --- Bits of halves -------------------------------------------------------------------------------------------------


@_inlined
def wide_bfloat16(bits: Any) -> Any:
    """Return the float32 of the bits of a bfloat16: they are its upper half."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@_inlined
def narrow_bfloat16(value: Any) -> Any:
    """The bits of the bfloat16 that is nearest to a float32, ties to even; NaN keeps its sign and loses its payload.

    Adding 0x7fff, or 0x8000 above an odd result, carries into the upper half exactly when it must be rounded up.
    """
    bits = np.float32(value).view(np.uint32)
    rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    nan = np.uint32((bits & np.uint32(0x80000000)) | np.uint32(0x7FC00000))
    return np.uint16((nan if value != value else rounded) >> np.uint32(16))


@_inlined
def wide_float16(bits: Any) -> Any:
    """The float32 of the bits of a float16: exponent and fraction are moved, and the exponent gets the bias of float32.

    A subnormal gets the exponent of 2⁻¹⁴ and an implicit leading one, which an exact subtraction removes. (F. Giesen,
    "Float → half conversions", 2012.)
    """
    half = np.uint32(np.uint16(bits))
    sign = np.uint32((half & np.uint32(0x8000)) << np.uint32(16))
    moved = np.uint32((half & np.uint32(0x7FFF)) << np.uint32(13))
    exponent = np.uint32(moved & np.uint32(0x0F800000))
    normal = np.uint32(moved + np.uint32(112 << 23))
    special = np.uint32(moved + np.uint32(224 << 23))
    tiny = np.float32(np.uint32(moved + np.uint32(113 << 23)).view(np.float32) - np.float32(2.0**-14)).view(np.uint32)
    finite = tiny if exponent == np.uint32(0) else normal
    return np.uint32((special if exponent == np.uint32(0x0F800000) else finite) | sign).view(np.float32)


@_inlined
def narrow_float16(value: Any) -> Any:
    """Return the bits of the float16 that is nearest to a float32, ties to even; infinity from 65520 on.

    A result below 2⁻¹⁴ is rounded by adding 0.5, whose last bit is worth as much as that of a subnormal float16
    (F. Giesen, as above). NaN keeps its sign and the upper bits of its payload.
    """
    bits = np.float32(value).view(np.uint32)
    sign = np.uint32(bits & np.uint32(0x80000000))
    size = np.uint32(bits ^ sign)
    rounded = np.uint32(size - np.uint32(112 << 23) + np.uint32(0xFFF) + ((size >> np.uint32(13)) & np.uint32(1)))
    normal = np.uint32(rounded >> np.uint32(13))
    shifted = np.float32(np.uint32(size).view(np.float32) + np.float32(0.5))
    tiny = np.uint32(np.float32(shifted).view(np.uint32) - np.uint32(0x3F000000))
    finite = tiny if size < np.uint32(113 << 23) else normal
    result = finite if size < np.uint32(143 << 23) else np.uint32(0x7C00)
    nan = np.uint32(np.uint32(0x7E00) | ((size >> np.uint32(13)) & np.uint32(0x1FF)))
    return np.uint16((nan if value != value else result) | (sign >> np.uint32(16)))


# --- One element ----------------------------------------------------------------------------------------------------


# What numba does with an element depends on its dtype: each of these three stands for one of two or three functions. An
# implementation must have the same signature as the function that chooses it, annotations included.


def _wide(bits: Any) -> Any:
    """Return an element of a source as a number of the compute dtype."""
    raise NotImplementedError


def _choose_wide(bits: Any) -> Any:
    def plain(bits: Any) -> Any:
        return bits

    def float16(bits: Any) -> Any:
        return wide_float16(bits)

    def bfloat16(bits: Any) -> Any:
        return wide_bfloat16(bits)

    return {types.int16: float16, types.uint16: bfloat16}.get(bits, plain)


_implement(_wide, _choose_wide)


def _rounded(value: Any, out: Any) -> Any:
    """Return a number of the compute dtype as an element of ``out``."""
    raise NotImplementedError


def _choose_rounded(value: Any, out: Any) -> Any:
    def plain(value: Any, out: Any) -> Any:
        return value

    def float16(value: Any, out: Any) -> Any:
        return narrow_float16(value)

    def bfloat16(value: Any, out: Any) -> Any:
        return narrow_bfloat16(value)

    return {types.int16: float16, types.uint16: bfloat16}.get(out.dtype, plain)


_implement(_rounded, _choose_rounded, inline="always")


def _keep(value: Any, index: Any, array: Any) -> None:
    """Write a number to an array that may be written: of all weights that is the master alone. None takes nothing."""
    raise NotImplementedError


def _choose_keep(value: Any, index: Any, array: Any) -> Any:
    def nothing(value: Any, index: Any, array: Any) -> None:
        pass

    def write(value: Any, index: Any, array: Any) -> None:
        array[index] = value

    return write if getattr(array, "mutable", False) else nothing


_implement(_keep, _choose_keep, inline="always")


@_inlined
def _first_numbers(numbers: Any) -> Any:
    """Return the numbers that all optimizers share, as a tuple: what is called for each element takes no arrays.

    LLVM would not inline a function that does: it counts the references to them.
    """
    return numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5], numbers[6]


@_inlined
def _merged(first: Any, second: Any, shared: Any, pair: Any, divide: Any) -> Any:
    """One element of the merge, in the compute dtype."""
    value = _wide(first) * shared[0]
    if pair:
        value = value + _wide(second) * shared[1]
    if divide:
        value = value / shared[2]
    return value


@_inlined
def _gradient(merged: Any, weight: Any, shared: Any, decay: Any) -> Any:
    """One element of ``clip(rescale · merged) + wd · w``; NaN stays NaN."""
    value = merged * shared[3]
    value = shared[4] if value < shared[4] else value
    value = shared[5] if value > shared[5] else value
    if decay:
        value = value + weight * shared[6]
    return value


# --- The loops ------------------------------------------------------------------------------------------------------


def merge(first: Any, second: Any, pair: Any, out: Any, numbers: Any, divide: Any) -> None:
    """The merge alone, without slots and weights: ``first, second, pair, out, numbers, divide``."""
    shared = _first_numbers(numbers)
    for i in range(out.size):
        out[i] = _rounded(_merged(first[i], second[i], shared, pair, divide), out)


def sgd(
    first: Any, second: Any, pair: Any, weight: Any, out: Any, numbers: Any, divide: Any, decay: Any, kept: Any
) -> None:
    """SGD without momentum. Its own numbers: η and the momentum."""
    rate = numbers[7]
    shared = _first_numbers(numbers)
    for i in range(out.size):
        value = _merged(first[i], second[i], shared, pair, divide)
        _keep(value, i, kept)
        g = _gradient(value, weight[i], shared, decay)
        w = weight[i] - g * rate
        _keep(w, i, weight)
        out[i] = _rounded(w, out)


def sgd_momentum(
    first: Any,
    second: Any,
    pair: Any,
    weight: Any,
    out: Any,
    buffer: Any,
    numbers: Any,
    divide: Any,
    decay: Any,
    kept: Any,
) -> None:
    """SGD with momentum. Its own numbers: η and the momentum."""
    rate, momentum = numbers[7], numbers[8]
    shared = _first_numbers(numbers)
    for i in range(out.size):
        value = _merged(first[i], second[i], shared, pair, divide)
        _keep(value, i, kept)
        g = _gradient(value, weight[i], shared, decay)
        b = buffer[i] * momentum + g
        buffer[i] = b
        w = weight[i] - b * rate
        _keep(w, i, weight)
        out[i] = _rounded(w, out)


def sgd_nesterov(
    first: Any,
    second: Any,
    pair: Any,
    weight: Any,
    out: Any,
    buffer: Any,
    numbers: Any,
    divide: Any,
    decay: Any,
    kept: Any,
) -> None:
    """SGD with Nesterov's momentum. Its own numbers: η and the momentum."""
    rate, momentum = numbers[7], numbers[8]
    shared = _first_numbers(numbers)
    for i in range(out.size):
        value = _merged(first[i], second[i], shared, pair, divide)
        _keep(value, i, kept)
        g = _gradient(value, weight[i], shared, decay)
        b = buffer[i] * momentum + g
        buffer[i] = b
        w = weight[i] - (g + b * momentum) * rate
        _keep(w, i, weight)
        out[i] = _rounded(w, out)


def adam(
    first: Any,
    second: Any,
    pair: Any,
    weight: Any,
    out: Any,
    mean: Any,
    variance: Any,
    numbers: Any,
    divide: Any,
    decay: Any,
    kept: Any,
) -> None:
    """Adam and AdamW. Their own numbers: β1, 1 − β1, β2, 1 − β2, step size, ε̂, and the factor of the decay."""
    beta1, rest1, beta2, rest2 = numbers[7], numbers[8], numbers[9], numbers[10]
    step_size, epsilon, left = numbers[11], numbers[12], numbers[13]
    shared = _first_numbers(numbers)
    for i in range(out.size):
        value = _merged(first[i], second[i], shared, pair, divide)
        _keep(value, i, kept)
        g = _gradient(value, weight[i], shared, decay)
        m = mean[i] * beta1 + g * rest1
        v = variance[i] * beta2 + g * g * rest2
        mean[i] = m
        variance[i] = v
        w = weight[i] * left - m / (math.sqrt(v) + epsilon) * step_size
        _keep(w, i, weight)
        out[i] = _rounded(w, out)


def adagrad(
    first: Any,
    second: Any,
    pair: Any,
    weight: Any,
    out: Any,
    total: Any,
    numbers: Any,
    divide: Any,
    decay: Any,
    kept: Any,
) -> None:
    """Adagrad. Its own numbers: the decayed η and ε."""
    rate, epsilon = numbers[7], numbers[8]
    shared = _first_numbers(numbers)
    for i in range(out.size):
        value = _merged(first[i], second[i], shared, pair, divide)
        _keep(value, i, kept)
        g = _gradient(value, weight[i], shared, decay)
        s = total[i] + g * g
        total[i] = s
        w = weight[i] - g / (math.sqrt(s) + epsilon) * rate
        _keep(w, i, weight)
        out[i] = _rounded(w, out)


def rmsprop(
    first: Any,
    second: Any,
    pair: Any,
    weight: Any,
    out: Any,
    square: Any,
    numbers: Any,
    divide: Any,
    decay: Any,
    kept: Any,
) -> None:
    """RMSProp. Its own numbers: η, α, 1 − α, ε and the momentum, as for its three relatives."""
    rate, alpha, rest, epsilon = numbers[7], numbers[8], numbers[9], numbers[10]
    shared = _first_numbers(numbers)
    for i in range(out.size):
        value = _merged(first[i], second[i], shared, pair, divide)
        _keep(value, i, kept)
        g = _gradient(value, weight[i], shared, decay)
        v = square[i] * alpha + g * g * rest
        square[i] = v
        w = weight[i] - g / (math.sqrt(v) + epsilon) * rate
        _keep(w, i, weight)
        out[i] = _rounded(w, out)


def rmsprop_momentum(
    first: Any,
    second: Any,
    pair: Any,
    weight: Any,
    out: Any,
    square: Any,
    buffer: Any,
    numbers: Any,
    divide: Any,
    decay: Any,
    kept: Any,
) -> None:
    """RMSProp with momentum."""
    rate, alpha, rest, epsilon, momentum = numbers[7], numbers[8], numbers[9], numbers[10], numbers[11]
    shared = _first_numbers(numbers)
    for i in range(out.size):
        value = _merged(first[i], second[i], shared, pair, divide)
        _keep(value, i, kept)
        g = _gradient(value, weight[i], shared, decay)
        v = square[i] * alpha + g * g * rest
        square[i] = v
        b = buffer[i] * momentum + g / (math.sqrt(v) + epsilon)
        buffer[i] = b
        w = weight[i] - b * rate
        _keep(w, i, weight)
        out[i] = _rounded(w, out)


@_inlined
def _spread(square: Any, mean: Any, zero: Any) -> Any:
    """``max(v − a², 0)`` of one element; the zero is of its dtype, since a literal would make it a float64."""
    spread = square - mean * mean
    return zero if spread < zero else spread


def rmsprop_centered(
    first: Any,
    second: Any,
    pair: Any,
    weight: Any,
    out: Any,
    square: Any,
    mean: Any,
    numbers: Any,
    divide: Any,
    decay: Any,
    kept: Any,
) -> None:
    """RMSProp, centered."""
    rate, alpha, rest, epsilon = numbers[7], numbers[8], numbers[9], numbers[10]
    zero = numbers.dtype.type(0)
    shared = _first_numbers(numbers)
    for i in range(out.size):
        value = _merged(first[i], second[i], shared, pair, divide)
        _keep(value, i, kept)
        g = _gradient(value, weight[i], shared, decay)
        v = square[i] * alpha + g * g * rest
        a = mean[i] * alpha + g * rest
        square[i] = v
        mean[i] = a
        root = math.sqrt(_spread(v, a, zero))
        w = weight[i] - g / (root + epsilon) * rate
        _keep(w, i, weight)
        out[i] = _rounded(w, out)


def rmsprop_centered_momentum(
    first: Any,
    second: Any,
    pair: Any,
    weight: Any,
    out: Any,
    square: Any,
    mean: Any,
    buffer: Any,
    numbers: Any,
    divide: Any,
    decay: Any,
    kept: Any,
) -> None:
    """RMSProp, centered and with momentum."""
    rate, alpha, rest, epsilon, momentum = numbers[7], numbers[8], numbers[9], numbers[10], numbers[11]
    zero = numbers.dtype.type(0)
    shared = _first_numbers(numbers)
    for i in range(out.size):
        value = _merged(first[i], second[i], shared, pair, divide)
        _keep(value, i, kept)
        g = _gradient(value, weight[i], shared, decay)
        v = square[i] * alpha + g * g * rest
        a = mean[i] * alpha + g * rest
        square[i] = v
        mean[i] = a
        root = math.sqrt(_spread(v, a, zero))
        b = buffer[i] * momentum + g / (root + epsilon)
        buffer[i] = b
        w = weight[i] - b * rate
        _keep(w, i, weight)
        out[i] = _rounded(w, out)


# --- Rows of tables -------------------------------------------------------------------------------------------------

# The loops above, row by row, for the optimizers of embeddings. The rows lie anywhere in memory, so the processor is
# told some rows ahead which ones come. All arrays have two dimensions and are indexed as such: a view of a row would
# have its references counted.

_AHEAD = 4  # rows that are on their way while one is updated


def _pasted(function: F) -> F:
    """A part of the loops below that takes arrays: a call would count the references to them."""
    return cast(F, _njit(**_OPTIONS, inline="always")(function))


@_pasted
def _fetch(rows: Any, number: Any) -> None:
    """Have the processor fetch a row, in lines of 64 bytes."""
    for line in range((rows.shape[1] * rows.itemsize + 63) >> 6):
        prefetch(rows, number, line << 6)


@_pasted
def _merge_row(out: Any, k: Any, a: Any, b: Any, first: Any, second: Any, shared: Any, divide: Any) -> None:
    """Merge row ``a`` of the first and row ``b`` of the second contributions into row ``k`` of ``out``; a number below
    0: there is none."""
    if b < 0:
        for j in range(out.shape[1]):
            out[k, j] = first[a, j] * shared[0]
    elif a < 0:
        for j in range(out.shape[1]):
            out[k, j] = second[b, j] * shared[1]
    else:
        for j in range(out.shape[1]):
            out[k, j] = first[a, j] * shared[0] + second[b, j] * shared[1]
    if divide:
        for j in range(out.shape[1]):
            out[k, j] = out[k, j] / shared[2]


@_pasted
def _put_aside(before: Any, number: Any, weights: Any, place: Any) -> None:
    """Copy the weights of a row to ``before``, unless that is empty: nobody wants them."""
    if number < before.shape[0]:
        for j in range(weights.shape[1]):
            before[number, j] = weights[place, j]


def take_rows(left: Any, right: Any, first: Any, second: Any, out: Any, numbers: Any, divide: Any) -> None:
    """The merged rows into ``out``. Numbers: the factors of both, and the divisor."""
    shared = numbers[0], numbers[1], numbers[2]
    for k in range(left.size):
        if k + _AHEAD < left.size and left[k + _AHEAD] >= 0:
            _fetch(first, left[k + _AHEAD])
        _merge_row(out, k, left[k], right[k], first, second, shared, divide)


def add_rows(starts: Any, ends: Any, order: Any, rows: Any, sums: Any) -> None:
    """Into each row of ``sums`` those of the rows that ``order`` names from a start to an end, in this order."""
    for k in range(starts.size):
        for j in range(sums.shape[1]):
            sums[k, j] = rows[order[starts[k]], j]
        for n in range(starts[k] + 1, ends[k]):
            for j in range(sums.shape[1]):
                sums[k, j] = sums[k, j] + rows[order[n], j]


def join_rows(ordered: Any, order: Any, rows: Any, ids: Any, out: Any) -> None:
    """The ids of an ascending list, each once, into ``ids``, and into each row of ``out`` those of the rows that
    ``order`` names for its id, added up in this order."""
    n = -1
    for k in range(order.size):
        if k + _AHEAD < order.size:
            _fetch(rows, order[k + _AHEAD])
        a = order[k]
        if k == 0 or ordered[k] != ordered[k - 1]:
            n += 1
            ids[n] = ordered[k]
            for j in range(out.shape[1]):
                out[n, j] = rows[a, j]
        else:
            for j in range(out.shape[1]):
                out[n, j] = out[n, j] + rows[a, j]


def sgd_rows(
    places: Any,
    left: Any,
    right: Any,
    first: Any,
    second: Any,
    before: Any,
    weights: Any,
    numbers: Any,
    divide: Any,
    decay: Any,
) -> None:
    """``sgd`` of the rows at these places; ``left`` and ``right`` number the contributions to each, -1 for none."""
    rate = numbers[7]
    shared, merged = _first_numbers(numbers), np.empty((1, weights.shape[1]), weights.dtype)
    for k in range(places.size):
        if k + _AHEAD < places.size:
            _fetch(weights, places[k + _AHEAD])
        p = places[k]
        _merge_row(merged, 0, left[k], right[k], first, second, shared, divide)
        _put_aside(before, k, weights, p)
        for j in range(merged.shape[1]):
            g = _gradient(merged[0, j], weights[p, j], shared, decay)
            weights[p, j] = weights[p, j] - g * rate


def sgd_momentum_rows(
    places: Any,
    left: Any,
    right: Any,
    first: Any,
    second: Any,
    before: Any,
    weights: Any,
    buffers: Any,
    numbers: Any,
    divide: Any,
    decay: Any,
) -> None:
    """``sgd_momentum``, as above."""
    rate, momentum = numbers[7], numbers[8]
    shared, merged = _first_numbers(numbers), np.empty((1, weights.shape[1]), weights.dtype)
    for k in range(places.size):
        if k + _AHEAD < places.size:
            _fetch(weights, places[k + _AHEAD])
            _fetch(buffers, places[k + _AHEAD])
        p = places[k]
        _merge_row(merged, 0, left[k], right[k], first, second, shared, divide)
        _put_aside(before, k, weights, p)
        for j in range(merged.shape[1]):
            g = _gradient(merged[0, j], weights[p, j], shared, decay)
            b = buffers[p, j] * momentum + g
            buffers[p, j] = b
            weights[p, j] = weights[p, j] - b * rate


def adam_rows(
    places: Any,
    left: Any,
    right: Any,
    first: Any,
    second: Any,
    before: Any,
    weights: Any,
    means: Any,
    variances: Any,
    numbers: Any,
    divide: Any,
    decay: Any,
) -> None:
    """``adam``, as above."""
    beta1, rest1, beta2, rest2 = numbers[7], numbers[8], numbers[9], numbers[10]
    step_size, epsilon, rest = numbers[11], numbers[12], numbers[13]
    shared, merged = _first_numbers(numbers), np.empty((1, weights.shape[1]), weights.dtype)
    for k in range(places.size):
        if k + _AHEAD < places.size:
            _fetch(weights, places[k + _AHEAD])
            _fetch(means, places[k + _AHEAD])
            _fetch(variances, places[k + _AHEAD])
        p = places[k]
        _merge_row(merged, 0, left[k], right[k], first, second, shared, divide)
        _put_aside(before, k, weights, p)
        for j in range(merged.shape[1]):
            g = _gradient(merged[0, j], weights[p, j], shared, decay)
            m = means[p, j] * beta1 + g * rest1
            v = variances[p, j] * beta2 + g * g * rest2
            means[p, j] = m
            variances[p, j] = v
            weights[p, j] = weights[p, j] * rest - m / (math.sqrt(v) + epsilon) * step_size


def adagrad_rows(
    places: Any,
    left: Any,
    right: Any,
    first: Any,
    second: Any,
    before: Any,
    weights: Any,
    totals: Any,
    numbers: Any,
    divide: Any,
    decay: Any,
) -> None:
    """``adagrad``, as above."""
    rate, epsilon = numbers[7], numbers[8]
    shared, merged = _first_numbers(numbers), np.empty((1, weights.shape[1]), weights.dtype)
    for k in range(places.size):
        if k + _AHEAD < places.size:
            _fetch(weights, places[k + _AHEAD])
            _fetch(totals, places[k + _AHEAD])
        p = places[k]
        _merge_row(merged, 0, left[k], right[k], first, second, shared, divide)
        _put_aside(before, k, weights, p)
        for j in range(merged.shape[1]):
            g = _gradient(merged[0, j], weights[p, j], shared, decay)
            s = totals[p, j] + g * g
            totals[p, j] = s
            weights[p, j] = weights[p, j] - g / (math.sqrt(s) + epsilon) * rate


# --- Compilation ----------------------------------------------------------------------------------------------------

_TYPES = {
    "float16": types.int16,
    "bfloat16": types.uint16,
    "float32": types.float32,
    "float64": types.float64,
}

# The loops, each with the number of its slots; None for the one that has no weight either.
_LOOPS: dict[str, tuple[Callable[..., None], int | None]] = {
    "merge": (merge, None),
    "sgd": (sgd, 0),
    "sgd_momentum": (sgd_momentum, 1),
    "sgd_nesterov": (sgd_nesterov, 1),
    "adam": (adam, 2),
    "adagrad": (adagrad, 1),
    "rmsprop": (rmsprop, 1),
    "rmsprop_momentum": (rmsprop_momentum, 2),
    "rmsprop_centered": (rmsprop_centered, 2),
    "rmsprop_centered_momentum": (rmsprop_centered_momentum, 3),
}


# Those of rows, in the same way: ROW_LOOPS names them.
_ROW_LOOPS: dict[str, tuple[Callable[..., None], int]] = {
    "sgd": (sgd_rows, 0),
    "sgd_momentum": (sgd_momentum_rows, 1),
    "adam": (adam_rows, 2),
    "adagrad": (adagrad_rows, 1),
}


# Those that merge rows: MERGE_LOOPS names them.
_MERGE_LOOPS: dict[str, Callable[..., None]] = {"take_rows": take_rows, "add_rows": add_rows, "join_rows": join_rows}

_WITH_TYPES = {**CODEC_LOOPS, **ID_LOOPS}


def compile_loop(name: str, source: str, target: str) -> Callable[..., None]:
    """Compile one loop for one combination of dtypes, or take it from the cache on disk; this takes up to seconds.

    The cache lies where numba puts it: NUMBA_CACHE_DIR, else beside this file, else in the user's cache. Where none
    of these can be written, or what is there cannot be read, the loop is compiled without one.

    Args:
        name: one of the loops above, or that with ``KEEPING`` or ``ROWS`` behind it; or one of codecs, or on row ids.
        source, target: the names of the dtypes of the contributions and of ``out``.

    Returns:
        The loop. It takes arrays that are C-contiguous, of any alignment; those that it only reads may be read-only.
    """
    if name in _WITH_TYPES:
        loop, signature = _WITH_TYPES[name]
    elif name in _MERGE_LOOPS:
        loop, signature = _MERGE_LOOPS[name], _merge_signature(name, target)
    elif name.endswith(ROWS):
        loop, slots = _ROW_LOOPS[name.removesuffix(ROWS)]
        signature = _row_signature(slots, target)
    else:
        loop, slots_or_none = _LOOPS[name.removesuffix(KEEPING)]
        signature = _signature(slots_or_none, source, target, name.endswith(KEEPING))
    try:
        return _compiled(loop, signature, cache=True)
    except Exception:  # noqa: BLE001 - a cache on disk fails in many ways, and a second failure is no fault of it
        return _compiled(loop, signature, cache=False)


def _compiled(function: Callable[..., None], signature: tuple[Any, ...], cache: bool) -> Callable[..., None]:
    dispatcher = _njit(**_OPTIONS, cache=cache)(function)
    dispatcher.compile(signature)
    dispatcher.disable_compile()  # a call with other types must fail, not compile
    return cast(Callable[..., None], dispatcher)


def _signature(slots: int | None, source: str, target: str, keeps: bool) -> tuple[Any, ...]:
    compute = types.float64 if target == "float64" else types.float32
    half = target in ("float16", "bfloat16")
    given = _array(_TYPES[source], readonly=True)
    sources = (given, given, types.boolean)
    out, numbers = _array(_TYPES[target], readonly=False), _array(compute, readonly=True)
    if slots is None:
        return *sources, out, numbers, types.boolean
    weight = _array(compute, readonly=not half)
    writable = _array(compute, readonly=False)
    kept = writable if keeps else types.none
    return *sources, weight, out, *[writable] * slots, numbers, types.boolean, types.boolean, kept


def _row_signature(slots: int, target: str) -> tuple[Any, ...]:
    compute = _TYPES[target]
    whole = _array(types.int64, readonly=True)
    given, kept = _array(compute, readonly=True, ndim=2), _array(compute, readonly=False, ndim=2)
    numbers, flag = _array(compute, readonly=True), types.boolean
    return whole, whole, whole, given, given, kept, kept, *[kept] * slots, numbers, flag, flag


def _merge_signature(name: str, target: str) -> tuple[Any, ...]:
    compute = _TYPES[target]
    whole = _array(types.int64, readonly=True)
    given, made = _array(compute, readonly=True, ndim=2), _array(compute, readonly=False, ndim=2)
    if name == "add_rows":
        return whole, whole, whole, given, made
    if name == "join_rows":
        return whole, whole, given, _array(types.int64, readonly=False), made
    return whole, whole, given, given, made, _array(compute, readonly=True), types.boolean


def _array(dtype: Any, readonly: bool, ndim: int = 1) -> Any:
    # A read-only, unaligned signature also takes arrays that are writable or aligned.
    return types.Array(dtype, ndim, "C", readonly=readonly, aligned=False)
