"""One scheduler at a time uses a ``state_dir``: the kernel keeps the lock, and takes it back when the process ends.

Without it, two schedulers would replace each other's record, and each would go on from that of the other.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger("kvd.node")

LOCK_FILE = "scheduler.lock"
OWNER_ONLY = 0o600
MOST_HOLDER_BYTES = 300


class InUse(Exception):
    """Another scheduler has the lock. The text says which one."""


class StateLock:
    """The lock of a directory.

    Args:
        folder: the directory.
        holder: who takes it, in words that its user understands: they stand in the lock's file for others.
    """

    def __init__(self, folder: Path, holder: str) -> None:
        self._path = folder / LOCK_FILE
        self._holder = holder
        self._descriptor: int | None = None
        self._is_missed = False  # the file system has no locks

    def take(self) -> None:
        """Take the lock, unless it is held here. Where the file system has none, a warning says so, this once.

        Raises:
            InUse: another process has it.
            OSError: its file cannot be made.
        """
        while not (self._is_held() or self._is_missed):
            self.release()
            descriptor = self._open()
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                said = os.pread(descriptor, MOST_HOLDER_BYTES, 0).decode(errors="replace").strip()
                os.close(descriptor)
                raise InUse(said or "another scheduler") from None
            except OSError as error:
                os.close(descriptor)
                self._is_missed = True
                why = error.strerror or error
                logger.warning("%s cannot be locked (%s): see that no other scheduler uses it", self._path.parent, why)
                return
            self._descriptor = descriptor  # the file may have been removed before it was locked: then once more
        if self._descriptor is not None:
            with suppress(OSError):  # without room the lock has no words
                os.ftruncate(self._descriptor, 0)
                os.pwrite(self._descriptor, self._holder.encode()[:MOST_HOLDER_BYTES], 0)

    def _open(self) -> int:
        """Open the file, or make it. Its content is replaced, so a link to another file is refused."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            descriptor = os.open(self._path, flags, OWNER_ONLY)
        except OSError as error:
            raise self._is_link() if error.errno == errno.ELOOP else error from None
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            os.close(descriptor)
            raise self._is_link()
        return descriptor

    def _is_link(self) -> OSError:
        text = f"{LOCK_FILE} in it is a link to another file, or no file: remove it"
        return OSError(errno.EINVAL, text, str(self._path))

    def keep(self) -> None:
        """Take the lock again if somebody has removed its file.

        Raises:
            InUse: another process has it now.
            OSError: its file cannot be made.
        """
        if not (self._is_held() or self._is_missed):
            self.take()

    def release(self) -> None:
        """Give the lock back; its file goes first, as long as nobody else can hold it."""
        if self._descriptor is not None:
            if self._is_held():
                with suppress(OSError):
                    self._path.unlink()
            os.close(self._descriptor)
            self._descriptor = None

    def _is_held(self) -> bool:
        if self._descriptor is None:
            return False
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._descriptor))
        except OSError:
            return False
