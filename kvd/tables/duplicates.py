"""Row ids in ascending order, each once; rows of the same id are added up, in the order in which they came."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvd.compute.compiled import id_loop, loop_for
from kvd.compute.quiet import quietly
from kvd.tables.merged_rows import Array, Ids, MergedRows, Places

_FEW_BITS = 1 << 31  # ids below this are sorted together with their places
_ROUNDS = 8  # of additions of whole arrays; what comes up more often is added one by one


class InOrder(NamedTuple):
    """Ids in ascending order.

    Attributes:
        places: of each of them in the list that they were in; those of the same id in their order.
        num_distinct: how many differ.
    """

    ids: Ids
    places: Places
    num_distinct: int


def added_up(ids: Ids, rows: Array) -> MergedRows:
    """Return the rows, shape (ids, width), with those of the same id added up."""
    return _added_up(in_order(ids), rows)


def add_up_into(given: InOrder, rows: Array, ids: Ids, out: Array) -> None:
    """Add up rows of the same id into existing memory.

    Args:
        given: the ids of the rows.
        ids, out: of as many rows as different ids were given.
    """
    if rows.flags.c_contiguous and out.flags.c_contiguous:
        loop = loop_for("join_rows", rows.dtype, rows.dtype).ready(rows.size)
        if loop is not None:
            quietly(loop, given.ids, given.places, rows, ids, out)
            return
    merged = _added_up(given, rows)
    ids[:] = merged.ids
    merged.take(slice(None), out)


def _added_up(given: InOrder, rows: Array) -> MergedRows:
    ids, order, num_distinct = given
    if num_distinct == len(ids):
        return MergedRows(ids, order, np.full(len(ids), -1), rows, rows[:0])
    starts = np.flatnonzero(firsts(ids))
    left, right = order[starts], np.full(len(starts), -1)
    ends = np.append(starts[1:], len(ids))
    summed = np.flatnonzero(ends - starts > 1)
    sums = np.empty((len(summed), rows.shape[1]), rows.dtype)
    quietly(_add_up, starts[summed], ends[summed], order, rows, sums)
    left[summed], right[summed] = -1, np.arange(len(summed))
    return MergedRows(ids[starts], left, right, rows, sums)


def of_both(first: Ids, second: Ids) -> tuple[Ids, Places, Places]:
    """Return the ids of two lists, ascending as both are, and the place of each in either list; -1: it is not there."""
    total = len(first) + len(second)
    loop = id_loop("merge_ids", total)
    if loop is not None:
        ids, left, right = np.empty((3, total), np.int64)
        count = loop(np.ascontiguousarray(first), np.ascontiguousarray(second), ids, left, right)
        return ids[:count], left[:count], right[:count]
    ordered, order, _ = in_order(np.concatenate((first, second)))
    is_first = firsts(ordered)
    group = np.cumsum(is_first) - 1
    left, right = np.full((2, int(group[-1]) + 1 if len(group) else 0), -1)
    from_second = order >= len(first)
    left[group[~from_second]] = order[~from_second]
    right[group[from_second]] = order[from_second] - len(first)
    return ordered[is_first], left, right


def in_order(ids: Ids) -> InOrder:
    """Return the ids, ascending."""
    loop = id_loop("sort_ids", len(ids))
    if loop is not None:
        ordered, order = np.empty((2, len(ids)), np.int64)
        return InOrder(ordered, order, loop(np.ascontiguousarray(ids), ordered, order))
    if len(ids) and int(ids.max()) >= _FEW_BITS:
        order = np.argsort(ids, kind="stable")
        ordered = ids[order]
    else:
        keyed = (ids << 32) | np.arange(len(ids))  # one sort of these takes half the time of a stable argsort
        keyed.sort()
        ordered, order = keyed >> 32, keyed & 0xFFFFFFFF
    return InOrder(ordered, order, int(np.count_nonzero(firsts(ordered))))


def num_distinct(ids: Ids) -> int:
    """Return the number of distinct ids."""
    loop = id_loop("count_ids", len(ids))
    if loop is not None:
        return int(loop(np.ascontiguousarray(ids)))
    return in_order(ids).num_distinct


def are_ascending(ids: Ids) -> bool:
    """Return whether the ids are strictly ascending."""
    loop = id_loop("are_ascending", len(ids))
    if loop is not None:
        return bool(loop(np.ascontiguousarray(ids)))
    return bool((ids[1:] > ids[:-1]).all())


def firsts(ordered: Ids) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return a mask of the ids that differ from the one before, for an ascending list."""
    is_first = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    return is_first


def _add_up(starts: Places, ends: Places, order: Places, rows: Array, sums: Array) -> None:
    """Add up into each sum the rows that `order` names between a start and an end, in this order."""
    loop = loop_for("add_rows", rows.dtype, rows.dtype).ready(sums.size) if rows.flags.c_contiguous else None
    if loop is not None:
        loop(starts, ends, order, rows, sums)
        return
    sums[...] = rows[order[starts]]
    for turn in range(1, min(_ROUNDS, int((ends - starts).max())) + 1):
        now = np.flatnonzero(ends - starts > turn)
        sums[now] += rows[order[starts[now] + turn]]
    for number in np.flatnonzero(ends - starts > _ROUNDS + 1).tolist():
        later = order[starts[number] + _ROUNDS + 1 : ends[number]]
        np.add.at(sums, np.full(len(later), number), rows[later])
