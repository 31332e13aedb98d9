"""The rows of a call in the order of the parts of their table, as messages to the servers carry them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvd.compute.compiled import id_loop
from kvd.protocol.specs import ROW_ID_BYTES, padded
from kvd.tables.duplicates import InOrder, add_up_into, firsts, in_order, num_distinct
from kvd.tables.parts import parts_of
from kvd.tables.row_values import Ids, Rows

Array = np.ndarray[Any, Any]
Places = np.ndarray[Any, np.dtype[np.intp]]
_FEW = 1 / 16  # of the rows of a pull may be asked for twice
Ranges = tuple[tuple[int, int], ...]  # offset and size in bytes of what goes to each part


class RowsInParts(NamedTuple):
    """Rows to push: for each part, at a multiple of 8, the ids as int64, ascending, then the rows in that order."""

    data: Array
    ranges: Ranges


class IdsInParts(NamedTuple):
    """Rows to pull.

    Attributes:
        ids: in the order of the parts.
        ranges: of them, in bytes.
        where: the place among them of each id that is asked for; None: they are in the same order.
    """

    ids: Ids
    ranges: Ranges
    where: Places | None


def rows_in_parts(pushed: Rows, parts: int, memory: Callable[[int], Array]) -> RowsInParts:
    """Return the rows of a push to a table of so many parts. Rows of the same id are added up in their order.

    Args:
        memory: gives so many bytes, as uint8.
    """
    width, dtype = pushed.rows.shape[1], pushed.rows.dtype
    nbytes = ROW_ID_BYTES + width * dtype.itemsize
    given, lists = _ordered(in_order(pushed.ids), parts)
    ranges, begin = [], 0
    for _, count in lists:
        ranges.append((begin, count * nbytes))
        begin = padded(begin + count * nbytes)
    data = memory(sum(ranges[-1]))
    for (part, count), (offset, size) in zip(lists, ranges, strict=True):
        rows_at = offset + count * ROW_ID_BYTES
        ids = data[offset:rows_at].view(np.int64)
        rows = data[rows_at : offset + size].view(dtype).reshape(count, width)
        add_up_into(InOrder(given.ids[part], given.places[part], count), pushed.rows, ids, rows)
    return RowsInParts(data, tuple(ranges))


def ids_in_parts(ids: Ids, parts: int) -> IdsInParts:
    """Divide the ids of a pull among so many parts, each id once.

    A few duplicates are left in: then ids need no sorting, and rows from one part arrive in the wanted order.
    """
    if num_distinct(ids) >= len(ids) * (1 - _FEW):
        if parts == 1:
            return IdsInParts(ids, ((0, ids.nbytes),), None)
        by_part, where, ends = _split(ids, parts)
        return IdsInParts(by_part, _ranges(ends), where)
    ordered, places, _ = in_order(ids)
    is_first = firsts(ordered)
    distinct, where = ordered[is_first], np.empty(len(ids), np.intp)
    where[places] = np.cumsum(is_first) - 1
    if parts == 1:
        return IdsInParts(distinct, ((0, distinct.nbytes),), where)
    by_part, place, ends = _split(distinct, parts)
    return IdsInParts(by_part, _ranges(ends), place[where])


def _ranges(ends: Sequence[int]) -> Ranges:
    return tuple(
        [(first * ROW_ID_BYTES, (end - first) * ROW_ID_BYTES) for first, end in zip((0, *ends), ends, strict=False)]
    )


def _ordered(given: InOrder, parts: int) -> tuple[InOrder, list[tuple[slice, int]]]:
    """Return the ids in the order of their parts, ascending in each.

    Also return, for each part, the positions of its ids and the number of distinct ones.
    """
    if parts == 1:
        return given, [(slice(0, len(given.ids)), given.num_distinct)]
    ids, places, num_distinct_ = given
    loop = id_loop("part_ids", len(ids))
    if loop is not None:
        by_part, order = np.empty((2, len(ids)), np.int64)
        ends, distinct_ends = np.empty((2, parts), np.int64)
        loop(ids, places, by_part, order, ends, distinct_ends)
    else:
        part = _parts(ids, parts)
        at = np.argsort(part, kind="stable")
        by_part, order = ids[at], places[at]
        ends = np.cumsum(np.bincount(part, minlength=parts))
        distinct_ends = np.cumsum(np.bincount(part[firsts(ids)], minlength=parts))
    lists = [
        (slice(first, end), distinct_end - distinct_first)
        for first, end, distinct_first, distinct_end in zip(
            (0, *ends.tolist()), ends.tolist(), (0, *distinct_ends.tolist()), distinct_ends.tolist(), strict=False
        )
    ]
    return InOrder(by_part, order, num_distinct_), lists


def _split(ids: Ids, parts: int) -> tuple[Ids, Places, list[int]]:
    """Return the ids in the order of their parts, the place of each among them, and the end of each part."""
    loop = id_loop("split_ids", len(ids))
    if loop is not None:
        by_part, where = np.empty((2, len(ids)), np.int64)
        ends = np.empty(parts, np.int64)
        loop(np.ascontiguousarray(ids), by_part, where, ends)
        return by_part, where, ends.tolist()
    part = _parts(ids, parts)
    order = np.argsort(part, kind="stable")
    where = np.empty(len(ids), np.intp)
    where[order] = np.arange(len(ids))
    return ids[order], where, np.cumsum(np.bincount(part, minlength=parts)).tolist()


def _parts(ids: Ids, parts: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return parts_of(ids, parts).astype(np.uint8)  # MAX_TABLE_PARTS fits; a stable sort of bytes takes linear time
