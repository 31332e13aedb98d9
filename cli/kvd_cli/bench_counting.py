"""Counters for `kvd bench -v`: Python functions, system calls and context switches of a step.

Each is counted in steps of its own, because counting slows them down.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final

FOLDER: Final = "KVD_BENCH_FOLDER"
"""The variable with the folder that all processes of a run share."""

BEGIN: Final = signal.SIGUSR1
END: Final = signal.SIGUSR2
"""They tell a server of the run to count its functions, and to write down how many it has called."""

PATIENCE_S: Final = 10.0
"""How long a server or strace may take to begin, and to end."""

_PR_SET_PTRACER: Final = 0x59616D61
_PR_SET_PTRACER_ANY: Final = -1


class CountFailed(Exception):
    """A counter failed; the message says why."""


class Calls:
    """Counter of the Python functions that the calling thread calls."""

    def __init__(self) -> None:
        self._count = 0

    def begin(self) -> None:
        self._count = 0
        sys.setprofile(self._note)

    def end(self) -> int:
        sys.setprofile(None)
        return self._count

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self._count += 1


def allow_tracing() -> None:
    """Let every process of this user trace this one, where only parents may otherwise (Yama)."""
    with contextlib.suppress(OSError, AttributeError):  # a system without prctl has no such limit
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(_PR_SET_PTRACER_ANY), 0, 0, 0)


def begun_file(folder: Path, pid: int) -> Path:
    return folder / f"counting-{pid}"


def calls_file(folder: Path, pid: int) -> Path:
    return folder / f"calls-{pid}"


@contextlib.contextmanager
def calls_of(pids: Iterable[int], folder: Path, into: list[int]) -> Iterator[None]:
    """Count the functions that these daemons call inside the block, and append the number to the list.

    Raises:
        CountFailed: one does not answer.
    """
    pids = list(pids)
    for pid in pids:
        calls_file(folder, pid).unlink(missing_ok=True)
        os.kill(pid, BEGIN)
    _await(begun_file(folder, pid) for pid in pids)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, END)
    _await(calls_file(folder, pid) for pid in pids)
    into.append(sum(int(calls_file(folder, pid).read_text()) for pid in pids))


def _await(files: Iterable[Path]) -> None:
    until = time.monotonic() + PATIENCE_S
    for file in files:
        while not file.exists():
            if time.monotonic() > until:
                raise CountFailed(f"a server did not write {file.name} within {PATIENCE_S:g} s")
            time.sleep(0.005)


def switches_of(pids: Iterable[int | str]) -> int | None:
    """Return the context switches of all threads of these processes since their start; None if a process is gone."""
    total = 0
    for pid in pids:
        threads = Path("/proc") / str(pid) / "task"
        try:
            for thread in threads.iterdir():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                    total += _switches_in((thread / "status").read_text(errors="replace"))
        except OSError:
            return None
    return total


def _switches_in(status: str) -> int:
    return sum(int(line.split()[1]) for line in status.splitlines() if "voluntary_ctxt_switches:" in line)


class SystemCalls:
    """Counter of system calls by strace.

    Args:
        pids: of the processes, all threads of which count.
        file: for the table of strace.

    Raises:
        CountFailed: there is no strace, or it cannot trace them; the text is what it says.
    """

    def __init__(self, pids: Iterable[int], file: Path) -> None:
        self._file = file
        if shutil.which("strace") is None:
            raise CountFailed("system calls are counted where strace is installed")
        traced = [argument for pid in pids for argument in ("-p", str(pid))]
        self._log = file.with_suffix(".log").open("wb")
        command = ["strace", "-f", "-c", "-o", str(file), *traced]
        self._strace = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log)
        self._await_attached(len(traced) // 2)

    def _await_attached(self, processes: int) -> None:
        until = time.monotonic() + PATIENCE_S
        while self._said().count(" attached") < processes:
            if self._strace.poll() is not None or time.monotonic() > until:
                self._end()
                raise CountFailed(self._said().strip() or "strace does not begin")
            time.sleep(0.05)  # strace may count already how often this process looks

    def _said(self) -> str:
        return Path(self._log.name).read_text(errors="replace")

    def end(self) -> int:
        """Stop, and return the number of calls."""
        self._end()
        return total_of(self._file.read_text(errors="replace"))

    def _end(self) -> None:
        self._log.close()
        if self._strace.poll() is None:
            self._strace.send_signal(signal.SIGINT)
        try:
            self._strace.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._strace.kill()
            self._strace.wait()


def total_of(table: str) -> int:
    """Return the total number of calls from the table of ``strace -c``.

    Raises:
        CountFailed: it has no line of totals.
    """
    headings: list[str] = []
    for line in table.splitlines():
        words = line.split()
        if "calls" in words:
            headings = words
        elif words and words[-1] == "total" and headings:
            # "% time" is two words; the column of errors is empty if there were none, and comes after that of calls.
            return int(words[headings.index("calls") - 1])
    raise CountFailed("strace has written no totals")
