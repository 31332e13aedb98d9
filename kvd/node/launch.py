"""A whole job on this machine: a scheduler, servers and workers, started, watched and ended together.

The story is `Launch.run`: the scheduler comes up on a free port of the loopback, servers and workers start with its
address, and whatever ends the job (the workers are done, one failed, a daemon died, a signal) ends the rest in order:
workers, servers, scheduler. Each process has a session of its own, so that no signal of the terminal reaches it and
everything that it started can be ended with it; `kvd.node.parent` sees to those whose launcher is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, Literal

from kvd.config import child_environment
from kvd.errors import ConfigError, KvdError, RequestTimeout
from kvd.node.affinity import Plan, plan, running_on, usable_cores
from kvd.node.parent import exit_code, guarded, kill_session, tied

MAX_LINE: Final = 64 * 1024
"""Bytes of a line that are held back until its end comes; a longer one is handed on in pieces."""

PARENT_GRACE_S: Final = 2.0
"""What a worker may take to end when the launcher was killed: its cluster is gone already."""

KILL_GRACE_S: Final = 1.0
"""What a guard may take to end its command at once, before it is ended itself."""

Stream = Literal["stdout", "stderr"]
Sink = Callable[[str, Stream, bytes], None]
"""Takes one line (without its end) of a node's output. Called from several threads; may block, which slows down the
node; an OSError ends the job."""

_STOPPED_BY: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to run.

    Attributes:
        command: program and arguments of each worker.
        workers: how many, at least 1.
        servers: how many, at least 1.
        environment: variables for all processes: the settings of the cluster, and whatever the workers need. Two of
            the settings are for the launcher: ``KVD_STATE_DIR``, where each daemon gets a folder of its own, and
            ``KVD_CPU_AFFINITY``: with ``auto`` each server gets a core of its own, if there are enough.
        restarts: how often each worker that failed is started again, under its old node id.
        grace_s: what processes may take to end after SIGTERM.
        startup_s: what the scheduler may take to be ready.
        daemon: the command line of kvd, to which ``scheduler`` or ``server`` is added.
    """

    command: Sequence[str]
    workers: int
    servers: int
    environment: Mapping[str, str] = field(default_factory=dict)
    restarts: int = 0
    grace_s: float = 10.0
    startup_s: float = 60.0
    daemon: Sequence[str] = (sys.executable, "-m", "kvd_cli.main")

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigError("a job needs the command of its workers: … -- python train.py")
        for name in ("workers", "servers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"a job needs at least one of its {name}", setting=f"num_{name}")

    def names(self) -> list[str]:
        """The node ids of all processes, in the order in which they start."""
        servers = [f"server-{index}" for index in range(self.servers)]
        return ["scheduler", *servers, *(f"worker-{rank}" for rank in range(self.workers))]


def run(job: Job, sink: Sink, *, handle_signals: bool = True) -> int:
    """Run a job from its start to its end.

    Args:
        job: what to run.
        sink: where the output goes; what the launcher itself has to say comes from ``"launch"``.
        handle_signals: end the job at SIGINT, SIGTERM or SIGHUP, at the second one at once. Only in the main thread.

    Returns:
        The exit code: 0 if all workers ended well, else that of the first worker that failed; 128 + n after signal n;
        2 or 1 if a daemon did not start or died.
    """
    with _handlers_restored() if handle_signals else contextlib.nullcontext():
        return asyncio.run(Launch(job, sink).run(handle_signals=handle_signals))


@contextlib.contextmanager
def _handlers_restored() -> Iterator[None]:
    """Put back the handlers of the signals that end a job, which `Launch.run` leaves without effect at its end."""
    old = {number: signal.getsignal(number) for number in _STOPPED_BY}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


class Launch:
    """One run of one job. It is used from the loop in which it runs, except `stop`.

    Attributes:
        scheduler: the address of the scheduler, once it is ready.
    """

    def __init__(self, job: Job, sink: Sink) -> None:
        self.scheduler = ""
        self._job = job
        self._sink = sink
        self._daemons: list[_Child] = []  # the scheduler first
        self._workers: dict[int, _Child] = {}  # by rank, those that have not ended well
        self._ended: list[_Child] = []
        self._restarted: dict[int, int] = {}
        self._plan: Plan | None = None  # who is pinned to which cores
        self._stop_code: asyncio.Future[int] | None = None  # done when the job is to end, with its exit code
        self._at_once: asyncio.Future[None] | None = None  # done when grace is over
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, *, handle_signals: bool = False) -> int:
        """Run the job; return its exit code (see `run` of this module)."""
        self._loop = loop = asyncio.get_running_loop()
        self._stop_code, self._at_once = loop.create_future(), loop.create_future()
        with (
            self._signals(handle_signals),
            tempfile.TemporaryDirectory(prefix="kvd-launch-", ignore_cleanup_errors=True) as folder,
        ):
            try:
                code = await self._start(Path(folder))
                return await self._outcome() if code is None else code
            finally:
                await self._end()

    def stop(self, code: int) -> None:
        """End the job with this exit code; when it is ending already, at once. May be called from any thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the job has ended
                self._loop.call_soon_threadsafe(self._on_stop, code)

    def pid_of(self, name: str) -> int | None:
        """The pid of a process that runs: of a daemon its own, of a worker that of its guard."""
        children = [child for child in (*self._daemons, *self._workers.values()) if not child.exited.done()]
        return next((child.pid for child in children if child.name == name), None)

    # --- the parts of the story ---------------------------------------------------------------------------------------

    async def _start(self, folder: Path) -> int | None:
        """Start everything. The exit code if that was not possible."""
        self._plan = self._planned()
        ready_file = folder / "scheduler"
        with _ReadySocket(self._running_loop()) as ready:
            changes = {"KVD_BIND": "tcp://127.0.0.1:0", "NOTIFY_SOCKET": ready.name}
            arguments = ("scheduler", "--ready-file", str(ready_file))
            self._start_daemon("scheduler", arguments, changes)
            code = await self._scheduler_ready(ready.message)
            if code is not None:
                return code
        self.scheduler = ready_file.read_text(encoding="utf-8").strip()
        for index in range(self._job.servers):
            self._start_daemon(
                f"server-{index}",
                ("server",),
                {"KVD_PREFERRED_RANK": str(index), "KVD_BIND": "", "KVD_METRICS_BIND": ""},
                server=index,
            )
        for rank in range(self._job.workers):
            self._start_worker(rank)
        return None

    async def _scheduler_ready(self, ready: asyncio.Future[None]) -> int | None:
        """Wait for the scheduler. The exit code if it does not become ready."""
        process, stop = self._daemons[0], self._stopped()
        events: set[asyncio.Future[Any]] = {ready, process.exited, stop}
        await asyncio.wait(events, timeout=self._job.startup_s, return_when=asyncio.FIRST_COMPLETED)
        if stop.done():
            return stop.result()
        if process.exited.done():
            return self._daemon_died(process)
        if not ready.done():
            limit = f"{self._job.startup_s:g} s"
            raise RequestTimeout(f"the scheduler was not ready within {limit}", waiting_for=("scheduler",))
        return None

    async def _outcome(self) -> int:
        """Wait until the workers are done or something goes wrong; the exit code."""
        stop = self._stopped()
        while self._workers:
            children = [*self._daemons, *self._workers.values()]
            await asyncio.wait({stop, *(c.exited for c in children)}, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                return stop.result()
            dead = next((daemon for daemon in self._daemons if daemon.exited.done()), None)
            if dead is not None:
                return self._daemon_died(dead)
            for rank, worker in list(self._workers.items()):
                code = self._worker_ended(rank, worker) if worker.exited.done() else 0
                if code:
                    return code
        return 0

    def _worker_ended(self, rank: int, worker: _Child) -> int:
        """Deal with the end of a worker: the exit code of the job, or 0 if it goes on."""
        code = worker.exited.result()
        if code == 0:
            self._ended.append(self._workers.pop(rank))
            return 0
        used = self._restarted.get(rank, 0)
        if used >= self._job.restarts:
            self._say(f"{worker.name} failed ({_in_words(code)}): ending the job")
            return code
        self._restarted[rank] = used + 1
        self._say(f"{worker.name} failed ({_in_words(code)}): restart {used + 1} of {self._job.restarts}")
        self._ended.append(worker)
        self._start_worker(rank)
        return 0

    def _daemon_died(self, daemon: _Child) -> int:
        code = daemon.exited.result()
        self._say(f"{daemon.name} ended ({_in_words(code)}): ending the job")
        return code if code == 2 else 1  # 2: its settings are wrong, and so are ours

    async def _end(self) -> None:
        """End what runs: workers, servers, scheduler, each of them after what needs it."""
        await self._end_all(self._workers.values())
        await self._end_all(self._daemons[1:])
        await self._end_all(self._daemons[:1])
        outputs = [thread for c in (*self._workers.values(), *self._ended, *self._daemons) for thread in c.outputs]
        hurried = self._at_once is not None and self._at_once.done()
        limit_s = KILL_GRACE_S if hurried else self._job.grace_s
        await asyncio.get_running_loop().run_in_executor(None, _join, outputs, limit_s)

    async def _end_all(self, children: Iterable[_Child]) -> None:
        at_once = self._at_once
        assert at_once is not None
        running = [child for child in children if not child.exited.done()]
        if running and not at_once.done():
            for child in running:
                child.terminate()
            events: set[asyncio.Future[Any]] = {asyncio.gather(*(child.exited for child in running)), at_once}
            await asyncio.wait(events, timeout=self._job.grace_s, return_when=asyncio.FIRST_COMPLETED)
            running = [child for child in running if not child.exited.done()]
            if running and not at_once.done():
                names = ", ".join(child.name for child in running)
                self._say(f"killing {names}: still there {self._job.grace_s:g} s after SIGTERM")
        for child in running:
            child.kill()
        if running:
            exits = {child.exited for child in running}
            _, stuck = await asyncio.wait(exits, timeout=KILL_GRACE_S)
            for child in running:
                if child.exited in stuck:
                    child.kill_session()
            await asyncio.wait(exits)

    # --- processes ----------------------------------------------------------------------------------------------------

    def _planned(self) -> Plan | None:
        """Who gets which cores, which the log tells; None: everyone runs wherever the system puts him."""
        if self._job.environment.get("KVD_CPU_AFFINITY") != "auto":
            return None
        cores, workers, servers = usable_cores(), self._job.workers, self._job.servers
        found = plan(workers, servers, cores)
        if found is None:
            processes = workers + servers
            self._say(f"no server gets a core of its own: {processes} workers and servers, {len(cores)} usable cores")
        else:
            self._say(f"servers run on cores {_listed(found.servers)}, everyone else on {_listed(found.rest)}")
        return found

    def _cores_of(self, server: int | None) -> Collection[int] | None:
        return None if self._plan is None else self._plan.cores_of(server)

    def _start_daemon(
        self, name: str, arguments: Sequence[str], changes: Mapping[str, str], server: int | None = None
    ) -> None:
        command = tied([*self._job.daemon, *arguments])
        own = {"KVD_ROLE": "", "KVD_PARENT_PID": str(os.getpid()), **self._state_dir(name), **changes}
        with running_on(self._cores_of(server)):
            self._daemons.append(self._child(name, command, own, guards=False))

    def _start_worker(self, rank: int) -> None:
        own = {
            "KVD_ROLE": "worker",
            "KVD_PREFERRED_RANK": str(rank),
            "KVD_LOCAL_RANK": str(rank),
            "KVD_PARENT_PID": "",  # its guard watches for it
            "KVD_BIND": "",
            "KVD_METRICS_BIND": "",
            "PYTHONUNBUFFERED": "1",  # its lines are to appear when they are printed, although they go to a pipe
        }
        command = guarded(self._job.command, min(PARENT_GRACE_S, self._job.grace_s))
        with running_on(self._cores_of(None)):
            self._workers[rank] = self._child(f"worker-{rank}", command, own, guards=True)

    def _child(self, name: str, command: Sequence[str], changes: Mapping[str, str], *, guards: bool) -> _Child:
        everyone = {
            "KVD_SCHEDULER": self.scheduler,
            "KVD_NUM_WORKERS": str(self._job.workers),
            "KVD_NUM_SERVERS": str(self._job.servers),
            "KVD_NODE_ID": name,
        }
        environment = child_environment({**self._job.environment, **everyone, **changes})
        return _Child(name, command, environment, self._sink, self._on_sink_error, guards=guards)

    def _state_dir(self, name: str) -> dict[str, str]:
        """Each daemon keeps its state in a folder of its own."""
        parent = self._job.environment.get("KVD_STATE_DIR", "")
        return {"KVD_STATE_DIR": str(Path(parent) / name) if parent else ""}

    # --- what ends the job --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self, handle: bool) -> Iterator[None]:
        loop = self._running_loop()
        numbers = _STOPPED_BY if handle else ()
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            # The job has its exit code: a signal that comes now has nothing to end, and must not end this process with
            # another. Held back meanwhile, for the default handler is in place between the two calls.
            held_back = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
            for number in numbers:
                loop.remove_signal_handler(number)
                signal.signal(number, _do_nothing)
            signal.pthread_sigmask(signal.SIG_SETMASK, held_back)

    def _on_signal(self, number: signal.Signals) -> None:
        again = self._stopped().done()
        self._on_stop(128 + number)
        if again:
            self._say(f"{number.name} again: killing everything")
        else:
            self._say(f"{number.name}: ending the job; once more kills it")

    def _on_stop(self, code: int) -> None:
        stop, at_once = self._stopped(), self._at_once
        if not stop.done():
            stop.set_result(code)
        elif at_once is not None and not at_once.done():
            at_once.set_result(None)

    def _on_sink_error(self, stream: Stream, error: OSError) -> None:
        """The output goes nowhere any more: end as a program does that writes to a closed pipe, or to a full disk. From
        any thread."""

        def end() -> None:
            if self._stopped().done():
                return
            if isinstance(error, BrokenPipeError):
                self._on_stop(exit_code(-signal.SIGPIPE))
            else:
                self._say(f"cannot write {stream} ({error.strerror or error}): ending the job")
                self._on_stop(1)

        with contextlib.suppress(RuntimeError):
            self._running_loop().call_soon_threadsafe(end)

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # nobody reads it
            self._sink("launch", "stderr", text.encode())

    def _stopped(self) -> asyncio.Future[int]:
        assert self._stop_code is not None, "run() makes it"
        return self._stop_code

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None, "run() sets it"
        return self._loop


class _Child:
    """One process and the threads that serve it: one waits for its end, two hand its output on.

    Attributes:
        name: its node id.
        pid: its process id, which is also its session.
        exited: done when it has ended, with its exit code.
        outputs: the threads that hand its output on; they end with the output.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        sink: Sink,
        on_sink_error: Callable[[Stream, OSError], None],
        *,
        guards: bool,
    ) -> None:
        self.name = name
        self._guards = guards
        self._reaping = threading.Lock()  # held to take the exit code, after which the number may be somebody else's
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int] = self._loop.create_future()
        try:
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise KvdError(f"cannot start {name}: {error}") from None
        self.pid = self._process.pid
        streams: tuple[tuple[Stream, IO[bytes] | None], ...]
        streams = (("stdout", self._process.stdout), ("stderr", self._process.stderr))
        self.outputs = [
            threading.Thread(target=_relay, args=(name, stream, pipe, sink, on_sink_error), daemon=True)
            for stream, pipe in streams
        ]
        waiter = threading.Thread(target=self._wait, name=f"wait for {name}", daemon=True)
        for thread in (*self.outputs, waiter):
            thread.start()

    def terminate(self) -> None:
        """Ask it to end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once: a guard ends its command and all that this left behind, then itself."""
        self._signal(signal.SIGQUIT if self._guards else signal.SIGKILL)

    def kill_session(self) -> None:
        """End it and everything in its session, without asking anyone."""
        with self._reaping:
            if self._process.returncode is None:
                kill_session(self.pid)

    def _signal(self, number: signal.Signals) -> None:
        # Not by `Popen.send_signal`, which takes the exit code of one that has just ended away from `_wait`.
        with self._reaping:
            if self._process.returncode is None:
                os.kill(self.pid, number)

    def _wait(self) -> None:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        # As long as nobody has taken its exit code, nobody else can have its number. A guard that did its work has
        # left nobody behind; one that was killed has.
        kill_session(self.pid)
        with self._reaping:
            code = exit_code(self._process.wait())
        for thread in self.outputs:
            thread.join(KILL_GRACE_S)  # so that its last words come before its end is told
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.exited.set_result, code)


class _ReadySocket:
    """Where a daemon reports that it is ready, in the manner of systemd.

    Attributes:
        name: for ``NOTIFY_SOCKET``.
        message: done when it has reported.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        # an abstract name: a path could be longer than a socket's may be
        self.name = f"@kvd-launch-{secrets.token_hex(8)}"
        self.message: asyncio.Future[None] = loop.create_future()

    def __enter__(self) -> _ReadySocket:
        self._socket.setblocking(False)
        self._socket.bind(f"\0{self.name[1:]}")
        self._loop.add_reader(self._socket, self._read)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if b"READY=1" in self._socket.recv(8192).splitlines() and not self.message.done():
                self.message.set_result(None)


def _relay(
    name: str, stream: Stream, pipe: IO[bytes], sink: Sink, on_sink_error: Callable[[Stream, OSError], None]
) -> None:
    """Hand a pipe on, line by line, until its end."""
    broken = False
    with pipe:
        while line := pipe.readline(MAX_LINE):
            if broken:
                continue  # keep reading: a node must not stop because nobody listens
            try:
                sink(name, stream, line.removesuffix(b"\n"))
            except OSError as error:
                broken = True
                on_sink_error(stream, error)


def _do_nothing(*_: object) -> None:
    """A handler: of a signal that comes too late."""


def _join(threads: Sequence[threading.Thread], limit_s: float) -> None:
    """Wait until the last lines are out, but not for ever: who reads them may have stopped reading."""
    for thread in threads:
        thread.join(limit_s)
        if thread.is_alive():
            return


def _listed(cores: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(cores)))


def _in_words(code: int) -> str:
    """An exit code as people read it."""
    if code > 128:
        with contextlib.suppress(ValueError):
            return signal.Signals(code - 128).name
    return f"exit code {code}"
