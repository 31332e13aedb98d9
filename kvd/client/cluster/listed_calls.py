"""Calls on a list of keys whose arrays are like those of an earlier call: looked at by loops in C, not one by one.

What is looked at, each time and of each array, is all that a program may change in an array that it passes again: its
type, dtype, shape, order in memory, and whether it can be written to. So it does not matter whether the arrays are the
same objects, and none of them is kept. Those that are written to share no memory. Where an array lies is asked again
when its bytes are moved.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any

import numpy as np

from kvd.client.calls.values import BYTE, Array, spec_of
from kvd.compute.overlap import are_apart
from kvd.core.requests import Item, ListedKeys

_dtype, _shape = attrgetter("dtype"), attrgetter("shape")
_is_contiguous, _is_writable_too = attrgetter("flags.c_contiguous"), attrgetter("flags.carray")


class ListedCall:
    """The arrays of one call: see `kvd.core.requests.Listed`."""

    __slots__ = ("_items", "_lock", "keys", "sources", "targets")

    def __init__(self, keys: ListedKeys, sources: Sequence[Array], targets: Sequence[Array]) -> None:
        self.keys = keys
        self.sources = tuple(sources)
        self.targets = tuple(targets)
        self._items: tuple[Item, ...] | None = None
        self._lock = threading.Lock()

    def items(self) -> tuple[Item, ...]:
        with self._lock:
            if self._items is None:
                entries = zip(self.keys.names, self.keys.specs, self.sources, self.targets, strict=True)
                self._items = tuple(
                    [
                        Item(name, spec, value.ravel().view(BYTE), out.ravel().view(BYTE))
                        for name, spec, value, out in entries
                    ]
                )
            return self._items


class ArrayForms:
    """What the arrays for the keys of a list were like, and so what others must be like to need no other look.

    Attributes:
        keys: the list; its specs are those of the arrays.
        bound_changes: `BoundKeys.changes` when none of the keys was bound.
    """

    __slots__ = ("_dtypes", "_shapes", "_sizes", "bound_changes", "keys")

    def __init__(self, names: Sequence[str], values: Sequence[Array], slice_bytes: int, bound_changes: int) -> None:
        """Of values that are as `are_plain` wants them.

        Raises:
            DtypeMismatch, NotAllowed: no key can have such a value.
        """
        self._dtypes = list(map(_dtype, values))
        self._shapes = list(map(_shape, values))
        specs = map(spec_of, self._dtypes, self._shapes, repeat(slice_bytes))
        self.keys = ListedKeys(names, list(specs))
        self._sizes = np.array([spec.nbytes for spec in self.keys.specs], np.intp)
        self.bound_changes = bound_changes

    def fit(self, values: Sequence[Any], outs: Sequence[Any]) -> bool:
        """Whether these are arrays of the same forms, `outs` such that can be written to, which share no memory, and
        none with the value of another key; one per key."""
        for arrays in (outs,) if outs is values else (values, outs):
            if (
                list(map(type, arrays)).count(np.ndarray) != len(self._dtypes)
                or list(map(_dtype, arrays)) != self._dtypes
                or list(map(_shape, arrays)) != self._shapes
            ):
                return False
        return (
            all(map(_is_writable_too, outs))
            and (outs is values or all(map(_is_contiguous, values)))
            and are_apart(outs, self._sizes, None if outs is values else values)
        )


def are_plain(values: Iterable[Any]) -> bool:
    """Whether all are arrays in the byte order of this machine."""
    return all(type(value) is np.ndarray and value.dtype.isnative for value in values)
