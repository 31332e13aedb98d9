"""Atomic folders: written under another name in the same parent, synced, and renamed."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import TypeAlias

from kvd.files import owner_only

Buffer: TypeAlias = bytes | memoryview

PIECES_AT_ONCE = 1024  # in one call of writev; Linux takes no more
MAX_NAME_CHARS = 60  # of the folder's name, in that of the one beside it


class NewFolder:
    """The folder beside `path` that becomes `path`; only its owner can enter it. Those
    that killed processes have left there are removed.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self._target = Path(os.path.realpath(path))
        _remove_leftovers(self._target)
        self._folder = self._target.with_name(hidden_name(self._target, secrets.token_hex(4)))
        self._folder.mkdir(0o700)

    def write(self, name: str, *content: Buffer) -> None:
        """Write these bytes to a new file on stable storage.

        Raises:
            OSError: it cannot be written.
        """
        with open(self._folder / name, "xb", buffering=0, opener=owner_only) as file:
            _write_all(file, content)
            os.fsync(file.fileno())

    def link(self, name: str, there: Path, nbytes: int) -> bool:
        """Link an existing file on stable storage under one more name, replacing the file of that name. False: it
        cannot be done, or it has another size; then nothing has changed."""
        aside = self._folder / f".{name}"
        try:
            os.link(there, aside, follow_symlinks=False)
        except OSError:  # it is gone, or the file system has no links, or no more of them
            return False
        if aside.stat().st_size != nbytes:
            aside.unlink()
            return False
        aside.rename(self._folder / name)
        return True

    def publish(self) -> None:
        """Give the folder its name.

        Raises:
            OSError: something else has the name, or it cannot be given.
        """
        _sync(self._folder)
        self._folder.rename(self._target)  # an empty folder there is replaced, another one is not
        _sync(self._target.parent)

    def discard(self) -> None:
        """Remove the written files."""
        shutil.rmtree(self._folder, ignore_errors=True)


def hidden_name(path: Path, token: str) -> str:
    """Return the name of an incomplete or outdated folder beside `path`; the next one at `path` removes such."""
    return f".{path.name[:MAX_NAME_CHARS]}.{token}.part"


def is_taken(path: Path) -> bool:
    """Return whether the name is taken by anything but an empty folder."""
    try:
        with os.scandir(path) as entries:
            return next(entries, None) is not None
    except FileNotFoundError:
        return os.path.lexists(path)
    except NotADirectoryError:
        return True


def _write_all(file: FileIO, content: Sequence[Buffer]) -> None:
    """Write many pieces per system call."""
    left = deque(memoryview(piece) for piece in content)
    while left:
        written = os.writev(file.fileno(), list(islice(left, PIECES_AT_ONCE)))
        while left and written >= left[0].nbytes:
            written -= left.popleft().nbytes
        if written:
            left[0] = left[0][written:]


def _remove_leftovers(target: Path) -> None:
    pattern = re.compile(rf"\.{re.escape(target.name[:MAX_NAME_CHARS])}\.[0-9a-f]{{8}}\.part")
    for path in target.parent.iterdir():
        if pattern.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Sync the entries of a folder to stable storage, if the file system supports it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
