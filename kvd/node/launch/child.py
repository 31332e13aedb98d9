"""One process of a job: started in a session of its own, signalled, and waited for in a thread.

A process on another host is the ssh that it runs through, which passes on its output and its exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from functools import partial
from typing import IO, Final, TypeVar

from kvd.errors import KvdError
from kvd.node.affinity import running_on
from kvd.node.launch.connection import Greeted, Lifeline
from kvd.node.launch.output import OutputRelay, Sink, SinkError
from kvd.node.launch.plan import ProcessSpec
from kvd.node.launch.stdin import StdinCopies, copy_in_thread
from kvd.node.parent import exit_code, kill_session
from kvd.node.remote import KILL, TERMINATE

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
