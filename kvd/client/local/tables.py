"""The tables of a store in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvd.client.calls import checks
from kvd.client.calls.handle import Handle
from kvd.client.calls.held_signals import signals
from kvd.client.calls.tables import check_export, pulled_rows, rows_at_once, rows_of, wanted_rows
from kvd.client.calls.values import Array
from kvd.client.local.keys import LocalKeys, TableEntry, table_spec
from kvd.client.local.updates import LocalUpdates
from kvd.node.storage.table_file import Exported, write_table
from kvd.tables.description import RowSparse
from kvd.tables.row_values import Ids, Rows, rows_for
from kvd.tables.stored_rows import StoredRows
from kvd.tables.table import Table
from kvd.tables.wire import table_of_spec


class LocalTables:
    """Called under the lock of the keys, but for `row_sparse_pull`."""

    def __init__(self, keys: LocalKeys, updates: LocalUpdates) -> None:
        self._keys = keys
        self._updates = updates

    def make(self, name: str, description: RowSparse, merge: str, begun: StoredRows | None) -> None:
        """Makes a table, with the rows that it begins with. `merge`: its own, or ""."""
        table = Table(table_of_spec(table_spec(description, merge)), name)  # which lets go of the given values
        if begun is not None:
            table.store(begun.ids, begun.rows, begun.slots)
        self._keys.tables[name] = TableEntry(table, merge)

    def rows(self, values: Sequence[tuple[str, Any]], *, cast: bool) -> list[Rows]:
        """The rows that a call pushes to each of these tables.

        Raises:
            KeyNotFound, NotAllowed: a key is no table.
            What `rows_for` raises.
        """
        return [
            rows_for(self._keys.table(name).table.description, self._key(name), value, cast=cast)
            for name, value in values
        ]

    def check(self, names: Sequence[str]) -> None:
        """Raises NotAllowed if a table takes no push now."""
        for name in names:
            self._updates.check_rows(name, self._keys.table(name))

    def push(self, names: Sequence[str], rows: Sequence[Rows], samples: int) -> None:
        """Updates these tables."""
        for name, pushed in zip(names, rows, strict=True):
            entry = self._keys.table(name)
            self._updates.apply_rows(name, entry, pushed, samples)
            entry.version += 1

    def row_sparse_pull(self, key: Any, row_ids: Any, out: Any, priority: int) -> Handle:
        """See `Tables.row_sparse_pull`."""
        keys = self._keys.named(key)
        checks.priority_and_samples(priority)

        def work() -> Any:
            wanted = wanted_rows(keys, row_ids, out, lambda name: self._keys.table(name).table.description, self._key)
            for name, ids, target in wanted:
                table = self._keys.table(name).table
                table.read(ids, rows_of(target, table.description))
            return pulled_rows(keys, wanted, out)

        return self._keys.answered(work)

    def export_table(self, key: Any, path: Any, since: Any) -> Handle:
        """See `Tables.export_table`."""
        keys = self._keys.named(key)
        file, since = checks.file_path(path), check_export(keys, since)

        def work() -> int:
            name = keys.names[0]
            entry = self._keys.table(name)
            table, evicted = entry.table, None
            if since is None:
                ids = table.ids()
            else:
                ids, evicted = table.updated_since(since), table.evicted_since(since)
            version = entry.version if table.tracked is None else table.tracked
            exported = Exported(ids, evicted, since, version)
            write_table(file, name, table.description, exported, _pieces(table, ids))
            return version

        return self._keys.answered(work)

    def unknown(self, key: Any, value: Any, *, takes_pairs: bool = True) -> None:
        """See `Tables.unknown`."""

    def _key(self, name: str) -> str | int:
        return self._keys.written.of(name)


def _pieces(table: Table, ids: Ids) -> Iterator[Array]:
    step = rows_at_once(table.description)
    for first in range(0, len(ids), step):
        part = ids[first : first + step]
        rows = np.empty((len(part), table.description.width), table.description.numpy_dtype)
        table.read(part, rows)
        signals.handle()  # a table may take long to write
        yield rows
