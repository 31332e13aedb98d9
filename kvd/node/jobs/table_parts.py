"""The parts of tables that a server has: what its jobs do with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np

from kvd.compute.by_key import optimizer_for
from kvd.core.machine import (
    Apply,
    FirstBytes,
    KeepRows,
    KeptRows,
    ListRows,
    Load,
    LoadRows,
    ReadPart,
    ReadRows,
    ReadStored,
    Span,
    TableVersion,
)
from kvd.errors import KvdError, NotAllowed, ProtocolError
from kvd.protocol.messages import ALL_ROWS, STATE_OF_ROWS
from kvd.tables.copies import PartReader, PartWriter, checksum_of
from kvd.tables.part import TablePart
from kvd.tables.parts import parts_of
from kvd.tables.row_index import Ids
from kvd.tables.stored_rows import RowPages, page_of
from kvd.tables.table import Table
from kvd.tables.wire import table_of_spec

Array: TypeAlias = np.ndarray[Any, Any]

_INT64: np.dtype[np.int64] = np.dtype(np.int64)
_UINT8: np.dtype[np.uint8] = np.dtype(np.uint8)


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
        self._parts_of_table: dict[tuple[str, int], int] = {}  # of the table that has this part
        self._readers: dict[tuple[str, int], PartReader] = {}  # of parts that are sent to another server
        self._pages: dict[tuple[str, int], RowPages] = {}  # of parts that are read for a snapshot
        self._writers: dict[tuple[str, int], PartWriter] = {}  # of parts that come from another server

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
        self._parts_of_table[first.key, first.slice_index] = first.table.num_slices
        part = self._parts[first.key, first.slice_index] = TablePart(description, first.key, table)
        return _version_of(part)

    def apply(self, job: Apply) -> TableVersion | tuple[TableVersion, Span]:
        """Merges the contributions, and makes the next version.

        Raises:
            ProtocolError, NotAllowed: a push brings no rows, or none of this part. Nothing was changed.
            What `TablePart.update` raises.
        """
        extent = job.layout[0]
        part = self._part(extent.key, extent.slice_index)
        optimizer: Any = job.optimizer
        mode: Any = job.merge
        given = [
            part.pushed(self._view(each.span, _UINT8), each.samples)
            for each in job.contributions
            if each.span is not None
        ]
        for pushed in () if job.is_merged or job.is_final else given:
            self._check_part(extent.key, extent.slice_index, pushed.rows.ids)
        self._end_reading((extent.key, extent.slice_index))
        optimizer = None if optimizer is None else optimizer_for(optimizer, extent.key)
        made = part.update(optimizer, given, mode, self._allocate if job.keeps_merged else None)
        return _version_of(part) if made is None else (_version_of(part), Span(made, 0, made.nbytes))

    def _check_part(self, key: str, index: int, ids: Ids) -> None:
        parts = self._parts_of_table[key, index]
        if parts == 1:
            return
        found = parts_of(ids, parts)
        if bool((found != index).any()):
            at = int(np.argmax(found != index))
            text = f"row {int(ids[at])} of table {key!r} is in part {int(found[at])}, not in {index}"
            raise ProtocolError(f"{text}: all nodes have to run the same release of kvd")

    def read(self, job: ReadRows) -> tuple[Span | KvdError, ...]:
        """The rows that workers want, or why one of them cannot have them."""
        part = self._part(job.key, job.slice_index)
        return tuple([self._rows(part, job.version.number, ids) for ids in job.ids])

    def _rows(self, part: TablePart, version: int, ids: Span) -> Span | KvdError:
        try:
            rows = part.read(version, self._view(ids, _INT64), self._allocate)
        except KvdError as error:
            return error
        except MemoryError as error:
            return NotAllowed(f"MemoryError: {error}")
        return Span(rows, 0, rows.nbytes)

    def list_rows(self, job: ListRows) -> tuple[int, bool, Span]:
        """Which rows there are, or have changed: the version, whether there are more, and their ids.

        Raises:
            NotAllowed: the table does not know what has changed since.
        """
        part = self._part(job.key, job.slice_index)
        if job.since == ALL_ROWS:
            ids = part.table.ids_by_place()
        else:
            ids = part.table.evicted_since(job.since) if job.evicted else part.table.updated_since(job.since)
        rest = ids[ids > job.after]
        page = np.sort(rest if len(rest) <= job.most else np.partition(rest, job.most - 1)[: job.most])
        made = self._allocate(page.nbytes)
        made.view(np.int64)[:] = page
        version = part.version if part.table.tracked is None else part.table.tracked
        return version, len(rest) > job.most, Span(made, 0, made.nbytes)

    # ── copies on other servers ──

    def piece(self, job: ReadPart) -> tuple[Span, int | None]:
        """A piece of a part, for another server, and where the next one begins."""
        slice_id = (job.key, job.slice_index)
        part = self._part(*slice_id)
        if not job.position:
            self._readers[slice_id] = PartReader(part)
        piece, following = self._readers[slice_id].piece(job.position, job.nbytes, self._allocate)
        if following is None:
            del self._readers[slice_id]
        return Span(piece, 0, piece.nbytes), following

    def load(self, job: LoadRows) -> int:
        """Takes a piece that another server has sent. Returns the memory of those that are here."""
        slice_id = (job.key, job.slice_index)
        writer = self._writers.get(slice_id) or PartWriter(table_of_spec(job.spec), job.key, job.spec.num_slices)
        writer.add(self._view(job.piece, np.dtype(np.uint8)))
        self._writers[slice_id] = writer
        return writer.nbytes

    def adopt(self, first: FirstBytes) -> TableVersion:
        """Makes a part of the pieces that were loaded.

        Raises:
            ProtocolError: some are missing, or all.
        """
        slice_id = (first.key, first.slice_index)
        writer = self._writers.pop(slice_id, None)
        if writer is None:
            raise ProtocolError(f"pieces of table {first.key!r} are missing: none came before it was made")
        assert first.table is not None
        part = self._parts[slice_id] = writer.part()
        self._parts_of_table[slice_id] = first.table.num_slices
        return _version_of(part)

    def checksum(self, slice_id: tuple[str, int]) -> tuple[int, int]:
        """See `kvd.tables.copies.checksum_of`."""
        return checksum_of(self._parts[slice_id])

    # ── rows for snapshots ──

    def stored(self, job: ReadStored) -> Span:
        """Some rows of a part, with what the optimizer keeps of them."""
        if job.kept is not None:
            kept, _ = job.kept.rows.page(job.first, job.nbytes, self._allocate)
            return Span(kept, 0, kept.nbytes)
        slice_id = (job.key, job.slice_index)
        if not job.first or slice_id not in self._pages:
            part = self._part(*slice_id)
            self._pages[slice_id] = RowPages(part.table, part.version)
        page, rows_after = self._pages[slice_id].page(job.first, job.nbytes, self._allocate)
        if not rows_after:
            del self._pages[slice_id]
        return Span(page, 0, page.nbytes)

    def keep(self, job: KeepRows) -> KeptRows:
        """A copy of all rows, which later updates do not change."""
        part = self._part(job.key, job.slice_index)
        pages = RowPages(part.table, part.version, keeps=True)
        return KeptRows(pages, pages.nbytes)

    def store(self, job: Load) -> TableVersion:
        """Puts rows of a snapshot into a part, or what the optimizer keeps of rows."""
        part = self._part(job.key, job.slice_index)
        self._end_reading((job.key, job.slice_index))
        piece = self._view(job.source, np.dtype(np.uint8))
        stored = page_of(piece, part.description, job.key, has_rows=job.slots != STATE_OF_ROWS).stored
        if job.slots == STATE_OF_ROWS:
            part.store_state(stored, is_first=not job.step)
        else:
            part.store(stored)
        return _version_of(part)

    # ── what becomes of them ──

    def reset(self, slice_id: tuple[str, int]) -> None:
        """Another optimizer is set."""
        self._end_reading(slice_id)
        self._parts[slice_id].forget_optimizer()

    def forget(self, slice_id: tuple[str, int]) -> None:
        """The slice is deleted, or made again as something else."""
        self._end_reading(slice_id)
        for of_slice in (self._parts, self._writers, self._parts_of_table):
            of_slice.pop(slice_id, None)

    def _end_reading(self, slice_id: tuple[str, int]) -> None:
        """The part changes: who was reading it begins again."""
        for of_slice in (self._readers, self._pages):
            of_slice.pop(slice_id, None)

    def _part(self, key: str, index: int) -> TablePart:
        part = self._parts.get((key, index))
        if part is None:
            raise NotAllowed(f"part {index} of table {key!r} is not here any more", key=key)
        return part


def _version_of(part: TablePart) -> TableVersion:
    return TableVersion(part.version, part.num_rows, part.nbytes)
