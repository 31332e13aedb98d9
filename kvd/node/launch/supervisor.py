"""The story of one run: start everything, wait for what ends the job, and end the rest in order."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shlex
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kvd.errors import RequestTimeout
from kvd.node.daemon.exit_codes import ExitCode
from kvd.node.launch.child import KILL_GRACE_S, Child, Crew, end_all
from kvd.node.launch.hosts import LOST, Reach
from kvd.node.launch.job import Job, job_key
from kvd.node.launch.job_output import JobOutput
from kvd.node.launch.output import Stream
from kvd.node.launch.plan import READY_FILE, JobPlan, ProcessSpec
from kvd.node.launch.preflight import Sighting, look_at
from kvd.node.launch.restart_policy import JobRestarts, Restarts
from kvd.node.launch.signals import StopRequest, Urgency
from kvd.node.launch.stdin import MAX_BYTES, StdinCopies
from kvd.node.parent import exit_code


class ReadySocket:
    """A socket on which the scheduler reports to its launcher that it is ready, as with ``Type=notify`` of systemd.

    Attributes:
        name: for ``NOTIFY_SOCKET``.
        reported: done when the daemon has reported.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        # an abstract name: a path might be longer than a socket's may be
        self.name = f"@kvd-launch-{secrets.token_hex(8)}"
        self.reported: asyncio.Future[None] = loop.create_future()

    def __enter__(self) -> ReadySocket:
        self._socket.setblocking(False)
        self._socket.bind(f"\0{self.name[1:]}")
        self._loop.add_reader(self._socket, self._read)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if b"READY=1" in self._socket.recv(8192).splitlines() and not self.reported.done():
                self.reported.set_result(None)


MOST_CONNECTING: Final = 4
"""Connections to one host that are made at the same time."""

NOT_RESTARTED: Final = frozenset({ExitCode.OK, ExitCode.USAGE})
"""The exit codes of a daemon that was told to end, and of one whose settings are wrong."""

ONLY_COPY_LOST: Final = "its part of the keys is gone, since each value has one copy: "
NO_SERVER_LEFT: Final = "no server is left, and no copy of the keys: "
MAY_BE_LOST: Final = "more servers have died than there are copies, and keys may be gone: "
START_AGAIN: Final = "start the job again from a checkpoint; "


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
        self._crew = Crew()
        self._unfinished = set(range(job.workers))  # the ranks of the workers that have not ended well
        self._restarts = Restarts(job.restarts)
        self._job_restarts = JobRestarts(job.restarts, job.replicas, restores=job.restores)
        self._folder = folder
        self._stdin = None if job.stdin is None else StdinCopies(job.stdin, self._on_long_stdin)

    async def run(self) -> int:
        """Run the job; return its exit code."""
        try:
            code = await self._start()
            return await self._outcome() if code is None else code
        finally:
            await self._end()
            if self._stdin is not None:
                self._stdin.close()

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
        return self._crew.pid_of(name)

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
        seen = look.result()
        self._reach = Reach(self._job.scheduler, {host: sighting.launcher for host, sighting in seen.items()})
        first = self._plan.placement.worker(0).host
        if first:
            self._plan.meet_at(self._reach.worker(first, seen[first].address), seen[first].port)
        return None

    async def _start_scheduler(self) -> int | None:
        """Start the scheduler and wait until it is ready. The exit code if that was not possible."""
        with ReadySocket(self._loop) as ready:
            bind = self._listening or self._reach.bind
            self._crew.scheduler = self._child(self._plan.scheduler(bind, self._folder, ready.name))
            code = await self._scheduler_ready(self._crew.scheduler, ready.reported)
            if code is not None:
                return code
        if self._listening:  # it is there again
            return None
        self._listening = (self._folder / READY_FILE).read_text(encoding="utf-8").strip()
        self.scheduler = self._reach.scheduler("", self._listening)
        if self._job.announce:
            settings = {"KVD_SCHEDULER": self.scheduler, "KVD_JOB": self._plan.name, **self._key.settings}
            variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in settings.items())
            self._say(f"scheduler at {self.scheduler}; look at the job with: {variables} kvd status")
            if self._job.is_elastic:
                self._say(f"workers may join: {variables} kvd worker -- {shlex.join(self._job.command)}")
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
            pending = self._crew.connecting_to(host)
            if len(pending) < MOST_CONNECTING:
                return
            events: set[asyncio.Future[Any]] = {
                self._stop.code,
                *(future for c in pending for future in (c.connected, c.exited)),
            }
            await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)

    async def _scheduler_ready(self, process: Child, ready: asyncio.Future[None]) -> int | None:
        """Wait for the scheduler. The exit code if it does not become ready."""
        stop = self._stop.code
        events: set[asyncio.Future[Any]] = {ready, process.exited, stop}
        await asyncio.wait(events, timeout=self._job.startup_s, return_when=asyncio.FIRST_COMPLETED)
        if stop.done():
            return stop.result()
        if process.exited.done():
            return self._died(process)
        if not ready.done():
            limit = f"{self._job.startup_s:g} s"
            self._output.show_log_of(process.name)
            raise RequestTimeout(f"the scheduler was not ready within {limit}", waiting_for=("scheduler",))
        return None

    def _start_scheduler_again(self) -> None:
        self._crew.scheduler = self._child(self._plan.scheduler(self._listening, self._folder, ""))

    def _start_server(self, index: int) -> None:
        scheduler = self._reach.scheduler(self._plan.placement.server(index), self._listening)
        self._crew.servers[index] = self._child(self._plan.server(index, scheduler))

    def _start_worker(self, rank: int) -> None:
        host = self._plan.placement.worker(rank).host
        scheduler = self._reach.scheduler(host, self._listening)
        self._crew.workers[rank] = self._child(self._plan.worker(rank, scheduler))

    def _child(self, spec: ProcessSpec) -> Child:
        stdin = self._stdin if spec.takes_stdin else None
        return Child(spec, self._output.write, self._on_sink_error, self._output.turn, stdin)

    # --- what ends the job --------------------------------------------------------------------------------------------

    async def _outcome(self) -> int:
        """Wait until the workers are done or something goes wrong; the exit code."""
        stop = self._stop.code
        while self._unfinished:
            events: set[asyncio.Future[Any]] = {stop, *(c.exited for c in self._crew), *self._restarts.due}
            await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                return stop.result()
            code = self._deal_with_ends()
            if code:
                return code
            if self._job_restarts.is_due and (failed := await self._begin_anew()) is not None:
                return failed
            self._restarts.start_due()
        return ExitCode.OK

    async def _begin_anew(self) -> int | None:
        """End all processes, and start them as the next run of the job. The exit code if that was not possible."""
        await self._end_crew()
        self._crew.end()
        self._restarts.cancel()
        await asyncio.wait({self._stop.code}, timeout=self._job_restarts.begin())
        if self._stop.code.done():
            return self._stop.code.result()
        self._plan.begin_run()
        self._unfinished = set(range(self._job.workers))
        code = await self._start_scheduler()
        return await self._start_others() if code is None else code

    def _deal_with_ends(self) -> int:
        """Deal with each process that has ended, unless all are to end. The exit code of the job, or 0 if the job
        continues."""
        if (
            self._crew.scheduler is not None
            and self._crew.scheduler.exited.done()
            and (code := self._scheduler_ended(self._crew.scheduler))
        ):
            return code
        for index, server in list(self._crew.servers.items()):
            if not self._job_restarts.is_due and server.exited.done() and (code := self._server_ended(index, server)):
                return code
        for rank, worker in list(self._crew.workers.items()):
            if self._job_restarts.is_due:
                return 0
            if worker.exited.done() and (code := self._worker_ended(rank, worker)):
                return code
        return 0

    def _scheduler_ended(self, scheduler: Child) -> int:
        """Deal with the end of the scheduler. The exit code of the job, or 0 if the job continues."""
        self._crew.scheduler = None
        self._crew.ended.append(scheduler)
        code = scheduler.exited.result()
        if code not in NOT_RESTARTED and self._is_restarted(scheduler, self._start_scheduler_again):
            return 0
        return self._died(scheduler)

    def _server_ended(self, index: int, server: Child) -> int:
        """Deal with the end of a server. The exit code of the job, or 0 if the job continues."""
        self._crew.ended.append(self._crew.servers.pop(index))
        self._job_restarts.server_ended()
        code = server.exited.result()
        if self._job.replicas == 1:
            return self._lost(server, ONLY_COPY_LOST)
        if code == ExitCode.USAGE and not self._restarts.used(server.name):
            return self._died(server)  # the others have the same settings
        if code not in NOT_RESTARTED and self._is_restarted(server, lambda: self._start_server(index)):
            return 0
        self._crew.given_up_servers.add(index)
        if len(self._crew.given_up_servers) == self._job.servers:
            return self._lost(server, NO_SERVER_LEFT)
        self._output.show_log_of(server.name)
        self._say(f"{_end_of(server)}: the job goes on without it, with the other copy of its keys")
        return 0

    def _worker_ended(self, rank: int, worker: Child) -> int:
        """Deal with the end of a worker. The exit code of the job, or 0 if the job continues."""
        self._crew.ended.append(self._crew.workers.pop(rank))
        code = worker.exited.result()
        if code == ExitCode.OK:
            self._unfinished.discard(rank)
        elif self._job_restarts.may_have_lost_copies and self._begins_anew(worker, MAY_BE_LOST):
            return 0
        elif not self._is_restarted(worker, lambda: self._start_worker(rank)):
            if not self._goes_on_without(rank, code):
                self._say(f"{_end_of(worker)}: ending the job")
                return code
            self._unfinished.discard(rank)
            self._crew.given_up_workers.add(rank)
            self._output.show_log_of(worker.name)
            self._say(f"{_end_of(worker)}: the job goes on without it, once the scheduler has missed it")
        return 0

    def _goes_on_without(self, rank: int, code: int) -> bool:
        """Whether others go on, or are done, without this one. What is wrong with its settings is wrong with theirs."""
        settings = self._job.environment
        shrinks = settings.get("KVD_ON_WORKER_LOSS") == "shrink"
        needed = 1 if shrinks else int(settings.get("KVD_QUORUM", "0"))
        left = self._job.workers - len(self._crew.given_up_workers | {rank})
        return 0 < needed <= left and code not in NOT_RESTARTED

    def _is_restarted(self, ended: Child, start: Callable[[], object]) -> bool:
        """Whether a process that ended is started again. If so, plans that and says when."""
        restart = self._restarts.plan(ended.name, ended.ran_s, start)
        if restart is None:
            return False
        self._output.show_log_of(ended.name)
        self._say(f"{_end_of(ended)}: {restart}")
        return True

    def _lost(self, server: Child, loss: str) -> int:
        """Deal with the end of a server that had the only copy. The exit code of the job, or 0 if it begins anew."""
        told = server.exited.result() in NOT_RESTARTED
        return 0 if not told and self._begins_anew(server, loss) else self._died(server, loss + START_AGAIN)

    def _begins_anew(self, ended: Child, loss: str) -> bool:
        """Whether the job begins again from its newest snapshot. If so, plans that and says when."""
        restart = self._job_restarts.plan(ended.ran_s)
        if restart is None:
            return False
        self._output.show_log_of(ended.name)
        self._say(f"{_end_of(ended)}: {loss}the job begins again from its newest snapshot, {restart}")
        return True

    def _died(self, daemon: Child, loss: str = "") -> int:
        """The exit code of a job that ends because a daemon ended; `loss` says what is lost with it."""
        self._output.show_log_of(daemon.name)
        self._say(f"{_end_of(daemon)}: {loss}ending the job")
        code = daemon.exited.result()
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

    def _on_long_stdin(self) -> None:
        """End the job because stdin is too long for its workers. Called from any thread."""

        def end() -> None:
            if self._stop.urgency is Urgency.NOT_ASKED:
                self._say(
                    f"stdin has more than {MAX_BYTES >> 20} MiB, and each worker gets a copy of it: let the program "
                    "read a file, and give kvd launch < /dev/null; ending the job"
                )
                self._stop.make(ExitCode.USAGE)

        with contextlib.suppress(RuntimeError):  # the loop is closed: the job has ended
            self._loop.call_soon_threadsafe(end)

    # --- ending -------------------------------------------------------------------------------------------------------

    async def _end(self) -> None:
        """End what runs."""
        self._output.expect_ends()
        await self._end_crew()
        outputs = self._crew.outputs()
        limit_s = KILL_GRACE_S if self._stop.at_once.done() else self._job.grace_s
        # all() stops at the first that is stuck: those who read the output have stopped reading
        await self._loop.run_in_executor(None, lambda: all(output.join(limit_s) for output in outputs))

    async def _end_crew(self) -> None:
        """Workers, servers, scheduler, in this order: each needs those after it."""
        for children in self._crew.in_order_of_end():
            await end_all(children, self._stop.at_once, self._job.grace_s, self._say)

    def _say(self, text: str) -> None:
        self._output.say(text)


async def _nothing() -> dict[str, Sighting]:
    return {}


def _end_of(child: Child) -> str:
    """Which process ended, and how."""
    title = f"{child.name} on {child.host}" if child.host else child.name
    verb = "failed" if child.name.startswith("worker-") else "ended"
    return f"{title} {verb} ({_in_words(child, child.exited.result())})"


def _in_words(child: Child, code: int) -> str:
    """An exit code as people read it."""
    if child.host and code == LOST:
        return f"exit code {code}: its ssh could not connect, or lost its connection"
    if code > 128:
        with contextlib.suppress(ValueError):
            return signal.Signals(code - 128).name
    return f"exit code {code}"
