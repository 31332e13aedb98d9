"""The story of one run: start everything, wait for what ends the job, and end the rest in order."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import signal
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

from kvd.errors import RequestTimeout
from kvd.node.exit_codes import ExitCode
from kvd.node.launch.child import Child
from kvd.node.launch.job import Job
from kvd.node.launch.job_key import job_key
from kvd.node.launch.job_output import JobOutput
from kvd.node.launch.look import look_at
from kvd.node.launch.output import Stream
from kvd.node.launch.plan import READY_FILE, JobPlan, ProcessSpec
from kvd.node.launch.reach import Reach
from kvd.node.launch.ready_socket import ReadySocket
from kvd.node.launch.ssh import LOST
from kvd.node.launch.stop_request import StopRequest, Urgency
from kvd.node.parent import exit_code

MOST_CONNECTING: Final = 4
"""Connections to one host that are made at the same time."""

SCHEDULER: Final = -1
"""The number of the scheduler among the daemons."""

KILL_GRACE_S: Final = 1.0
"""How long a guard that was told to kill its command may take, before it is killed itself."""


class Supervisor:
    """One run of one job. Used on the loop on which it was made, except where it says otherwise.

    Args:
        folder: an empty directory for this run, which only this user may enter.

    Attributes:
        scheduler: the address of the scheduler, once it is ready.

    Raises:
        ConfigError: the settings name a key that cannot be used, or are wrong.
    """

    def __init__(self, job: Job, output: JobOutput, folder: Path) -> None:
        self.scheduler = ""
        self._job = job
        self._output = output
        self._loop = asyncio.get_running_loop()
        self._stop = StopRequest(self._loop)
        self._key = job_key(job.environment, folder)
        self._plan = JobPlan(job, self._key)
        self._reach = Reach(job.scheduler, {})
        self._listening = ""  # where the scheduler listens
        self._daemons: dict[int, Child] = {}  # the servers by their number, and the SCHEDULER
        self._workers: dict[int, Child] = {}  # by rank, those that have not ended well
        self._ended: list[Child] = []
        self._restarts: dict[str, int] = {}  # by node id
        self._folder = folder

    async def run(self) -> int:
        """Run the job; return its exit code."""
        try:
            code = await self._start()
            return await self._outcome() if code is None else code
        finally:
            await self._end()

    def stop(self, code: int) -> None:
        """End the job with this exit code; if it is ending already, at once. May be called from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the job has ended
            self._loop.call_soon_threadsafe(self._stop.make, code)

    def on_signal(self, number: signal.Signals) -> None:
        """End the job as `stop` does, and say so."""
        again = self._stop.urgency is not Urgency.NOT_ASKED
        self._stop.make(128 + number)
        if again:
            self._say(f"{number.name} again: killing everything")
        else:
            self._say(f"{number.name}: ending the job; a second one kills it")

    def pid_of(self, name: str) -> int | None:
        """The pid of a running process: a daemon's own, or that of a worker's guard; on another host, of its ssh."""
        children = [child for child in self._children() if not child.exited.done()]
        return next((child.pid for child in children if child.name == name), None)

    # --- starting -----------------------------------------------------------------------------------------------------

    async def _start(self) -> int | None:
        """Start everything. The exit code if that was not possible."""
        code = await self._look_at_hosts()
        if code is None:
            code = await self._start_scheduler()
        return await self._start_others() if code is None else code

    async def _look_at_hosts(self) -> int | None:
        """Find out how the hosts reach the scheduler. The exit code if the job was stopped meanwhile."""
        names = [host.name for host in self._job.hosts]
        look = asyncio.ensure_future(look_at(names, self._job.ssh, self._plan.look()) if names else _nothing())
        stop = self._stop.code
        events: set[asyncio.Future[Any]] = {look, stop}
        await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        if not look.done():
            look.cancel()
            await asyncio.wait({look})
            return stop.result()
        self._reach = Reach(self._job.scheduler, look.result())
        return None

    async def _start_scheduler(self) -> int | None:
        """Start the scheduler and wait until it is ready. The exit code if that was not possible."""
        with ReadySocket(self._loop) as ready:
            self._daemons[SCHEDULER] = self._child(self._plan.scheduler(self._reach.bind, self._folder, ready.name))
            code = await self._scheduler_ready(ready.reported)
            if code is not None:
                return code
        self._listening = (self._folder / READY_FILE).read_text(encoding="utf-8").strip()
        self.scheduler = self._reach.scheduler("", self._listening)
        if self._job.announce:
            settings = {"KVD_SCHEDULER": self.scheduler, "KVD_JOB": self._plan.name, **self._key.settings}
            variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in settings.items())
            self._say(f"scheduler at {self.scheduler}; look at the job with: {variables} kvd status")
        for remark in self._plan.remarks:
            self._say(remark)
        return None

    async def _start_others(self) -> int | None:
        """Start servers and workers. The exit code if the job was stopped meanwhile."""
        placement, stop = self._plan.placement, self._stop.code
        for index in range(self._job.servers):
            await self._room_on(placement.server(index))
            if stop.done():
                return stop.result()
            self._start_server(index)
        for rank in range(self._job.workers):
            await self._room_on(placement.worker(rank).host)
            if stop.done():
                return stop.result()
            self._start_worker(rank)
        return None

    async def _room_on(self, host: str) -> None:
        """Wait until only few connections to a host are being made: an sshd refuses some of more than ten."""
        while host and not self._stop.code.done():
            pending = [c for c in self._children() if c.host == host and not (c.connected.done() or c.exited.done())]
            if len(pending) < MOST_CONNECTING:
                return
            events: set[asyncio.Future[Any]] = {
                self._stop.code,
                *(future for c in pending for future in (c.connected, c.exited)),
            }
            await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)

    async def _scheduler_ready(self, ready: asyncio.Future[None]) -> int | None:
        """Wait for the scheduler. The exit code if it does not become ready."""
        process, stop = self._daemons[SCHEDULER], self._stop.code
        events: set[asyncio.Future[Any]] = {ready, process.exited, stop}
        await asyncio.wait(events, timeout=self._job.startup_s, return_when=asyncio.FIRST_COMPLETED)
        if stop.done():
            return stop.result()
        if process.exited.done():
            return self._daemon_died(SCHEDULER, process)
        if not ready.done():
            limit = f"{self._job.startup_s:g} s"
            self._output.show_log_of(process.name)
            raise RequestTimeout(f"the scheduler was not ready within {limit}", waiting_for=("scheduler",))
        return None

    def _start_server(self, index: int) -> None:
        scheduler = self._reach.scheduler(self._plan.placement.server(index), self._listening)
        self._daemons[index] = self._child(self._plan.server(index, scheduler))

    def _start_worker(self, rank: int) -> None:
        host = self._plan.placement.worker(rank).host
        scheduler = self._reach.scheduler(host, self._listening)
        self._workers[rank] = self._child(self._plan.worker(rank, scheduler))

    def _children(self) -> list[Child]:
        """Those that belong to the job now."""
        return [*self._daemons.values(), *self._workers.values()]

    def _child(self, spec: ProcessSpec) -> Child:
        return Child(spec, self._output.write, self._on_sink_error)

    # --- what ends the job --------------------------------------------------------------------------------------------

    async def _outcome(self) -> int:
        """Wait until the workers are done or something goes wrong; the exit code."""
        stop = self._stop.code
        while self._workers:
            await asyncio.wait({stop, *(c.exited for c in self._children())}, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                return stop.result()
            for number, daemon in list(self._daemons.items()):
                code = self._daemon_ended(number, daemon) if daemon.exited.done() else 0
                if code:
                    return code
            for rank, worker in list(self._workers.items()):
                code = self._worker_ended(rank, worker) if worker.exited.done() else 0
                if code:
                    return code
        return ExitCode.OK

    def _worker_ended(self, rank: int, worker: Child) -> int:
        """Handle the end of a worker. The exit code of the job, or 0 if the job continues."""
        code = worker.exited.result()
        if code == ExitCode.OK:
            self._ended.append(self._workers.pop(rank))
            return 0
        why = f"{_title(worker)} failed ({_in_words(worker, code)})"
        if not self._may_restart(worker, why):
            self._say(f"{why}: ending the job")
            return code
        self._ended.append(worker)
        self._start_worker(rank)
        return 0

    def _may_restart(self, child: Child, why: str) -> bool:
        """Whether a process that ended is started again. Counts it, and says so."""
        used = self._restarts.get(child.name, 0)
        if used >= self._job.restarts:
            return False
        self._restarts[child.name] = used + 1
        self._say(f"{why}: restart {used + 1} of {self._job.restarts}")
        return True

    def _daemon_ended(self, number: int, daemon: Child) -> int:
        """Handle the end of a daemon. The exit code of the job, or 0 if the job continues."""
        code = daemon.exited.result()
        why = f"{_title(daemon)} ended ({_in_words(daemon, code)})"
        is_server = number != SCHEDULER
        if code == ExitCode.USAGE or (is_server and self._job.replicas == 1):  # in vain, or its keys are gone
            return self._daemon_died(number, daemon)
        has_copies = is_server and any(other not in (number, SCHEDULER) for other in self._daemons)
        restarts = self._may_restart(daemon, why)
        if not (restarts or has_copies):
            return self._daemon_died(number, daemon)
        self._output.show_log_of(daemon.name)
        self._ended.append(self._daemons.pop(number))
        if not restarts:
            self._say(f"{why}: the job goes on with the copies that other servers have of its keys")
        elif is_server:
            self._start_server(number)
        else:
            self._daemons[SCHEDULER] = self._child(self._plan.scheduler(self._listening, self._folder, ""))
        return 0

    def _daemon_died(self, number: int, daemon: Child) -> int:
        code = daemon.exited.result()
        self._output.show_log_of(daemon.name)
        loss = ""
        if self._listening and number != SCHEDULER:
            copies = "each value has one copy" if self._job.replicas == 1 else "no other server is left"
            loss = f" its part of the keys is gone, since {copies}: start the job again from a checkpoint;"
        self._say(f"{_title(daemon)} ended ({_in_words(daemon, code)}):{loss} ending the job")
        return ExitCode.USAGE if code == ExitCode.USAGE else ExitCode.FAILED  # its settings are ours

    def _on_sink_error(self, stream: Stream, error: OSError) -> None:
        """End the job because its output goes nowhere: as a program does that writes to a closed pipe or a full disk.

        Called from any thread.
        """

        def end() -> None:
            if self._stop.urgency is not Urgency.NOT_ASKED:
                return
            if isinstance(error, BrokenPipeError):
                self._stop.make(exit_code(-signal.SIGPIPE))
            else:
                self._say(f"cannot write {stream} ({error.strerror or error}): ending the job")
                self._stop.make(ExitCode.FAILED)

        with contextlib.suppress(RuntimeError):  # the loop is closed: the job has ended
            self._loop.call_soon_threadsafe(end)

    # --- ending -------------------------------------------------------------------------------------------------------

    async def _end(self) -> None:
        """End what runs: workers, servers, scheduler, in this order, for each needs those after it."""
        self._output.expect_ends()
        await self._end_all(self._workers.values())
        await self._end_all([daemon for number, daemon in self._daemons.items() if number != SCHEDULER])
        await self._end_all([daemon for number, daemon in self._daemons.items() if number == SCHEDULER])
        outputs = [child.output for child in (*self._children(), *self._ended)]
        limit_s = KILL_GRACE_S if self._stop.at_once.done() else self._job.grace_s
        # all() stops at the first that is stuck: those who read the output have stopped reading
        await self._loop.run_in_executor(None, lambda: all(output.join(limit_s) for output in outputs))

    async def _end_all(self, children: Collection[Child]) -> None:
        """End these processes: SIGTERM, then SIGKILL after the grace or at the second request."""
        at_once = self._stop.at_once
        running = [child for child in children if not child.exited.done()]
        if running and not at_once.done():
            for child in running:
                child.terminate()
            events: set[asyncio.Future[Any]] = {asyncio.gather(*(child.exited for child in running)), at_once}
            await asyncio.wait(events, timeout=self._job.grace_s, return_when=asyncio.FIRST_COMPLETED)
            running = [child for child in running if not child.exited.done()]
            if running and not at_once.done():
                names = ", ".join(child.name for child in running)
                self._say(f"killing {names}: still running {self._job.grace_s:g} s after SIGTERM")
        if running:
            await _kill(running)

    def _say(self, text: str) -> None:
        self._output.say(text)


async def _kill(running: Collection[Child]) -> None:
    for child in running:
        child.kill()
    exits = {child.exited for child in running}
    _, stuck = await asyncio.wait(exits, timeout=KILL_GRACE_S)
    for child in running:
        if child.exited in stuck:
            child.kill_session()
    await asyncio.wait(exits)


async def _nothing() -> dict[str, str]:
    return {}


def _title(child: Child) -> str:
    return f"{child.name} on {child.host}" if child.host else child.name


def _in_words(child: Child, code: int) -> str:
    """An exit code as people read it."""
    if child.host and code == LOST:
        return f"exit code {code}: its ssh could not connect, or lost its connection"
    if code > 128:
        with contextlib.suppress(ValueError):
            return signal.Signals(code - 128).name
    return f"exit code {code}"
