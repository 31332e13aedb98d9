"""Snapshots of a store in this process."""

from __future__ import annotations

import os
import secrets
from typing import Any

from kvd.client.calls import checks
from kvd.client.calls.handle import Handle
from kvd.client.calls.program_steps import ProgramSteps
from kvd.client.calls.snapshot_writing import SnapshotWriting
from kvd.client.calls.values import source_of
from kvd.client.local.keys import Entry, LocalKeys
from kvd.client.local.updates import LocalUpdates, exported, loaded
from kvd.errors import NotAllowed
from kvd.protocol.specs import MAX_SLICE_BYTES
from kvd.snapshots.layout import KeyMark
from kvd.snapshots.manifest import Origin
from kvd.snapshots.reader import StoredSnapshot
from kvd.snapshots.series import SnapshotSeries
from kvd.snapshots.writer import KeyContent, is_written


class LocalSnapshots:
    """As those of a cluster with one worker.

    Args:
        type_name: the type of the store.
    """

    def __init__(self, keys: LocalKeys, updates: LocalUpdates, steps: ProgramSteps, type_name: str) -> None:
        self._keys = keys
        self._updates = updates
        self._steps = steps
        self._type_name = type_name
        self._lineage = secrets.token_hex(8)
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
        self.wait()

        def work() -> Handle:
            origin = Origin("", self._type_name, self._lineage, boundary.steps, 1, self._updates.optimizer)
            clocks = {name: entry.version for name, entry in self._keys.entries.items()}
            if is_written(folder, origin, clocks, self._restored_from):
                return Handle.of(None)
            marks = {name: KeyMark(entry.value.nbytes, entry.version) for name, entry in self._keys.entries.items()}
            taken = self._series.begin(folder, origin, marks)
            contents = [[_content(name, self._keys.entry(name)) for name in group] for group in taken.groups]
            self._writing = SnapshotWriting(taken, contents)
            return self._keys.unobserved.watch((), Handle(self._writing.promise, what="snapshot"))

        return self._keys.answered(work)

    def wait(self) -> None:
        """Returns when no snapshot is being written any more."""
        if self._writing is not None:
            self._writing.promise.exception()

    def give_up(self) -> None:
        """Writes nothing any more."""
        if self._writing is not None:
            self._writing.give_up()

    def restore(self, path: Any, missing_ok: bool) -> Handle:
        folder = checks.file_path(path)
        self._keys.check_open()
        self._steps.check_may_restore()

        def work() -> int | None:
            if missing_ok and not os.path.lexists(folder):
                return None
            for name in self._keys.entries:
                text = (
                    f"this store has keys already, such as {name!r}: restore comes in place of init and set_optimizer"
                )
                raise NotAllowed(text, key=name)
            snapshot = StoredSnapshot.open(folder)
            snapshot.verify()
            origin = snapshot.manifest.origin
            self._updates.adopt(origin.optimizer)
            for key in snapshot.manifest.keys:
                value = snapshot.value(key).copy()
                entry = self._keys.make(key.key, source_of(value, MAX_SLICE_BYTES, copy=False))
                entry.state = loaded(key.updates, {name: array.copy() for name, array in snapshot.state(key).items()})
            self._restored_from = origin.lineage
            self._steps.restored(origin.steps)
            return origin.steps

        return self._keys.answered(work)


def _content(name: str, entry: Entry) -> KeyContent:
    """A copy of what a key is now."""
    updates, state = exported(entry)
    copies = {slot: array.copy() for slot, array in state.items()}
    return KeyContent(name, entry.value_as_array().copy(), entry.version, updates, copies)
