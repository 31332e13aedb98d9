"""Snapshots of a store in this process."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvd.client.calls import checks
from kvd.client.calls.handle import Handle
from kvd.client.calls.healing import Healing
from kvd.client.calls.held_signals import signals
from kvd.client.calls.program_steps import ProgramSteps
from kvd.client.calls.snapshot_schedule import SnapshotSchedule
from kvd.client.calls.snapshot_writing import SnapshotWriting
from kvd.client.calls.values import Array, source_of
from kvd.client.local.keys import Entry, LocalKeys, TableEntry, table_spec
from kvd.client.local.updates import LocalUpdates, exported, loaded
from kvd.compute.tensors import named_dtype
from kvd.config import Config
from kvd.errors import NotAllowed, SnapshotError
from kvd.protocol.specs import MAX_SLICE_BYTES, KeySpec, no_weights_text
from kvd.snapshots.layout import KeyMark
from kvd.snapshots.manifest import Origin, StoredKey
from kvd.snapshots.reader import StoredSnapshot
from kvd.snapshots.series import SnapshotSeries
from kvd.snapshots.shelf import newest_at
from kvd.snapshots.writer import KeyContent, is_written, table_content
from kvd.tables.stored_rows import StoredRows, all_of
from kvd.tables.table import Table
from kvd.tables.wire import table_of_spec


class LocalSnapshots:
    """As those of a cluster with one worker.

    Args:
        healing: has the state of a program that updates the weights itself.
        type_name: the type of the store.
    """

    def __init__(
        self,
        keys: LocalKeys,
        updates: LocalUpdates,
        steps: ProgramSteps,
        healing: Healing,
        type_name: str,
        config: Config,
    ) -> None:
        self._keys = keys
        self._updates = updates
        self._steps = steps
        self._healing = healing
        self._type_name = type_name
        self._lineage = secrets.token_hex(8)
        self._schedule = SnapshotSchedule(config, "", lambda: self._lineage)
        steps.take_snapshots(self._schedule, self._scheduled)
        self._series = SnapshotSeries()
        self._restored_from = ""  # the lineage of that snapshot
        self._writing: SnapshotWriting | None = None  # the latest

    def snapshot(self, path: Any) -> Handle:
        begun = self.snapshot_async(path)
        return begun if begun.exception() is not None else begun.result()

    def snapshot_async(self, path: Any) -> Handle:
        folder = checks.file_path(path)
        self._keys.check_open()
        boundary = self._steps.boundary()
        if boundary.is_past:
            return Handle.of(Handle.of(None))
        return self._keys.answered(lambda: self._keys.unobserved.watch((), self._begin(folder, boundary.steps)))

    def _scheduled(self, steps: int) -> Handle:
        """The snapshot after a step, by the schedule. What is wrong with the disk is logged."""

        def work() -> None:
            path = self._schedule.path(steps)
            try:
                self._schedule.make_room(path)
                self._schedule.watch(steps, self._begin(path, steps, self._schedule.published))
            except SnapshotError as error:
                self._schedule.failed(steps, error)

        return self._keys.answered(work)

    def _begin(self, folder: Path, steps: int, published: Callable[[], None] | None = None) -> Handle:
        """Copies the state; the handle says when it is written."""
        self.wait()
        program = self._healing.for_snapshot(steps, is_writer=True)
        weights = {} if program is None else program.weights
        for name, entry in self._keys.entries.items():
            if entry.spec.gradients and entry.version and name not in weights:
                raise NotAllowed(no_weights_text(name), key=name)
        origin = Origin("", self._type_name, self._lineage, steps, 1, self._updates.optimizer)
        clocks = {name: entry.version for name, entry in self._entries()}
        if is_written(folder, origin, clocks, self._restored_from):
            return Handle.of(None)
        marks = {name: KeyMark(_nbytes(entry), entry.version) for name, entry in self._entries()}
        taken = self._series.begin(folder, origin, marks)
        contents = [[self._content(name, weights.get(name)) for name in group] for group in taken.groups]
        self._writing = SnapshotWriting(taken, contents, program, published)
        return Handle(self._writing.promise, what="snapshot")

    def _entries(self) -> Iterable[tuple[str, Entry | TableEntry]]:
        return [*self._keys.entries.items(), *self._keys.tables.items()]

    def _content(self, name: str, weight: Array | None) -> KeyContent:
        """A copy of what a key is now.

        Args:
            weight: what the program has in place of merged gradients; None: nothing.
        """
        table = self._keys.tables.get(name)
        if table is None:
            return _content(name, self._keys.entry(name), weight)
        spec = table_spec(table.table.description, table.merge)
        return table_content(name, spec, all_of(table.table), table.version)

    def wait(self) -> None:
        """Returns when no snapshot is being written any more."""
        if self._writing is not None:
            self._writing.promise.exception()

    def give_up(self) -> None:
        """Writes nothing any more."""
        if self._writing is not None:
            self._writing.give_up()

    def restore(self, path: Any, missing_ok: bool, or_older: bool) -> Handle:
        folder = checks.file_path(path)
        self._keys.check_open()
        self._steps.check_may_restore()
        return self._keys.answered(
            lambda: self._restore(lambda: newest_at(folder, missing_ok=missing_ok, or_older=or_older))
        )

    def begin_run(self) -> Handle:
        def work() -> int | None:
            steps = self._restore(self._schedule.newest, begins_past=True)
            self._schedule.check(steps or 0)
            return steps

        return self._keys.answered(work)

    def _restore(self, find: Callable[[], StoredSnapshot | None], *, begins_past: bool = False) -> int | None:
        snapshot = find()
        if snapshot is None:
            return None
        for name in (*self._keys.entries, *self._keys.tables):
            text = f"this store has keys already, such as {name!r}: restore comes in place of init and set_optimizer"
            raise NotAllowed(text, key=name)
        origin = snapshot.manifest.origin
        read: list[tuple[str, KeySpec, Entry | TableEntry]] = []
        for key in snapshot.manifest.keys:
            signals.handle()  # reading may take long, and nothing is restored yet
            spec, entry = _entry(key, snapshot) if key.table is None else _table_entry(key, snapshot.rows(key))
            read.append((key.key, spec, entry))
        self._updates.adopt(origin.optimizer)
        for name, spec, entry in read:
            if isinstance(entry, TableEntry):
                self._keys.tables[name] = entry
            else:
                self._keys.entries[name] = entry
            self._keys.restored.add([(name, spec)])
        self._restored_from = origin.lineage
        has_program = snapshot.manifest.program is not None
        self._healing.restored(snapshot if has_program else None, has_program=has_program)
        self._steps.restored(origin.steps, begins_past=begins_past)
        return origin.steps


def _entry(key: StoredKey, snapshot: StoredSnapshot) -> tuple[KeySpec, Entry]:
    source = source_of(snapshot.value(key).copy(), MAX_SLICE_BYTES, copy=False)
    state = loaded(key.updates, {name: array.copy() for name, array in snapshot.state(key).items()})
    spec = replace(source.spec, merge=key.merge, gradients=key.gradients)
    return spec, Entry(spec, source.data.view(named_dtype(spec.dtype)), state)


def _table_entry(key: StoredKey, stored: StoredRows) -> tuple[KeySpec, TableEntry]:
    assert key.table is not None
    spec = KeySpec(key.dtype, key.shape, MAX_SLICE_BYTES, key.merge, key.table.spec)
    table = Table(table_of_spec(spec), key.key)
    table.store(stored.ids, stored.rows, stored.slots)
    table.step = stored.updates
    return spec, TableEntry(table, key.merge)


def _nbytes(entry: Entry | TableEntry) -> int:
    return entry.table.nbytes if isinstance(entry, TableEntry) else entry.value.nbytes


def _content(name: str, entry: Entry, weight: Array | None) -> KeyContent:
    updates, state = exported(entry)
    copies = {slot: array.copy() for slot, array in state.items()}
    value, spec = entry.value_as_array().copy() if weight is None else weight, entry.spec
    return KeyContent(name, value, entry.version, updates, copies, spec.merge, gradients=spec.gradients)
