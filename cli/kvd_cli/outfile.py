"""Output of ``-o``: files are replaced atomically; pipes and devices are written to."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from kvd.errors import ConfigError
from kvd.node.storage.atomic_file import write_atomically


class Sink(Protocol):
    """Writable output without a position, such as a pipe or a device."""

    def write(self, data: bytes, /) -> object:
        """Write these bytes."""


def write_file(file: Path, save: Callable[[Sink], None]) -> None:
    """Write a file. An existing file is replaced atomically and keeps its mode, so that no reader finds half of it.

    A symbolic link stays, and its target is replaced. Pipes, devices and sockets are written to.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        if _can_be_replaced(file):
            write_atomically(file, save)
        else:
            _write_through(file, save)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror or error}") from None


def _can_be_replaced(file: Path) -> bool:
    """Return whether the name resolves to a regular file or to nothing."""
    try:
        return stat.S_ISREG(os.stat(file).st_mode)
    except FileNotFoundError:
        return True


def _write_through(file: Path, save: Callable[[Sink], None]) -> None:
    with open(file, "wb") as stream:
        save(_Plain(stream.write))


class _Plain:
    """Stream with `write` alone: NumPy asks a file for its position, which a pipe does not have."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self.write = write
