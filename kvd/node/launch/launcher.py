"""Runs a job from its start to its end.

The scheduler starts first, servers and workers start with its address. When the job ends (the
workers are done, one failed, a daemon died, a signal came), the rest is ended in order: workers, servers, scheduler.
Each process has a session of its own, so that no signal of the terminal reaches it and everything that it started can
be ended with it. `kvd.node.parent` ends the processes of a launcher that was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
from pathlib import Path

from kvd.node.launch.job import Job
from kvd.node.launch.job_output import JobOutput
from kvd.node.launch.output import Sink
from kvd.node.launch.signals import handlers_restored, signals_handled
from kvd.node.launch.supervisor import Supervisor


def run(job: Job, sink: Sink, *, handle_signals: bool = True) -> int:
    """Run a job from its start to its end.

    Args:
        job: what to run.
        sink: where the output goes; lines of the launcher itself come from ``"launch"``.
        handle_signals: end the job at SIGINT, SIGTERM or SIGHUP, kill it at the second one. Only in the main thread.

    Returns:
        The exit code: 0 if all workers ended well, else that of the first worker that failed; 128 + n after signal n;
        2 or 1 if a daemon did not start or died.

    Raises:
        ConfigError: logs cannot be written to the job's folder, or the key that the settings name cannot be used.
        ConnectError: a host cannot be reached, or lacks what the job needs.
        RequestTimeout: the scheduler was not ready in time.
        KvdError: a process cannot be started.
    """
    with handlers_restored() if handle_signals else contextlib.nullcontext():
        return asyncio.run(Launch(job, sink).run(handle_signals=handle_signals))


class Launch:
    """One run of one job, which can be watched and stopped from outside."""

    def __init__(self, job: Job, sink: Sink) -> None:
        self._job = job
        self._sink = sink
        self._supervisor: Supervisor | None = None  # from the beginning of `run`

    @property
    def scheduler(self) -> str:
        """The address of the scheduler; empty until it is ready."""
        return "" if self._supervisor is None else self._supervisor.scheduler

    async def run(self, *, handle_signals: bool = False) -> int:
        """Run the job; return its exit code (see `run` of this module)."""
        loop = asyncio.get_running_loop()
        with (
            contextlib.closing(JobOutput(self._job, self._sink)) as output,
            signals_handled(loop, self._on_signal) if handle_signals else contextlib.nullcontext(),
            tempfile.TemporaryDirectory(prefix="kvd-launch-", ignore_cleanup_errors=True) as folder,
        ):
            self._supervisor = supervisor = Supervisor(self._job, output, Path(folder))
            return await supervisor.run()

    def _on_signal(self, number: signal.Signals) -> None:
        assert self._supervisor is not None, "it is made before the loop looks at signals"
        self._supervisor.on_signal(number)

    def stop(self, code: int) -> None:
        """End the job with this exit code; if it is ending already, at once. May be called from any thread."""
        if self._supervisor is not None:
            self._supervisor.stop(code)

    def pid_of(self, name: str) -> int | None:
        """The pid of a running process: a daemon's own, or that of a worker's guard."""
        return None if self._supervisor is None else self._supervisor.pid_of(name)
