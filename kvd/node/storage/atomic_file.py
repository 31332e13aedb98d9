"""Files that are replaced atomically: a reader finds the old content or the new one, even after a crash."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from kvd.files import owner_only


def write_atomically(path: Path, save: Callable[[BinaryIO], object], *, is_private: bool = False) -> None:
    """Write a temporary file beside `path`, sync it and rename it.

    An existing file keeps its mode, and its owner where the system allows it. A symbolic link stays, and its target is
    replaced.

    Args:
        path: the file.
        save: writes the content to the file object that it is given.
        is_private: only the owner can read a new file; otherwise the umask decides.

    Raises:
        OSError: it cannot be written, or is a folder, a device or a pipe; nothing is left behind.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():  # a rename would put a file in the place of a device
        raise OSError(errno.EINVAL, "this is not an ordinary file, and is not replaced", str(target))
    if not target.parent.exists():  # the error names the path that the caller knows
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    temporary = target.with_name(f".{target.name[:60]}.{secrets.token_hex(4)}.part")
    try:
        with open(temporary, "xb", opener=owner_only if is_private else None) as file:
            with suppress(FileNotFoundError):
                copy_owner_and_mode(target.stat(), file.fileno())
            save(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(target)
    except BaseException:
        with suppress(OSError):  # the first error is the one to report
            temporary.unlink()
        raise


def copy_owner_and_mode(old: os.stat_result, descriptor: int) -> None:
    """Give an open file the mode of an earlier one, and its owner where the system allows it."""
    with suppress(OSError):  # only root may give a file to another user
        os.fchown(descriptor, old.st_uid, old.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(old.st_mode))
