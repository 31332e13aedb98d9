"""What becomes of a job's output: to the log folder, if there is one, and to the sink, if it is not held back."""

from __future__ import annotations

import contextlib

from kvd.node.launch.held_back import HeldBack
from kvd.node.launch.job import Job
from kvd.node.launch.log_folder import LogFolder
from kvd.node.launch.output import Sink, Stream, say


class JobOutput:
    """Takes every line of a job, those of the launcher too.

    Raises:
        ConfigError: logs cannot be written to the job's folder.
    """

    def __init__(self, job: Job, sink: Sink) -> None:
        daemons = [name for name in job.names() if not name.startswith("worker-")]
        self._held_back = HeldBack(sink, daemons if job.quiet else ())
        self._folder = (
            None if job.log_dir is None else LogFolder(job.log_dir, ["launch", *job.names()], self._held_back.write)
        )
        self._take: Sink = self._held_back.write if self._folder is None else self._folder.write

    def write(self, node: str, stream: Stream, line: bytes) -> None:
        """Take one line. May be called from several threads.

        Raises:
            OSError: the sink takes no more.
        """
        self._take(node, stream, line)

    def say(self, text: str) -> None:
        """Write a line of the launcher itself."""
        say(self._take, text)

    def show_log_of(self, daemon: str) -> None:
        """Write the last lines that a daemon logged and that were held back: it failed."""
        with contextlib.suppress(OSError):  # nobody reads them
            self._held_back.release(daemon)

    def expect_ends(self) -> None:
        """From now on, a process that ends is no news: the job is ending."""
        self._held_back.expect_ends()

    def close(self) -> None:
        """Close the files of the log folder."""
        if self._folder is not None:
            self._folder.close()
