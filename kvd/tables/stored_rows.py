"""Rows of a table as they are stored, and come back: with what the optimizer keeps of them, in any order.

They go into snapshots, and from there into a table in other parts: what belongs to one part alone, such as the rows as
they were before its last updates, stays behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvd.errors import ProtocolError
from kvd.protocol.specs import ROW_ID_BYTES
from kvd.tables.description import RowSparse
from kvd.tables.pieces import MOST_SLOTS, cut, no_piece_error, packed, unpacked
from kvd.tables.row_values import Ids
from kvd.tables.table import Table

Array = np.ndarray[Any, Any]


class StoredRows(NamedTuple):
    """Attributes:
    ids: shape (n,), each once.
    rows: shape (n, width), of the dtype of the table.
    slots: what the optimizer keeps of each row, by name; shape (n, numbers of a row).
    updates: those that the optimizer has made.
    """

    ids: Ids
    rows: Array
    slots: Mapping[str, Array]
    updates: int

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row with its id and its state."""
        arrays = (self.rows, *self.slots.values())
        return int(ROW_ID_BYTES + sum([array.itemsize * array.shape[1] for array in arrays]))

    def some(self, which: slice | Array) -> StoredRows:
        """Return the rows that a mask selects."""
        slots = {name: array[which] for name, array in self.slots.items()}
        return StoredRows(self.ids[which], self.rows[which], slots, self.updates)

    def without_rows(self) -> StoredRows:
        """Return the optimizer's state without the rows."""
        return self._replace(rows=self.rows[:, :0])

    def to_bytes(self, allocate: Callable[[int], Array], version: int = 0, rows_after: int = 0) -> Array:
        """Serialize to one piece, uint8.

        Args:
            allocate: gives so many bytes, as uint8.
            version, rows_after: see `Page`.
        """
        slots = [(name, array.shape[1]) for name, array in self.slots.items()]
        head = [self.updates, slots, len(self.ids), version, rows_after]
        return packed(head, [self.ids, self.rows, *self.slots.values()], allocate)


class Page(NamedTuple):
    """Some rows of a part.

    Attributes:
        version: of the part.
        rows_after: how many come after these.
    """

    stored: StoredRows
    version: int
    rows_after: int


def page_of(piece: Array, description: RowSparse, key: str, *, has_rows: bool = True) -> Page:
    """Return the rows of a piece, uncopied.

    Args:
        has_rows: False: the rows have no elements, only what the optimizer keeps of them.

    Raises:
        ProtocolError: it is none of such a table.
    """
    plain, body = unpacked(piece, key)
    try:
        updates, slots, num_rows, version, rows_after = map(_checked, plain)
        named = {str(name): int(width) for name, width in slots}
        if min(updates, num_rows, version, rows_after, *named.values()) < 0 or len(named) > MOST_SLOTS:
            raise ValueError(plain)
    except (TypeError, ValueError):
        raise no_piece_error(key) from None
    dtype = description.numpy_dtype
    kinds = [
        (1, np.dtype(np.int64)),
        *[(width, dtype) for width in (description.width if has_rows else 0, *named.values())],
    ]
    arrays = cut(body, kinds, num_rows)
    if arrays is None:
        raise ProtocolError(f"a piece of table {key!r} has {body.nbytes} bytes for {num_rows} rows")
    ids = arrays[0].reshape(-1)
    ordered = np.sort(ids)
    limit = description.rows
    if num_rows and (int(ordered[0]) < 0 or bool((ordered[1:] == ordered[:-1]).any())):
        raise ProtocolError(f"a piece of table {key!r} names a row twice, or one below 0")
    if num_rows and limit is not None and int(ordered[-1]) >= limit:
        raise ProtocolError(f"a piece of table {key!r} has row {int(ordered[-1])}: the table has {limit}")
    return Page(StoredRows(ids, arrays[1], dict(zip(named, arrays[2:], strict=True)), updates), version, rows_after)


def _checked(value: Any) -> Any:
    if not isinstance(value, int | list) or isinstance(value, bool):
        raise TypeError(value)
    return value


class RowPages:
    """Reader of the rows of a part, some at a time.

    Args:
        version: of the part.
        keeps: copies all of them at once, so that later updates of the part change nothing here.
    """

    def __init__(self, table: Table, version: int, *, keeps: bool = False) -> None:
        self._table = table
        self._version = version
        self._updates = table.step
        self._ids = table.ids_by_place()
        self._widths = table.slot_widths
        self._kept = table.rows_at(slice(0, len(self._ids))) if keeps else None

    @property
    def nbytes(self) -> int:
        """The memory of what was copied."""
        return self._ids.nbytes + sum([array.nbytes for array in self._kept or ()])

    def page(self, first: int, most_nbytes: int, allocate: Callable[[int], Array]) -> tuple[Array, int]:
        """Return the rows from this one on, as a piece, and how many come after it; none behind the last.

        Args:
            most_nbytes: of the rows, but there is one at least.
            allocate: gives so many bytes, as uint8.
        """
        width = self._table.description.width + sum(self._widths.values())
        row_nbytes = ROW_ID_BYTES + width * self._table.description.numpy_dtype.itemsize
        where = slice(first, min(len(self._ids), first + max(1, most_nbytes // row_nbytes)))
        arrays = self._table.rows_at(where) if self._kept is None else [array[where] for array in self._kept]
        slots = dict(zip(self._widths, arrays[1:], strict=True))
        stored = StoredRows(self._ids[where], arrays[0], slots, self._updates)
        rows_after = max(0, len(self._ids) - where.stop)
        return stored.to_bytes(allocate, self._version, rows_after), rows_after


def all_of(table: Table) -> StoredRows:
    """Return all rows of a table, ids ascending, in new memory."""
    ids = table.ids_by_place()
    order = np.argsort(ids)
    rows, *slots = table.rows_at(order)
    return StoredRows(ids[order], rows, dict(zip(table.slot_widths, slots, strict=True)), table.step)


def joined(some: Sequence[StoredRows], description: RowSparse) -> StoredRows:
    """Return the rows of all, ids ascending, in memory of their own. A slot that some lack is zeros there.

    Args:
        some: of parts of one table, so no id is there twice.
    """
    dtype = description.numpy_dtype
    ids = np.concatenate([each.ids for each in some])
    order = np.argsort(ids)
    widths = {name: array.shape[1] for each in some for name, array in each.slots.items()}

    def together(arrays: Sequence[Array]) -> Array:
        whole: Array = np.concatenate(arrays)[order]
        return whole

    slots = {
        name: together([each.slots.get(name, np.zeros((len(each.ids), width), dtype)) for each in some])
        for name, width in widths.items()
    }
    rows = together([each.rows for each in some])
    return StoredRows(ids[order], rows, slots, max([each.updates for each in some]))
