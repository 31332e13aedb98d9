"""Reads a snapshot. Whatever is wrong with it is a SnapshotError that names the file."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from kvd.compute.tensors import named_dtype
from kvd.errors import SnapshotError
from kvd.snapshots import manifest
from kvd.snapshots.manifest import Manifest, NewerVersion, Piece, StoredKey
from kvd.snapshots.parts import unpack

Array: TypeAlias = np.ndarray[Any, Any]

_EARLIER = "take an earlier snapshot"


class NewerSnapshot(SnapshotError):
    """It was written by a kvd that this one does not know: no earlier one is as good."""


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
        """Reads the manifest.

        Raises:
            SnapshotError: this is no snapshot, no complete one, or one of a newer kvd.
        """
        file = path / manifest.FILE
        try:
            if file.stat().st_size > manifest.MAX_BYTES:
                raise SnapshotError(f"{file} is larger than any manifest of a snapshot: {_EARLIER}", path=str(file))
            data = file.read_bytes()
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
        """Reads every part once.

        Raises:
            SnapshotError: a part is missing or damaged; it names the file.
        """
        for number in range(len(self.manifest.parts)):
            self._checked(number)

    def value(self, key: StoredKey) -> Array:
        """The value of a key, in its shape. Raises SnapshotError."""
        return self._array(key.weight, key.dtype).reshape(key.shape)

    def state(self, key: StoredKey) -> dict[str, Array]:
        """The optimizer's arrays of a key by slot, one-dimensional. Raises SnapshotError."""
        return {name: self._array(slot.pieces, slot.dtype) for name, slot in key.state.items()}

    def _array(self, pieces: Sequence[Piece], dtype: str) -> Array:
        arrays = [self._tensor(piece, dtype) for piece in pieces]
        if len(arrays) == 1:
            return arrays[0]
        return np.concatenate(arrays) if arrays else np.empty(0, named_dtype(dtype))

    def _tensor(self, piece: Piece, dtype: str) -> Array:
        tensor = self._part(piece.part).get(piece.tensor)
        if tensor is None or tensor.size != piece.elements or tensor.dtype != named_dtype(dtype):
            file = self._file(piece.part)
            text = f"{file} does not have the tensor {piece.tensor!r} of the manifest: {_EARLIER}"
            raise SnapshotError(text, path=str(file))
        return tensor

    def _file(self, number: int) -> Path:
        return self.path / self.manifest.parts[number].file

    def _part(self, number: int) -> dict[str, Array]:
        """The tensors of a part. The one that was read last is kept: the arrays of a key lie side by side."""
        if self._loaded is None or self._loaded[0] != number:
            self._loaded = None
            self._loaded = number, self._unpacked(number)
        return self._loaded[1]

    def _unpacked(self, number: int) -> dict[str, Array]:
        data, file = self._checked(number), self._file(number)
        try:
            return unpack(data)
        except ValueError as error:
            raise SnapshotError(f"{file} is damaged: {error}; {_EARLIER}", path=str(file)) from None

    def _checked(self, number: int) -> bytes:
        """The bytes of a part, which have its size and checksum."""
        part, file = self.manifest.parts[number], self._file(number)
        try:
            size = file.stat().st_size
            data = file.read_bytes() if size == part.nbytes else b""
        except FileNotFoundError:
            raise SnapshotError(f"{file} is missing, and belongs to the snapshot: {_EARLIER}", path=str(file)) from None
        except OSError as error:
            text = f"{file}: {error.strerror}: the snapshot cannot be read"
            raise SnapshotError(text, path=str(file)) from error
        if size != part.nbytes:
            text = f"{file} has {size} bytes, not {part.nbytes}: it was cut off or changed; {_EARLIER}"
            raise SnapshotError(text, path=str(file))
        if sha256(data).hexdigest() != part.sha256:
            raise SnapshotError(f"{file} is damaged: its checksum is another one; {_EARLIER}", path=str(file))
        return data


def _no_manifest(path: Path) -> SnapshotError:
    if not path.exists():
        text = f"{path} is not there: name the folder of a snapshot that was taken with kv.snapshot"
    elif path.is_dir() and any(path.glob("part-*.safetensors")):
        text = f"{path} is a snapshot that was not finished: it has no {manifest.FILE}; {_EARLIER}"
    else:
        text = f"{path} is no snapshot: it has no {manifest.FILE}; name a folder that kv.snapshot has written"
    return SnapshotError(text, path=str(path))
