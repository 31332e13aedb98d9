"""The output of a job: it goes to the log folder, if there is one, and to the sink, if it is not held back.

While all is well, what the daemons log below a warning is held back.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO, Final

from kvd.errors import ConfigError
from kvd.node.launch.job import Job
from kvd.node.launch.output import Sink, Stream, say
from kvd.observe.log import level_of

MAX_FILE_BYTES: Final = 32 * 1024 * 1024
"""A file that would grow beyond this becomes ``NAME.log.1``, which replaces the one before: two such files at most."""


class LogFolder:
    """A folder with the log of each process of a job: all of its output, as it comes, within limits.

    Writes the output of each node to ``NAME.log``, and passes it on.

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


KEPT_LINES: Final = 30
"""Lines of each daemon that are kept, in case it fails."""

KEPT_BYTES: Final = 2048
"""Bytes of such a line that are kept."""


class HeldBack:
    """Passes on the output of a job, but for what its daemons log below a warning.

    The output of daemons has to come in whole lines. A line that is no log line is passed on: it may be why the
    interpreter did not start.
    """

    def __init__(self, sink: Sink, daemons: Collection[str]) -> None:
        """
        Args:
            sink: takes what is passed on.
            daemons: the nodes whose log is held back.
        """
        self._sink = sink
        self._kept: dict[str, deque[tuple[Stream, bytes]]] = {name: deque(maxlen=KEPT_LINES) for name in daemons}
        self._hidden: set[str] = set()  # those whose last record was held back: what is indented belongs to it
        self._shown_from = logging.WARNING
        self._lock = threading.Lock()

    def write(self, node: str, stream: Stream, line: bytes) -> None:
        """Take one line. May be called from several threads.

        Raises:
            OSError: the sink takes no more.
        """
        if node not in self._kept or not self._is_held_back(node, line):
            self._sink(node, stream, line)
            return
        with self._lock:
            self._kept[node].append((stream, line[:KEPT_BYTES].removesuffix(b"\n") + b"\n"))

    def expect_ends(self) -> None:
        """Hold back warnings, too: the job is ending, and daemons warn of each process that ends."""
        self._shown_from = logging.ERROR

    def release(self, node: str) -> None:
        """Pass on the last lines that were held back of this node, if it is a daemon: it failed.

        Raises:
            OSError: the sink takes no more.
        """
        with self._lock:
            kept = list(self._kept.get(node, ()))
            self._kept.get(node, deque()).clear()
        for stream, line in kept:
            self._sink(node, stream, line)

    def _is_held_back(self, node: str, line: bytes) -> bool:
        level = level_of(line)
        if level is None:
            return line.startswith(b"    ") and node in self._hidden
        if level < self._shown_from:
            self._hidden.add(node)
            return True
        self._hidden.discard(node)
        return False


TURN_LIMIT_S: Final = 0.5
"""How long a line of the launcher waits for pieces that are being written."""


class JobOutput:
    """Takes all output of a job, that of the launcher too.

    Attributes:
        turn: held while pieces are written that belong together.

    Raises:
        ConfigError: logs cannot be written to the job's folder.
    """

    def __init__(self, job: Job, sink: Sink) -> None:
        self.turn = threading.Lock()
        daemons = [name for name in job.names() if not name.startswith("worker-")]
        self._held_back = HeldBack(sink, daemons if job.quiet else ())
        self._folder = (
            None if job.log_dir is None else LogFolder(job.log_dir, ["launch", *job.names()], self._held_back.write)
        )
        self._take: Sink = self._held_back.write if self._folder is None else self._folder.write

    def write(self, node: str, stream: Stream, piece: bytes) -> None:
        """Take one piece. May be called from several threads.

        Raises:
            OSError: the sink takes no more.
        """
        self._take(node, stream, piece)

    def say(self, text: str) -> None:
        """Write a line of the launcher itself."""
        with self._own_turn():
            say(self._take, text)

    def show_log_of(self, daemon: str) -> None:
        """Write the last lines that a daemon logged and that were held back: it failed."""
        with self._own_turn(), contextlib.suppress(OSError):  # nobody reads them
            self._held_back.release(daemon)

    @contextlib.contextmanager
    def _own_turn(self) -> Iterator[None]:
        """Wait for the turn, but not for ever: the launcher must not stand still when a reader does."""
        has_turn = self.turn.acquire(timeout=TURN_LIMIT_S)
        try:
            yield
        finally:
            if has_turn:
                self.turn.release()

    def expect_ends(self) -> None:
        """From now on, a process that ends is no news: the job is ending."""
        self._held_back.expect_ends()

    def close(self) -> None:
        """Close the files of the log folder."""
        if self._folder is not None:
            self._folder.close()
