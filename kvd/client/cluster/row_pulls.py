"""Pulls of rows: what is asked of each part of a table, and how the rows get to where they are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvd.client.calls.tables import WantedRows, rows_of
from kvd.client.calls.values import Array
from kvd.client.cluster.engine import Engine
from kvd.core.requests import Item
from kvd.errors import NotAllowed
from kvd.protocol.specs import MAX_PAYLOAD_BYTES, ROW_ID_BYTES, KeySpec
from kvd.tables.by_part import ids_in_parts
from kvd.tables.description import RowSparse
from kvd.tables.row_values import Ids


class RowPull(NamedTuple):
    """The rows of one table that a call pulls.

    Attributes:
        where: the place of each wanted row among those that are pulled; None: they are in the same order.
        wanted: for each place of the key in the list; none if the rows arrive where they are wanted.
    """

    item: Item
    description: RowSparse
    where: np.ndarray[Any, np.dtype[np.intp]] | None
    wanted: Sequence[WantedRows]

    def spread(self) -> None:
        """Writes the rows, which have arrived, to where they are wanted."""
        rows: Array = self.item.target.view(self.description.numpy_dtype).reshape(-1, self.description.width)
        first = 0
        for _, ids, target in self.wanted:
            part = slice(first, first + len(ids))
            out = rows_of(target, self.description)
            if self.where is None:
                np.copyto(out, rows[part])
            else:
                np.take(rows, self.where[part], axis=0, out=out, mode="clip")
            first += len(ids)


def row_pull(engine: Engine, spec: KeySpec, description: RowSparse, wanted: Sequence[WantedRows]) -> RowPull:
    """The pull of these rows of one table.

    Raises:
        NotAllowed: they are more than a server sends in one message.
    """
    name = wanted[0].name
    asked = ids_in_parts(_joined([entry.ids for entry in wanted]), spec.num_slices)
    most = max(nbytes for _, nbytes in asked.ranges) // ROW_ID_BYTES
    check_size(engine, name, most * max(spec.row_nbytes, ROW_ID_BYTES), "pull")
    ids = engine.memory(asked.ids.nbytes)
    ids.view(np.int64)[:] = asked.ids
    if asked.where is None and len(wanted) == 1:  # straight to where they are wanted
        rows: Array = rows_of(wanted[0].target, description).reshape(-1).view(np.uint8)
        return RowPull(Item(name, spec, ids, rows, ranges=asked.ranges), description, None, ())
    rows = np.empty(len(asked.ids) * spec.row_nbytes, np.uint8)
    return RowPull(Item(name, spec, ids, rows, ranges=asked.ranges), description, asked.where, wanted)


def check_size(engine: Engine, name: str, nbytes: int, call: str) -> None:
    """Raises NotAllowed if so many bytes of one table for one server are too many for a message."""
    if nbytes > MAX_PAYLOAD_BYTES:
        key = engine.written.of(name)
        text = f"of table {key!r} this {call} has {nbytes >> 20} MiB for one server, and a message carries at most"
        raise NotAllowed(f"{text} {MAX_PAYLOAD_BYTES >> 20} MiB: {call} the rows in pieces", key=key)


def _joined(lists: Sequence[Ids]) -> Ids:
    return lists[0] if len(lists) == 1 else np.concatenate(lists)
