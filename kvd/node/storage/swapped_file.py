"""A file whose content is replaced atomically, again and again, by a process that may have no descriptor left.

Two files take turns. One has the name, the other waits beside it, and both stay open. New content goes to the one that
waits; then it gets the name, and the other one waits. Only the first write opens files, and those after somebody took
the files away. Where the file system has no hard links, each write opens one.
"""

from __future__ import annotations

import os
import secrets
import threading
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvd.node.storage.atomic_file import copy_owner_and_mode

OWNER_ONLY = 0o600
SUFFIX = ".spare"


class _Open(NamedTuple):
    """An open file, and the name that it has while it waits."""

    descriptor: int
    path: Path

    def is_at(self, path: Path) -> bool:
        try:
            return os.path.samestat(path.lstat(), os.fstat(self.descriptor))
        except OSError:
            return False

    def discard(self) -> None:
        """Close it, and remove it if it waits."""
        os.close(self.descriptor)
        with suppress(OSError):
            self.path.unlink()


class SwappedFile:
    """The two files under one name. Any thread may write; `close` does not wait for a write, which then closes.

    A new file is its user's alone. An existing one keeps its mode, and its owner where the system allows it. A symbolic
    link stays, and its target is replaced.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._named: _Open | None = None  # has the name, unless somebody took it away
        self._waiting: _Open | None = None
        self._is_first = True
        self._closing = False
        self._lock = threading.Lock()

    def write(self, content: bytes) -> None:
        """Replace the content. A crash leaves the old one or the new one, whole.

        Raises:
            OSError: it cannot be written; the old content is there.
        """
        try:
            with self._lock:
                self._write(content)
        finally:
            if self._closing:
                self._close()

    def close(self) -> None:
        """Close both files, and remove the one that waits."""
        self._closing = True
        self._close()

    # ── with the lock held ──

    def _write(self, content: bytes) -> None:
        target = Path(os.path.realpath(self._path))
        fresh, old = self._ready(target), self._named
        with suppress(FileNotFoundError):
            copy_owner_and_mode(target.stat(), fresh.descriptor)
        _fill(fresh.descriptor, content)
        if old is not None and old.is_at(target):
            with suppress(OSError):  # it has its name already, or the file system has no links
                os.link(target, old.path)
        fresh.path.rename(target)
        self._named, self._waiting = fresh, old
        with suppress(OSError):  # the next write tries again
            self._ready(target)

    def _ready(self, target: Path) -> _Open:
        """The file that waits; a new one if there is none, or if it is not where it was."""
        waiting = self._waiting
        if waiting is not None and waiting.path.parent == target.parent and waiting.is_at(waiting.path):
            return waiting
        if self._is_first:
            self._is_first = False
            _remove_leftovers(target)
        if waiting is not None:
            self._waiting = None
            waiting.discard()
        path = target.with_name(f"{_prefix(target)}{secrets.token_hex(4)}{SUFFIX}")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, OWNER_ONLY)
        self._waiting = _Open(descriptor, path)
        return self._waiting

    def _close(self) -> None:
        if not self._lock.acquire(blocking=False):
            return  # a write is under way, and looks afterwards
        try:
            named, waiting = self._named, self._waiting
            self._named = self._waiting = None
            for file in (named, waiting):
                if file is not None:
                    file.discard()
        finally:
            self._lock.release()


def _prefix(target: Path) -> str:
    return f".{target.name[:60]}."


def _remove_leftovers(target: Path) -> None:
    """Remove the files of processes that were killed."""
    for path in target.parent.iterdir():
        if path.name.startswith(_prefix(target)) and path.suffix == SUFFIX:
            path.unlink(missing_ok=True)


def _fill(descriptor: int, content: bytes) -> None:
    """Make this the content, on stable storage. What is there is overwritten first: a full disk has room for that."""
    view, at = memoryview(content), 0
    while at < len(view):
        at += os.pwrite(descriptor, view[at:], at)
    os.ftruncate(descriptor, len(view))
    os.fsync(descriptor)
