"""Plain calls: arrays in the program's memory, pushed and pulled under keys that an earlier call has looked at.

A training loop makes the same call again and again. Its keys are recognised, and nothing about them is found out anew.
Its arrays are looked at each time, since a program may pass others, or change the shape of one. They are not kept.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from operator import is_
from typing import Any, NamedTuple

import numpy as np

from kvd.client.calls.keys import KeyList
from kvd.client.calls.values import BYTE, spec_of
from kvd.client.cluster.bound_keys import BoundKeys
from kvd.client.cluster.listed_calls import ArrayForms, ListedCall, are_plain
from kvd.core.requests import Item
from kvd.transport.links.frames import INLINE_BELOW_BYTES

MOST_KEYS = 1 << 16  # that are recognised one by one
MOST_LISTS = 64  # and of the lists of keys, which are forgotten together


class PlainCall(NamedTuple):
    """The names of a call, and its one item as `Arguments` would make it, or what stands in place of the items."""

    names: Sequence[str]
    items: tuple[Item, ...]
    listed: ListedCall | None = None

    def sources(self) -> list[Any]:
        """What the machine reads: bytes of the arrays that are pushed."""
        return [item.source for item in (self.items if self.listed is None else self.listed.items())]


class RepeatedList:
    """The names of a list of keys, and what the arrays of the last plain call on it were like."""

    __slots__ = ("forms", "names")

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.forms: ArrayForms | None = None


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
        self._lists: dict[tuple[int, str, str], RepeatedList] = {}  # by number, first and last of the keys

    def note(self, key: Any, keys: KeyList) -> None:
        """A call on these keys, none of which is a table, was looked at: `key` as the program gave it."""
        if type(key) is str:
            if len(self._keys) < MOST_KEYS:
                self._keys.add(key)
        elif keys.places is None and not keys.written and type(key) in (list, tuple) and keys.names:
            if len(self._lists) >= MOST_LISTS:
                self._lists.clear()
            names = tuple(keys.names)
            self._lists[len(names), names[0], names[-1]] = RepeatedList(names)

    def forget(self, names: Set[str]) -> None:
        """Keys with these names are deleted."""
        self._keys.difference_update(names)
        self._lists = {place: repeated for place, repeated in self._lists.items() if names.isdisjoint(repeated.names)}

    def find(self, key: Any, value: Any, out: Any) -> PlainCall | None:
        """The call, if it is a plain one; of all others None.

        Args:
            value, out: an array each for one key, else a list.
        """
        if type(key) is str:
            item = self._item(key, value, out) if key in self._keys else None
            return None if item is None else PlainCall([key], (item,))
        repeated = self._list_of(key)
        if repeated is None or type(value) not in (list, tuple) or type(out) not in (list, tuple):
            return None
        if not len(repeated.names) == len(value) == len(out):
            return None
        forms = repeated.forms
        if forms is None or forms.bound_changes != self._bound.changes or not forms.fit(value, out):
            forms = self._forms_of(repeated.names, value, out)
            if forms is None:
                return None
            repeated.forms = forms
        return PlainCall(repeated.names, (), ListedCall(forms.keys, value, out))

    def _list_of(self, key: Any) -> RepeatedList | None:
        """A list of keys that was seen before: the same objects, in the same order."""
        if type(key) not in (list, tuple) or not key or type(key[0]) is not str or type(key[-1]) is not str:
            return None
        repeated = self._lists.get((len(key), key[0], key[-1]))
        return repeated if repeated is not None and all(map(is_, key, repeated.names)) else None

    def _forms_of(self, names: tuple[str, ...], values: Sequence[Any], outs: Sequence[Any]) -> ArrayForms | None:
        """Of arrays that are alike and lie in the memory of the program, for keys that are not bound; else None."""
        changes = self._bound.changes
        if any(map(self._bound.has, names)) or not are_plain(values):
            return None
        forms = ArrayForms(names, values, self._slice_bytes, changes)
        return forms if forms.fit(values, outs) else None

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
        if value is not out and value.nbytes > INLINE_BELOW_BYTES and np.may_share_memory(value, out):
            return None  # the first part of the answer may come before the last part of the value has left
        spec = spec_of(dtype, shape, self._slice_bytes)
        return Item(name, spec, value.ravel().view(BYTE), out.ravel().view(BYTE))
