"""A part of a table as a server keeps it: its rows, and what the last updates have changed.

An update changes rows in place, while earlier versions can still be asked for: by workers that are a round behind, and
until the version is committed. So before each update the rows that it changes are put aside. A version is read by
taking the rows as they are and laying over them what was put aside since, the newest first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from kvd.compute.merge import MergeMode
from kvd.errors import NotAllowed, ProtocolError
from kvd.optimizer import Optimizer
from kvd.protocol.specs import ROW_ID_BYTES
from kvd.tables.contributions import Contributed, merged_rows
from kvd.tables.description import RowSparse
from kvd.tables.duplicates import are_ascending
from kvd.tables.earlier_rows import EarlierRows
from kvd.tables.merged_rows import MergedRows
from kvd.tables.row_index import Ids
from kvd.tables.row_values import Rows
from kvd.tables.stored_rows import StoredRows
from kvd.tables.table import Table

Array = np.ndarray[Any, Any]

UPDATES_KEPT = 2  # the newest version may not be committed yet, and the one before the committed one is still asked for
_INT64: np.dtype[np.int64] = np.dtype(np.int64)


class TablePart:
    """Not safe to use from several threads.

    Args:
        key: the name of the table.
        table: its rows; None: there are none yet.
        put_aside: of the last updates, the oldest first: the rows as they were before it, their ids ascending.
        version: how many updates were made.

    Attributes:
        description, table, version: as given.
    """

    def __init__(
        self,
        description: RowSparse,
        key: str,
        table: Table | None = None,
        put_aside: Iterable[Rows] = (),
        version: int = 0,
    ) -> None:
        self.version = version
        self.description = description
        self.table = Table(description, key) if table is None else table
        self._key = key
        self._width, self._dtype = description.width, description.numpy_dtype
        self._row_nbytes = self._width * self._dtype.itemsize
        self._num_ids = 1 << 63 if description.rows is None else description.rows
        self._earlier = EarlierRows(self._width, self._dtype, UPDATES_KEPT)
        for rows in put_aside:
            self._earlier.add(rows)

    @property
    def num_rows(self) -> int:
        """The rows that take memory."""
        return len(self.table)

    @property
    def put_aside(self) -> Sequence[Rows]:
        """Rows as they were before each of the last updates, the oldest first, with ascending ids."""
        return self._earlier.kept()

    @property
    def nbytes(self) -> int:
        """The memory of the rows, and of those that were put aside."""
        return self.table.nbytes + self._earlier.nbytes

    # ── what arrives ──

    def pushed(self, payload: Array, samples: int) -> Contributed:
        """Read the push of a worker in its arrived form: n ids, then n rows. Nothing is copied.

        Raises:
            ProtocolError: it is nothing of the kind.
            NotAllowed: there is no such row.
        """
        count, rest = divmod(payload.nbytes, ROW_ID_BYTES + self._row_nbytes)
        if rest:
            raise ProtocolError(f"{payload.nbytes} bytes are no rows of table {self._key!r} with their ids")
        ids = payload[: count * ROW_ID_BYTES].view(_INT64)
        if not are_ascending(ids):
            raise ProtocolError(f"the row ids of a push to table {self._key!r} are not in ascending order")
        if count:
            self._check_range(int(ids[0]), int(ids[-1]))
        rows = payload[count * ROW_ID_BYTES :].view(self._dtype).reshape(count, self._width)
        return Contributed(Rows(ids, rows), samples, is_ascending=True)

    def _payload_of(self, merged: MergedRows, allocate: Callable[[int], Array]) -> Array:
        """Convert merged rows to the form that `pushed` reads."""
        dtype, width = self._dtype, self._width
        rows_at = merged.ids.nbytes
        made = allocate(rows_at + merged.num_rows * width * dtype.itemsize)
        made[:rows_at] = merged.ids.view(np.uint8)
        merged.rows(made[rows_at:].view(dtype).reshape(merged.num_rows, width))
        return made

    # ── updates ──

    def update(
        self,
        optimizer: Optimizer | None,
        contributions: Sequence[Contributed],
        mode: MergeMode,
        allocate: Callable[[int], Array] | None = None,
    ) -> Array | None:
        """Make the next version.

        Once rows are changed, the update counts. If there is no memory then to put rows aside, the versions before
        cannot be read any more.

        Args:
            optimizer: None: the merged rows replace those that are there.
            allocate: gives so many bytes, as uint8, for the merged rows; None: nobody wants them.

        Returns:
            The merged rows that made the version, as `pushed` takes them; None: nobody wants them.

        Raises:
            NotAllowed: the optimizer updates no single rows, or there would be too many rows. Nothing was changed.
            MemoryError: there is no memory for new or merged rows. No row was changed.
        """
        merged = merged_rows(contributions, mode, self._width, self._dtype)
        made = None if allocate is None else self._payload_of(merged, allocate)  # while the update may still fail
        before = self._earlier.room(merged.num_rows)
        if optimizer is None:
            updated = self.table.assign_merged(merged, before)
        else:
            updated = self.table.update_merged(optimizer, merged, before)
        self.version += 1
        try:
            ids = updated.ids.copy()  # they may lie in memory that the sender gets back
            self._earlier.put_aside(ids, before, updated.evicted)
        except MemoryError:
            self._earlier.forget()
        return made

    def store(self, stored: StoredRows) -> None:
        """Replace rows by id: the result is the next version, without an earlier one.

        Raises:
            NotAllowed: there would be too many rows.
            MemoryError: there is no memory for them.
        """
        self.table.store(stored.ids, stored.rows, stored.slots)
        self.table.step = stored.updates
        self._earlier = EarlierRows(self._width, self._dtype, UPDATES_KEPT)
        self.version += 1

    def store_state(self, stored: StoredRows, *, is_first: bool) -> None:
        """Replace the optimizer's state of rows. The rows and their version stay.

        Args:
            is_first: more of the same state may follow.

        Raises:
            NotAllowed: there would be too many rows.
            MemoryError: there is no memory for them.
        """
        self.table.store_state(stored.ids, stored.slots, is_first=is_first)
        self.table.step = stored.updates

    def forget_optimizer(self) -> None:
        """Drop the optimizer's state: the next optimizer begins with new state."""
        self.table.forget_optimizer()

    # ── reading ──

    def read(self, version: int, ids: Ids, allocate: Callable[[int], Array]) -> Array:
        """Return the rows of these ids at a version, in their order, as bytes.

        Args:
            allocate: gives so many bytes, as uint8.

        Raises:
            NotAllowed: there is no such row, or the version is not kept any more.
        """
        self._check(ids)
        newer = self.version - version
        if newer and not 0 <= newer <= len(self._earlier):
            raise NotAllowed(f"version {version} of table {self._key!r} is not kept any more", key=self._key)
        made = allocate(len(ids) * self._row_nbytes)
        out = made.view(self._dtype).reshape(len(ids), self._width)
        self.table.read(ids, out)
        if newer:
            self._earlier.lay_over(out, ids, newer)
        return made

    def _check(self, ids: Ids) -> None:
        # One look at all of them: as unsigned numbers, those below 0 are the largest.
        if len(ids) and int(np.maximum.reduce(ids.view(np.uint64))) >= self._num_ids:
            self._check_range(int(ids.min()), int(ids.max()))

    def _check_range(self, low: int, high: int) -> None:
        if low < 0 or high >= self._num_ids:
            has = "" if self.description.rows is None else f": it has {self.description.rows}"
            wrong = low if low < 0 else high
            raise NotAllowed(f"table {self._key!r} has no row {wrong}{has}", key=self._key)
