"""What becomes of a job's output: to the log folder, if there is one, and to the sink, if it is not held back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Final

from kvd.node.launch.held_back import HeldBack
from kvd.node.launch.job import Job
from kvd.node.launch.log_folder import LogFolder
from kvd.node.launch.output import Sink, Stream, say

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
