"""Jobs and records: work whose result comes back to the machine as an event."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor

from kvd.core.machine import DropRun, ForgetState, Job, JobDone, Persist, Persisted, ReadRows, ResetState, Run
from kvd.errors import NotAllowed
from kvd.node.jobs.runner import JobRunner
from kvd.node.shell.threads import Stepper
from kvd.node.storage.records import RecordSaver
from kvd.transport.links.write_coalescing import WriteCoalescing

FEW_IDS_NBYTES = 16 << 10
"""Of a read of rows that is over soon: what waits to be sent waits for it."""


class Background:
    """Starts work on the loop's thread. Commands and writes to disk run in the executor. Numeric jobs run at once: on
    two cores, handing a merge of 1 MiB to another thread costs more than it gains.

    Args:
        new_runner: makes what runs the jobs of a server, for one run.
        executor: None: everything runs at once.
        persist: puts a record on stable storage; None: records are not kept.
        holding: messages that wait leave before a job that may take long.
    """

    def __init__(
        self,
        stepper: Stepper,
        new_runner: Callable[[], JobRunner] | None,
        executor: Executor | None,
        persist: Callable[[Mapping[str, object]], None] | None,
        holding: WriteCoalescing | None = None,
    ) -> None:
        self._stepper = stepper
        self._holding = holding
        self._new_runner = new_runner
        self._runners: dict[int, JobRunner] = {}  # by run
        self._executor = executor
        self._saver = None if persist is None or executor is None else RecordSaver(persist, executor, stepper.feed)

    def reset_state(self, effect: ResetState, run: int) -> None:
        """Another optimizer is set for slices of this run."""
        self.runner(run).reset(effect.slices)

    def forget_state(self, effect: ForgetState, run: int) -> None:
        """Slices of this run are deleted."""
        self.runner(run).forget(effect.slices)

    def drop_run(self, effect: DropRun) -> None:
        self._runners.pop(effect.run, None)

    def run_job(self, job: Job, run: int) -> None:
        """Runs a job of this run."""
        runner = self.runner(run)
        if self._holding is not None and not (type(job) is ReadRows and job.ids_nbytes <= FEW_IDS_NBYTES):
            self._holding.pass_on()
        if self._executor is None or not isinstance(job, Run):
            self._stepper.queue(runner.run(job, run))
            return
        future = asyncio.get_running_loop().run_in_executor(self._executor, runner.run, job, run)
        future.add_done_callback(lambda done: self._job_done(job, run, done))

    def save_record(self, effect: Persist) -> None:
        if self._saver is None:
            self._stepper.queue(Persisted(effect.token))
        else:
            self._saver.save(effect)

    def stop(self) -> None:
        """Records that could not be saved are not tried again."""
        if self._saver is not None:
            self._saver.stop()

    def runner(self, run: int) -> JobRunner:
        """What runs the jobs of this run."""
        runner = self._runners.get(run)
        if runner is None:
            assert self._new_runner is not None
            runner = self._runners[run] = self._new_runner()
        return runner

    def _job_done(self, job: Run, run: int, done: asyncio.Future[JobDone]) -> None:
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            self._stepper.feed(done.result())
        else:  # not an Exception: the command tried to end the process
            refused = NotAllowed(f"it raised {type(error).__name__}({error})")
            self._stepper.feed(JobDone(job.job, None, refused, run))
