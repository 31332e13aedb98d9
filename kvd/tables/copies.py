"""Parts of tables in pieces: as one server sends a part to another, which makes the same part of them.

A piece has some of the rows that were put aside before an update, the oldest update first; or, after all of those, some
of the rows as they are, with what the optimizer keeps of them, in the order of their places; or, last of all, some of
the numbers that say which rows are kept (`kvd.tables.keeper`). Each piece says in its head how much there is in all, so
what comes can be checked. Its arrays (`kvd.tables.pieces`) are ids, rows, and the rows of each slot; numbers stand in
the place of the ids. Positions count rows and numbers through all of that, from 0 on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple
from zlib import crc32

import msgpack
import numpy as np

from kvd.errors import ProtocolError
from kvd.protocol.specs import ROW_ID_BYTES
from kvd.tables.counted_bits import mix
from kvd.tables.description import RowSparse
from kvd.tables.part import UPDATES_KEPT, TablePart
from kvd.tables.pieces import MOST_SLOTS, cut, no_piece_error, packed, unpacked
from kvd.tables.row_values import Ids, Rows
from kvd.tables.table import Table

Array = np.ndarray[Any, Any]

CHECKED_NBYTES = 8 << 20  # about so much is read for one checksum


class _Head(NamedTuple):
    """Head of a piece: the description of its part.

    Attributes:
        version, step: the updates of the part, and those of them that an optimizer made.
        counts: the rows of each update that were put aside, then those of the part, then how many numbers there are
            under each of the names.
        slots: what the optimizer keeps of each row: names, and numbers per row.
        keeping: the names of the numbers.
        position, num_rows: the rows of this piece, or its numbers.
    """

    version: int
    step: int
    counts: tuple[int, ...]
    slots: tuple[tuple[str, int], ...]
    keeping: tuple[str, ...]
    position: int
    num_rows: int

    @property
    def section(self) -> int:
        """Index of the count of these rows."""
        ends = list(accumulate(self.counts))
        return min(bisect_right(ends, self.position), len(ends) - 1)

    @property
    def num_aside(self) -> int:
        """Number of updates with rows put aside."""
        return len(self.counts) - 1 - len(self.keeping)

    @property
    def is_of_part(self) -> bool:
        """True if these are rows of the part."""
        return self.section == self.num_aside

    @property
    def is_of_keeping(self) -> bool:
        """True if these are numbers of the keeper."""
        return self.section > self.num_aside


class PartReader:
    """Reader of a part that does not change meanwhile."""

    def __init__(self, part: TablePart) -> None:
        self._part = part
        self._ids = part.table.ids_by_place()
        self._keeping = part.table.keeping_state()

    def piece(self, position: int, most_nbytes: int, allocate: Callable[[int], Array]) -> tuple[Array, int | None]:
        """Return the piece at a position, and the position of the next one; None after the last.

        There is always a first piece.

        Args:
            most_nbytes: of its rows; there is one row at least.
            allocate: gives so many bytes, as uint8.
        """
        part, table = self._part, self._part.table
        aside = part.put_aside
        counts = (*[len(before.ids) for before in aside], len(table), *map(len, self._keeping.values()))
        slots = tuple(table.slot_widths.items())
        head = _Head(part.version, table.step, counts, slots, tuple(self._keeping), position, 0)
        first = position - sum(counts[: head.section])
        count = min(counts[head.section] - first, max(1, most_nbytes // _nbytes_per_row(head, part.description)))
        head = head._replace(num_rows=count)
        where = slice(first, first + count)
        if head.is_of_part:
            arrays = [self._ids[where], *table.rows_at(where)]
        elif head.is_of_keeping:
            arrays = [self._keeping[head.keeping[head.section - head.num_aside - 1]][where]]
        else:
            arrays = [aside[head.section].ids[where], aside[head.section].rows[where]]
        end = position + count
        return packed(head, arrays, allocate), end if end < sum(counts) else None


class PartWriter:
    """Builder of a part from its pieces, in their order. A repeated piece is ignored.

    Args:
        parts: of the table, of which this is one.
    """

    def __init__(self, description: RowSparse, key: str, parts: int = 1) -> None:
        self._description = description
        self._key = key
        self._table = Table(description, key, parts)
        self._aside: list[list[Rows]] = []
        self._keeping: dict[str, list[Ids]] = {}
        self._head: _Head | None = None
        self._position = 0

    @property
    def nbytes(self) -> int:
        """The memory that it takes so far."""
        aside = sum([r.ids.nbytes + r.rows.nbytes for pieces in self._aside for r in pieces])
        return self._table.nbytes + aside + sum([each.nbytes for pieces in self._keeping.values() for each in pieces])

    def add(self, piece: Array) -> None:
        """Add a piece, as uint8.

        Raises:
            ProtocolError: it is none of this part, or others are missing before it.
            NotAllowed: there would be too many rows.
            MemoryError: there is no memory for them.
        """
        head, body = _parsed(piece, self._key)
        if head.position + head.num_rows <= self._position and self._head is not None:
            return
        expected = self._head or head
        if head._replace(position=0, num_rows=0) != expected._replace(position=0, num_rows=0):
            raise self._error("is of another version than the piece before")
        if head.position != self._position:
            raise self._error(f"begins at row {head.position}, and those before have {self._position}")
        ids, *arrays = self._arrays(head, body)
        if head.is_of_part:
            self._add_rows(head, ids, arrays)
        elif head.is_of_keeping:
            self._keeping.setdefault(head.keeping[head.section - head.num_aside - 1], []).append(ids.copy())
        else:
            self._aside += [[] for _ in range(len(self._aside), head.section + 1)]
            self._aside[head.section].append(Rows(ids.copy(), arrays[0].copy()))
        self._head = head
        self._position += head.num_rows

    def part(self) -> TablePart:
        """Return the part, once all pieces have arrived.

        Raises:
            ProtocolError: some are missing, or do not say which rows are kept.
        """
        head = self._head
        if head is None or self._position != sum(head.counts):
            raise ProtocolError(f"pieces of table {self._key!r} are missing: row {self._position} is the next")
        self._table.step = head.step
        dtype = self._description.numpy_dtype
        slots = {name: np.empty((0, width), dtype) for name, width in head.slots}  # also those of a table without rows
        self._table.load(np.zeros(0, np.int64), np.empty((0, self._description.width), dtype), slots)
        self._restore_keeping(head)
        self._aside += [[] for _ in range(len(self._aside), head.num_aside)]
        aside = [_joined(pieces, self._description) for pieces in self._aside]
        return TablePart(self._description, self._key, self._table, aside, head.version)

    def _arrays(self, head: _Head, body: Array) -> list[Array]:
        """Return the ids, rows and slots of a piece, as they arrived."""
        dtype = self._description.numpy_dtype
        kinds = [(1, np.dtype(np.int64))]
        if not head.is_of_keeping:
            widths = [width for _, width in head.slots] if head.is_of_part else []
            kinds += [(width, dtype) for width in (self._description.width, *widths)]
        arrays = cut(body, kinds, head.num_rows)
        if arrays is None:
            raise self._error(f"has {body.nbytes} bytes for {head.num_rows} rows")
        return [arrays[0].reshape(-1), *arrays[1:]]

    def _add_rows(self, head: _Head, ids: Ids, arrays: Sequence[Array]) -> None:
        ordered = np.sort(ids)
        if head.num_rows and (int(ordered[0]) < 0 or bool((ordered[1:] == ordered[:-1]).any())):
            raise self._error("names a row twice, or one below 0")
        slots = dict(zip([name for name, _ in head.slots], arrays[1:], strict=True))
        if not self._table.load(ids, arrays[0], slots):
            raise self._error("has rows of a piece before")

    def _restore_keeping(self, head: _Head) -> None:
        none = np.zeros(0, np.int64)
        state = {name: np.concatenate([none, *self._keeping.get(name, ())]) for name in head.keeping}
        if not self._table.restore_keeping(state):
            raise self._error("does not say which rows are kept")

    def _error(self, what: str) -> ProtocolError:
        return ProtocolError(f"a piece of table {self._key!r} {what}")


def checksum_of(part: TablePart) -> tuple[int, int]:
    """Return a checksum of about `CHECKED_NBYTES` of a part, and how many bytes were read for it.

    It is the same for parts that have the same rows, wherever these lie; so that all rows have their turn, the version
    says which are looked at.
    """
    table = part.table
    buckets = max(1, -(-_rows_nbytes(table) // CHECKED_NBYTES))
    ids = table.ids_by_place()
    turn = int(mix(np.array([part.version], np.uint64))[0] % np.uint64(buckets))
    places = np.flatnonzero(mix(ids.view(np.uint64)) % np.uint64(buckets) == turn)
    places = places[np.argsort(ids[places])]
    found = crc32(msgpack.packb([part.version, table.step, len(table), sorted(table.slot_widths.items())]))
    nbytes = ids.nbytes
    for array in (ids[places], *table.rows_at(places), *table.keeping_marks(ids[places])):
        found = crc32(np.ascontiguousarray(array).view(np.uint8).data, found)
        nbytes += array.nbytes
    return found, nbytes


def _rows_nbytes(table: Table) -> int:
    width = table.description.width + sum(table.slot_widths.values())
    return len(table) * (ROW_ID_BYTES + width * table.description.numpy_dtype.itemsize)


def _nbytes_per_row(head: _Head, description: RowSparse) -> int:
    if head.is_of_keeping:
        return ROW_ID_BYTES
    width = description.width + (sum([width for _, width in head.slots]) if head.is_of_part else 0)
    return ROW_ID_BYTES + width * description.numpy_dtype.itemsize


def _joined(pieces: Sequence[Rows], description: RowSparse) -> Rows:
    if not pieces:
        return Rows(np.zeros(0, np.int64), np.zeros((0, description.width), description.numpy_dtype))
    return Rows(np.concatenate([each.ids for each in pieces]), np.concatenate([each.rows for each in pieces]))


def _parsed(piece: Array, key: str) -> tuple[_Head, Array]:
    """Return the head of a piece, and what follows it."""
    plain, body = unpacked(piece, key)
    try:
        version, step, counts, slots, keeping, position, count = plain
        named = tuple([(str(name), int(width)) for name, width in slots])
        kept = tuple(map(str, keeping))
        head = _Head(int(version), int(step), tuple(map(int, counts)), named, kept, int(position), int(count))
        _check(head)
    except (TypeError, ValueError):
        raise no_piece_error(key) from None
    return head, body


def _check(head: _Head) -> None:
    numbers = (head.version, head.step, *head.counts, head.position, head.num_rows, *dict(head.slots).values())
    if not 0 <= head.num_aside <= UPDATES_KEPT:
        raise ValueError(head)
    begin = sum(head.counts[: head.section])
    if (
        min(numbers) < 0
        or len(set(head.keeping)) < len(head.keeping)
        or len(head.slots) > MOST_SLOTS
        or head.position + head.num_rows > begin + head.counts[head.section]
    ):
        raise ValueError(head)
