"""Row ids in ascending order, each once; rows of the same id are added up, in the order in which they came."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvd.compute.compiled import id_loop
from kvd.compute.quiet import quietly
from kvd.tables.merged_rows import Array, Ids, MergedRows, Places

_FEW_BITS = 1 << 31  # ids below this are sorted together with their places
_ROUNDS = 8  # of additions of whole arrays; what comes up more often is added one by one


def distinct_ids(ids: Ids) -> tuple[Ids, Places]:
    """Each id once, ascending, and the place among these of each of `ids`."""
    ordered, order = in_order(ids)
    is_first = _firsts(ordered)
    where = np.empty(len(ids), np.intp)
    where[order] = np.cumsum(is_first) - 1
    return ordered[is_first], where


def added_up(ids: Ids, rows: Array) -> MergedRows:
    """These rows, shape (ids, width); of the same id, their sum."""
    ordered, order = in_order(ids)
    is_first = _firsts(ordered)
    starts = np.flatnonzero(is_first)
    left, right = order[starts], np.full(len(starts), -1)
    if len(starts) == len(ids):
        return MergedRows(ordered, left, right, rows, rows[:0])
    group = np.cumsum(is_first) - 1
    rest = np.flatnonzero(~is_first)
    summed = np.unique(group[rest])
    number = np.searchsorted(summed, group[rest])  # of the sum that a row goes into
    turn = rest - starts[group[rest]]  # 1 for the second of its id
    sums = rows[left[summed]]
    quietly(_add_in_turn, sums, rows, order[rest], number, turn)
    left[summed], right[summed] = -1, np.arange(len(summed))
    return MergedRows(ordered[starts], left, right, rows, sums)


def of_both(first: Ids, second: Ids) -> tuple[Ids, Places, Places]:
    """The ids of two lists, ascending as both are, and the place of each in either list; -1: it is not there."""
    total = len(first) + len(second)
    loop = id_loop("merge_ids", total)
    if loop is not None:
        found, count = np.empty((3, total), np.int64), np.zeros(1, np.int64)
        loop(first, second, *found, count)
        ids, left, right = found[:, : count[0]]
        return ids, left, right
    ordered, order = in_order(np.concatenate((first, second)))
    is_first = _firsts(ordered)
    group = np.cumsum(is_first) - 1
    left, right = np.full((2, int(group[-1]) + 1 if len(group) else 0), -1)
    from_second = order >= len(first)
    left[group[~from_second]] = order[~from_second]
    right[group[from_second]] = order[from_second] - len(first)
    return ordered[is_first], left, right


def in_order(ids: Ids) -> tuple[Ids, Places]:
    """The ids, ascending, and the place of each of them in `ids`; those of the same id in the order of their places."""
    loop = id_loop("sort_ids", len(ids))
    if loop is not None:
        ordered, order = np.empty((2, len(ids)), np.int64)
        loop(ids, ordered, order)
        return ordered, order
    if len(ids) and int(ids.max()) >= _FEW_BITS:
        order = np.argsort(ids, kind="stable")
        return ids[order], order
    keyed = (ids << 32) | np.arange(len(ids))  # one sort of these takes half the time of a stable argsort
    keyed.sort()
    return keyed >> 32, keyed & 0xFFFFFFFF


def _firsts(ordered: Ids) -> np.ndarray[Any, np.dtype[np.bool_]]:
    is_first = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    return is_first


def _add_in_turn(sums: Array, rows: Array, order: Places, number: Places, turn: Places) -> None:
    for current in range(1, min(_ROUNDS, int(turn.max())) + 1):
        now = np.flatnonzero(turn == current)
        sums[number[now]] += rows[order[now]]
    later = np.flatnonzero(turn > _ROUNDS)
    if later.size:  # ascending, so each sum gets its rows in order
        np.add.at(sums, number[later], rows[order[later]])
