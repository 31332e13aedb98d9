"""A folder with the log of each process of a job: all of its output, as it comes, within limits."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO, Final

from kvd.errors import ConfigError
from kvd.node.launch.output import Sink, Stream, say

MAX_FILE_BYTES: Final = 32 * 1024 * 1024
"""A file that would grow beyond this becomes ``NAME.log.1``, which replaces the one before: two such files at most."""


class LogFolder:
    """Writes the output of each node of a job to ``NAME.log`` in a folder, and passes it on.

    The files of an earlier job in the same folder are kept as ``NAME.log.1``. When a file cannot be written any more,
    the job goes on without logs, and a line says so.

    Raises:
        ConfigError: the folder cannot be made, or files cannot be written in it.
    """

    def __init__(
        self, folder: Path, names: Collection[str], sink: Sink, *, max_file_bytes: int = MAX_FILE_BYTES
    ) -> None:
        self._folder = folder
        self._sink = sink
        self._max_file_bytes = max_file_bytes
        self._files: dict[str, BinaryIO] = {}
        self._begun: dict[str, Stream] = {}  # by node, the stream that has begun the last line and not ended it
        self._lock = threading.Lock()
        self._is_broken = False
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in names:
                self._open(name)
        except OSError as error:
            self._close_files()
            raise ConfigError(
                f"cannot write logs to {folder}: {error.strerror or error}; "
                "give --log-dir a folder that you may write to"
            ) from None

    def write(self, node: str, stream: Stream, piece: bytes) -> None:
        """Take one piece. May be called from several threads.

        Raises:
            OSError: the sink takes no more.
        """
        trouble = self._log(node, stream, piece)
        if trouble is not None:
            text = f"cannot write logs to {self._folder} ({trouble.strerror or trouble}): the job goes on without them"
            say(self._sink, text)
        self._sink(node, stream, piece)

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            self._is_broken = True  # a late line is passed on only
            self._close_files()

    def _log(self, node: str, stream: Stream, piece: bytes) -> OSError | None:
        """Write a piece to the file. The error that was the end of the logs, if it was this one."""
        with self._lock:
            if self._is_broken:
                return None
            try:
                file = self._files.get(node) or self._open(node)
                if file.tell() and file.tell() + len(piece) > self._max_file_bytes:
                    file = self._open(node)
                elif self._begun.get(node, stream) != stream:
                    file.write(b"\n")  # the line that the other stream has begun
                file.write(piece)
                if piece.endswith(b"\n"):
                    self._begun.pop(node, None)
                else:
                    self._begun[node] = stream
            except OSError as error:
                self._is_broken = True
                self._close_files()
                return error
        return None

    def _open(self, node: str) -> BinaryIO:
        """A new file for the node; the one before, of this job or an earlier one, is kept."""
        old = self._files.pop(node, None)
        if old is not None:
            old.close()
        path = self._folder / f"{node}.log"
        with contextlib.suppress(FileNotFoundError):
            path.replace(path.with_name(f"{path.name}.1"))
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        # unbuffered: someone who follows the file sees each line at once, and none is lost when the launcher is killed
        file = self._files[node] = open(descriptor, "wb", buffering=0)  # noqa: SIM115 - `close` closes it
        return file

    def _close_files(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()
        self._files.clear()
