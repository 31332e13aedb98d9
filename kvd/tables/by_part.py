"""The rows of a call in the order of the parts of their table, as messages to the servers carry them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kvd.protocol.specs import ROW_ID_BYTES, padded
from kvd.tables.duplicates import add_up_into, added_up, firsts, in_order
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
    """The rows of a push to a table of so many parts. Rows of the same id are added up in their order.

    Args:
        memory: gives so many bytes, as uint8.
    """
    width, dtype = pushed.rows.shape[1], pushed.rows.dtype
    row_nbytes = width * dtype.itemsize
    if parts == 1:
        ordered = in_order(pushed.ids)
        count = ordered.num_distinct
        data = memory(count * (ROW_ID_BYTES + row_nbytes))
        rows_at = count * ROW_ID_BYTES
        add_up_into(
            ordered, pushed.rows, data[:rows_at].view(np.int64), data[rows_at:].view(dtype).reshape(count, width)
        )
        return RowsInParts(data, ((0, data.nbytes),))
    merged = added_up(pushed.ids, pushed.rows)
    order, ends = _ordered(merged.ids, parts)
    ranges, begin = [], 0
    for first, end in zip((0, *ends), ends, strict=False):
        ranges.append((begin, (end - first) * (ROW_ID_BYTES + row_nbytes)))
        begin = padded(sum(ranges[-1]))
    data = memory(sum(ranges[-1]))
    for first, end, (offset, nbytes) in zip((0, *ends), ends, ranges, strict=False):
        rows_at = offset + (end - first) * ROW_ID_BYTES
        np.take(merged.ids, order[first:end], out=data[offset:rows_at].view(np.int64), mode="clip")
        rows = data[rows_at : offset + nbytes].view(dtype).reshape(end - first, width)
        merged.take(order[first:end], rows)
    return RowsInParts(data, tuple(ranges))


def ids_in_parts(ids: Ids, parts: int) -> IdsInParts:
    """The rows of a pull from a table of so many parts: each once. From one part, those that come up again are asked
    for again if they are few: then the rows arrive in the order in which they are wanted."""
    ordered, places, num_distinct = in_order(ids)
    if parts == 1 and num_distinct >= len(ids) * (1 - _FEW):
        return IdsInParts(ids, ((0, ids.nbytes),), None)
    is_first = firsts(ordered)
    distinct, where = ordered[is_first], np.empty(len(ids), np.intp)
    where[places] = np.cumsum(is_first) - 1
    order, ends = _ordered(distinct, parts)
    place = np.empty(len(order), np.intp)
    place[order] = np.arange(len(order))
    ranges = tuple(
        [(first * ROW_ID_BYTES, (end - first) * ROW_ID_BYTES) for first, end in zip((0, *ends), ends, strict=False)]
    )
    return IdsInParts(distinct[order], ranges, place[where])


def _ordered(distinct: Ids, parts: int) -> tuple[Places, list[int]]:
    """The places of these ids in the order of their parts, and the end of each part in that order."""
    if parts == 1:
        return np.arange(len(distinct)), [len(distinct)]
    part = parts_of(distinct, parts).astype(np.uint8)  # MAX_TABLE_PARTS fits; a stable sort of bytes takes linear time
    return np.argsort(part, kind="stable"), np.cumsum(np.bincount(part, minlength=parts)).tolist()
