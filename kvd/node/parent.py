"""The tie between a process and its parent: nothing that a launcher starts outlives the launcher.

`tied` makes a command that dies with its parent: for our daemons, which start no processes themselves. `guarded` makes
a command under a `Guard`, a small process that stays: it passes signals on, notices when its parent is gone, and ends
all descendants that the command left behind. ``kvd worker`` is a `Guard` in its own process.

This is one file that imports the standard library only, and it is run by its path: the process that guards a command
must start at once and take little memory. It also keeps the system call that ties a child to its parent out of the
launcher, which has threads: after a fork, only a fresh program may run Python code safely.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Final, Protocol

PASSED_ON: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a guard passes on to its command, unless they stay ignored.

SIGQUIT kills the command and all that it started at once.
"""

KEPT_IGNORED: Final = frozenset({signal.SIGINT, signal.SIGHUP})
"""Signals that stay ignored if they were ignored at the start.

``nohup`` ignores SIGHUP, so that a closing terminal ends nothing. A script's shell ignores SIGINT for its background
jobs, so that Ctrl-C ends the foreground only.
"""

LEFTOVER_GRACE_S: Final = 2.0
"""How long processes that a command left behind may take to end after SIGTERM."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_S: Final = 0.5


class Mode(Enum):
    """What this file does when it is run as a program."""

    TIED = "tied"
    GUARDED = "guarded"


def tied(command: Sequence[str]) -> list[str]:
    """A command that becomes `command` in the same process and is killed when the thread that starts it ends."""
    return _own_program(Mode.TIED, str(os.getpid()), "--", *command)


def guarded(command: Sequence[str], grace_s: float) -> list[str]:
    """A command that runs `command` under a guard.

    Args:
        command: program and arguments.
        grace_s: how long the command may take to end after SIGTERM once this process is gone.
    """
    return _own_program(Mode.GUARDED, str(os.getpid()), str(grace_s), "--", *command)


def without_ignored(numbers: Iterable[signal.Signals]) -> tuple[signal.Signals, ...]:
    """Return the signals that may get a handler: all but those of `KEPT_IGNORED` that are ignored now."""
    return tuple(n for n in numbers if n not in KEPT_IGNORED or signal.getsignal(n) is not signal.SIG_IGN)


def exit_code(status: int) -> int:
    """The exit code as a shell gives it, 128 + n for signal n. In `status`, signal n is ``-n``."""
    return status if status >= 0 else 128 - status


def kill_session(leader_pid: int) -> None:
    """Send SIGKILL to every process of the session and its leader. Only safe before the leader was waited for."""
    for pid, _parent, session in _processes():
        if session == leader_pid:
            _kill(pid, signal.SIGKILL)


class Tie(Protocol):
    """What a `Guard` watches: something by whose end its command ends.

    Attributes:
        descriptor: becomes readable when `is_gone` should be called; None if that has to be from time to time.
    """

    descriptor: int | None

    def is_gone(self) -> bool:
        """Whether it has ended."""

    def close(self) -> None:
        """Give the descriptor back."""


class ParentWatch:
    """Notices when another process is gone.

    Attributes:
        descriptor: becomes readable when it is gone; None if this kernel has no such descriptor, so that `is_gone`
            must be called from time to time.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._gone = False
        self.descriptor: int | None = None
        try:
            self.descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._gone = True
        except (OSError, AttributeError):
            pass  # not in this kernel, or not in this sandbox

    def is_gone(self) -> bool:
        """Whether the process has ended."""
        if self._gone or self.descriptor is not None:
            return self._gone or bool(_readable([self.descriptor], 0.0))
        try:
            os.kill(self._pid, 0)
        except ProcessLookupError:
            self._gone = True
        except PermissionError:
            pass  # it exists, and belongs to another user
        return self._gone

    def close(self) -> None:
        """Give the descriptor back."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class Guard:
    """Runs one command in the foreground of this process, and leaves none of its processes behind.

    It replaces the signal handlers and waits for every child: for the main thread of a process that does nothing else.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        parent_pid: int = 0,
        parent: Tie | None = None,
        grace_s: float = 10.0,
        on_start: Callable[[int], None] | None = None,
        on_stop: Callable[[], object] | None = None,
        on_tick: Callable[[], object] | None = None,
        tick_s: float | None = None,
    ) -> None:
        """
        Args:
            command: program and arguments.
            environment: its variables; None: those of this process.
            parent_pid: the process whose end ends the command; 0: none.
            parent: what ends the command instead of a process.
            grace_s: how long it may then take to end after SIGTERM.
            on_start: called with the pid of the command.
            on_stop: called when the command is told to end.
            on_tick: called every `tick_s` seconds.
        """
        self._command = list(command)
        self._environment = environment
        self._parent: Tie | None = ParentWatch(parent_pid) if parent_pid else parent
        self._grace_s = grace_s
        self._on_start = on_start
        self._on_stop = on_stop
        self._on_tick = on_tick
        self._tick_s = tick_s if on_tick is not None else None
        self._pid = 0
        self._status: int | None = None
        self._alone = True  # no other children are left
        self._kill_at: float | None = None
        # To read from a terminal, the command has to stay in the terminal's group. The terminal then sends Ctrl-C to
        # the command itself.
        self._shares_terminal = os.isatty(0) if _is_open(0) else False
        self._passed_on = without_ignored(PASSED_ON)

    def run(self) -> int:
        """Run the command; return its exit code, 128 + n if signal n ended it."""
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans of the command become children of this process
        with _SignalPipe((*self._passed_on, signal.SIGQUIT, signal.SIGCHLD)) as signals:
            self._start()
            while self._status is None:
                self._wait(signals)
            self._sweep(signals)
        return exit_code(self._status)

    def _start(self) -> None:
        arguments = tied(self._command)
        environment = os.environ if self._environment is None else self._environment
        self._pid = os.posix_spawn(
            arguments[0],
            arguments,
            dict(environment),
            setsigmask=(),
            setsigdef=[*self._passed_on, signal.SIGQUIT, signal.SIGCHLD, signal.SIGPIPE],
            **({} if self._shares_terminal else {"setpgroup": 0}),  # type: ignore[arg-type]
        )
        if self._on_start is not None:
            self._on_start(self._pid)

    def _wait(self, signals: _SignalPipe) -> None:
        """Wait for the next event, and handle it."""
        watch = self._parent
        descriptors = [watch.descriptor] if watch is not None and watch.descriptor is not None else []
        for number in signals.wait(self._timeout_s(), descriptors):
            self._handle(number)
        if self._on_tick is not None:
            self._on_tick()
        if watch is not None and watch.is_gone():
            watch.close()
            self._parent = None
            self._stop(signal.SIGTERM)
            self._kill_at = time.monotonic() + self._grace_s
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._kill_at = None
            self._kill_all()

    def _timeout_s(self) -> float | None:
        limits = [] if self._tick_s is None else [self._tick_s]
        if self._kill_at is not None:
            limits.append(max(0.0, self._kill_at - time.monotonic()))
        if self._parent is not None and self._parent.descriptor is None:
            limits.append(_POLL_S)
        return min(limits, default=None)

    def _handle(self, number: int) -> None:
        if number == signal.SIGCHLD:
            self._reap()
        elif number == signal.SIGQUIT:
            self._kill_all()
        elif not (number == signal.SIGINT and self._shares_terminal):
            self._stop(number)

    def _stop(self, number: int) -> None:
        if self._on_stop is not None and number not in (signal.SIGUSR1, signal.SIGUSR2):
            self._on_stop()
        if self._status is not None:
            return
        if self._shares_terminal:
            _kill(self._pid, number)
        else:
            _kill(-self._pid, number)  # the whole group, as Ctrl-C does: a shell would not pass it on

    def _kill_all(self) -> None:
        """Send SIGKILL to the command and to all children of this process."""
        if self._status is None and not self._shares_terminal:
            _kill(-self._pid, signal.SIGKILL)
        for pid, parent, _session in _processes():
            if parent == os.getpid():
                _kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        """Collect every child that has ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._alone = True
                return
            if pid == 0:
                self._alone = False
                return
            if pid == self._pid:
                self._status = os.waitstatus_to_exitcode(status)

    def _sweep(self, signals: _SignalPipe) -> None:
        """End what the command left behind: with SIGTERM, then with SIGKILL."""
        self._reap()
        if not self._alone:
            for pid, parent, _session in _processes():
                if parent == os.getpid():
                    _kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + LEFTOVER_GRACE_S
        while not self._alone and (left_s := deadline - time.monotonic()) > 0:
            for number in signals.wait(left_s, []):
                self._handle(number)
        while not self._alone:  # each round may make us the parent of the children of those it killed
            self._kill_all()
            signals.wait(0.05, [])
            self._reap()


class _SignalPipe:
    """Signals that can be waited for together with descriptors. Restores the handlers at its end."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._old: dict[int, object] = {}
        self._old_wakeup = -1

    def __enter__(self) -> _SignalPipe:
        self._old_wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in self._numbers:
            self._old[number] = signal.signal(number, lambda *_: None)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler or signal.SIG_DFL)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._old_wakeup)
        self._reader.close()
        self._writer.close()

    def wait(self, timeout_s: float | None, descriptors: Sequence[int]) -> list[int]:
        """Wait for a signal, a readable descriptor or the timeout; return the signals that came."""
        _readable([self._reader.fileno(), *descriptors], timeout_s)
        try:
            return list(self._reader.recv(4096))
        except BlockingIOError:
            return []


def _readable(descriptors: Sequence[int | None], timeout_s: float | None) -> list[int]:
    poll = select.poll()  # select() refuses descriptors above 1023
    for descriptor in descriptors:
        if descriptor is not None:
            poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000 + 1)]


def _processes() -> Iterator[tuple[int, int, int]]:
    """Pid, parent and session of every visible process."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):  # it may end while we read
                # the name before the last parenthesis may contain anything
                fields = Path(f"/proc/{entry}/stat").read_text(errors="replace").rpartition(")")[2].split()
                yield int(entry), int(fields[1]), int(fields[3])


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _prctl(option: int, value: int) -> bool:
    """Change a setting of this process. False if that fails: not Linux, or a sandbox without ctypes."""
    try:
        import ctypes  # only here: ctypes does not load everywhere, and most uses need no prctl

        zero = ctypes.c_ulong(0)
        return bool(ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), zero, zero, zero) == 0)
    except (ImportError, OSError, AttributeError, MemoryError):
        return False


def _own_program(mode: Mode, *arguments: str) -> list[str]:
    # isolated and without site-packages: the environment is meant for the command, not for this interpreter
    return [sys.executable, "-I", "-S", str(Path(__file__).resolve()), mode.value, *arguments]


def _become(parent_pid: int, command: Sequence[str]) -> int:
    """Replace this program by `command`. Returns only if that fails, with the exit code that shells use for it."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before we were tied to it
        return exit_code(-signal.SIGKILL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # this interpreter ignores them, which the command would inherit
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        print(f"error: cannot run {command[0]!r}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126


def main(arguments: Sequence[str]) -> int:
    """``tied PARENT -- CMD…`` or ``guarded PARENT GRACE -- CMD…``."""
    split = list(arguments).index("--")
    mode, parent, *rest = arguments[:split]
    command = arguments[split + 1 :]
    if Mode(mode) is Mode.TIED:
        return _become(int(parent), command)
    return Guard(command, parent_pid=int(parent), grace_s=float(rest[0])).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
