"""What the optimizer keeps of the rows of tables, in a file of optimizer states.

There are `KEY|rows/ids`, ascending, and `KEY|rows/NAME` for each array, which has one row for each id.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from kvd.errors import NotAllowed
from kvd.tables.description import RowSparse
from kvd.tables.stored_rows import StoredRows

Array = np.ndarray[Any, Any]

_PREFIX, _IDS = "rows/", "ids"


def is_of_rows(slot: str) -> bool:
    """Whether the array of this slot is one of a table."""
    return slot.startswith(_PREFIX)


def arrays_of(stored: StoredRows) -> Iterator[tuple[str, Array]]:
    """The arrays of a table with their slots."""
    yield _PREFIX + _IDS, stored.ids
    for name, array in stored.slots.items():
        yield _PREFIX + name, array


def rows_from(arrays: Mapping[str, Array], updates: int) -> StoredRows:
    """The inverse; rows without elements.

    Raises:
        ValueError: the arrays are no such state.
    """
    slots = {name.removeprefix(_PREFIX): array for name, array in arrays.items()}
    ids = slots.pop(_IDS, None)
    if ids is None or ids.dtype != np.int64 or ids.ndim != 1 or not bool((ids[1:] > ids[:-1]).all()):
        raise ValueError("a table has no row ids in ascending order")
    dtypes = {array.dtype for array in slots.values()}
    if any(array.ndim != 2 or len(array) != len(ids) for array in slots.values()) or len(dtypes) > 1:
        raise ValueError("the arrays of a table have not one row for each id")
    dtype = next(iter(dtypes), np.dtype(np.float32))
    return StoredRows(ids, np.zeros((len(ids), 0), dtype), slots, updates)


def check_fits(table: RowSparse, key: str | int, state: StoredRows) -> None:
    """Raise NotAllowed unless the state can be one of this table."""
    last = int(state.ids[-1]) if len(state.ids) else -1
    if (len(state.ids) and int(state.ids[0]) < 0) or (table.rows is not None and last >= table.rows):
        text = f"the file has the state of row {last} of table {key!r}, which has {table.rows} rows"
        raise NotAllowed(text, key=key)
    for name, array in state.slots.items():
        if array.dtype != table.numpy_dtype or array.shape[1] not in (1, table.width):
            text = (
                f"the file has {array.shape[1]} numbers of {array.dtype} under {name} for each row of table {key!r}, "
            )
            raise NotAllowed(f"{text}whose rows have {table.width} of {table.dtype}", key=key)
