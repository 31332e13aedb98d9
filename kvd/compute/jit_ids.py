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
_SALT = 0xD1B54A32D192ED03  # of `kvd.tables.parts`


def _mix_of(bits: Any) -> Any:
    """`kvd.tables.counted_bits.mix`."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


_mix = _njit(nogil=True)(_mix_of)


def _home_of(row: Any, mask: Any) -> Any:
    """Return the slot at which the search for an id begins."""
    return np.int64(_mix(np.uint64(row)) & np.uint64(mask))


def _part_of(row: Any, parts: Any) -> Any:
    """`kvd.tables.parts.parts_of`."""
    high = _mix(np.uint64(row) ^ np.uint64(_SALT)) >> np.uint64(32)
    return np.int64((high * np.uint64(parts)) >> np.uint64(32))


_home = _njit(nogil=True)(_home_of)
_part = _njit(nogil=True)(_part_of)


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


def are_ascending(ids: Any) -> bool:
    """Return whether the ids are strictly ascending."""
    wrong = np.int64(0)
    for k in range(1, ids.size):
        wrong += ids[k] <= ids[k - 1]
    return bool(wrong == 0)


def count_ids(ids: Any) -> int:
    """Return the number of distinct ids, which are ≥ 0."""
    slots = 2
    while slots < 2 * ids.size:
        slots *= 2
    seen, mask, distinct = np.full(slots, _FREE), slots - 1, 0
    for k in range(ids.size):
        at = _home(ids[k], mask)
        while seen[at] != ids[k] and seen[at] != _FREE:
            at = (at + 1) & mask
        distinct += seen[at] == _FREE
        seen[at] = ids[k]
    return distinct


def split_ids(ids: Any, by_part: Any, where: Any, ends: Any) -> None:
    """The ids in the order of their parts, those of a part in the order in which they came, and where each of them is;
    and where each part ends."""
    part_of = np.empty(ids.size, np.int64)
    next_of = np.zeros(ends.size, np.int64)
    for k in range(ids.size):
        part_of[k] = _part(ids[k], ends.size)
        next_of[part_of[k]] += 1
    total = 0
    for part in range(ends.size):
        count = next_of[part]
        next_of[part] = total
        total += count
        ends[part] = total
    for k in range(ids.size):
        at = next_of[part_of[k]]
        next_of[part_of[k]] = at + 1
        by_part[at], where[k] = ids[k], at


def part_ids(ordered: Any, order: Any, by_part: Any, order_by_part: Any, ends: Any, distinct_ends: Any) -> None:
    """An ascending list in the order of the parts, with the numbers beside it; where each part ends, and where it ended
    if each id were there once."""
    where = np.empty(ordered.size, np.int64)
    split_ids_(ordered, by_part, where, ends)
    distinct = np.zeros(ends.size, np.int64)
    for k in range(ordered.size):
        order_by_part[where[k]] = order[k]
        if k == 0 or ordered[k] != ordered[k - 1]:
            distinct[_part(ordered[k], ends.size)] += 1
    total = 0
    for part in range(ends.size):
        total += distinct[part]
        distinct_ends[part] = total


split_ids_ = _njit(nogil=True)(split_ids)


def _array(dtype: Any, readonly: bool) -> Any:
    return types.Array(dtype, 1, "C", readonly=readonly, aligned=False)


_GIVEN, _MADE = _array(types.int64, readonly=True), _array(types.int64, readonly=False)
_PLACES_GIVEN, _PLACES_MADE = _array(types.int32, readonly=True), _array(types.int32, readonly=False)

LOOPS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "find_ids": (find_ids, (_GIVEN, _GIVEN, _PLACES_GIVEN, _MADE)),
    "put_ids": (put_ids, (_GIVEN, _GIVEN, _MADE, _PLACES_MADE)),
    "sort_ids": (sort_ids, (_GIVEN, _MADE, _MADE)),
    "merge_ids": (merge_ids, (_GIVEN, _GIVEN, _MADE, _MADE, _MADE)),
    "are_ascending": (are_ascending, (_GIVEN,)),
    "count_ids": (count_ids, (_GIVEN,)),
    "split_ids": (split_ids, (_GIVEN, _MADE, _MADE, _MADE)),
    "part_ids": (part_ids, (_GIVEN, _GIVEN, _MADE, _MADE, _MADE, _MADE)),
}
"""Each with the types of its arguments."""
