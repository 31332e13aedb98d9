"""The arguments of a call as the worker machine takes them: names, bytes to send, memory to write to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvd.client.calls.handle import Handle
from kvd.client.calls.keys import KeyList, key_list
from kvd.client.calls.memory_budget import MemoryBudget, Reservation
from kvd.client.calls.tied_weights import TensorsOfKeys
from kvd.client.calls.unobserved_errors import UnobservedErrors
from kvd.client.calls.values import (
    Array,
    Source,
    Target,
    Unlike,
    copy_of,
    of_each,
    source_of,
    targets_by_name,
    values_by_name,
)
from kvd.client.cluster.bound_keys import BoundKeys
from kvd.client.cluster.compression import Compressing, Room
from kvd.client.cluster.engine import Engine
from kvd.core import requests
from kvd.core.requests import Item
from kvd.core.worker.transfer import say_unpushed
from kvd.errors import KeyNotFound, RemoteError
from kvd.tables.description import RowSparse
from kvd.tables.first_rows import RowPages, first_rows, pages_of
from kvd.tables.wire import spec_of_table


class Arguments:
    """Resolves what a program passed, the same way for every call.

    Args:
        engine: gives the memory for copies, which servers of this host can read.
        bound: the gradients that need no copy.
        budget: what the copies count against.
        unobserved: errors of earlier calls on the same keys, which a call raises first.
        slice_bytes: the size of the slices in this cluster.
    """

    def __init__(
        self, engine: Engine, bound: BoundKeys, budget: MemoryBudget, unobserved: UnobservedErrors, slice_bytes: int
    ) -> None:
        self._engine = engine
        self._bound = bound
        self._budget = budget
        self._unobserved = unobserved
        self._slice_bytes = slice_bytes
        self._tensors = TensorsOfKeys()

    def forget(self, names: Sequence[str]) -> None:
        """The keys are deleted."""
        self._tensors.forget(names)

    def named(self, key: Any) -> KeyList:
        """One key, or a list of keys. Raises unobserved errors of these."""
        keys = key_list(key)
        self._engine.written.note(keys)
        self._unobserved.raise_for(keys.names)
        return keys

    def raise_unobserved(self, names: Sequence[str]) -> None:
        """Raises unobserved errors of these keys."""
        self._unobserved.raise_for(names)

    def sources(
        self,
        keys: KeyList,
        value: Any,
        *,
        copy: bool,
        reservation: Reservation | None = None,
        rows: Sequence[Source] = (),
    ) -> list[Source]:
        """The bytes to send. Copies count against the memory budget, see `MemoryBudget.take`.

        Args:
            rows: of the tables of the same push, which count as well.
        """
        copies = list(rows)

        def read(name: str, entry: Any) -> Source:
            source = self._bound.source(name, entry, self._slice_bytes)
            if source is None:
                source = source_of(entry, self._slice_bytes, copy=copy, memory=self._engine.memory)
                copies.append(source)
            return source

        sources = of_each(keys, values_by_name(keys, value), read)
        if copies and (copy or rows):
            self._budget.take(copies, reservation)
        return sources

    def copied(self, item: Item, reservation: Reservation | None) -> Item:
        """The same item with a copy of its source, which counts against the memory budget."""
        assert item.spec is not None
        data = copy_of(item.source, self._engine.memory)
        self._budget.take([Source(data, item.spec)], reservation)
        return item._replace(source=data)

    def rooms(
        self,
        keys: KeyList,
        value: Any,
        compressing: Compressing,
        *,
        copy: bool,
        reservation: Reservation | None = None,
        rows: Sequence[Source] = (),
    ) -> tuple[list[Source], list[Room | None]]:
        """The same for values that are compressed: those with a room are to be encoded into it, and are no copies. The
        rooms count as copies do."""
        rooms: list[Room | None] = []
        taken = list(rows)

        def read(name: str, entry: Any) -> Source:
            source = self._bound.source(name, entry, self._slice_bytes)
            is_bound = source is not None
            source = source or source_of(entry, self._slice_bytes, copy=False)
            layout = compressing.layout(source.spec)
            rooms.append(None if layout is None else Room(layout, self._engine.memory(layout.nbytes)))
            if rooms[-1] is not None:
                taken.append(Source(rooms[-1].memory, source.spec))
            elif copy and not is_bound:
                source = source_of(entry, self._slice_bytes, copy=True, memory=self._engine.memory)
                taken.append(source)
            return source

        sources = of_each(keys, values_by_name(keys, value), read)
        if taken:
            self._budget.take(taken, reservation)
        return sources, rooms

    def mismatch(self, unlike: Unlike, *, makes_key: bool = False) -> Handle:
        """A call that fails with what is wrong: the value or the `out`, whichever does not fit the key.

        Args:
            makes_key: the call would make a key that does not exist, like its value.
        """
        return Handle(self._engine.run(self._compare(unlike, makes_key)))

    async def _compare(self, unlike: Unlike, makes_key: bool) -> None:
        try:
            spec = await self._engine.call(requests.DescribeKey(unlike.name))
        except KeyNotFound:
            if not makes_key:
                raise
            spec = unlike.value
        try:
            unlike.check(spec)
        except RemoteError as error:
            say_unpushed(error, self._engine.machine.view)
            raise

    def init_sources(self, keys: KeyList, value: Any, *, copy: bool) -> list[Source]:
        """The values to init keys with: copies of them do not count against the budget."""
        values = values_by_name(keys, value)
        sources = of_each(keys, values, lambda _, entry: source_of(entry, self._slice_bytes, copy=copy))
        self._tensors.note(keys, values)
        return sources

    def given_sources(self, values: Sequence[Array]) -> list[Source]:
        """The bytes of arrays that the caller gives away. They count against the budget as copies do, one by one."""
        sources = [source_of(value, self._slice_bytes, copy=False) for value in values]
        for source in sources:
            self._budget.take([source])
        return sources

    def new_table(self, description: RowSparse, merge: str) -> Source:
        """What makes a table: its spec, with a part for each server, and no bytes."""
        parts = self._engine.machine.view.settings.num_servers
        spec = spec_of_table(description, parts=parts, slice_bytes=self._slice_bytes, merge=merge)
        return Source(np.zeros(0, np.uint8), spec)

    def first_pages(self, tables: Sequence[tuple[str, RowSparse]]) -> dict[str, RowPages]:
        """The rows that new tables begin with, by name, of those that begin with some.

        Raises:
            ShapeMismatch, DtypeMismatch, NotAllowed: they are no rows of their table.
        """
        parts = self._engine.machine.view.settings.num_servers
        begun = {name: first_rows(table, self._engine.written.of(name)) for name, table in tables}
        return {
            name: pages_of(stored, parts, self._engine.memory) for name, stored in begun.items() if stored is not None
        }

    def targets(self, keys: KeyList, out: Any, *, in_place: str = "") -> list[Target]:
        """The memory to write to, see `targets_by_name`."""
        return targets_by_name(keys, out, self._slice_bytes, in_place=in_place)
