"""Calls on a list of keys whose arrays are like those of an earlier call: looked at by loops in C, not one by one.

What is looked at, each time and of each array, is all that a program may change in an array that it passes again: its
type, dtype, shape, order in memory, and whether it can be written to. So it does not matter whether the arrays are the
same objects, and none of them is kept. Where an array lies is asked when its bytes are moved, and, of those that are
written to, when they are not the objects of the last call: no two may share memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import attrgetter, call, is_
from typing import Any
from weakref import ref

import numpy as np

from kvd.client.calls.values import BYTE, Array, spec_of
from kvd.compute.overlap import addresses_of, are_apart
from kvd.core.requests import Item, ListedKeys

_dtype, _shape = attrgetter("dtype"), attrgetter("shape")
_is_contiguous, _is_writable_too = attrgetter("flags.c_contiguous"), attrgetter("flags.carray")
_has_own_memory = attrgetter("flags.owndata")


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

    __slots__ = ("_apart", "_dtypes", "_shapes", "_sizes", "bound_changes", "keys")

    def __init__(self, names: Sequence[str], values: Sequence[Array], slice_bytes: int, bound_changes: int) -> None:
        """Of values that are as `are_plain` wants them.

        Raises:
            DtypeMismatch, NotAllowed: no key can have such a value.
        """
        self._dtypes = list(map(_dtype, values))
        self._shapes = list(map(_shape, values))
        specs = map(spec_of, self._dtypes, self._shapes, repeat(slice_bytes))
        self.keys = ListedKeys(names, list(specs))
        self._sizes = [spec.nbytes for spec in self.keys.specs]
        self._apart: tuple[ref[Array], ...] = ()  # the arrays that were written to last, and share no memory
        self.bound_changes = bound_changes

    def fit(self, values: Sequence[Any], outs: Sequence[Any]) -> bool:
        """Whether these are arrays of the same forms, `outs` such that can be written to, and share no memory; one per
        key."""
        if outs is values:
            return self._are_alike(outs) and all(map(_is_writable_too, outs)) and self._are_apart(outs)
        return (
            self._are_alike(values)
            and self._are_alike(outs)
            and all(map(_is_contiguous, values))
            and all(map(_is_writable_too, outs))
            and self._are_apart(outs)
        )

    def _are_apart(self, outs: Sequence[Array]) -> bool:
        """Whether no two of these arrays, which have the forms, share memory. Those of the last call are known."""
        known = self._apart
        if known and all(map(is_, outs, map(call, known))):
            return True
        if all(map(_has_own_memory, outs)):
            if len(set(map(id, outs))) < len(outs):
                return False
        elif not are_apart(addresses_of(outs), self._sizes):
            return False
        self._apart = tuple(map(ref, outs))
        return True

    def _are_alike(self, arrays: Sequence[Any]) -> bool:
        return (
            list(map(type, arrays)).count(np.ndarray) == len(self._dtypes)
            and list(map(_dtype, arrays)) == self._dtypes
            and list(map(_shape, arrays)) == self._shapes
        )


def are_plain(values: Iterable[Any]) -> bool:
    """Whether all are arrays in the byte order of this machine."""
    return all(type(value) is np.ndarray and value.dtype.isnative for value in values)
