"""Progress of waiting commands on stderr, with one owner.

A command is silent while it is fast. Anything slower than `SILENT_FOR_S` is reported: in a status line that vanishes if
stderr is a terminal, else in a line of its own, since a reader of a script's log wants to know where the time went.
Nothing is written to stdout.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Final

import click
from rich.console import Console
from rich.status import Status
from rich.text import Text

from kvd.config import Config, terminal_colour
from kvd_cli.output import printable

SILENT_FOR_S: Final = 2.0
"""How long a command may wait before it says so."""


@contextlib.contextmanager
def told_when_slow(doing: str, config: Config) -> Iterator[Patience]:
    """Report on stderr what the command does, once it has taken a while.

    Args:
        doing: such as ``"waiting for the scheduler"``; how long that may take and how to end it is added.
        config: has the deadline.
    """
    deadline_s = config.request_timeout_s
    patience = Patience(f"{doing}, for up to {deadline_s:g} s (--timeout); Ctrl-C ends it")
    if deadline_s > SILENT_FOR_S:
        patience.begin()
    try:
        yield patience
    finally:
        patience.end()


class Patience:
    """One wait of a command."""

    def __init__(self, text: str) -> None:
        self._text = printable(text)
        self._lock = threading.Lock()
        self._timer = threading.Timer(SILENT_FOR_S, self._show)
        self._timer.daemon = True
        self._is_over = False
        self._status: Status | None = None  # of a terminal, once it is shown

    def begin(self) -> None:
        """Start the clock."""
        self._timer.start()

    def say(self, text: str) -> None:
        """Report a new detail of the wait now."""
        self._timer.cancel()
        self._text = printable(text)
        self._show()

    def end(self) -> None:
        """End the wait, and report nothing further."""
        self._timer.cancel()
        with self._lock:
            self._is_over = True
            if self._status is not None:
                self._status.stop()

    def _show(self) -> None:
        with self._lock:
            if self._is_over:
                return
            if not terminal_colour(None, sys.stderr):
                click.echo(self._text, err=True)
            elif self._status is None:
                self._status = Console(file=sys.stderr).status(Text(self._text))
                self._status.start()
            else:
                self._status.update(Text(self._text))
