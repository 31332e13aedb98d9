"""The snapshots that one store takes, one after the other: a part that is as it was is not written again.

Whether it is, its bytes say, by their checksum. The new snapshot then gets a hard link to the file of the earlier one,
where both are in one folder: either can be deleted, and the file goes with the last of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvd.snapshots.layout import Group, KeyMark, Layout
from kvd.snapshots.manifest import Manifest, Origin, StoredPart
from kvd.snapshots.writer import PART_BYTES, KeyContent, ProgramContent, SnapshotWriter


class SnapshotSeries:
    """Series of snapshots of one store, with the parts of the latest."""

    def __init__(self, part_bytes: int = PART_BYTES) -> None:
        self._part_bytes = part_bytes
        self._layout = Layout(part_bytes)
        self._path: Path | None = None
        self._parts: Sequence[StoredPart] = ()

    def begin(self, path: Path, origin: Origin, keys: Mapping[str, KeyMark]) -> NextSnapshot:
        """Begin the next snapshot.

        Raises:
            SnapshotError: it cannot be written.
        """
        before = self._path
        earlier = {}
        if before is not None and before.parent == _real(path).parent:
            earlier = {part.sha256: before / part.file for part in self._parts}
        writer = SnapshotWriter(path, origin, self._part_bytes, earlier)
        resting = frozenset(self._layout.resting(keys) if earlier else ())
        return NextSnapshot(self, writer, path, self._layout.next(keys), resting, keys)

    def taken(self, path: Path, groups: Sequence[Group], keys: Mapping[str, KeyMark], content: Manifest) -> None:
        """Record a published snapshot."""
        self._path = _real(path)
        self._parts = content.parts
        self._layout.taken(groups, keys)


class NextSnapshot:
    """A snapshot that is being written: each group, the program's state if there is one, then `finish`; or `abort`.

    Attributes:
        groups: the keys, in the order in which they are written.
    """

    def __init__(
        self,
        series: SnapshotSeries,
        writer: SnapshotWriter,
        path: Path,
        groups: Sequence[Group],
        resting: frozenset[Group],
        keys: Mapping[str, KeyMark],
    ) -> None:
        self._writer = writer
        self._resting = resting
        self.groups = groups
        self._series = series
        self._path = path
        self._keys = keys

    def add_group(self, contents: Sequence[KeyContent]) -> None:
        """Write the keys of the next group. Raises SnapshotError."""
        group = tuple([content.key for content in contents])
        self._writer.add_group(contents, rests=group in self._resting)

    def add_program(self, content: ProgramContent) -> None:
        """See `SnapshotWriter.add_program`. Raises SnapshotError."""
        self._writer.add_program(content)

    def abort(self) -> None:
        """Remove the written files."""
        self._writer.abort()

    def finish(self) -> None:
        """Give the snapshot its name, and remember it. Raises SnapshotError."""
        self._series.taken(self._path, self.groups, self._keys, self._writer.finish())


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))
