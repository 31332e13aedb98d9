"""Processes of a job: each is started in a session of its own, signalled, and waited for in a thread.

A process on another host is the ssh that it runs through, which passes on its output and its exit code. `Lifeline` is
what goes in there through stdin, and `Greeted` what comes out first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import IO, Any, Final, TypeVar

from kvd.errors import KvdError
from kvd.node.affinity import running_on
from kvd.node.launch.output import MAX_LINE, OutputRelay, Sink, SinkError, Stream
from kvd.node.launch.plan import ProcessSpec
from kvd.node.launch.stdin import StdinCopies, copy_in_thread
from kvd.node.parent import exit_code, kill_session
from kvd.node.remote import ALIVE, GREETING, INPUT, INPUT_SIZE_BYTES, KILL, TERMINATE

ALIVE_EVERY_S: Final = 5.0

MOST_INPUTS: Final = 4
"""Pieces of stdin that are on their way to a process at a time. Commands follow them."""


class Lifeline:
    """Writes the order, signs of life, commands and stdin to a pipe, in a thread of its own: the pipe may be full."""

    def __init__(self, pipe: IO[bytes], order: bytes) -> None:
        self._pipe = pipe
        self._queue: queue.Queue[bytes | None] = queue.Queue()
        self._queue.put(order)
        self._changed = threading.Condition()
        self._inputs = 0  # pieces of stdin on their way
        self._has_ended = False
        threading.Thread(target=self._write, name="lifeline", daemon=True).start()

    def send(self, command: bytes) -> None:
        """Send a command, unless the connection has ended."""
        self._queue.put(command)

    def send_input(self, data: bytes) -> None:
        """Send a piece of stdin, empty at its end. Wait while earlier ones are on their way.

        Raises:
            BrokenPipeError: the connection has ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or self._inputs < MOST_INPUTS)
            if self._has_ended:
                raise BrokenPipeError
            self._inputs += 1
        self._queue.put(INPUT + len(data).to_bytes(INPUT_SIZE_BYTES, "big") + data)

    def close(self) -> None:
        """End the connection, if it has not ended."""
        self._queue.put(None)

    def _write(self) -> None:
        with contextlib.suppress(OSError), self._pipe:  # the other side has ended
            while (data := self._next()) is not None:
                self._pipe.write(data)
                self._pipe.flush()
                if data.startswith(INPUT):
                    self._note(inputs=-1)
        self._note(has_ended=True)

    def _note(self, *, inputs: int = 0, has_ended: bool = False) -> None:
        with self._changed:
            self._inputs += inputs
            self._has_ended |= has_ended
            self._changed.notify_all()

    def _next(self) -> bytes | None:
        try:
            return self._queue.get(timeout=ALIVE_EVERY_S)
        except queue.Empty:
            return ALIVE


class Greeted:
    """A sink for the output of a process on another host, which begins with a greeting.

    What comes on stdout before that is the login shell's; it goes to stderr, where it tells why no greeting came.
    """

    def __init__(self, sink: Sink, on_greeting: Callable[[], object]) -> None:
        self._sink = sink
        self._on_greeting = on_greeting
        self._was_greeted = False
        self._line = b""  # before the greeting, as far as it has come

    def write(self, node: str, stream: Stream, piece: bytes) -> None:
        """Take one piece.

        Raises:
            OSError: the sink takes no more.
        """
        if stream == "stderr" or self._was_greeted:
            self._sink(node, stream, piece)
            return
        self._line += piece
        if self._line.endswith(GREETING + b"\n"):  # the shell may have left a line without an end
            self._was_greeted = True
            self._on_greeting()
        elif piece.endswith((b"\n", b"\r")) or len(self._line) >= MAX_LINE:
            self._sink(node, "stderr", self._line)
            self._line = b""


T = TypeVar("T")

LAST_WORDS_S: Final = 1.0
"""How long the last output of a process may delay the report of its end."""


class Child:
    """A running process. Made on the event loop that is told of its end.

    Attributes:
        name: its node id.
        host: where it runs; empty: here.
        connected: done when its host has taken the order, at once if that is this host. Never, if that fails.
        pid: its process id, which is also the id of its session.
        exited: done when it has ended, with its exit code.
        output: hands its output on.

    Raises:
        KvdError: it cannot be started.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        sink: Sink,
        on_sink_error: SinkError,
        turn: threading.Lock,
        stdin: StdinCopies | None = None,
    ) -> None:
        """
        Args:
            spec: how to start it.
            sink: takes its output.
            on_sink_error: called when the sink takes no more.
            turn: held while output is handed on that belongs together.
            stdin: what it gets on stdin, if it is to get something.
        """
        self.name = spec.name
        self.host = spec.host
        self._is_guard = spec.is_guard
        self._reaping = threading.Lock()  # held to take the exit code, which frees the pid for another process
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int] = self._loop.create_future()
        self.connected: asyncio.Future[None] = self._loop.create_future()
        self._began_at: float | None = None  # on the loop's clock, as the next
        self._ended_at: float | None = None
        self.connected.add_done_callback(self._on_begin)
        self.exited.add_done_callback(self._on_end)
        try:
            with running_on(spec.cores):
                self._process = subprocess.Popen(
                    spec.command,
                    env=dict(spec.environment),
                    stdin=subprocess.DEVNULL if spec.order is None and stdin is None else subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
        except OSError as error:
            raise KvdError(f"cannot start {spec.name}: {error}") from None
        self.pid = self._process.pid
        self._lifeline: Lifeline | None = None
        pipe = self._process.stdin
        if spec.order is None:
            self.connected.set_result(None)
            if stdin is not None:
                assert pipe is not None
                copy_in_thread(stdin, partial(_write, pipe), pipe.close)
        else:
            assert pipe is not None
            self._lifeline = lifeline = Lifeline(pipe, spec.order)
            if stdin is not None:
                copy_in_thread(stdin, lifeline.send_input, lambda: lifeline.send_input(b""))
            sink = Greeted(sink, lambda: self._tell(self.connected, None)).write
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        pipes = {"stdout": self._process.stdout, "stderr": self._process.stderr}
        self.output = OutputRelay(
            spec.name,
            pipes,  # type: ignore[arg-type]
            sink,
            on_sink_error,
            turn,
            shows_unfinished=spec.shows_unfinished,
        )
        threading.Thread(target=self._wait, name=f"wait for {spec.name}", daemon=True).start()

    @property
    def ran_s(self) -> float:
        """How long it has run, or ran until it ended; 0.0 if its host has not taken the order."""
        if self._began_at is None:
            return 0.0
        return (self._loop.time() if self._ended_at is None else self._ended_at) - self._began_at

    def terminate(self) -> None:
        """Ask it to end."""
        if self._lifeline is None:
            self._signal(signal.SIGTERM)
        else:
            self._lifeline.send(TERMINATE)

    def kill(self) -> None:
        """End it at once. A guard first ends its command and all that the command left behind."""
        if self._lifeline is None:
            self._signal(signal.SIGQUIT if self._is_guard else signal.SIGKILL)
        else:
            self._lifeline.send(KILL)

    def kill_session(self) -> None:
        """End it and everything in its session, without asking anyone. On another host, the guard there does that."""
        with self._reaping:
            if self._process.returncode is None:
                kill_session(self.pid)

    def _signal(self, number: signal.Signals) -> None:
        # Not with `Popen.send_signal`: it would take the exit code of a process that has just ended away from `_wait`.
        with self._reaping:
            if self._process.returncode is None:
                os.kill(self.pid, number)

    def _wait(self) -> None:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        # The pid cannot belong to another process until the exit code is taken. A guard that did its work has left
        # nothing behind; one that was killed has.
        kill_session(self.pid)
        with self._reaping:
            code = exit_code(self._process.wait())
        if self._lifeline is not None:
            self._lifeline.close()
        self.output.join(LAST_WORDS_S)  # so that its last words come before the report of its end
        self._tell(self.exited, code)

    def _on_begin(self, _: asyncio.Future[None]) -> None:
        self._began_at = self._loop.time()

    def _on_end(self, _: asyncio.Future[int]) -> None:
        self._ended_at = self._loop.time()

    def _tell(self, future: asyncio.Future[T], result: T) -> None:
        """Set the result of a future, from another thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(future.set_result, result)


def _write(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(data)
    pipe.flush()


class Crew:
    """The processes of a job: those that run or whose end has yet to be dealt with, and those that have ended.

    Attributes:
        scheduler: None before it is started, and while it waits for a restart.
        servers: by their index.
        workers: by their rank.
        ended: those whose end was dealt with.
        given_up_servers: indices of those that are not started again, and without which the job goes on.
        given_up_workers: ranks of the same.
    """

    def __init__(self) -> None:
        self.scheduler: Child | None = None
        self.servers: dict[int, Child] = {}
        self.workers: dict[int, Child] = {}
        self.ended: list[Child] = []
        self.given_up_servers: set[int] = set()
        self.given_up_workers: set[int] = set()

    def __iter__(self) -> Iterator[Child]:
        """All but those that have ended: daemons first."""
        if self.scheduler is not None:
            yield self.scheduler
        yield from self.servers.values()
        yield from self.workers.values()

    def in_order_of_end(self) -> Iterator[list[Child]]:
        """Those who end first come first."""
        yield list(self.workers.values())
        yield list(self.servers.values())
        yield [] if self.scheduler is None else [self.scheduler]

    def end(self) -> None:
        """All of them have ended, and that was dealt with."""
        self.ended += list(self)
        self.scheduler = None
        self.servers.clear()
        self.workers.clear()
        self.given_up_servers.clear()
        self.given_up_workers.clear()

    def pid_of(self, name: str) -> int | None:
        """The pid of the process with this node id, if it runs."""
        return next((child.pid for child in self if child.name == name and not child.exited.done()), None)

    def connecting_to(self, host: str) -> list[Child]:
        """Those whose connection to a host is being made."""
        return [c for c in self if c.host == host and not (c.connected.done() or c.exited.done())]

    def outputs(self) -> list[OutputRelay]:
        """The output of every process that there was."""
        return [child.output for child in (*self.ended, *self)]


KILL_GRACE_S: Final = 1.0
"""How long a guard that was told to kill its command may take, before it is killed itself."""


async def end_all(
    children: Collection[Child], at_once: asyncio.Future[None], grace_s: float, say: Callable[[str], None]
) -> None:
    """Ends these processes: SIGTERM, then SIGKILL after the grace, or when `at_once` is done."""
    running = [child for child in children if not child.exited.done()]
    if running and not at_once.done():
        for child in running:
            child.terminate()
        events: set[asyncio.Future[Any]] = {asyncio.gather(*(child.exited for child in running)), at_once}
        await asyncio.wait(events, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        running = [child for child in running if not child.exited.done()]
        if running and not at_once.done():
            names = ", ".join(child.name for child in running)
            say(f"killing {names}: still running {grace_s:g} s after SIGTERM")
    if running:
        await _kill(running)


async def _kill(running: Collection[Child]) -> None:
    for child in running:
        child.kill()
    exits = {child.exited for child in running}
    _, stuck = await asyncio.wait(exits, timeout=KILL_GRACE_S)
    for child in running:
        if child.exited in stuck:
            child.kill_session()
    await asyncio.wait(exits)
