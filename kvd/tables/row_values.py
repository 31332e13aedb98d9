"""Row ids, and rows with their ids, as programs write them: checked, and as arrays of this host."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvd.compute.tensors import as_array, check_unmasked, dtype_name, is_torch
from kvd.errors import DtypeMismatch, NotAllowed, RemoteError, ShapeMismatch
from kvd.optimizer.fields import shown
from kvd.tables.description import RowSparse

Array = np.ndarray[Any, Any]
Ids = np.ndarray[Any, np.dtype[np.int64]]

MOST_ROWS_AT_ONCE = (1 << 31) - 1
_INT64: np.dtype[np.int64] = np.dtype(np.int64)


class RowSparseArray:
    """Rows and their ids: a value to push to a table. Rows of the same id are added up, in this order.

    Args:
        ids: whole numbers, shape (n,): an array of an integer dtype, or a list.
        rows: shape (n, …row_shape), of the dtype of the table. None may be there: n = 0 takes part in a round.
    """

    __slots__ = ("ids", "rows")

    def __init__(self, ids: Any, rows: Any) -> None:
        self.ids = ids
        self.rows = rows

    def __repr__(self) -> str:
        return f"RowSparseArray(ids={shown(self.ids)}, rows={shown(self.rows)})"


class Rows(NamedTuple):
    """Rows that fit a table.

    Attributes:
        ids: shape (n,).
        rows: shape (n, width), of the table's dtype.
    """

    ids: Ids
    rows: Array


def is_row_sparse(value: object) -> bool:
    """Whether a value can only be one for a table: rows with ids, a sparse tensor of torch, a sparse matrix of SciPy or
    CuPy, or a list of such."""
    if isinstance(value, list):
        return len(value) > 0 and all(is_row_sparse(entry) for entry in value)
    return isinstance(value, RowSparseArray) or _is_sparse_tensor(value) or _is_sparse_matrix(value)


def rows_for(table: RowSparse, key: str | int, value: Any, *, cast: bool = False, is_first: bool = False) -> Rows:
    """The rows of a value for this table; those of a list, one value per device, one after the other.

    Args:
        cast: the rows may have another floating dtype than the table.
        is_first: the table is to begin with them; they are no push.

    Raises:
        NotAllowed: the value is not of rows with ids, or the table has no such row.
        ShapeMismatch: there are not as many rows as ids, or they have another shape than the table's.
        DtypeMismatch: ids are no whole numbers, or the rows have another dtype than the table's.
    """
    if isinstance(value, list):
        if not value:
            raise NotAllowed(f"key {key!r} is a table: an empty list is no value for it", key=key)
        parts = [rows_for(table, key, entry, cast=cast, is_first=is_first) for entry in value]
        return parts[0] if len(parts) == 1 else _joined(parts)
    given_ids, given_rows = _parted(key, value)
    ids = row_ids(table, key, given_ids)
    try:
        rows = as_array(given_rows)
    except RemoteError as error:
        error.name_key(key)
        raise
    if rows.shape != (len(ids), *table.row_shape):
        text = f"key {key!r} is a table: its {len(ids)} row ids need rows of shape {(len(ids), *table.row_shape)}, "
        raise ShapeMismatch(f"{text}the given rows have {rows.shape}", key=key)
    if rows.dtype != table.numpy_dtype:
        if not cast or dtype_name(rows.dtype) not in ("float16", "bfloat16", "float32", "float64"):
            text = f"key {key!r} is a table of {table.dtype}, the given rows are {dtype_name(rows.dtype)}: cast them, "
            text += f"with astype({table.dtype!r})" + ("" if is_first else " or with cast=True in push")
            raise DtypeMismatch(text, key=key)
        rows = rows.astype(table.numpy_dtype)
    return Rows(ids, rows.reshape(len(ids), table.width))


def row_ids(table: RowSparse, key: str | int, value: Any) -> Ids:
    """The row ids of a call, shape (n,).

    Raises:
        DtypeMismatch: they are no whole numbers.
        ShapeMismatch: they are not of one dimension.
        NotAllowed: the table has no such row.
    """
    ids = _integers(key, value)
    if ids.ndim != 1:
        raise ShapeMismatch(f"the row ids for table {key!r} have the shape {ids.shape}: pass ids.reshape(-1)", key=key)
    if len(ids) > MOST_ROWS_AT_ONCE:
        raise NotAllowed(f"a call names at most {MOST_ROWS_AT_ONCE} rows, not {len(ids)}", key=key)
    last = (1 << 63) - 1 if table.rows is None else table.rows - 1
    if ids.dtype == _INT64:
        # One look at all of them: as unsigned numbers, those below 0 are the largest.
        is_wrong = ids.size and int(ids.view(np.uint64).max()) > last
    else:
        is_wrong = ids.size and (int(ids.min()) < 0 or int(ids.max()) > last)
    if is_wrong:
        place = int(np.flatnonzero((ids < 0) | (ids > last))[0])
        has = f"has the rows 0 to {last}" if last >= 0 else "has no rows"
        raise NotAllowed(f"table {key!r} {has}; ids[{place}] is {int(ids[place])}", key=key)
    return np.ascontiguousarray(ids, _INT64)


def _integers(key: str | int, value: Any) -> Array:
    if isinstance(value, list | tuple) and not value:
        return np.zeros(0, np.int64)
    try:
        return _all_integers(key, value)
    except RemoteError as error:
        error.name_key(key)
        raise


def _all_integers(key: str | int, value: Any) -> Array:
    if isinstance(value, list | tuple | np.ndarray):  # such as uint64, which no key can have
        check_unmasked(value)
        try:
            ids = np.asarray(value)
        except (TypeError, ValueError, OverflowError):
            raise ShapeMismatch(f"the row ids for table {key!r} are no array of one dimension", key=key) from None
    elif value is None or isinstance(value, str | bytes):
        raise DtypeMismatch(f"the row ids for table {key!r} are whole numbers, not {shown(value)}", key=key)
    else:
        ids = as_array(value)
    if ids.dtype.kind not in "iu":
        text = f"the row ids for table {key!r} are {ids.dtype}: they are whole numbers, such as ids.astype('int64')"
        raise DtypeMismatch(text, key=key)
    return ids


def _parted(key: str | int, value: Any) -> tuple[Any, Any]:
    """The ids and the rows of one value."""
    if isinstance(value, RowSparseArray):
        return value.ids, value.rows
    if _is_sparse_tensor(value):
        return _parted_tensor(key, value)
    if _is_sparse_matrix(value):
        return _parted_matrix(key, value)
    if isinstance(value, tuple) and len(value) == 2:
        return value[0], value[1]
    text = f"key {key!r} is a table: push kvd.RowSparseArray(ids, rows), or a sparse tensor of torch; "
    raise NotAllowed(f"{text}this {type(value).__name__} says no row ids", key=key)


def _is_sparse_tensor(value: Any) -> bool:
    return is_torch(value) and value.layout is sys.modules["torch"].sparse_coo


def _parted_tensor(key: str | int, tensor: Any) -> tuple[Any, Any]:
    """Of a tensor as `nn.Embedding(sparse=True)` makes them, coalesced or not."""
    if tensor.sparse_dim() != 1:
        text = f"key {key!r} is a table: the sparse tensor has {tensor.sparse_dim()} sparse dimensions, a table has one"
        raise ShapeMismatch(text, key=key)
    return tensor._indices()[0], tensor._values()  # indices() would want it coalesced, which the merge does anyway


def _is_sparse_matrix(value: Any) -> bool:
    return type(value).__module__.startswith(("scipy.sparse.", "cupyx.scipy.sparse.")) and hasattr(value, "tocsr")


def _parted_matrix(key: str | int, matrix: Any) -> tuple[Any, Any]:
    """Of a sparse matrix as SciPy's or CuPy's: those of its rows that have entries."""
    if len(matrix.shape) != 2:
        text = f"key {key!r} is a table: the sparse array has the shape {matrix.shape}, of rows it has two dimensions"
        raise ShapeMismatch(text, key=key)
    by_row = matrix.tocsr()
    counts = np.diff(as_array(by_row.indptr))
    columns, elements = as_array(by_row.indices), as_array(by_row.data)
    ids = np.flatnonzero(counts)
    rows = np.zeros((len(ids), by_row.shape[1]), elements.dtype)
    np.add.at(rows, (np.repeat(np.arange(len(ids)), counts[ids]), columns), elements)
    return ids, rows


def _joined(parts: Sequence[Rows]) -> Rows:
    return Rows(np.concatenate([part.ids for part in parts]), np.concatenate([part.rows for part in parts]))
