"""Reader of snapshots. Every fault of a snapshot is a SnapshotError that names the file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import file_digest, sha256
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from kvd.compute.tensors import named_dtype
from kvd.errors import SnapshotError
from kvd.files import open_file
from kvd.protocol.messages import BIGGEST
from kvd.protocol.specs import ANY_ROW
from kvd.snapshots import manifest
from kvd.snapshots.manifest import Manifest, NewerVersion, Piece, StoredKey
from kvd.snapshots.part_memory import PartMemory
from kvd.snapshots.parts import Place, places, tensors
from kvd.tables.stored_rows import StoredRows

Array: TypeAlias = np.ndarray[Any, Any]

VERIFIERS = 4  # threads that read parts at once; each has a buffer of 256 KiB
READ_BYTES = 1 << 20  # at once, so that they are hashed in the processor's cache
_EARLIER = "take an earlier snapshot"


class NewerSnapshot(SnapshotError):
    """Snapshot of a newer kvd. Earlier snapshots are no substitute for it."""


class StoredSnapshot:
    """A snapshot on disk. Values are checked against the checksums whenever they are read.

    Attributes:
        path: its folder.
        manifest: what it holds.
    """

    def __init__(self, path: Path, content: Manifest) -> None:
        self.manifest = content
        self.path = path
        self._loaded: tuple[int, dict[str, Array]] | None = None  # the part that was read last

    @classmethod
    def open(cls, path: Path) -> StoredSnapshot:
        """Read the manifest.

        Raises:
            SnapshotError: this is no snapshot, no complete one, or one of a newer kvd.
        """
        file = path / manifest.FILE
        try:
            with open_file(file) as opened:
                if os.fstat(opened.fileno()).st_size > manifest.MAX_BYTES:
                    text = f"{file} is larger than any manifest of a snapshot: {_EARLIER}"
                    raise SnapshotError(text, path=str(file))
                data = opened.read()
        except (FileNotFoundError, NotADirectoryError):
            raise _no_manifest(path) from None
        except OSError as error:
            text = f"{file}: {error.strerror}: the snapshot cannot be read; see to its owner and mode"
            raise SnapshotError(text, path=str(file)) from error
        try:
            return cls(path, Manifest.from_json(data))
        except NewerVersion as error:
            text = f"{file} was written by a newer kvd: {error}; install that version"
            raise NewerSnapshot(text, path=str(file)) from None
        except ValueError as error:
            raise SnapshotError(f"{file} is damaged: {error}; {_EARLIER}", path=str(file)) from None

    def verify(self) -> None:
        """Read and check every part once, without keeping it.

        Raises:
            SnapshotError: a part is missing or damaged, or of another snapshot; it names the file.
        """
        expected = self._pieces_by_part()
        with ThreadPoolExecutor(VERIFIERS, "kvd-snapshot-reader") as threads:
            for _ in threads.map(self._verify_part, range(len(expected)), expected):
                pass  # raises the error of the first part that has one

    def value(self, key: StoredKey, memory: PartMemory | None = None) -> Array:
        """Return the value of a key, in its shape. It is valid until its parts are given back to the memory.

        Raises:
            SnapshotError: a part is missing or damaged.
        """
        return self._array(key.weight, key.dtype, memory).reshape(key.shape)

    def rows(self, key: StoredKey, memory: PartMemory | None = None) -> StoredRows:
        """Return the rows of a table; valid as a value is. Raises SnapshotError."""
        table = key.table
        assert table is not None
        count = table.num_rows
        ids = self._array(table.ids, "int64", memory).reshape(-1)
        rows = self._array(key.weight, key.dtype, memory).reshape(count, prod(key.shape))
        slots = {name: array.reshape(count, -1) for name, array in self.state(key, memory).items()} if count else {}
        limit = BIGGEST + 1 if table.spec.rows == ANY_ROW else table.spec.rows
        if count and (ids[0] < 0 or int(ids[-1]) >= limit or bool((ids[1:] <= ids[:-1]).any())):
            text = f"{self.path} names rows of table {key.key!r} that it does not have, or twice: {_EARLIER}"
            raise SnapshotError(text, path=str(self.path))
        return StoredRows(ids, rows, slots, key.updates)

    def state(self, key: StoredKey, memory: PartMemory | None = None) -> dict[str, Array]:
        """Return the optimizer's arrays of a key by slot, one-dimensional.

        They are valid as long as a value. Raises SnapshotError.
        """
        return {name: self._array(slot.pieces, slot.dtype, memory) for name, slot in key.state.items()}

    def program(self) -> tuple[bytes, Array] | None:
        """Layout and bytes of the program's state, without the weights; None: there is none. Raises SnapshotError."""
        stored = self.manifest.program
        if stored is None:
            return None
        return self._array(stored.layout, "uint8", None).tobytes(), self._array(stored.state, "uint8", None)

    def _array(self, pieces: Sequence[Piece], dtype: str, memory: PartMemory | None) -> Array:
        if len(pieces) == 1:
            return self._tensor(pieces[0], dtype, memory)
        whole = np.empty(sum(piece.elements for piece in pieces), named_dtype(dtype))
        begin = 0
        for piece in pieces:  # each part can go once it is copied, so it is not one that somebody must give back
            whole[begin : begin + piece.elements] = self._tensor(piece, dtype, None)
            begin += piece.elements
        whole.flags.writeable = False
        return whole

    def _tensor(self, piece: Piece, dtype: str, memory: PartMemory | None) -> Array:
        tensor = self._part(piece.part, memory).get(piece.tensor)
        if tensor is None or tensor.size != piece.elements or tensor.dtype != named_dtype(dtype):
            raise self._misses(piece)
        return tensor

    def _misses(self, piece: Piece) -> SnapshotError:
        file = self._file(piece.part)
        text = f"{file} does not have the tensor {piece.tensor!r} of the manifest: {_EARLIER}"
        return SnapshotError(text, path=str(file))

    def _file(self, number: int) -> Path:
        return self.path / self.manifest.parts[number].file

    def _part(self, number: int, memory: PartMemory | None) -> dict[str, Array]:
        """Return the tensors of a part. The one that was read last is kept: the arrays of a key lie side by side."""
        if self._loaded is None or self._loaded[0] != number:
            self._loaded = None
            self._loaded = number, self._read_part(number, memory)
        return self._loaded[1]

    def _read_part(self, number: int, memory: PartMemory | None) -> dict[str, Array]:
        """Read a part, hashing each piece while it is in the processor's cache."""
        nbytes = self.manifest.parts[number].nbytes
        data = np.empty(nbytes, np.uint8) if memory is None else memory.take(number, nbytes)
        with self._opened(number) as file:
            digest, left = sha256(), data.data
            while left:
                read = file.readinto(left[:READ_BYTES])
                digest.update(left[:read])
                left = left[read or len(left) :]  # one that was cut off meanwhile has another checksum
            self._check_digest(number, digest.hexdigest())
            found = self._places(number, file)
        data.flags.writeable = False
        return tensors(data, found)

    def _verify_part(self, number: int, pieces: Sequence[tuple[Piece, str]]) -> None:
        with self._opened(number) as file:
            self._check_digest(number, file_digest(file, sha256).hexdigest())
            found = self._places(number, file)
        for piece, dtype in pieces:
            place = found.get(piece.tensor)
            if place is None or place.dtype != dtype or place.nbytes != piece.elements * named_dtype(dtype).itemsize:
                raise self._misses(piece)

    def _pieces_by_part(self) -> list[list[tuple[Piece, str]]]:
        """Return the tensors that each part must have, with their dtypes."""
        found: list[list[tuple[Piece, str]]] = [[] for _ in self.manifest.parts]
        for pieces, dtype in self.manifest.pieces():
            for piece in pieces:
                found[piece.part].append((piece, dtype))
        return found

    @contextmanager
    def _opened(self, number: int) -> Iterator[FileIO]:
        """Open a part of the right size. Every fault is a SnapshotError."""
        part, file = self.manifest.parts[number], self._file(number)
        try:
            with open_file(file) as opened:
                size = os.fstat(opened.fileno()).st_size
                if size != part.nbytes:
                    text = f"{file} has {size} bytes, not {part.nbytes}: it was cut off or changed; {_EARLIER}"
                    raise SnapshotError(text, path=str(file))
                yield opened
        except FileNotFoundError:
            raise SnapshotError(f"{file} is missing, and belongs to the snapshot: {_EARLIER}", path=str(file)) from None
        except OSError as error:
            text = f"{file}: {error.strerror}: the snapshot cannot be read"
            raise SnapshotError(text, path=str(file)) from error

    def _check_digest(self, number: int, digest: str) -> None:
        if digest != self.manifest.parts[number].sha256:
            file = self._file(number)
            raise SnapshotError(f"{file} is damaged: its checksum is another one; {_EARLIER}", path=str(file))

    def _places(self, number: int, file: FileIO) -> dict[str, Place]:
        """Return the positions of the tensors of a part with a correct checksum."""
        file.seek(0)
        try:
            return places(file, self.manifest.parts[number].nbytes)
        except ValueError as error:
            path = self._file(number)
            raise SnapshotError(f"{path} is damaged: {error}; {_EARLIER}", path=str(path)) from None


def _no_manifest(path: Path) -> SnapshotError:
    if not path.exists():
        text = f"{path} is not there: name the folder of a snapshot that was taken with kv.snapshot"
    elif path.is_dir() and any(path.glob("part-*.safetensors")):
        text = f"{path} is a snapshot that was not finished: it has no {manifest.FILE}; {_EARLIER}"
    else:
        text = f"{path} is no snapshot: it has no {manifest.FILE}; name a folder that kv.snapshot has written"
    return SnapshotError(text, path=str(path))
