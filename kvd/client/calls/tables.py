"""Calls on tables: which of the keys of a call are tables, and what is given or wanted for each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvd.client.calls.checks import whole
from kvd.client.calls.keys import KeyList
from kvd.client.calls.values import (
    Array,
    Target,
    check_apart,
    fresh_target,
    of_each,
    on_devices,
    paired,
    spec_of,
    target_of,
)
from kvd.errors import DtypeMismatch, NotAllowed, ShapeMismatch
from kvd.protocol.specs import MAX_SLICE_BYTES, KeySpec, no_table_text, table_text
from kvd.tables.description import RowSparse
from kvd.tables.row_values import Ids, dense_value, is_row_sparse, row_ids

_EXPORTED_AT_ONCE_NBYTES = 16 << 20


class Parted(NamedTuple):
    """A call on several keys, some of which are tables.

    Attributes:
        names, values: the keys that are no tables, with the value of each.
        tables: the tables, with the value of each.
    """

    names: list[str]
    values: list[Any]
    tables: list[tuple[str, Any]]


def parted(keys: KeyList, value: Any, is_table: Callable[[str], bool]) -> Parted:
    """Tables are the keys that are known as such, or whose value can only be one for a table."""
    result = Parted([], [], [])

    def sort(name: str, entries: list[Any]) -> None:
        if is_table(name) or any(map(is_for_table, entries)):
            result.tables.append((name, entries[0] if len(entries) == 1 else _one_after_the_other(entries)))
        else:
            result.names.append(name)
            result.values.append(entries[0] if len(entries) == 1 else on_devices(entries))

    of_each(keys, keys.by_name(paired(keys, value, "values")), sort)
    return result


def is_for_table(value: object) -> bool:
    """Whether a value makes a table, or names rows. A plain array, as most values are, costs little."""
    return type(value) is not np.ndarray and (isinstance(value, RowSparse) or is_row_sparse(value))


def has_tables(keys: KeyList, value: Any) -> bool:
    """Whether the call has a value that makes a table, or names rows."""
    if keys.many and isinstance(value, list | tuple):
        return any(map(is_for_table, value))
    return is_for_table(value)


def may_be_pairs(keys: KeyList, value: Any) -> bool:
    """Whether a value of the call may be a pair of ids and rows, though it may be two arrays of two devices as well."""
    return any(map(_may_be_pair, value)) if keys.many and isinstance(value, list | tuple) else _may_be_pair(value)


def _may_be_pair(value: object) -> bool:
    if type(value) is list:
        return len(value) > 0 and all(map(_may_be_pair, value))
    return type(value) is tuple and len(value) == 2


def with_dense_rows(
    keys: KeyList,
    value: Any,
    is_table: Callable[[str], bool],
    spec_of_key: Callable[[str], KeySpec | None],
    *,
    cast: bool,
    in_place: bool = False,
) -> Any:
    """The value of a call in which row-sparse values for keys that are no tables are dense.

    Args:
        is_table, spec_of_key: asked by name, for keys with row-sparse values. The spec is None if the call makes the
            key.
        in_place: the call writes its result into the value.

    Raises:
        NotAllowed: the result cannot be written into a row-sparse value; or as `dense_value`.
        What `spec_of_key` and `dense_value` raise.
    """
    if not has_tables(keys, value):
        return value

    def densify(name: str, entry: Any) -> Any:
        if not is_row_sparse(entry) or is_table(name):
            return entry
        key = keys.key(name)
        if in_place:
            raise NotAllowed(
                f"without out=, pushpull writes the result into the value, and that of key {key!r} has only some "
                f"rows: pass out=, an array for the whole value, or copy=False for a new one",
                key=key,
            )
        return dense_value(key, entry, spec_of_key(name), cast=cast)

    at_places = KeyList([str(keys.at(place)) for place in range(keys.size)], keys.many, None, keys.written)
    values = of_each(at_places, paired(keys, value, "values"), densify)
    return values if keys.many else values[0]


def table_error(key: str | int) -> NotAllowed:
    """The error of a call that takes no tables."""
    return NotAllowed(table_text(key), key=key)


def check_descriptions(tables: Sequence[tuple[str, Any]]) -> None:
    """Raises NotAllowed unless these values make tables."""
    for name, value in tables:
        if not isinstance(value, RowSparse):
            text = (
                f"rows do not say how many there can be: make table {name!r} with init(key, kvd.RowSparse(shape=…)), "
                "or a dense key with the whole array, then push the rows"
            )
            raise NotAllowed(text, key=name)


def check_no_tables(keys: KeyList, is_table: Callable[[str], bool]) -> None:
    """Raises NotAllowed if a key of the call is a table."""
    for name in keys.names:
        if is_table(name):
            raise table_error(keys.written.get(name, name))


def check_whole(keys: KeyList, value: Any, call: str, is_table: Callable[[str], bool]) -> None:
    """Raises NotAllowed if a key of the call is a table, or a value is row-sparse."""
    check_no_tables(keys, is_table)
    if has_tables(keys, value):
        places = [place for place, entry in enumerate(paired(keys, value, "values")) if is_for_table(entry)]
        key = keys.at(places[0])
        raise NotAllowed(f"{call} takes whole values for key {key!r}: push rows, or pass value.to_dense()", key=key)


def no_table_error(key: str | int) -> NotAllowed:
    """The error of a call that is for tables, on another key."""
    return NotAllowed(no_table_text(key), key=key)


def rows_target(table: RowSparse, key: str | int, count: int, out: Any) -> Target:
    """The memory for rows that are pulled: of ``out``, an array or one per device; None: a new array.

    Raises:
        ShapeMismatch, DtypeMismatch: ``out`` is not for so many rows of the table.
        NotAllowed: it cannot be written to.
    """
    spec = spec_of(table.numpy_dtype, (count, *table.row_shape), MAX_SLICE_BYTES)
    if out is None:
        return fresh_target(spec)
    target = target_of(out, MAX_SLICE_BYTES)
    if target.spec != spec:
        text = (
            f"out is {target.spec.dtype} of shape {target.spec.shape}; {count} rows of table {key!r} are {spec.dtype} "
        )
        kind = ShapeMismatch if target.spec.shape != spec.shape else DtypeMismatch
        raise kind(f"{text}of shape {spec.shape}", key=key)
    return target


def rows_of(target: Target, table: RowSparse) -> Array:
    """The memory of a target as rows, shape (count, width)."""
    rows: Array = target.data.view(table.numpy_dtype).reshape(-1, table.width)
    return rows


class WantedRows(NamedTuple):
    """What a pull names of one table, and where it goes."""

    name: str
    ids: Ids
    target: Target


def wanted_rows(
    keys: KeyList, ids: Any, out: Any, table_of: Callable[[str], RowSparse], written: Callable[[str], str | int]
) -> list[WantedRows]:
    """The rows of a call, for each place in its list of keys.

    Args:
        table_of: what was said of a table by name; raises the error of the call if there is none.
        written: the key as the program writes it.

    Raises:
        NotAllowed: there are not as many lists of row ids, or of `out`, as keys; a table has no such row; or arrays of
            `out` share memory.
        ShapeMismatch, DtypeMismatch: row ids are none, or an `out` does not fit.
    """
    many_ids = paired(keys, ids, "lists of row ids")
    outs = [None] * len(many_ids) if out is None else paired(keys, out, "outs")
    at_places = KeyList([str(keys.at(place)) for place in range(keys.size)], keys.many, None, keys.written)

    def find(name: str, given: tuple[Any, Any]) -> WantedRows:
        table, key = table_of(name), written(name)
        wanted = row_ids(table, key, given[0])
        return WantedRows(name, wanted, rows_target(table, key, len(wanted), given[1]))

    found = of_each(at_places, list(zip(many_ids, outs, strict=True)), find)
    if out is not None:
        check_apart(at_places, [wanted.target.memories for wanted in found])
    return found


def pulled_rows(keys: KeyList, wanted: Sequence[WantedRows], out: Any) -> Any:
    """The result of a call whose rows have arrived: `out` as the program gave it; None: new arrays."""
    arrays = [entry.target.finish() for entry in wanted]
    if out is not None:
        return list(out) if keys.many else out
    return arrays if keys.many else arrays[0]


def check_export(keys: KeyList, since: object) -> int | None:
    """The number of an update, of a call to export what has changed since.

    Raises:
        NotAllowed: it is none, or the call names a list of keys.
    """
    if keys.many:
        raise NotAllowed("export_table takes one key, and a file for it: call it for each key")
    return None if since is None else whole("since", since, 0)


def rows_at_once(table: RowSparse) -> int:
    """How many rows are exported at a time."""
    return max(1, _EXPORTED_AT_ONCE_NBYTES // (table.width * table.numpy_dtype.itemsize))


def _one_after_the_other(entries: Sequence[Any]) -> list[Any]:
    """The values of a key that is in the list several times, as those of several devices."""
    return [value for entry in entries for value in (entry if isinstance(entry, list) else [entry])]
