"""Values as both sides describe them: dtypes, keys, and the slices of a key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from kvd.errors import DtypeMismatch, MergeMismatch, NotAllowed, ShapeMismatch

MAX_KEY_CHARS = 200
MAX_DIMENSIONS = 32
MAX_KEY_NBYTES = 1 << 40
MIN_SLICE_BYTES = 4 << 10
MAX_SLICE_BYTES = 16 << 20
MAX_PAYLOAD_BYTES = 128 << 20  # of one message
MOST_HELD_VERSIONS = 2  # of a key, in the memory of its servers, by the arrays of one worker
MERGES = ("sum", "mean", "weighted")  # how the contributions of a round become one
ANY_ROW = -1  # in place of the number of a table's rows: row ids are any whole numbers from 0 to 2⁶³ - 1
ROW_ID_BYTES = 8
TABLE_DTYPES = ("float32", "float64")
MAX_ROW_BYTES = 32 << 20
MAX_TABLE_PARTS = 200  # one for each server
MAX_KEPT_BYTES = (1 << 62) - 1
MAX_UPDATES = (1 << 31) - 1  # that name a row before it is admitted, or after which it is evicted


class Dtype(NamedTuple):
    """One element type: its name on the wire, the bytes of an element, and whether optimizers apply to it."""

    name: str
    itemsize: int
    is_float: bool


DTYPES: dict[str, Dtype] = {
    dtype.name: dtype
    for dtype in (
        Dtype("float16", 2, True),
        Dtype("float32", 4, True),
        Dtype("float64", 8, True),
        Dtype("bfloat16", 2, True),
        Dtype("int8", 1, False),
        Dtype("int32", 4, False),
        Dtype("int64", 8, False),
        Dtype("uint8", 1, False),
    )
}


class Initial(NamedTuple):
    """Initial rows of a table: the name of an initializer, its numbers and seed (`kvd.tables.wire`)."""

    name: str
    numbers: tuple[float, ...] = ()
    seed: int = 0

    def __str__(self) -> str:
        shown = ", ".join(map(repr, self.numbers))
        return f"{self.name}({shown}, seed={self.seed})" if self.seed else f"{self.name}({shown})"


class Keeping(NamedTuple):
    """Retention rule of a table; without arguments, all updated rows are kept (`kvd.tables.keeper`)."""

    admit_after: int = 1  # updates that name a row before it is made
    ttl_updates: int = 0  # without the row, after which it is evicted; 0: never
    max_rows: int = 0  # of the whole table; 0: no limit
    max_bytes: int = 0  # of the whole table; 0: no limit
    track_updates: bool = False

    def __str__(self) -> str:
        chosen = [f"{name}={value}" for name, value in self._asdict().items() if value != self._field_defaults[name]]
        return ", ".join(chosen) or "all that were updated"


class TableSpec(NamedTuple):
    """Table properties of a key. Pushes and pulls of a table name rows.

    A slice of a table is one of its parts: the rows of some ids (`kvd.tables.parts`), in memory that grows with them.
    """

    rows: int  # ANY_ROW: as many as there are ids
    initial: Initial
    parts: int
    keeping: Keeping = Keeping()


@dataclass(frozen=True, slots=True)
class KeySpec:
    """The dtype and shape of a key, the size of its slices, and its own merge; fixed when the key is published.

    `merge`: one of MERGES; "": that of the cluster. `table`: the key is a table, and `shape` is that of one row.
    `gradients`: the value is what the newest round has merged, for weights that the workers keep themselves.

    Slice ``i`` holds the bytes ``[i · slice_bytes, (i + 1) · slice_bytes)`` of the C-contiguous value. An empty value
    has one empty slice, so that its rounds close like those of other keys.
    """

    dtype: str
    shape: tuple[int, ...]
    slice_bytes: int
    merge: str = ""
    table: TableSpec | None = None
    gradients: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the whole value. A table has none when it is made."""
        return 0 if self.table else prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def num_slices(self) -> int:
        return self.table.parts if self.table else max(1, -(-self.nbytes // self.slice_bytes))

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row, of a table."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    def num_rows(self, nbytes: int) -> int | None:
        """Return the number of rows in a push of this size to a part of a table, or None if no number fits.

        The ids come first, as int64, then the rows.
        """
        num_rows, rest = divmod(nbytes, ROW_ID_BYTES + self.row_nbytes)
        return None if rest else num_rows

    def span(self, index: int) -> tuple[int, int]:
        """Return offset and length of slice `index` in bytes."""
        if self.table:
            return 0, 0
        offset = index * self.slice_bytes
        return offset, min(self.slice_bytes, self.nbytes - offset)

    def slice_nbytes(self, index: int) -> int:
        return self.span(index)[1]

    def check_same(
        self, other: KeySpec, key: str | int, node: str = "", *, cast: bool = False, what: str = "value"
    ) -> None:
        """Raise ShapeMismatch or DtypeMismatch if `other`, a value for `key`, does not fit this spec; NotAllowed if
        one of the two is a table, or they are tables with different initializers or rows to keep.

        Args:
            cast: one floating dtype instead of another fits.
            what: "value", or "out" if `other` is that of an array that the value is to be written to.
        """
        if self.table is not None or other.table is not None:
            self._check_same_table(other, key, node)
        if other.shape != self.shape:
            raise ShapeMismatch(
                f"key {key!r} has shape {self.shape}, the given {what} has {other.shape}: "
                + (
                    "reshape the value, or use another key for it" if what == "value" else "pass one of the key's shape"
                ),
                key=key,
                node=node,
            )
        if other.dtype != self.dtype:
            floats = DTYPES[other.dtype].is_float and DTYPES[self.dtype].is_float
            if cast and floats:
                return
            raise DtypeMismatch(
                f"key {key!r} has dtype {self.dtype}, the given {what} has {other.dtype}: "
                + (f"cast it to {self.dtype}" if what == "value" else "pass one of the key's dtype")
                + (", or pass cast=True to push, pull or pushpull" if floats else ""),
                key=key,
                node=node,
            )

    def _check_same_table(self, other: KeySpec, key: str | int, node: str) -> None:
        """Check that both are the same table apart from the number of parts, which a program does not choose."""
        mine, theirs = self.table, other.table
        if mine is None:
            raise NotAllowed(no_table_text(key), key=key, node=node)
        if theirs is None:
            raise NotAllowed(table_text(key), key=key, node=node)
        if theirs.rows != mine.rows or other.shape != self.shape:
            text = f"table {key!r} has {_in_words(self)}, the given one has {_in_words(other)}: give it the same shape"
            raise ShapeMismatch(f"{text}, or use another key", key=key, node=node)
        if theirs.initial != mine.initial:
            text = f"the rows of table {key!r} begin as {mine.initial}, those of the given one as {theirs.initial}"
            raise NotAllowed(f"{text}: give it the same initializer, or use another key", key=key, node=node)
        if theirs.keeping != mine.keeping:
            text = f"table {key!r} keeps these rows: {mine.keeping}; the given one: {theirs.keeping}. Give it the same"
            raise NotAllowed(f"{text} options, or use another key", key=key, node=node)

    def check_merge(self, other: KeySpec, key: str | int, default: str) -> None:
        """Raise MergeMismatch if `other`, with which the key is made again, has another merge; NotAllowed if this is a
        key of gradients, and `other` is not.

        Args:
            default: the merge of the cluster.
        """
        mine, theirs = (spec.merge or default or "sum" for spec in (self, other))
        if mine != theirs:
            told = "" if other.merge else ", that of the cluster, as it names none"
            text = f"key {key!r} is merged by {mine!r}, and this init wants {theirs!r}{told}: pass merge={mine!r}"
            raise MergeMismatch(f"{text}, or use another key", key=key)
        if self.gradients and not other.gradients:
            text = f'key {key!r} holds merged gradients, since it was made by an optimizer with where="workers"'
            raise NotAllowed(f"{text}: wrap the optimizer in the same way, or use another key", key=key)


def _in_words(spec: KeySpec) -> str:
    """Return the rows of a table."""
    assert spec.table is not None
    rows = "any number of" if spec.table.rows == ANY_ROW else spec.table.rows
    return f"{rows} rows of shape {spec.shape}"


def table_text(key: str | int) -> str:
    """Return the error text for a call on whole values of a table."""
    return (
        f"key {key!r} is a table, of which calls name rows: push kvd.RowSparseArray(ids, rows) to it, "
        "and read rows with row_sparse_pull(key, row_ids)"
    )


def no_table_text(key: str | int) -> str:
    """Return the error of a call for tables, on another key."""
    return (
        f"key {key!r} is no table: push arrays or row-sparse gradients to it, and pull its whole value; "
        "a table is made by init(key, kvd.RowSparse(shape=…))"
    )


def state_of_table_text(key: str | int) -> str:
    """Return the error text for saving or restoring the optimizer's state of a table."""
    return f"key {key!r} is a table: what the optimizer keeps of its rows cannot be saved"


def gradients_text(key: str | int) -> str:
    """Return the error text for a call that reads weights from a key of gradients."""
    return (
        f'key {key!r} holds the gradients that the workers have merged, not weights: with where="workers" the weights '
        f"are in the memory of the workers. Read them from a snapshot that the program takes (kv.snapshot, or the "
        f"settings snapshot_dir and snapshot_every), or have the program push them to keys of their own"
    )


def no_weights_text(key: str) -> str:
    """Return the error text for a snapshot without the weights for a key of gradients."""
    return (
        f'key {key!r} holds merged gradients, and this snapshot has no weights for it: with where="workers" it needs '
        f"the loop `for step in optimizer.steps(total)`, and of several optimizers one that keeps the others, by "
        f"optimizer.keep(name, other)"
    )


def merge_error(key: str | int, dtype: str, merge: str) -> str | None:
    """Return the reason why no key of this dtype can have this merge; None if one can."""
    if merge == "weighted" and not DTYPES[dtype].is_float:
        return f"key {key!r} is {dtype}: a weighted merge takes float keys only"
    return None


def accumulator_scale(dtype: str) -> int:
    """Return the size of a sum's element relative to the value's: float16 and bfloat16 are summed in float32."""
    known = DTYPES[dtype]
    return 4 // known.itemsize if known.is_float and known.itemsize < 4 else 1


def padded(nbytes: int) -> int:
    """Return the offset of the part after one of `nbytes`: parts start at multiples of 8."""
    return (nbytes + 7) & ~7


def payload_nbytes(lengths: Sequence[int]) -> int:
    """Return the bytes of a payload with parts of these lengths: all but the last are padded."""
    return sum([padded(nbytes) for nbytes in lengths[:-1]]) + lengths[-1] if lengths else 0
