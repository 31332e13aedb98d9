"""A part of a table as a server keeps it: its rows, and what the last updates have changed.

An update changes rows in place, while earlier versions can still be asked for: by workers that are a round behind, and
until the version is committed. So before each update the rows that it changes are put aside. A version is read by
taking the rows as they are and laying over them what was put aside since, the newest first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvd.compute.merge import MergeMode
from kvd.errors import NotAllowed, ProtocolError
from kvd.optimizer import Optimizer
from kvd.protocol.specs import ROW_ID_BYTES
from kvd.tables.contributions import Contributed, merged_rows
from kvd.tables.description import RowSparse
from kvd.tables.earlier_rows import EarlierRows
from kvd.tables.merged_rows import MergedRows
from kvd.tables.row_index import Ids
from kvd.tables.row_values import Rows
from kvd.tables.table import Table

Array = np.ndarray[Any, Any]

UPDATES_KEPT = 2  # the newest version may not be committed yet, and the one before the committed one is still asked for
_INT64: np.dtype[np.int64] = np.dtype(np.int64)


class TablePart:
    """Not safe to use from several threads.

    Args:
        key: the name of the table.

    Attributes:
        version: how many updates were made.
    """

    def __init__(self, description: RowSparse, key: str) -> None:
        self.version = 0
        self._key = key
        self._description = description
        self._table = Table(description, key)
        self._earlier = EarlierRows(description.width, description.numpy_dtype, UPDATES_KEPT)

    @property
    def num_rows(self) -> int:
        """The rows that take memory."""
        return len(self._table)

    @property
    def nbytes(self) -> int:
        """The memory of the rows, and of those that were put aside."""
        return self._table.nbytes + self._earlier.nbytes

    # ── what arrives ──

    def pushed(self, payload: Array, samples: int) -> Contributed:
        """What a worker has pushed, as it arrived: n ids, then n rows. Nothing is copied.

        Raises:
            ProtocolError: it is nothing of the kind.
            NotAllowed: there is no such row.
        """
        row_nbytes = self._description.width * self._description.numpy_dtype.itemsize
        count, rest = divmod(payload.nbytes, ROW_ID_BYTES + row_nbytes)
        if rest:
            raise ProtocolError(f"{payload.nbytes} bytes are no rows of table {self._key!r} with their ids")
        ids = payload[: count * ROW_ID_BYTES].view(_INT64)
        if not bool((ids[1:] > ids[:-1]).all()):
            raise ProtocolError(f"the row ids of a push to table {self._key!r} are not in ascending order")
        self._check(ids)
        rows = payload[count * ROW_ID_BYTES :].view(self._description.numpy_dtype)
        return Contributed(Rows(ids, rows.reshape(count, self._description.width)), samples)

    # ── updates ──

    def update(self, optimizer: Optimizer | None, contributions: Sequence[Contributed], mode: MergeMode) -> MergedRows:
        """Makes the next version, and returns the merged rows that made it: they refer to the contributions.

        Args:
            optimizer: None: the merged rows replace those that are there.

        Raises:
            NotAllowed: the optimizer updates no single rows, or there would be too many rows. Nothing was changed.
            MemoryError: there is no memory for new rows. Nothing was changed.
        """
        merged = merged_rows(contributions, mode, self._description.width, self._description.numpy_dtype)
        memory = self._earlier.room(merged.num_rows)
        before = memory[: merged.num_rows]
        if optimizer is None:
            self._table.assign_merged(merged, before)
        else:
            self._table.update_merged(optimizer, merged, before)
        self._earlier.put_aside(merged.ids.copy(), memory)  # they may lie in memory that the sender gets back
        self.version += 1
        return merged

    def forget_optimizer(self) -> None:
        """The next optimizer begins with new state."""
        self._table.forget_optimizer()

    # ── reading ──

    def read(self, version: int, ids: Ids, allocate: Callable[[int], Array]) -> Array:
        """The rows of these ids at a version, in their order, as bytes.

        Args:
            allocate: gives so many bytes, as uint8.

        Raises:
            NotAllowed: there is no such row, or the version is not kept any more.
        """
        self._check(ids)
        newer = self.version - version
        if not 0 <= newer <= len(self._earlier):
            raise NotAllowed(f"version {version} of table {self._key!r} is not kept any more", key=self._key)
        dtype, width = self._description.numpy_dtype, self._description.width
        made = allocate(len(ids) * width * dtype.itemsize)
        out = made.view(dtype).reshape(len(ids), width)
        self._table.read(ids, out)
        self._earlier.lay_over(out, ids, newer)
        return made

    def _check(self, ids: Ids) -> None:
        if not len(ids):
            return
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or (self._description.rows is not None and high >= self._description.rows):
            has = "" if self._description.rows is None else f": it has {self._description.rows}"
            wrong = low if low < 0 else high
            raise NotAllowed(f"table {self._key!r} has no row {wrong}{has}", key=self._key)
