"""Writer of snapshots, key by key. At most one part and one key are in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kvd.compute.tensors import dtype_name
from kvd.errors import SnapshotError
from kvd.protocol.specs import KeySpec, TableSpec
from kvd.snapshots import manifest
from kvd.snapshots.folder import NewFolder, is_taken
from kvd.snapshots.hashing import digest_of, hashed_beside
from kvd.snapshots.manifest import Manifest, Origin, Piece, Slot, StoredKey, StoredPart, StoredProgram, StoredTable
from kvd.snapshots.parts import packed
from kvd.snapshots.reader import StoredSnapshot
from kvd.tables.stored_rows import StoredRows

Array: TypeAlias = np.ndarray[Any, Any]

PART_BYTES = 64 << 20  # the values of a part have at most so many bytes


def is_written(path: Path, origin: Origin, clocks: Mapping[str, int], restored_from: str = "") -> bool:
    """Return whether this very snapshot exists: worker 0 may have died after writing it.

    Args:
        clocks: of each key.
        restored_from: the lineage of the snapshot that the store was restored from. It may be the one at `path`.

    Raises:
        SnapshotError: something else is there.
    """
    with _said(path):
        if not is_taken(path):
            return False
    try:
        found = StoredSnapshot.open(path)
    except SnapshotError as error:
        text = f"{path} is there already, and is no snapshot: choose another name, or move it away"
        raise SnapshotError(text, path=str(path)) from error
    there = found.manifest
    is_source = there.origin.lineage == restored_from and there.origin.steps == origin.steps
    if (is_source and not any(clocks.values())) or (
        there.origin == origin and {key.key: key.clock for key in there.keys} == clocks
    ):
        found.verify()
        return True
    text = (
        f"{path} is there already: a snapshot of job {there.origin.job!r} after {there.origin.steps} steps; "
        f"choose another name for each snapshot, or move it away"
    )
    raise SnapshotError(text, path=str(path))


class TableContent(NamedTuple):
    """Table properties of a key, and the ids of its rows in ascending order."""

    spec: TableSpec
    ids: Array


class KeyContent(NamedTuple):
    """One key of a snapshot: what `SnapshotWriter.add` takes."""

    key: str
    value: Array
    clock: int
    updates: int
    state: Mapping[str, Array]
    merge: str = ""
    table: TableContent | None = None
    gradients: bool = False


class ProgramContent(NamedTuple):
    """The state of a program that updates the weights itself.

    Attributes:
        weights: by key; they are the values of these keys.
        layout: says what the state consists of.
        state: its other bytes.
    """

    weights: Mapping[str, Array]
    layout: bytes
    state: Array


def table_content(key: str, spec: KeySpec, stored: StoredRows, clock: int) -> KeyContent:
    """Return a table as a key of a snapshot.

    Args:
        stored: all its rows, ids ascending.
    """
    assert spec.table is not None
    content = TableContent(spec.table._replace(parts=1), stored.ids)
    value = stored.rows.reshape(len(stored.ids), *spec.shape)
    return KeyContent(key, value, clock, stored.updates, stored.slots, spec.merge, content)


class SnapshotWriter:
    """One snapshot: `add` each key, then `finish`; or `abort`. Nothing has the name `path` before it is finished.

    Args:
        part_bytes: how large a part may be.
        earlier: parts of earlier snapshots, by their checksums: such a part takes no room again, but is linked.

    Raises:
        SnapshotError: it cannot be written, or the name is taken. So do the methods.
    """

    def __init__(
        self,
        path: Path,
        origin: Origin,
        part_bytes: int = PART_BYTES,
        earlier: Mapping[str, Path] = MappingProxyType({}),
    ) -> None:
        self._path = path
        self._origin = origin
        self._part_bytes = part_bytes
        self._earlier = earlier
        self._keys: list[StoredKey] = []
        self._parts: list[StoredPart] = []
        self._program: StoredProgram | None = None
        self._pending: dict[str, Array] = {}  # of the part that is not full yet
        self._pending_bytes = 0
        self._rests = False
        with _said(path):
            self._folder = NewFolder(path)

    def add(
        self,
        key: str,
        value: Array,
        clock: int,
        updates: int,
        state: Mapping[str, Array],
        merge: str = "",
        table: TableContent | None = None,
        gradients: bool = False,
    ) -> None:
        """Write one key. The arrays must not change until `finish`.

        Args:
            value: in the shape of the key; of a table its rows, shape (rows, …shape of a row).
            clock, updates, merge, gradients: see `StoredKey`.
            state: the optimizer's arrays by slot, each with as many elements as the value; of a table, some per row.
        """
        with _said(self._path):
            ids = () if table is None else self._put("ids", key, table.ids)
            weight = self._put("weight", key, value)
            slots = {
                slot: Slot(dtype_name(array.dtype), self._put(f"state {slot}", key, array))
                for slot, array in state.items()
            }
        name = dtype_name(value.dtype)
        shape, stored = tuple(value.shape), None
        if table is not None:
            shape, stored = shape[1:], StoredTable(table.spec, len(table.ids), ids)
        self._keys.append(StoredKey(key, name, shape, clock, updates, weight, slots, merge, stored, gradients))

    def add_group(self, contents: Sequence[KeyContent], *, rests: bool) -> None:
        """Write keys into parts of their own.

        Args:
            rests: they have probably not changed since they were written into earlier parts. A wrong guess costs time.
        """
        self._end_part()
        self._rests = rests
        try:
            for content in contents:
                self.add(*content)
            self._end_part()
        finally:
            self._rests = False

    def add_program(self, content: ProgramContent) -> None:
        """The state of the program, in parts of its own. The weights are those of the keys."""
        self._end_part()
        with _said(self._path):
            layout = self._put("layout", "", np.frombuffer(content.layout, np.uint8))
            self._program = StoredProgram(layout, self._put("program", "", content.state))
        self._end_part()

    def finish(self) -> Manifest:
        """Write the rest, give the folder its name, and return its manifest."""
        self._end_part()
        content = Manifest(self._origin, tuple(self._keys), tuple(self._parts), self._program)
        with _said(self._path):
            self._folder.write(manifest.FILE, content.to_json())
            self._folder.publish()
        return content

    def abort(self) -> None:
        """Remove the written files; not after `finish`."""
        self._folder.discard()

    def _end_part(self) -> None:
        with _said(self._path):
            if self._pending:
                self._write_part()

    def _put(self, what: str, key: str, array: Array) -> tuple[Piece, ...]:
        """Cut an array into tensors that fit into parts, with names that are unique for all keys."""
        if array.nbytes <= self._part_bytes:
            return (self._put_piece(f"{what}|{key}", array, array.size),)
        flat = array.reshape(-1)
        count = max(1, self._part_bytes // array.itemsize)
        pieces = []
        for number, start in enumerate(range(0, flat.size, count)):
            piece = flat[start : start + count]
            pieces.append(self._put_piece(f"{what} {number}|{key}", piece, piece.size))
        return tuple(pieces)

    def _put_piece(self, name: str, array: Array, count: int) -> Piece:
        if self._pending and self._pending_bytes + array.nbytes > self._part_bytes:
            self._write_part()
        self._pending[name] = np.ascontiguousarray(array).reshape(array.shape)
        self._pending_bytes += array.nbytes
        return Piece(len(self._parts), name, count)

    def _write_part(self) -> None:
        content = packed(self._pending)
        self._pending, self._pending_bytes = {}, 0
        file = f"part-{len(self._parts):05}.safetensors"
        nbytes = sum(piece.nbytes for piece in content)
        if self._rests:
            digest = digest_of(content)
            if not self._linked(file, digest, nbytes):
                self._folder.write(file, *content)
        else:
            with hashed_beside(content) as hashing:
                self._folder.write(file, *content)
                digest = hashing.digest()
            self._linked(file, digest, nbytes)  # the same after all: it takes no room of its own
        self._parts.append(StoredPart(file, nbytes, digest))

    def _linked(self, file: str, digest: str, nbytes: int) -> bool:
        earlier = self._earlier.get(digest)
        return earlier is not None and self._folder.link(file, earlier, nbytes)


@contextmanager
def _said(path: Path) -> Iterator[None]:
    """Convert errors of the file system to SnapshotErrors."""
    try:
        yield
    except OSError as error:
        text = (
            f"{path}: {error.strerror}: the snapshot cannot be written there, and nothing of it stays; make room, or "
            f"choose a folder that can be written to"
        )
        raise SnapshotError(text, path=str(path)) from error
