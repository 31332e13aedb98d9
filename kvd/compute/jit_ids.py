"""The loops on row ids that numba compiles: they give the results of NumPy's arrays in `kvd.tables`, one id at a time.

Imported by `kvd.compute.jit` alone. What the loops inline stands here, too, but for `prefetch`: numba's cache on disk
notices only changes of the file that defines a loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types

from kvd.compute.jit_prefetch import prefetch

_njit: Any = numba.njit
_FREE = -1  # a slot of `kvd.tables.row_index` that no id has
_AHEAD = 12  # look-ups that are on their way while one is made
_DIGIT_BITS = 11
_DIGITS = 1 << _DIGIT_BITS


def _home_of(row: Any, mask: Any) -> Any:
    """The slot at which the search for an id begins: `kvd.tables.counted_bits.mix`, cut off."""
    bits = np.uint64(row)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.int64((bits ^ (bits >> np.uint64(31))) & np.uint64(mask))


_home = _njit(nogil=True)(_home_of)


def find_ids(ids: Any, slot_ids: Any, slot_places: Any, found: Any) -> Any:
    """The place of each id into ``found``; -1 for those that have none, the number of which it returns."""
    mask, absent = slot_ids.size - 1, 0
    for k in range(ids.size):
        if k + _AHEAD < ids.size:
            coming = _home(ids[k + _AHEAD], mask)
            prefetch(slot_ids, coming, 0)
            prefetch(slot_places, coming, 0)
        at = _home(ids[k], mask)
        while slot_ids[at] != ids[k] and slot_ids[at] != _FREE:
            at = (at + 1) & mask
        found[k] = slot_places[at] if slot_ids[at] == ids[k] else -1
        absent += found[k] < 0
    return absent


def put_ids(ids: Any, places: Any, slot_ids: Any, slot_places: Any) -> None:
    """Give ids that have none a slot each, with these places."""
    mask = slot_ids.size - 1
    for k in range(ids.size):
        if k + _AHEAD < ids.size:
            coming = _home(ids[k + _AHEAD], mask)
            prefetch(slot_ids, coming, 0)
            prefetch(slot_places, coming, 0)
        at = _home(ids[k], mask)
        while slot_ids[at] != _FREE:
            at = (at + 1) & mask
        slot_ids[at] = ids[k]
        slot_places[at] = places[k]


def sort_ids(ids: Any, ordered: Any, order: Any) -> Any:
    """The ids, which are ≥ 0, ascending, and the place of each in ``ids``; equal ones in the order of their places.
    Returns how many differ.

    A radix sort, digit by digit from the lowest on. A digit that all of them share is left out.
    """
    keys, places = ids.copy(), np.arange(ids.size)
    other_keys, other_places = np.empty_like(keys), np.empty_like(places)
    differing = np.int64(0)
    for k in range(ids.size):
        differing |= ids[k] ^ ids[0]
    for shift in range(0, 63, _DIGIT_BITS):
        if (differing >> shift) & (_DIGITS - 1) == 0:
            continue
        next_of = np.zeros(_DIGITS, np.int64)
        for k in range(keys.size):
            next_of[(keys[k] >> shift) & (_DIGITS - 1)] += 1
        total = 0
        for digit in range(_DIGITS):
            count = next_of[digit]
            next_of[digit] = total
            total += count
        for k in range(keys.size):
            digit = (keys[k] >> shift) & (_DIGITS - 1)
            at = next_of[digit]
            next_of[digit] = at + 1
            other_keys[at], other_places[at] = keys[k], places[k]
        keys, other_keys = other_keys, keys
        places, other_places = other_places, places
    distinct = np.int64(0)
    for k in range(keys.size):
        ordered[k], order[k] = keys[k], places[k]
        distinct += k == 0 or keys[k] != keys[k - 1]
    return distinct


def merge_ids(first: Any, second: Any, ids: Any, left: Any, right: Any) -> Any:
    """The ids of two lists, both ascending, and the place of each in either list, or -1. Returns how many they are.

    Which list has the next id cannot be guessed, so the loop does the same in either case.
    """
    a, b, n = 0, 0, 0
    while a < first.size and b < second.size:
        x, y = first[a], second[b]
        ids[n] = min(x, y)
        left[n] = a if x <= y else -1
        right[n] = b if y <= x else -1
        a += x <= y
        b += y <= x
        n += 1
    for k in range(a, first.size):
        ids[n], left[n], right[n] = first[k], k, -1
        n += 1
    for k in range(b, second.size):
        ids[n], left[n], right[n] = second[k], -1, k
        n += 1
    return n


def _array(dtype: Any, readonly: bool) -> Any:
    return types.Array(dtype, 1, "C", readonly=readonly, aligned=False)


_GIVEN, _MADE = _array(types.int64, readonly=True), _array(types.int64, readonly=False)
_PLACES_GIVEN, _PLACES_MADE = _array(types.int32, readonly=True), _array(types.int32, readonly=False)

LOOPS: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
    "find_ids": (find_ids, (_GIVEN, _GIVEN, _PLACES_GIVEN, _MADE)),
    "put_ids": (put_ids, (_GIVEN, _GIVEN, _MADE, _PLACES_MADE)),
    "sort_ids": (sort_ids, (_GIVEN, _MADE, _MADE)),
    "merge_ids": (merge_ids, (_GIVEN, _GIVEN, _MADE, _MADE, _MADE)),
}
"""Each with the types of its arguments."""
