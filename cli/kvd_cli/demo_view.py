"""The display of ``kvd demo``: a live picture on a terminal, a line per epoch elsewhere."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final, TextIO

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvd.node.launch import Stream
from kvd_cli.output import console, printable

_LAST_WORDS: Final = 40
_BARS: Final = "▁▂▃▄▅▆▇█"
_CURVE: Final = 60


@dataclass
class Progress:
    """Progress of one worker.

    Attributes:
        step: its clock, the number of completed steps.
        loss: the mean of its last steps.
        rate: bytes per second that it pushes and pulls.
        restarts: how often it was restarted.
        digest: the digest of its final weights.
    """

    step: int = 0
    loss: float = 0.0
    rate: float = 0.0
    restarts: int = 0
    digest: str = ""
    last: tuple[float, float] = field(default=(0.0, 0.0))  # seconds and bytes at the last report
    has_started: bool = False


class DemoView:
    """Base of the views: reads the output of the job's processes from several threads.

    Attributes:
        out: where lines for a person go.
        log_to: where the log of the processes goes; None: only its end is kept.
    """

    def __init__(self, workers: int, servers: int) -> None:
        self.out: TextIO = sys.stdout
        self.log_to: TextIO | None = None
        self.workers = [Progress() for _ in range(workers)]
        self.servers = servers
        self.steps = 0
        self.steps_per_epoch = 1
        self.accuracies: list[float] = []
        self.losses: deque[float] = deque(maxlen=_CURVE)
        self.started = time.monotonic()
        self._final: float | None = None
        self._lock = threading.RLock()
        self._news: list[str] = []  # lines to show as soon as the lock is free
        self._words: deque[str] = deque(maxlen=_LAST_WORDS)

    def __enter__(self) -> DemoView:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def take(self, node: str, stream: Stream, line: bytes) -> None:
        """Take one line of a process, with its end: a report of a worker, or something for the log."""
        report = _report_in(line) if stream == "stdout" and node.startswith("worker-") else None
        with self._lock:
            if report is not None and 0 <= report["worker"] < len(self.workers):
                self._take_report(report)
            else:
                self._take_log(node, printable(line.rstrip(b"\r\n").decode("utf-8", "replace")))
            news, self._news = self._news, []
        # without the lock: the thread that draws a picture holds the console, and wants the lock
        for text in news:
            self.say(text)

    def say(self, text: str) -> None:
        """Show a line at once."""
        print(text, file=self.out, flush=True)

    def on_epoch(self, accuracy: float) -> None:
        """Show the test accuracy at the end of an epoch."""

    def final_accuracy(self) -> float:
        """Return the test accuracy of the final weights."""
        return self._final or 0.0

    def digests(self) -> list[str]:
        """Return the digests of the workers' final weights, each once."""
        return sorted({worker.digest for worker in self.workers})

    def print_last_words(self) -> None:
        """Show the last lines of the processes, which have the cause of a failure."""
        for line in self._words:
            print(line, file=sys.stderr)

    def mean_loss(self) -> float:
        """Return the mean loss of the workers that have reported one."""
        losses = [worker.loss for worker in self.workers if worker.loss]
        return sum(losses) / len(losses) if losses else 0.0

    def megabytes_per_s(self) -> float:
        """Return the rate at which all workers push and pull, in MB/s."""
        return sum(worker.rate for worker in self.workers) / 1e6

    def epoch(self) -> int:
        """Return the number of epochs that all workers have completed."""
        return min(worker.step for worker in self.workers) // self.steps_per_epoch

    def _take_log(self, node: str, text: str) -> None:
        self._words.append(f"{node} | {text}")
        if self.log_to is not None:
            print(f"{node} | {text}", file=self.log_to, flush=True)
        elif node == "launch":
            self._news.append(text)

    def _take_report(self, report: dict[str, Any]) -> None:
        worker = self.workers[report["worker"]]
        if report["event"] == "start":
            self.steps, self.steps_per_epoch = report["steps"], report["steps_per_epoch"]
            if worker.has_started:
                worker.restarts += 1
                self._news.append(f"worker {report['worker']} is back and continues with step {report['step']}")
            worker.has_started, worker.step, worker.last = True, report["step"], (0.0, 0.0)
        elif report["event"] == "step":
            seconds, count = report["t"] - worker.last[0], report["bytes"] - worker.last[1]
            worker.step, worker.loss, worker.last = report["step"], report["loss"], (report["t"], report["bytes"])
            worker.rate = count / seconds if seconds > 0 else worker.rate
            self.losses.append(self.mean_loss())
            if "accuracy" in report:
                self.accuracies.append(report["accuracy"])
                self.on_epoch(report["accuracy"])
        elif report["event"] == "end":
            worker.digest, self._final = report["digest"], report["accuracy"]


class PlainView(DemoView):
    """One line per epoch."""

    def __enter__(self) -> PlainView:
        self.say(f"starting a scheduler, {self.servers} servers and {len(self.workers)} workers on this machine")
        return self

    def on_epoch(self, accuracy: float) -> None:
        clocks = " ".join(str(worker.step) for worker in self.workers)
        self._news.append(
            f"epoch {len(self.accuracies):3d}  loss {self.mean_loss():.4f}  test accuracy {accuracy:.2%}  "
            f"{self.megabytes_per_s():6.1f} MB/s  clocks {clocks}"
        )


class LiveView(DemoView):
    """A picture that is redrawn."""

    def __enter__(self) -> LiveView:
        self._console = console()
        self._live = Live(get_renderable=self._picture, console=self._console, refresh_per_second=8, transient=False)
        self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.__exit__(None, None, None)

    def say(self, text: str) -> None:
        self._console.print(Text(text))

    def _picture(self) -> RenderableType:
        with self._lock:
            bar = Table.grid()  # a bar alone would not end its line
            bar.add_row(ProgressBar(max(self.steps, 1), self._done(), width=_CURVE))
            return Group(self._headline(), bar, self._table())

    def _done(self) -> int:
        return min(worker.step for worker in self.workers)

    def _headline(self) -> RenderableType:
        grid = Table.grid(padding=(0, 3))
        if not self.steps:
            grid.add_row(Text(f"starting a scheduler, {self.servers} servers and {len(self.workers)} workers", "dim"))
            return grid
        best = f"{self.accuracies[-1]:.2%}" if self.accuracies else "–"
        seconds = time.monotonic() - self.started
        grid.add_row("epoch", "loss", "test accuracy", "pushed and pulled", "time")
        grid.add_row(
            Text(f"{self.epoch()} / {self.steps // self.steps_per_epoch}", "bold"),
            Text(f"{self.mean_loss():.4f}", "bold"),
            Text(best, "bold green"),
            Text(f"{self.megabytes_per_s():.1f} MB/s", "bold"),
            Text(f"{seconds:.0f} s", "bold"),
        )
        return Group(grid, Text(_curve(list(self.losses)), "cyan"))

    def _table(self) -> RenderableType:
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 3, 0, 0))
        for column in ("WORKER", "CLOCK", "LOSS", "MB/S", ""):
            table.add_column(column, justify="left" if column in ("WORKER", "") else "right")
        for rank, worker in enumerate(self.workers):
            note = f"restarted {worker.restarts}×" if worker.restarts else ""
            table.add_row(str(rank), str(worker.step), f"{worker.loss:.4f}", f"{worker.rate / 1e6:.1f}", note)
        return table


def _curve(values: list[float]) -> str:
    """Return the values as a row of bars."""
    top = max(values, default=0.0)
    if top <= 0:
        return ""
    return "".join(_BARS[min(len(_BARS) - 1, int(value / top * len(_BARS)))] for value in values)


def _report_in(line: bytes) -> dict[str, Any] | None:
    """Return the report in a line; None if the worker printed something else."""
    try:
        report = json.loads(line)
    except ValueError:
        return None
    is_report = isinstance(report, dict) and isinstance(report.get("event"), str)
    return report if is_report and isinstance(report.get("worker"), int) else None
