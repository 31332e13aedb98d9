"""The rows that a program gives a new table to begin with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kvd.compute.tensors import as_array
from kvd.errors import RemoteError, ShapeMismatch
from kvd.protocol.specs import padded
from kvd.tables.description import RowSparse
from kvd.tables.duplicates import added_up
from kvd.tables.parts import parts_of
from kvd.tables.row_values import is_row_sparse, rows_for
from kvd.tables.stored_rows import StoredRows

Array = np.ndarray[Any, Any]

PAGE_NBYTES = 4 << 20  # of rows, on their way to one server


def first_rows(table: RowSparse, key: str | int) -> StoredRows | None:
    """Return the rows that `RowSparse` was given as `values`; None if there were none.

    Raises:
        ShapeMismatch, DtypeMismatch, NotAllowed: they are no rows of this table.
    """
    values = table.values
    if values is None:
        return None
    if not is_row_sparse(values) and not _are_pairs(values):
        try:
            whole = as_array(values)
        except RemoteError as error:
            error.name_key(key)
            raise
        if table.rows is not None and whole.shape != (shape := (table.rows, *table.row_shape)):
            text = f"table {key!r} has the shape {shape}, and the values that it is to begin with {whole.shape}: "
            raise ShapeMismatch(f"{text}give all its rows, or some of them as kvd.RowSparseArray(ids, rows)", key=key)
        values = (np.arange(len(whole) if whole.ndim else 0), whole)
    merged = added_up(*rows_for(table, key, values, is_first=True))
    return StoredRows(merged.ids, merged.rows(), {}, 0)


class RowPages(NamedTuple):
    """Rows on their way into the parts of a table.

    Attributes:
        data: the pieces, uint8.
        ranges: for each part, offset and size of its pieces, each at a multiple of 8.
    """

    data: Array
    ranges: tuple[tuple[tuple[int, int], ...], ...]


def pages_of(stored: StoredRows, parts: int, memory: Callable[[int], Array]) -> RowPages:
    """Return the rows in pieces for each of so many parts; none for a part without rows.

    Args:
        memory: gives so many bytes, as uint8.
    """
    part = parts_of(stored.ids, parts)
    made: list[list[Array]] = []
    for index in range(parts):
        places = np.flatnonzero(part == index)
        step = max(1, PAGE_NBYTES // stored.row_nbytes)
        made.append([stored.some(places[at : at + step]).to_bytes(_private) for at in range(0, len(places), step)])
    data = memory(sum([padded(page.nbytes) for pages in made for page in pages]))
    ranges, begin = [], 0
    for pages in made:
        own = []
        for page in pages:
            data[begin : begin + page.nbytes] = page
            own.append((begin, page.nbytes))
            begin += padded(page.nbytes)
        ranges.append(tuple(own))
    return RowPages(data, tuple(ranges))


def _are_pairs(values: object) -> bool:
    """Return whether the value is a pair of ids and rows, or a list of such pairs."""
    return all(isinstance(each, tuple) for each in values) if isinstance(values, list) else isinstance(values, tuple)


def _private(nbytes: int) -> Array:
    return np.empty(nbytes, np.uint8)
