"""Ordinary files, which are read without waiting, and private ones.

A path that a user names may lead to a pipe, which waits for a writer, or to a device, which may have no
end. Such a path is refused before anything is read, so that no call hangs there.
"""

from __future__ import annotations

import errno
import os
import stat
from io import FileIO
from pathlib import Path
from typing import BinaryIO


def open_file(path: Path) -> FileIO:
    """Open an ordinary file for reading, without a buffer. Symbolic links are followed.

    Raises:
        OSError: it cannot be opened, or is a folder, a pipe, a socket or a device.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait for a writer
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is not an ordinary file", str(path))
        return FileIO(descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def read_file(path: Path) -> bytes:
    """Return the content of an ordinary file.

    Raises:
        OSError: as in `open_file`.
    """
    with open_file(path) as file:
        return file.readall()


def owner_only(path: str, flags: int) -> int:
    """Open a file as the ``opener`` of `open`. A new one can be read by its owner alone."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def new_file(path: Path, *, is_private: bool = False) -> BinaryIO:
    """Make a file for reading and writing. What had the name is removed, so that no link there is followed.

    Args:
        is_private: only the owner can read it; otherwise the umask decides.

    Raises:
        OSError: it cannot be made.
    """
    path.unlink(missing_ok=True)
    return open(path, "xb+", opener=owner_only if is_private else None)
