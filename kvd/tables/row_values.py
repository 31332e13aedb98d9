"""Row ids and rows as programs write them: checked, and converted to arrays on this host."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvd.compute.quiet import quietly
from kvd.compute.tensors import as_array, check_unmasked, dtype_name, is_torch
from kvd.errors import DtypeMismatch, KeyNotFound, NotAllowed, RemoteError, ShapeMismatch
from kvd.optimizer.fields import shown
from kvd.protocol.specs import KeySpec
from kvd.tables.description import RowSparse

Array = np.ndarray[Any, Any]
Ids = np.ndarray[Any, np.dtype[np.int64]]

MOST_ROWS_AT_ONCE = (1 << 31) - 1
_INT64: np.dtype[np.int64] = np.dtype(np.int64)


class RowSparseArray:
    """Rows and their ids: a value to push to a table, or to the rows of a dense key. Rows with equal ids are added up.

    Args:
        ids: whole numbers, shape (n,): an array of an integer dtype, or a list.
        rows: shape (n, …row_shape), of the dtype of the key. An empty value (n = 0) counts as a push, too.
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
    """Return whether a value names rows.

    Such are rows with ids, sparse tensors of torch, and sparse matrices of SciPy or CuPy. A list with one value per
    device does if one of its values does.
    """
    if isinstance(value, list | tuple):
        for entry in value:
            if is_row_sparse(entry):
                return True
            if isinstance(entry, float | int | np.generic):  # a list of numbers, which may be long
                return False
        return False
    return isinstance(value, RowSparseArray) or _is_sparse_tensor(value) or _is_sparse_matrix(value)


def rows_for(table: RowSparse, key: str | int, value: Any, *, cast: bool = False, is_first: bool = False) -> Rows:
    """Return the rows of a value for this table; those of a list, one value per device, one after the other.

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


def dense_value(key: str | int, value: Any, spec: KeySpec | None, *, cast: bool = False) -> Any:
    """Return a row-sparse value as the dense array that is zero in all other elements.

    Elements that are given several times are added up. In a list with one value per device, the row-sparse ones are
    converted.

    Args:
        spec: the spec of the key, which is no table. None: the key is new, and gets the shape and dtype of the value.
        cast: the value may have another floating dtype than the key; it keeps it.

    Raises:
        ShapeMismatch, DtypeMismatch: the value does not fit the key, or its row ids are not whole numbers.
        NotAllowed: the key has no such row.
        KeyNotFound: the key is new, and rows with ids do not say how many rows it has.
    """
    if isinstance(value, list | tuple):
        return [dense_value(key, entry, spec, cast=cast) if is_row_sparse(entry) else entry for entry in value]
    try:
        indices, rows, shape = _elements(key, value, spec)
        if spec is not None:
            spec.check_same(KeySpec(dtype_name(rows.dtype), shape, spec.slice_bytes), key, cast=cast)
    except RemoteError as error:
        error.name_key(key)
        raise
    for ids, size in zip(indices, shape, strict=False):
        _check_within(f"key {key!r}", key, ids, size - 1)
    wanted = (len(indices[0]), *shape[len(indices) :])
    if rows.shape != wanted:
        text = f"key {key!r} has shape {shape}: {len(indices[0])} row ids need rows of shape {wanted}, "
        raise ShapeMismatch(f"{text}the given rows have {rows.shape}", key=key)
    dense = np.zeros(shape, rows.dtype)
    quietly(np.add.at, dense, indices, rows)
    return dense


def _elements(key: str | int, value: Any, spec: KeySpec | None) -> tuple[tuple[Ids, ...], Array, tuple[int, ...]]:
    """Split a row-sparse value into leading indices, rows and the shape of the whole.

    There is one array of indices per dimension.
    """
    if _is_sparse_tensor(value):
        indices = tuple(as_array(value._indices()))
        return indices, as_array(value._values()), tuple(value.shape)
    ids, rows = _parted(key, value)
    if not isinstance(value, RowSparseArray):
        return (ids,), rows, tuple(value.shape)
    if spec is None:
        text = f"key {key!r} does not exist, and rows with ids do not say how many rows it has"
        raise KeyNotFound(f"{text}: make it first, with init or broadcast", key=key)
    if not spec.shape:
        raise ShapeMismatch(f"key {key!r} has shape (), so it has no rows: push an array of that shape", key=key)
    return (_one_dimension(f"key {key!r}", key, ids),), as_array(rows), spec.shape


def row_ids(table: RowSparse, key: str | int, value: Any) -> Ids:
    """Return the row ids of a call, shape (n,).

    Raises:
        DtypeMismatch: they are no whole numbers.
        ShapeMismatch: they are not of one dimension.
        NotAllowed: the table has no such row.
    """
    ids = _one_dimension(f"table {key!r}", key, value)
    _check_within(f"table {key!r}", key, ids, (1 << 63) - 1 if table.rows is None else table.rows - 1)
    return np.ascontiguousarray(ids, _INT64)


def _one_dimension(what: str, key: str | int, value: Any) -> Array:
    """Convert row ids to an array of whole numbers, shape (n,). `what` is the key or table, for errors."""
    ids = _integers(what, key, value)
    if ids.ndim != 1:
        raise ShapeMismatch(f"the row ids for {what} have the shape {ids.shape}: pass ids.reshape(-1)", key=key)
    if len(ids) > MOST_ROWS_AT_ONCE:
        raise NotAllowed(f"a call names at most {MOST_ROWS_AT_ONCE} rows, not {len(ids)}", key=key)
    return ids


def _check_within(what: str, key: str | int, ids: Array, last: int) -> None:
    """Raise NotAllowed unless all ids are from 0 to `last`."""
    if ids.dtype == _INT64:
        # One look at all of them: as unsigned numbers, those below 0 are the largest.
        is_wrong = ids.size and int(ids.view(np.uint64).max()) > last
    else:
        is_wrong = ids.size and (int(ids.min()) < 0 or int(ids.max()) > last)
    if is_wrong:
        place = int(np.flatnonzero((ids < 0) | (ids > last))[0])
        has = f"has the rows 0 to {last}" if last >= 0 else "has no rows"
        raise NotAllowed(f"{what} {has}; ids[{place}] is {int(ids[place])}", key=key)


def _integers(what: str, key: str | int, value: Any) -> Array:
    if isinstance(value, list | tuple) and not value:
        return np.zeros(0, np.int64)
    try:
        return _all_integers(what, key, value)
    except RemoteError as error:
        error.name_key(key)
        raise


def _all_integers(what: str, key: str | int, value: Any) -> Array:
    if isinstance(value, list | tuple | np.ndarray):  # such as uint64, which no key can have
        check_unmasked(value)
        try:
            ids = np.asarray(value)
        except (TypeError, ValueError, OverflowError):
            raise ShapeMismatch(f"the row ids for {what} are no array of one dimension", key=key) from None
    elif value is None or isinstance(value, str | bytes):
        raise DtypeMismatch(f"the row ids for {what} are whole numbers, not {shown(value)}", key=key)
    else:
        ids = as_array(value)
    if ids.dtype.kind not in "iu":
        text = f"the row ids for {what} are {ids.dtype}: they are whole numbers, such as ids.astype('int64')"
        raise DtypeMismatch(text, key=key)
    return ids


def _parted(key: str | int, value: Any) -> tuple[Any, Any]:
    """Return the ids and the rows of one value."""
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
    """Split a tensor of `nn.Embedding(sparse=True)`, coalesced or not, into ids and rows."""
    if tensor.sparse_dim() != 1:
        text = f"key {key!r} is a table: the sparse tensor has {tensor.sparse_dim()} sparse dimensions, a table has one"
        raise ShapeMismatch(text, key=key)
    return tensor._indices()[0], tensor._values()  # indices() would want it coalesced, which the merge does anyway


def _is_sparse_matrix(value: Any) -> bool:
    return type(value).__module__.startswith(("scipy.sparse.", "cupyx.scipy.sparse.")) and hasattr(value, "tocsr")


def _parted_matrix(key: str | int, matrix: Any) -> tuple[Any, Any]:
    """Split a sparse matrix of SciPy or CuPy into the ids and values of rows with entries."""
    if len(matrix.shape) != 2:
        text = f"key {key!r}: the sparse array has the shape {matrix.shape}, one of rows has two dimensions"
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
