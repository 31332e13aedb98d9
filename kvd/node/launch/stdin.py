"""The stdin of a launcher, of which each worker gets a copy from its beginning, after a restart, too."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable
from typing import Final

MAX_BYTES: Final = 64 * 1024 * 1024
"""Bytes of stdin that are kept for the workers. More end the job."""

READ_BYTES: Final = 64 * 1024
"""Bytes that are read at once, and that stdin is read ahead of the fastest worker."""

_BACKGROUND_S: Final = 0.5


class StdinCopies:
    """Reads a descriptor as far as the fastest worker needs it, and keeps what it has read. Used from any thread.

    What can be sought, such as a file, is read without moving the position that other processes share. A terminal is
    read only while this process is in its foreground.
    """

    def __init__(self, descriptor: int, on_overflow: Callable[[], None]) -> None:
        """
        Args:
            descriptor: what is read.
            on_overflow: called from another thread when there is more than `MAX_BYTES`.
        """
        self._descriptor = descriptor
        self._on_overflow = on_overflow
        self._kept = bytearray()
        self._wanted = 0  # how many bytes the fastest worker can take
        self._has_ended = False
        self._is_reading = False
        self._changed = threading.Condition()
        self._wake_reader, self._wake_writer = os.pipe()

    def read(self, offset: int) -> bytes:
        """Wait for what comes after the first `offset` bytes, and return it; empty at the end."""
        with self._changed:
            self._wanted = max(self._wanted, offset + READ_BYTES)
            if not (self._is_reading or self._has_ended):
                self._is_reading = True
                threading.Thread(target=self._read, name="stdin", daemon=True).start()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._has_ended or len(self._kept) > offset)
            return bytes(self._kept[offset : offset + READ_BYTES])

    def close(self) -> None:
        """End all copies, also those that wait for more."""
        self._end()  # from now on, no reader begins
        os.close(self._wake_writer)
        if not self._is_reading:
            os.close(self._wake_reader)

    def _end(self) -> None:
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _read(self) -> None:
        # A read in the background of a terminal fails then, and does not stop this process.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTIN})
        begin = _position(self._descriptor)
        poll = select.poll()
        for descriptor in (self._descriptor, self._wake_reader):
            poll.register(descriptor, select.POLLIN)
        while self._is_wanted():
            if any(descriptor == self._wake_reader for descriptor, _ in poll.poll()):
                break
            try:
                data = self._next(begin)
            except BlockingIOError:  # another process that has the descriptor was faster
                continue
            except OSError:
                if os.isatty(self._descriptor):
                    self._pause()
                    continue
                data = b""
            if not data or not self._keep(data):
                break
        self._end()
        os.close(self._wake_reader)

    def _is_wanted(self) -> bool:
        """Wait until a worker can take more. Return False if none ever will."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or len(self._kept) < self._wanted)
            return not self._has_ended

    def _next(self, begin: int | None) -> bytes:
        if begin is None:
            return os.read(self._descriptor, READ_BYTES)
        return os.pread(self._descriptor, READ_BYTES, begin + len(self._kept))

    def _pause(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended, _BACKGROUND_S)

    def _keep(self, data: bytes) -> bool:
        """Keep the data. Return False if it is too much."""
        if len(self._kept) + len(data) > MAX_BYTES:
            self._on_overflow()
            return False
        with self._changed:
            self._kept += data
            self._changed.notify_all()
        return True


def copy_in_thread(stdin: StdinCopies, write: Callable[[bytes], object], close: Callable[[], object]) -> None:
    """Copy stdin to one process, in a thread of its own.

    Args:
        stdin: is read from its beginning.
        write: takes the data, piece by piece. Its OSError ends the copy: the process reads no more.
        close: called at the end.
    """

    def copy() -> None:
        offset = 0
        with contextlib.suppress(OSError):
            try:
                while data := stdin.read(offset):
                    write(data)
                    offset += len(data)
            finally:
                close()

    threading.Thread(target=copy, name="copy of stdin", daemon=True).start()


def _position(descriptor: int) -> int | None:
    """The place in a file from which it would be read; None: it cannot be sought."""
    try:
        return os.lseek(descriptor, 0, os.SEEK_CUR)
    except OSError:
        return None
