"""The parts of tables that a server has: what its jobs do with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np

from kvd.compute.by_key import optimizer_for
from kvd.core.machine import Apply, FirstBytes, ReadRows, Span, TableVersion
from kvd.errors import NotAllowed
from kvd.tables.part import TablePart
from kvd.tables.table import Table
from kvd.tables.wire import table_of_spec

Array: TypeAlias = np.ndarray[Any, Any]


class TableParts:
    """Tables by key and index of their slice.

    Args:
        allocate: gives memory for rows that are read: this many bytes, as a uint8 array.
        view: a span as a 1-D array of a dtype, without a copy.
    """

    def __init__(self, allocate: Callable[[int], Array], view: Callable[[Span, np.dtype[Any]], Array]) -> None:
        self._allocate = allocate
        self._view = view
        self._parts: dict[tuple[str, int], TablePart] = {}

    def __contains__(self, slice_id: tuple[str, int]) -> bool:
        return slice_id in self._parts

    def ids(self) -> Iterable[tuple[str, int]]:
        """Those that are here, by key and index."""
        return self._parts.keys()

    def create(self, first: FirstBytes) -> TableVersion:
        """Makes an empty part.

        Raises:
            ProtocolError: no table has such a spec.
        """
        assert first.table is not None
        description = table_of_spec(first.table)
        table = Table(description, first.key, first.table.num_slices)
        part = self._parts[first.key, first.slice_index] = TablePart(description, first.key, table)
        return _version_of(part)

    def apply(self, job: Apply) -> TableVersion:
        """Merges the contributions, and makes the next version."""
        extent = job.layout[0]
        part = self._part(extent.key, extent.slice_index)
        optimizer: Any = job.optimizer
        mode: Any = job.merge
        given = [
            part.pushed(self._view(each.span, np.dtype(np.uint8)), each.samples)
            for each in job.contributions
            if each.span is not None
        ]
        part.update(None if optimizer is None else optimizer_for(optimizer, extent.key), given, mode)
        return _version_of(part)

    def read(self, job: ReadRows) -> Span:
        """The rows that a worker wants."""
        part = self._part(job.key, job.slice_index)
        rows = part.read(job.version.number, self._view(job.ids, np.dtype(np.int64)), self._allocate)
        return Span(rows, 0, rows.nbytes)

    def reset(self, slice_id: tuple[str, int]) -> None:
        """Another optimizer is set."""
        self._parts[slice_id].forget_optimizer()

    def forget(self, slice_id: tuple[str, int]) -> None:
        """The slice is deleted, or made again as something else."""
        self._parts.pop(slice_id, None)

    def _part(self, key: str, index: int) -> TablePart:
        part = self._parts.get((key, index))
        if part is None:
            raise NotAllowed(f"part {index} of table {key!r} is not here any more", key=key)
        return part


def _version_of(part: TablePart) -> TableVersion:
    return TableVersion(part.version, part.num_rows, part.nbytes)
