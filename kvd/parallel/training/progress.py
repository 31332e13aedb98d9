"""The progress bar of `fit`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class Bar:
    """A bar that shows nothing. `RichBar` shows what these methods are told."""

    def begin(self, epoch: int, batches: int | None) -> None:
        """An epoch of this many batches begins; None: their number is unknown."""

    def step(self, done: int, samples: int, values: Mapping[str, float]) -> None:
        """``done`` batches of the epoch are done, ``samples`` were computed here, and the metrics have these values."""

    def end(self, evaluation: Mapping[str, float]) -> None:
        """The epoch is done; ``evaluation`` has its metrics."""


class RichBar(Bar):
    """A line per epoch on stderr: batches, time, samples per second, metrics."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = TaskID(0)
        self._text = ""

    def begin(self, epoch: int, batches: int | None) -> None:
        self._task = self._progress.add_task(f"epoch {epoch + 1}", total=batches, text="")
        self._text = ""

    def step(self, done: int, samples: int, values: Mapping[str, float]) -> None:
        elapsed = self._progress.tasks[-1].elapsed or 0.0
        rate = f"{samples / elapsed:.0f} samples/s " if elapsed > 0 else ""
        self._text = rate + _text(values)
        self._progress.update(self._task, completed=done, text=self._text)

    def end(self, evaluation: Mapping[str, float]) -> None:
        shown = f"{self._text}  evaluation: {_text(evaluation)}" if evaluation else self._text
        self._progress.update(self._task, text=shown)
        self._progress.stop_task(self._task)


@contextlib.contextmanager
def bar_of(wanted: bool | Literal["auto"]) -> Iterator[Bar]:
    """A bar; it shows nothing if it is not wanted, or for ``"auto"`` if stderr is not a terminal."""
    if wanted is False or (wanted == "auto" and not sys.stderr.isatty()):
        yield Bar()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[text]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield RichBar(progress)


def _text(values: Mapping[str, float]) -> str:
    return " ".join(f"{name} {value:.4g}" for name, value in values.items())
