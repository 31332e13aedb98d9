"""What compression keeps of a key in a file, so that a worker that is started again goes on with it.

The file is mapped into memory and holds two generations: what was left after the last push that was encoded, and after
the one before. Each has the number of its push among those of the key, the clock under which that push went (0 while it
has not set out), and a checksum. A process that is killed leaves the page cache as it was; where a machine went down in
between, or anything else was written there, the checksum says so.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from kvd.files import new_file, read_file

Floats = NDArray[np.float32]

_MAGIC = b"kvd kept 1\n"
_MARKS_AT, _DATA_AT = 2048, 4096
_MARK = struct.Struct("<4Q")
_ALIGNMENT = 64
_ZEROS = bytes(1 << 20)


class Unusable(Exception):
    """A file from which no worker can go on. The text says why."""


class Kept(NamedTuple):
    """What is kept after a push.

    Attributes:
        ordinal: the number of the push.
        arrays: float32, shape (size,) each.
    """

    ordinal: int
    arrays: tuple[Floats, ...]


class _Mark(NamedTuple):
    ordinal: int  # 0: the generation is being written
    clock: int
    checksum: int

    def packed(self) -> bytes:
        return _MARK.pack(*self, _mixed(self))

    @classmethod
    def at(cls, data: bytes | mmap.mmap, index: int) -> _Mark | None:
        """None: it is torn."""
        *numbers, check = _MARK.unpack_from(data, _MARKS_AT + index * _MARK.size)
        mark = cls(*numbers)
        return mark if check == _mixed(mark) else None


def _mixed(mark: _Mark) -> int:
    return crc32(struct.pack("<3Q", *mark)) + 1


class KeptFile:
    """The file of one key of one worker: a new one, which takes the place of its predecessor's.

    Args:
        path: of the file.
        identity: what the arrays belong to, in at most 1900 bytes.
        sizes: elements of each array.
        last: what is there so far, and the clock of its push; it is the first generation.

    Raises:
        OSError: it cannot be made. The file that was there is still there.
    """

    def __init__(self, path: Path, identity: bytes, sizes: Sequence[int], last: Kept | None = None, clock: int = 0):
        self.identity = identity
        self._sizes = tuple(sizes)
        self._lock = threading.Lock()
        made = path.with_suffix(".part")
        with new_file(made, is_private=True) as file:
            _reserve(file.fileno(), _DATA_AT + 2 * _nbytes(sizes))
            self._map = mmap.mmap(file.fileno(), 0)
        head = _MAGIC + struct.pack("<I", len(identity)) + identity
        self._map[: len(head)] = head
        for index in (0, 1):
            self._write_mark(index, _Mark(0, 0, 0))
        if last is not None:
            self.begin(last)
            self.end(last.ordinal)
            self.set_clock(last.ordinal, clock)
        os.replace(made, path)

    def begin(self, kept: Kept) -> tuple[Floats, ...]:
        """Copies what is kept to the generation of the push ``kept.ordinal``. Returns the arrays there, for changes."""
        index = kept.ordinal % 2
        with self._lock:
            self._write_mark(index, _Mark(0, 0, 0))
        arrays = self._arrays(index)
        for target, source in zip(arrays, kept.arrays, strict=True):
            np.copyto(target, source)
        return arrays

    def end(self, ordinal: int) -> None:
        """The generation of this push is complete."""
        checksum = _checksum(self._words(ordinal % 2))
        with self._lock:
            self._write_mark(ordinal % 2, _Mark(ordinal, 0, checksum))

    def set_clock(self, ordinal: int, clock: int) -> None:
        """The push sets out under this clock. Nothing happens if its generation was replaced since."""
        with self._lock:
            mark = _Mark.at(self._map, ordinal % 2)
            if mark is not None and mark.ordinal == ordinal:
                self._write_mark(ordinal % 2, mark._replace(clock=clock))

    def clock_of(self, ordinal: int) -> int:
        """The clock under which the push set out; 0: it has not, or its generation was replaced since."""
        mark = _Mark.at(self._map, ordinal % 2)
        return mark.clock if mark is not None and mark.ordinal == ordinal else 0

    def _write_mark(self, index: int, mark: _Mark) -> None:
        start = _MARKS_AT + index * _MARK.size
        self._map[start : start + _MARK.size] = mark.packed()

    def _words(self, index: int) -> NDArray[np.uint64]:
        nbytes = _nbytes(self._sizes)
        return np.frombuffer(self._map, np.uint64, nbytes // 8, _DATA_AT + index * nbytes)

    def _arrays(self, index: int) -> tuple[Floats, ...]:
        return _cut(self._words(index).view(np.float32), self._sizes)


def read(path: Path, identity: bytes, sizes: Sequence[int], clock: int) -> tuple[Kept, int] | None:
    """What was kept after the last push that set out under ``clock`` or before, and its clock; None: there is no file,
    or no push was made.

    Raises:
        Unusable: the file belongs to something else, or has not this generation, or was not written to its end.
    """
    try:
        data = read_file(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unusable(error.strerror or str(error)) from None
    if clock == 0:
        return None
    head = _MAGIC + struct.pack("<I", len(identity)) + identity
    nbytes = _nbytes(sizes)
    if not data.startswith(head) or len(data) != _DATA_AT + 2 * nbytes:
        raise Unusable("it was written for a compression with another momentum or rank, or not to its end")
    marks = [_Mark.at(data, index) for index in (0, 1)]
    usable = [(mark, index) for index, mark in enumerate(marks) if mark is not None and 0 < mark.clock <= clock]
    if not usable:
        raise Unusable(f"it has nothing of push {clock} of the key, the last one that counts")
    mark, index = max(usable, key=lambda found: (found[0].clock, found[0].ordinal))
    words = np.frombuffer(data, np.uint64, nbytes // 8, _DATA_AT + index * nbytes).copy()
    if _checksum(words) != mark.checksum or (mark.clock < clock and None in marks):
        raise Unusable("it was not written to its end, or damaged")
    return Kept(mark.ordinal, _cut(words.view(np.float32), sizes)), mark.clock


def remove(path: Path) -> None:
    """Removes the file, and what is left of an attempt to make it."""
    for each in (path, path.with_suffix(".part")):
        with suppress(OSError):
            each.unlink()


def _reserve(descriptor: int, nbytes: int) -> None:
    """Writes zeros: a mapped file for whose pages the disk has no room would end the process."""
    for start in range(0, nbytes, len(_ZEROS)):
        rest = memoryview(_ZEROS)[: nbytes - start]
        while rest:
            rest = rest[os.write(descriptor, rest) :]


def _nbytes(sizes: Sequence[int]) -> int:
    return sum(_padded(size) for size in sizes)


def _padded(size: int) -> int:
    return -(-4 * size // _ALIGNMENT) * _ALIGNMENT


def _cut(floats: Floats, sizes: Sequence[int]) -> tuple[Floats, ...]:
    arrays, start = [], 0
    for size in sizes:
        arrays.append(floats[start : start + size])
        start += _padded(size) // 4
    return tuple(arrays)


def _checksum(words: NDArray[np.uint64]) -> int:
    """The sum of all words: quick, and no mixture of two generations is likely to have the sum of one."""
    return int(np.add.reduce(words, dtype=np.uint64, initial=np.uint64(words.size)))
