"""Values that are pulled into arrays of another floating dtype, because the program said `cast=True`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvd.client.calls.keys import KeyList
from kvd.client.calls.values import Array, Source, checked_out, fill, on_devices, paired, spec_of
from kvd.compute.quiet import quietly
from kvd.protocol.specs import MAX_SLICE_BYTES, KeySpec


class _Out(NamedTuple):
    """An array of the program, and what it is like."""

    array: Any
    spec: KeySpec
    dtype: np.dtype[Any]


class CastOuts:
    """The arrays that a call with `cast=True` fills; each may have a dtype of its own.

    Args:
        out: as the program gave it.

    Raises:
        NotAllowed: an array cannot be written to.
        DtypeMismatch: no key can have its dtype.
    """

    def __init__(self, keys: KeyList, out: Any) -> None:
        self._keys = keys
        self._out = out
        by_name = keys.by_name(paired(keys, out, "outs"))
        self._outs = [[_described(array) for array in on_devices(entries)] for entries in by_name]

    def check_shapes(self, sources: Sequence[Source]) -> None:
        """Raises ShapeMismatch or DtypeMismatch unless what is pulled goes into what is pushed."""
        for name, source, outs in zip(self._keys.names, sources, self._outs, strict=True):
            for out in outs:
                source.spec.check_same(out.spec, self._keys.written.get(name, name), cast=True)

    def fill(self, values: Sequence[Array]) -> Any:
        """Writes the values of the keys into the arrays. Returns `out` as the program gave it.

        Raises:
            ShapeMismatch, DtypeMismatch: an array does not fit its key.
        """
        for name, value, outs in zip(self._keys.names, values, self._outs, strict=True):
            spec = spec_of(value.dtype, value.shape, MAX_SLICE_BYTES)
            for out in outs:
                spec.check_same(out.spec, self._keys.written.get(name, name), cast=True)
        for value, outs in zip(values, self._outs, strict=True):
            for out in outs:
                fill(out.array, quietly(value.astype, out.dtype))
        return list(self._out) if self._keys.many else self._out


def cast_values(values: Array, dtype: np.dtype[Any]) -> Array:
    """The values in this dtype; the same array if they have it."""
    return values if values.dtype == dtype else quietly(values.astype, dtype)


def _described(array: Any) -> _Out:
    like = checked_out(array)
    return _Out(array, spec_of(like.dtype, like.shape, MAX_SLICE_BYTES), like.dtype)
