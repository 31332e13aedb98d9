"""Tables as they stand in the specs of keys, and back."""

from __future__ import annotations

from kvd.errors import KvdError, ProtocolError
from kvd.initializer import Constant, Initializer, Normal, Uniform, Zeros
from kvd.protocol.specs import ANY_ROW, Initial, KeySpec, TableSpec
from kvd.tables.description import RowSparse


def spec_of_table(table: RowSparse, *, parts: int, slice_bytes: int, merge: str = "") -> KeySpec:
    """Return the spec of a key that is this table, in so many parts."""
    rows = ANY_ROW if table.rows is None else table.rows
    as_spec = TableSpec(rows, _initial_of(table.initializer), parts, table.keeping)
    return KeySpec(table.dtype, table.row_shape, slice_bytes, merge, as_spec)


def table_of_spec(spec: KeySpec) -> RowSparse:
    """Return the table that a key of this spec is.

    Raises:
        ProtocolError: there is none like it.
    """
    table = spec.table
    if table is None:
        raise ProtocolError(f"a key of {spec} is no table")
    try:
        is_bounded = table.rows != ANY_ROW
        return RowSparse(
            (table.rows, *spec.shape) if is_bounded else None,
            spec.dtype,
            _initializer_of(table.initial),
            row_shape=None if is_bounded else spec.shape,
            admit_after=table.keeping.admit_after,
            ttl_updates=table.keeping.ttl_updates or None,
            max_rows=table.keeping.max_rows or None,
            max_bytes=table.keeping.max_bytes or None,
            track_updates=table.keeping.track_updates,
        )
    except ProtocolError:
        raise
    except KvdError as error:
        raise ProtocolError(f"there is no table like {table}: {error}") from None


def _initial_of(initializer: Initializer) -> Initial:
    name = type(initializer).__name__
    seed = getattr(initializer, "seed", 0)
    match initializer:
        case Constant(value=value):
            return Initial(name, (value,))
        case Uniform(low=low, high=high):
            return Initial(name, (low, high), seed)
        case Normal(std=std):
            return Initial(name, (std,), seed)
    return Initial(name)


def _initializer_of(initial: Initial) -> Initializer:
    name, numbers, seed = initial
    match name, len(numbers):
        case "Zeros", 0:
            return Zeros()
        case "Constant", 1:
            return Constant(numbers[0])
        case "Uniform", 2:
            return Uniform(numbers[0], numbers[1], seed)
        case "Normal", 1:
            return Normal(numbers[0], seed)
    raise ProtocolError(f"no initializer of {len(numbers)} numbers is called {name!r}")
