"""Plain calls: arrays in the program's memory, pushed and pulled under keys that an earlier call has looked at.

A training loop makes the same call again and again. Its keys are recognised, and nothing about them is found out anew.
Its arrays are looked at each time, since a program may pass others, or change the shape of one. They are not kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple

import numpy as np

from kvd.client.calls.keys import KeyList
from kvd.client.calls.values import BYTE, spec_of
from kvd.client.cluster.bound_keys import BoundKeys
from kvd.core.requests import Item

MOST_KEYS = 1 << 16  # that are recognised one by one
MOST_LISTS = 64  # and of the lists of keys, which are forgotten together


class PlainCall(NamedTuple):
    """The names of a call, and its items as `Arguments` would make them."""

    names: Sequence[str]
    items: tuple[Item, ...]


class PlainCalls:
    """Recognises plain calls. Calls of several threads may come at the same time.

    Args:
        bound: the keys whose arrays are the store's.
        slice_bytes: the size of the slices in this cluster.
    """

    def __init__(self, bound: BoundKeys, slice_bytes: int) -> None:
        self._bound = bound
        self._slice_bytes = slice_bytes
        self._keys: set[str] = set()
        self._lists: dict[tuple[int, str, str], tuple[str, ...]] = {}  # by number, first and last of the keys

    def note(self, key: Any, keys: KeyList) -> None:
        """A call on these keys, none of which is a table, was looked at: `key` as the program gave it."""
        if type(key) is str:
            if len(self._keys) < MOST_KEYS:
                self._keys.add(key)
        elif keys.places is None and not keys.written and type(key) in (list, tuple) and keys.names:
            if len(self._lists) >= MOST_LISTS:
                self._lists.clear()
            names = tuple(keys.names)
            self._lists[len(names), names[0], names[-1]] = names

    def find(self, key: Any, value: Any, out: Any) -> PlainCall | None:
        """The call, if it is a plain one; of all others None.

        Args:
            value, out: an array each for one key, else a list.
        """
        if type(key) is str:
            item = self._item(key, value, out) if key in self._keys else None
            return None if item is None else PlainCall([key], (item,))
        names = self._names_of(key)
        if names is None or type(value) not in (list, tuple) or type(out) not in (list, tuple):
            return None
        if not len(names) == len(value) == len(out):
            return None
        items = []
        for each in zip(names, value, out, strict=True):
            item = self._item(*each)
            if item is None:
                return None
            items.append(item)
        return PlainCall(names, tuple(items))

    def _names_of(self, key: Any) -> tuple[str, ...] | None:
        """The names of a list of keys that was seen before: the same objects, in the same order."""
        if type(key) not in (list, tuple) or not key or type(key[0]) is not str or type(key[-1]) is not str:
            return None
        names = self._lists.get((len(key), key[0], key[-1]))
        return names if names is not None and all(map(is_, key, names)) else None

    def _item(self, name: str, value: Any, out: Any) -> Item | None:
        """Of two arrays that are alike and lie in the memory of the program, as most do; None of others, and of keys
        that are bound."""
        if type(value) is not np.ndarray or type(out) is not np.ndarray:
            return None
        dtype, shape = value.dtype, value.shape
        if out.dtype != dtype or out.shape != shape or not dtype.isnative or self._bound.has(name):
            return None
        if not value.flags.c_contiguous or not out.flags.carray:
            return None
        spec = spec_of(dtype, shape, self._slice_bytes)
        return Item(name, spec, value.ravel().view(BYTE), out.ravel().view(BYTE))
