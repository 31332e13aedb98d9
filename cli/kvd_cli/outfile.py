"""Where ``-o`` writes: a file is replaced as a whole, anything else that has the name is written to as it is."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from kvd.errors import ConfigError


class Sink(Protocol):
    """What can be written to, and no more: a pipe has no position, and a device may have no end."""

    def write(self, data: bytes, /) -> object:
        """Take these bytes."""


def write_file(file: Path, save: Callable[[Sink], None]) -> None:
    """Write a file. One that is there is replaced in one step and keeps its mode, so that nobody finds half of one.

    A link stays, and what it points at is replaced. A pipe, a device or a socket is no file that could be replaced:
    it is written to.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        there = _look(file)
        if there is None or stat.S_ISREG(there.st_mode):
            _replace(Path(os.path.realpath(file)), there, save)
        else:
            _write_through(file, save)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror or error}") from None


def _look(file: Path) -> os.stat_result | None:
    """What the name stands for, at the end of all links; None: nothing yet."""
    try:
        return os.stat(file)
    except FileNotFoundError:
        return None


def _write_through(file: Path, save: Callable[[Sink], None]) -> None:
    with open(file, "wb") as stream:
        save(_Plain(stream.write))


def _replace(file: Path, old: os.stat_result | None, save: Callable[[Sink], None]) -> None:
    descriptor, aside = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with open(descriptor, "wb") as stream:
            save(stream)
        if old is not None:
            with contextlib.suppress(OSError):  # only root may give a file to somebody else
                os.chown(aside, old.st_uid, old.st_gid)
        os.chmod(aside, 0o666 & ~_umask() if old is None else stat.S_IMODE(old.st_mode))
        os.replace(aside, file)
    except BaseException:
        os.unlink(aside)
        raise


class _Plain:
    """Only the `write` of a stream. NumPy asks a file for its position, which a pipe does not have."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self.write = write


def _umask() -> int:
    """The permissions that new files do not get. There is no other way to ask than to set it."""
    umask = os.umask(0o077)
    os.umask(umask)
    return umask
