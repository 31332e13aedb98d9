"""The keys of a store in this process: their values, the lock, and the unobserved errors."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvd.client.calls import checks
from kvd.client.calls.bound_arrays import BoundArrays
from kvd.client.calls.exits import raise_at_exit
from kvd.client.calls.handle import Handle
from kvd.client.calls.keys import KeyList, WrittenKeys, key_list, missing
from kvd.client.calls.promise import Promise
from kvd.client.calls.restored_keys import RestoredKeys
from kvd.client.calls.tables import no_table_error, table_error
from kvd.client.calls.unobserved_errors import UnobservedErrors
from kvd.client.calls.values import Array, Source
from kvd.compute.optimizers import SliceState
from kvd.compute.tensors import named_dtype
from kvd.errors import KvdError
from kvd.protocol.specs import MAX_SLICE_BYTES, KeySpec
from kvd.tables.description import RowSparse
from kvd.tables.table import Table
from kvd.tables.wire import spec_of_table

Result = TypeVar("Result")


@dataclass(slots=True)
class Entry:
    """One key: its value as a flat array, and its optimizer state."""

    spec: KeySpec
    value: Array
    state: SliceState = field(default_factory=SliceState)
    version: int = 0
    bound: BoundArrays | None = None

    def value_as_array(self) -> Array:
        """Its value in its shape: not a copy."""
        return self.value.reshape(self.spec.shape)


@dataclass(slots=True)
class TableEntry:
    """One key that is a table."""

    table: Table
    merge: str  # its own; "": that of the store
    version: int = 0


def table_spec(description: RowSparse, merge: str) -> KeySpec:
    """Of a table in this process, which is one part."""
    return spec_of_table(description, parts=1, slice_bytes=MAX_SLICE_BYTES, merge=merge)


class LocalKeys:
    """Every call does its work at once, under one lock, so every handle is done.

    As with a cluster, errors that only the store can find are raised by the handle.

    Args:
        place: asks where the program is.

    Attributes:
        entries: the keys that were made, but for tables.
        tables: those that are tables.
        written: how the program writes them.
        restored: those that a snapshot had, and the program has yet to make.
        unobserved: the errors of handles that nobody waits for.
    """

    def __init__(self, place: Callable[[], int]) -> None:
        self.entries: dict[str, Entry] = {}
        self.tables: dict[str, TableEntry] = {}
        self.written = WrittenKeys()
        self.restored = RestoredKeys()
        self._lock = threading.RLock()
        self.unobserved = UnobservedErrors(place)
        self._closed = False
        self._pid = os.getpid()

    def check_open(self) -> None:
        """Raises StoreClosed after close, and in a child process."""
        if self._pid != os.getpid():
            raise checks.forked_error()
        if self._closed:
            raise checks.closed_error()

    @property
    def is_open(self) -> bool:
        """Whether calls work."""
        return self._pid == os.getpid() and not self._closed

    def close(self) -> None:
        """No call works after this."""
        self._closed = True

    # ── calls ──

    def named(self, key: Any) -> KeyList:
        """One key, or a list of keys. Raises unobserved errors of these."""
        self.check_open()
        keys = key_list(key)
        self.written.note(keys)
        self.unobserved.raise_for(keys.names)
        return keys

    def answered(self, work: Callable[[], Any], finish: Callable[[Any], Any] | None = None) -> Handle:
        """The handle of work that is done here and now: it has the errors of kvd, others are raised at once.

        Args:
            finish: as that of a `Handle`.
        """
        promise = Promise()
        try:
            with self._lock:
                promise.set_result(work())
        except KvdError as error:  # any other comes from an updater or from the file system
            promise.set_exception(self.written.restored(error))
        return Handle(promise, finish)

    def at_once(self, work: Callable[[], Result]) -> Result:
        """What work returns; its errors are raised here, and not by a handle."""
        try:
            with self._lock:
                return work()
        except KvdError as error:
            raise self.written.restored(error) from None

    def watched(
        self,
        names: list[str],
        work: Callable[[], Any],
        what: str,
        refused: Callable[[Sequence[str]], None] | None = None,
        finish: Callable[[Any], Any] | None = None,
    ) -> Handle:
        """The same for a call that errors call `what`; an unobserved error is raised by a later call. `refused`: see
        `UnobservedErrors.watch`."""
        handle = self.answered(work, finish)
        handle.what = what
        self.unobserved.watch(names, handle, refused)
        if self.unobserved:
            raise_at_exit(self.unobserved)
        return handle

    def raise_unobserved(self) -> None:
        self.unobserved.raise_for(None)

    def forget_unobserved(self) -> None:
        self.unobserved.clear()

    # ── entries ──

    def is_live(self, name: str) -> bool:
        """Whether there is such a key."""
        return name in self.entries or name in self.tables

    def is_table(self, name: str) -> bool:
        """Whether it is a table."""
        return name in self.tables

    def make(self, name: str, source: Source) -> Entry:
        """A new key, in place of one of this name that is no table."""
        entry = Entry(source.spec, source.data.view(named_dtype(source.spec.dtype)))
        self.entries[name] = entry
        return entry

    def entry(self, name: str) -> Entry:
        """Raises KeyNotFound if nobody made the key, and NotAllowed if it is a table."""
        entry = self.entries.get(name)
        if entry is None:
            raise table_error(self.written.of(name)) if name in self.tables else missing(name)
        return entry

    def spec(self, name: str) -> KeySpec:
        """That of a live key, which may be a table."""
        table = self.tables.get(name)
        return self.entries[name].spec if table is None else table_spec(table.table.description, table.merge)

    def version(self, name: str) -> int:
        """How many pushes of the key counted. Raises KeyNotFound."""
        table = self.tables.get(name)
        return self.entry(name).version if table is None else table.version

    def table(self, name: str) -> TableEntry:
        """Raises KeyNotFound, or NotAllowed if the key is no table."""
        entry = self.tables.get(name)
        if entry is None:
            self.entry(name)  # raises KeyNotFound
            raise no_table_error(self.written.of(name))
        return entry

    def drop(self, name: str) -> None:
        """The key is gone."""
        self.entries.pop(name, None)
        self.tables.pop(name, None)

    def matching(
        self, names: list[str], specs: list[KeySpec], *, cast: bool = False, what: str = "value"
    ) -> list[Entry]:
        """The entries of these keys. Raises KeyNotFound, or ShapeMismatch or DtypeMismatch if a spec differs.

        Args:
            cast: another floating dtype fits.
            what: see `KeySpec.check_same`.
        """
        entries = [self.entry(name) for name in names]
        for name, entry, spec in zip(names, entries, specs, strict=True):
            entry.spec.check_same(spec, name, cast=cast, what=what)
        return entries
