"""Description of a table by the program that makes it."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from kvd.compute.tensors import dtype_name, named_dtype
from kvd.errors import ConfigError, DtypeMismatch, NotAllowed
from kvd.initializer import Initializer, Zeros
from kvd.optimizer.fields import shown
from kvd.protocol.specs import MAX_DIMENSIONS, MAX_KEPT_BYTES, MAX_KEY_NBYTES, MAX_UPDATES, TABLE_DTYPES, Keeping

MOST_ROW_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True, init=False)
class RowSparse:
    """A table: a key whose pushes and pulls name rows. It is the value that `init` takes in place of an array::

        kv.init("embedding", kvd.RowSparse(shape=(1_000_000, 64), initializer=kvd.initializer.Normal(std=0.01, seed=7)))
        kv.init("users", kvd.RowSparse(row_shape=(64,)))        # row ids are any whole numbers from 0 to 2⁶³ - 1

    A row takes memory from its first update on; before that it reads as the initializer says.

    Args:
        shape: the number of rows, then the shape of a row.
        row_shape: in place of `shape`, if any row id may come.
        dtype: float32 or float64.
        initializer: what rows are before their first update; None: zeros.
        admit_after: a row is made by the update that is the `admit_after`-th one to name it; what was pushed to it
            before is dropped. An update is a round, or a push where there are no rounds.
        ttl_updates: a row that none of the last `ttl_updates` updates has named is evicted: it reads as the initializer
            says, and takes no memory, until it is admitted again. None: never.
        max_rows: the rows that the table keeps after an update: those that were updated longest ago are evicted, of
            several the smallest ids. Every server of a cluster keeps an equal share. None: no limit.
        max_bytes: the same in bytes of rows and optimizer state, and 96 for each row; a server keeps one row at least.
        track_updates: remember the last update of each row, and which ones were evicted, for `export_table(since=…)`.
        values: the rows that the table begins with, as an array of this `shape`, or some of them as a
            `kvd.RowSparseArray`; the others are what the initializer says. Of the workers of a cluster, worker 0 gives
            them; `init` reads them, and keeps no reference.

    Raises:
        NotAllowed: a shape is none, or both or none of the two are given; a number is out of its range.
        DtypeMismatch: a table cannot have the dtype.
        ConfigError: the initializer is none.

    Attributes:
        rows: the number of rows; None: any row id may come.
        row_shape: the shape of a row.
        dtype: its name.
        initializer: as given.
        keeping: which rows are kept: the other arguments, as numbers (0: None).
        values: as given. Two tables that differ in nothing else are equal.
    """

    rows: int | None
    row_shape: tuple[int, ...]
    dtype: str
    initializer: Initializer
    keeping: Keeping
    values: Any = field(compare=False, repr=False)

    def __init__(
        self,
        shape: Iterable[int] | None = None,
        dtype: Any = "float32",
        initializer: Initializer | None = None,
        *,
        row_shape: Iterable[int] | None = None,
        admit_after: int = 1,
        ttl_updates: int | None = None,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        track_updates: bool = False,
        values: Any = None,
    ) -> None:
        if (shape is None) == (row_shape is None):
            text = "a table has a shape=(rows, …), or for any row id a row_shape=(…): pass one of the two"
            raise NotAllowed(text)
        rows, of_row = _parted(shape) if shape is not None else (None, _dimensions("row_shape", row_shape))
        if not 0 < prod(of_row) <= MOST_ROW_ELEMENTS or len(of_row) >= MAX_DIMENSIONS:
            raise NotAllowed(f"a row of a table has 1 to {MOST_ROW_ELEMENTS} elements; this shape is {of_row}")
        if initializer is not None and (not isinstance(initializer, Initializer) or type(initializer) is Initializer):
            text = f"the initializer of a table is one of kvd.initializer, such as Zeros(), not {shown(initializer)}"
            raise ConfigError(text, setting="initializer")
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "row_shape", of_row)
        object.__setattr__(self, "dtype", _table_dtype(dtype))
        object.__setattr__(self, "initializer", Zeros() if initializer is None else initializer)
        keeping = Keeping(
            _number("admit_after", admit_after, MAX_UPDATES),
            _number("ttl_updates", ttl_updates, MAX_UPDATES),
            _number("max_rows", max_rows, MAX_KEY_NBYTES),
            _number("max_bytes", max_bytes, MAX_KEPT_BYTES),
            bool(track_updates),
        )
        object.__setattr__(self, "keeping", keeping)
        object.__setattr__(self, "values", values)

    @property
    def width(self) -> int:
        """The elements of a row."""
        return prod(self.row_shape)

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype as NumPy's."""
        return named_dtype(self.dtype)


def _parted(shape: Iterable[int]) -> tuple[int, tuple[int, ...]]:
    """Return the number of rows, and the shape of one."""
    dimensions = _dimensions("shape", shape)
    if not dimensions:
        raise NotAllowed("the shape of a table begins with the number of its rows: shape=() has none")
    if not dimensions[0]:
        text = (
            f"shape={shown(dimensions)} is a table without rows: say how many it may have, or row_shape= for any row id"
        )
        raise NotAllowed(text)
    return dimensions[0], dimensions[1:]


def _dimensions(name: str, shape: object) -> tuple[int, ...]:
    try:
        dimensions = tuple(operator.index(size) for size in shape)  # type: ignore[attr-defined]
    except TypeError:
        raise NotAllowed(f"{name} is a tuple of whole numbers, not {shown(shape)}") from None
    if any(not 0 <= size <= MAX_KEY_NBYTES for size in dimensions):
        raise NotAllowed(f"{name} is a tuple of numbers from 0 to {MAX_KEY_NBYTES}, not {shown(dimensions)}")
    return dimensions


def _number(name: str, value: object, most: int) -> int:
    """Return an argument that may be None; 0 stands for None."""
    if value is None and name != "admit_after":
        return 0
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = 0
    if not 1 <= number <= most or isinstance(value, bool):
        raise NotAllowed(f"{name} of a table is a whole number from 1 to {most}, not {shown(value)}")
    return number


def _table_dtype(dtype: Any) -> str:
    try:
        name = dtype_name(named_dtype(dtype) if isinstance(dtype, str) else dtype)
    except TypeError:  # nothing that NumPy takes for a dtype; DtypeMismatch is one, too
        name = shown(dtype)
    if name not in TABLE_DTYPES:
        raise DtypeMismatch(f"the rows of a table are {' or '.join(TABLE_DTYPES)}, not {name}")
    return name
