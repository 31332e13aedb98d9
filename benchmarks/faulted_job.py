"""One job, one fault, and what becomes of the job. A supervisor starts a process that was killed again, once."""

from __future__ import annotations

import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Final

from benchmarks.faulted_systems import Entrant, Part, Size

POLL_S: Final = 0.02
RESTART_S: Final = 1.0
"""A supervisor starts a process again after this time."""
PAUSE_S: Final = 30.0
LAST_WORDS_S: Final = 5.0
"""How long the other workers may take to end once one of them has failed."""
GRACE_S: Final = 10.0


class Means(Enum):
    """What happens to a process: in words, the signal, and after how long it is remedied."""

    NOTHING = ("undisturbed", None, 0.0)
    KILLED = ("killed", signal.SIGKILL, RESTART_S)
    PAUSED = (f"paused {PAUSE_S:g} s", signal.SIGSTOP, PAUSE_S)

    def __init__(self, words: str, number: signal.Signals | None, lasts_s: float) -> None:
        self.words = words
        self.number = number
        self.lasts_s = lasts_s


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to the last process of a role; rank 0 often does more than the others."""

    role: str
    means: Means

    def __str__(self) -> str:
        return self.means.words if self.means is Means.NOTHING else f"{self.role} {self.means.words}"


class Verdict(Enum):
    """What became of a job."""

    GOES_ON = "goes on"
    RESTARTS = "restarts"  # the program that was killed ran again, and the result is right
    LOSES_DATA = "loses data"
    FAILS = "fails"
    HANGS = "hangs"
    HANGS_AT_ITS_END = "hangs at its end"
    NO_START = "did not start"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a job.

    Attributes:
        pause_s: the longest time between two steps of a worker to which nothing happened, from the fault on; for a job
            that fails, the time from the fault to the first error.
        note: what it said, or which values it had.
    """

    verdict: Verdict
    pause_s: float
    note: str = ""


@dataclass
class Running:
    """A process of a job, and what it has printed."""

    part: Part
    process: subprocess.Popen[str]
    log: Path
    steps_at_s: list[float] = field(default_factory=list)
    values: tuple[float, float] | None = None
    lives: int = 1

    def __post_init__(self) -> None:
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            match line.split():
                case ["step", _]:
                    self.steps_at_s.append(time.monotonic())
                case ["values", smallest, largest]:
                    self.values = float(smallest), float(largest)

    def last_words(self) -> str:
        """The last line that it wrote to standard error, which is usually its error."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else f"exit code {self.process.returncode}"


class Job:
    """The processes of a job, once `start` has started them. `close` ends them all."""

    def __init__(self, entrant: Entrant, size: Size, folder: Path) -> None:
        self._entrant = entrant
        self._size = size
        self._folder = folder
        self._starts = 0
        self._running: list[Running] = []

    def start(self) -> None:
        for part in self._entrant.parts(self._size, self._folder):
            self._running.append(self._start(part))

    def _start(self, part: Part, lives: int = 1) -> Running:
        self._starts += 1
        log = self._folder / f"{part.role}-{part.rank}-{self._starts}.log"
        with log.open("w") as stream:
            process = subprocess.Popen(
                part.command, env=dict(part.environment), stdout=subprocess.PIPE, stderr=stream, text=True,
                start_new_session=True,
            )  # fmt: skip
        return Running(part, process, log, lives=lives)

    @property
    def workers(self) -> list[Running]:
        return [running for running in self._running if running.part.role == "worker"]

    def has(self, role: str) -> bool:
        return any(running.part.role == role for running in self._running)

    def wait_for_step(self, step: int, limit_s: float) -> bool:
        """Whether all workers come to this step."""
        deadline = time.monotonic() + limit_s
        while any(len(worker.steps_at_s) <= step for worker in self.workers):
            if time.monotonic() > deadline or any(worker.process.poll() is not None for worker in self.workers):
                return False
            time.sleep(POLL_S)
        return True

    def suffer(self, fault: Fault, limit_s: float) -> Outcome:
        """Injects the fault, and tells what becomes of the job within the limit."""
        victim = [running for running in self._running if running.part.role == fault.role][-1]
        begun = time.monotonic()
        if fault.means.number is not None:
            victim.process.send_signal(fault.means.number)
        remedied, failed_s = False, None
        while (now := time.monotonic()) < begun + limit_s:
            if not remedied and now >= begun + fault.means.lasts_s:
                self._remedy(victim, fault)
                remedied = True
            codes = [w.process.poll() for w in self.workers if remedied or w is not victim]
            if failed_s is None and any(code not in (None, 0) for code in codes):
                failed_s = now
            if remedied and None not in codes:
                break
            if failed_s is not None and now > failed_s + LAST_WORDS_S:
                break
            time.sleep(POLL_S)
        for worker in self.workers:
            if worker.process.poll() is not None:
                worker.reader.join(GRACE_S)
        return self._judge(victim, begun, failed_s)

    def _remedy(self, victim: Running, fault: Fault) -> None:
        """What ends the fault: a supervisor, or SIGCONT."""
        if fault.means is Means.PAUSED:
            victim.process.send_signal(signal.SIGCONT)
        elif fault.means is Means.KILLED:
            victim.process.wait()
            self._running[self._running.index(victim)] = self._start(victim.part, victim.lives + 1)

    def _judge(self, victim: Running, begun: float, failed_s: float | None) -> Outcome:
        workers, expected = self.workers, float(self._size.steps * self._size.workers)
        pause_s = max(_longest_pause_s(worker, begun) for worker in workers if worker.part != victim.part)
        failed = next((worker for worker in workers if worker.process.poll() not in (None, 0)), None)
        if failed is not None:
            return Outcome(Verdict.FAILS, (failed_s or time.monotonic()) - begun, failed.last_words())
        told = {worker.values for worker in workers}
        wrong = next((values for values in told if values is not None and values != (expected, expected)), None)
        if wrong is not None:
            return Outcome(Verdict.LOSES_DATA, pause_s, f"values from {wrong[0]:g} to {wrong[1]:g}, not {expected:g}")
        if any(worker.process.poll() is None for worker in workers):
            steps = max(len(worker.steps_at_s) for worker in workers)
            verdict = Verdict.HANGS if None in told else Verdict.HANGS_AT_ITS_END
            return Outcome(verdict, pause_s, f"after step {steps} of {self._size.steps}")
        restarted = any(worker.lives > 1 for worker in workers)
        return Outcome(Verdict.RESTARTS if restarted else Verdict.GOES_ON, pause_s)

    def close(self) -> None:
        """Kills what is left, workers first."""
        for running in reversed(self._running):
            if running.process.poll() is None:
                running.process.send_signal(signal.SIGCONT)
                running.process.kill()
            running.process.wait()
            running.reader.join(GRACE_S)


def _longest_pause_s(worker: Running, begun: float) -> float:
    """From the fault on, or from the last step before it."""
    before = [at for at in worker.steps_at_s if at <= begun][-1:]
    times = [*before, *(at for at in worker.steps_at_s if at > begun)]
    return max((later - earlier for earlier, later in pairwise(times)), default=0.0)


@contextmanager
def job(entrant: Entrant, size: Size) -> Iterator[Job]:
    """A job that runs. None of its processes is left afterwards."""
    with tempfile.TemporaryDirectory(prefix="kvd-faults-") as folder:
        running = Job(entrant, size, Path(folder))
        try:
            running.start()
            yield running
        finally:
            running.close()


def run(entrant: Entrant, fault: Fault, size: Size, at_step: int, limit_s: float) -> Outcome | None:
    """What becomes of a job with this fault in this step; None if the system has no such process."""
    with job(entrant, size) as running:
        if not running.has(fault.role):
            return None
        if running.wait_for_step(at_step, limit_s):
            return running.suffer(fault, limit_s)
        words = next((w.last_words() for w in running.workers if w.process.poll() is not None), "no step was made")
        return Outcome(Verdict.NO_START, 0.0, words)
