"""Tables in a cluster: their rows lie on the servers, each of which has a part of every table."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from kvd.client.calls import checks
from kvd.client.calls.handle import Handle
from kvd.client.calls.keys import KeyList, key_list
from kvd.client.calls.tables import (
    check_export,
    has_tables,
    may_be_pairs,
    no_table_error,
    pulled_rows,
    rows_at_once,
    wanted_rows,
    with_dense_rows,
)
from kvd.client.calls.values import Array, Source
from kvd.client.cluster.arguments import Arguments
from kvd.client.cluster.engine import Engine
from kvd.client.cluster.row_pulls import check_size, row_pull
from kvd.client.cluster.table_export import listed
from kvd.core import requests
from kvd.core.requests import Item
from kvd.errors import KeyNotFound, RemoteError
from kvd.node.storage.table_file import write_table
from kvd.protocol.specs import KeySpec
from kvd.tables.by_part import rows_in_parts
from kvd.tables.description import RowSparse
from kvd.tables.row_values import Ids, rows_for
from kvd.tables.wire import table_of_spec


class KnownTable(NamedTuple):
    """What a worker knows of a table."""

    spec: KeySpec
    description: RowSparse


class PushedTable(NamedTuple):
    """The rows of one table that a push brings, and what goes to each of its parts."""

    name: str
    source: Source
    ranges: tuple[tuple[int, int], ...]

    def item(self) -> Item:
        """The item of the request."""
        return Item(self.name, self.source.spec, self.source.data, ranges=self.ranges)


class ClusterTables:
    """A worker asks once for a key of which it does not know whether it is a table: that waits for an answer. Later
    calls do not."""

    def __init__(self, engine: Engine, arguments: Arguments) -> None:
        self._engine = engine
        self._arguments = arguments
        self._tables: dict[str, KnownTable] = {}
        self._others: dict[str, KeySpec] = {}  # keys that are no tables
        self._inited: set[str] = set()  # keys that this process wanted to make as tables

    # ── which keys are tables ──

    def unknown(self, key: Any, value: Any, *, takes_pairs: bool = True) -> Handle | None:
        """See `Tables.unknown`."""
        keys = key_list(key)
        if value is not None and not has_tables(keys, value) and not (takes_pairs and may_be_pairs(keys, value)):
            return None
        names = [name for name in keys.names if name not in self._tables and name not in self._others]
        return Handle(self._engine.run(self._ask(names))) if names else None

    async def _ask(self, names: Sequence[str]) -> None:
        for name in names:
            with suppress(RemoteError):  # the call that follows meets it again
                self._note(name, await self._engine.call(requests.DescribeKey(name)))

    def is_table(self, name: str) -> bool:
        """Whether the key is known to be a table."""
        return name in self._tables

    def note_init(self, names: Sequence[str]) -> None:
        """An init makes these keys as tables, if it goes well."""
        self._inited.update(names)

    def are_pushed(self, keys: KeyList, value: Any) -> bool:
        """Whether a push of this value goes to tables, among others."""
        if has_tables(keys, value):
            return True
        are_pairs = may_be_pairs(keys, value)
        for name in keys.names if are_pairs or self._inited else ():
            if name not in self._tables and name not in self._others and (are_pairs or name in self._inited):
                with suppress(RemoteError):
                    self._note(name, self._engine.submit(requests.DescribeKey(name)).result())
        return bool(self._tables) and any(map(self.is_table, keys.names))

    def with_dense_rows(
        self, keys: KeyList, value: Any, *, cast: bool, in_place: bool = False, declares: bool = False
    ) -> Any:
        """See `with_dense_rows`.

        Args:
            declares: the call makes the keys that are new.

        Raises:
            KeyNotFound: nobody made a key that gets rows.
        """

        def is_table(name: str) -> bool:
            if name not in self._tables and name not in self._others:
                try:
                    self._note(name, self._engine.submit(requests.DescribeKey(name)).result())
                except KeyNotFound:
                    if not declares:
                        raise
            return self.is_table(name)

        return with_dense_rows(keys, value, is_table, self._others.get, cast=cast, in_place=in_place)

    def forget(self, names: Sequence[str]) -> None:
        """The keys are deleted: others may get their names."""
        for name in names:
            self._tables.pop(name, None)
            self._others.pop(name, None)
            self._inited.discard(name)

    def _known(self, name: str) -> KnownTable:
        """Raises KeyNotFound, or NotAllowed if the key is no table."""
        if name not in self._tables:
            self._note(name, self._engine.submit(requests.DescribeKey(name)).result())
        if name not in self._tables:
            raise no_table_error(self._engine.written.of(name))
        return self._tables[name]

    def _note(self, name: str, spec: KeySpec) -> None:
        if spec.table is None:
            self._others[name] = spec
        else:
            self._tables[name] = KnownTable(spec, table_of_spec(spec))

    # ── rows to push ──

    def rows(self, values: Sequence[tuple[str, Any]], *, cast: bool) -> list[PushedTable]:
        """The rows that a call pushes to each of these tables, in memory of their own.

        Raises:
            KeyNotFound: nobody made a table.
            NotAllowed: a key is no table; or more rows go to a server than a message carries.
            What `rows_for` raises.
        """
        written = self._engine.written
        checked = [
            (name, rows_for(self._known(name).description, written.of(name), value, cast=cast))
            for name, value in values
        ]
        pushed = []
        for name, rows in checked:
            spec = self._tables[name].spec
            data, ranges = rows_in_parts(rows, spec.num_slices, self._engine.memory)
            check_size(self._engine, name, max(nbytes for _, nbytes in ranges), "push")
            pushed.append(PushedTable(name, Source(data, spec), ranges))
        return pushed

    # ── rows to pull ──

    def row_sparse_pull(self, key: Any, row_ids: Any, out: Any, priority: int) -> Handle:
        """See `Tables.row_sparse_pull`."""
        keys = self._arguments.named(key)
        priority, _ = checks.priority_and_samples(priority)
        try:
            wanted = wanted_rows(
                keys, row_ids, out, lambda name: self._known(name).description, self._engine.written.of
            )
            pulls = [
                row_pull(self._engine, *self._tables[name], [entry for entry in wanted if entry.name == name])
                for name in keys.names
            ]
        except RemoteError as error:
            return Handle.failed(self._engine.written.restored(error))
        items = tuple([pull.item for pull in pulls])
        transfer = requests.Transfer(items, push=False, pull=True, priority=priority, some_rows=True)

        def finish(_: Any) -> Any:
            for pull in pulls:
                pull.spread()
            return pulled_rows(keys, wanted, out)

        return Handle(self._engine.submit(transfer), finish, "row_sparse_pull", self._engine.wait)

    def export_table(self, key: Any, path: Any, since: Any) -> Handle:
        """See `Tables.export_table`."""
        keys = self._arguments.named(key)
        file, since = checks.file_path(path), check_export(keys, since)

        async def work() -> int:
            await self._engine.call(requests.Flush())
            name = keys.names[0]
            self._note(name, await self._engine.call(requests.DescribeKey(name)))
            if name not in self._tables:
                raise no_table_error(self._engine.written.of(name))
            spec, description = self._tables[name]
            exported = await listed(self._engine, name, spec.num_slices, since)
            pieces = self._pieces(key, description, exported.ids)
            await asyncio.to_thread(write_table, file, name, description, exported, pieces)
            return exported.version

        return Handle(self._engine.run(work()), what="export_table")

    def _pieces(self, key: Any, description: RowSparse, ids: Ids) -> Iterator[Array]:
        """Rows of these ids, for a thread that may wait."""
        step = rows_at_once(description)
        for first in range(0, len(ids), step):
            yield self.row_sparse_pull(key, ids[first : first + step], None, 0).wait()
