"""Jobs and records: work whose result comes back to the machine as an event."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor

from kvd.core.machine import ForgetState, Halt, Job, JobDone, Persist, Persisted, ResetState, Run
from kvd.errors import KvdError, NotAllowed
from kvd.node.jobs import JobRunner
from kvd.node.threads import Stepper


class Background:
    """Starts work on the loop's thread. Commands and writes to disk run in the executor. Numeric jobs run at once: on
    two cores, handing a merge of 1 MiB to another thread costs more than it gains.

    Args:
        jobs: runs the jobs of a server.
        executor: None: everything runs at once.
        persist: puts a record on stable storage; None: records are not kept.
        halt: called when a record cannot be saved.
    """

    def __init__(
        self,
        stepper: Stepper,
        jobs: JobRunner | None,
        executor: Executor | None,
        persist: Callable[[Mapping[str, object]], None] | None,
        halt: Callable[[Halt], None],
    ) -> None:
        self._stepper = stepper
        self._jobs = jobs
        self._executor = executor
        self._persist = persist
        self._halt = halt

    def reset_state(self, effect: ResetState) -> None:
        self._runner().reset()

    def forget_state(self, effect: ForgetState) -> None:
        self._runner().forget(effect.slices)

    def run_job(self, job: Job) -> None:
        runner = self._runner()
        if self._executor is None or not isinstance(job, Run):
            self._stepper.queue(runner.run(job))
            return
        future = asyncio.get_running_loop().run_in_executor(self._executor, runner.run, job)
        future.add_done_callback(lambda done: self._job_done(job, done))

    def save_record(self, effect: Persist) -> None:
        if self._persist is None or self._executor is None:
            self._stepper.queue(Persisted(effect.token))
            return
        future = asyncio.get_running_loop().run_in_executor(self._executor, self._persist, effect.record)
        future.add_done_callback(lambda done: self._record_saved(effect.token, done))

    def _runner(self) -> JobRunner:
        assert self._jobs is not None
        return self._jobs

    def _job_done(self, job: Run, done: asyncio.Future[JobDone]) -> None:
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            self._stepper.feed(done.result())
        else:  # not an Exception: the command tried to end the process
            self._stepper.feed(JobDone(job.job, None, NotAllowed(f"it raised {type(error).__name__}({error})")))

    def _record_saved(self, token: int, done: asyncio.Future[None]) -> None:
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            self._stepper.feed(Persisted(token))
        else:
            text = f"the state cannot be saved ({error}): free space in state_dir, or set another state_dir"
            self._halt(Halt(KvdError(text)))
