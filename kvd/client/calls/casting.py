"""Values that are pulled into arrays of another floating dtype, because the program said `cast=True`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvd.client.calls.keys import KeyList
from kvd.client.calls.values import (
    Array,
    Source,
    Unlike,
    check_apart,
    checked_out,
    fill,
    of_each,
    on_devices,
    paired,
    spec_of,
)
from kvd.compute.quiet import quietly
from kvd.protocol.specs import DTYPES, MAX_SLICE_BYTES, KeySpec


class _Out(NamedTuple):
    """An array of the program, and what it is like."""

    array: Any
    spec: KeySpec
    dtype: np.dtype[Any]
    memory: Array


class CastOuts:
    """The arrays that a call with `cast=True` fills; each may have a dtype of its own.

    Args:
        out: as the program gave it.
        in_place: as in `targets_by_name`.

    Raises:
        NotAllowed: an array cannot be written to, or shares memory with another one.
        DtypeMismatch: no key can have its dtype.
    """

    def __init__(self, keys: KeyList, out: Any, in_place: str = "") -> None:
        self._keys = keys
        self._out = out
        by_name = keys.by_name(paired(keys, out, "values" if in_place else "outs"))
        self._outs = of_each(keys, by_name, lambda _, entries: _all_described(entries, in_place))
        check_apart(keys, [[out.memory for out in outs] for outs in self._outs])

    def first_unlike(self, sources: Sequence[Source]) -> Unlike | None:
        """The first key of which what is pulled does not go into what is pushed; None: they all fit."""
        for name, source, outs in zip(self._keys.names, sources, self._outs, strict=True):
            for out in outs:
                floats = DTYPES[source.spec.dtype].is_float and DTYPES[out.spec.dtype].is_float
                if source.spec.shape != out.spec.shape or not (floats or source.spec.dtype == out.spec.dtype):
                    return Unlike(name, source.spec, out.spec, cast=True)
        return None

    def check(self, specs: Sequence[KeySpec]) -> None:
        """Raises ShapeMismatch or DtypeMismatch if an array does not fit its key, of these specs."""
        for name, spec, outs in zip(self._keys.names, specs, self._outs, strict=True):
            for out in outs:
                spec.check_same(out.spec, self._keys.key(name), cast=True, what="out")

    def fill(self, values: Sequence[Array]) -> Any:
        """Writes the values of the keys into the arrays. Returns `out` as the program gave it.

        Raises:
            ShapeMismatch, DtypeMismatch: an array does not fit its key.
        """
        self.check([spec_of(value.dtype, value.shape, MAX_SLICE_BYTES) for value in values])
        for value, outs in zip(values, self._outs, strict=True):
            for out in outs:
                fill(out.array, quietly(value.astype, out.dtype))
        return list(self._out) if self._keys.many else self._out


def cast_values(values: Array, dtype: np.dtype[Any]) -> Array:
    """The values in this dtype; the same array if they have it."""
    return values if values.dtype == dtype else quietly(values.astype, dtype)


def _all_described(entries: Sequence[Any], in_place: str) -> list[_Out]:
    return [_described(array, in_place) for array in on_devices(entries)]


def _described(array: Any, in_place: str) -> _Out:
    like, memory = checked_out(array, in_place)
    return _Out(array, spec_of(like.dtype, like.shape, MAX_SLICE_BYTES), like.dtype, memory)
