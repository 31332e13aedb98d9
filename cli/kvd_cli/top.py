"""``kvd top``: a cluster as it runs, drawn once a second on a terminal, in a line a second elsewhere."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import click
from rich.console import ConsoleDimensions
from rich.live import Live

from kvd.config import Loaded
from kvd.errors import ConfigError, ConnectError, KvdError
from kvd.node.daemon.exit_codes import ExitCode
from kvd_cli import interrupts
from kvd_cli.connect import NOBODY_THERE_S
from kvd_cli.copies import Report
from kvd_cli.flags import common_options
from kvd_cli.options import current, with_deadline
from kvd_cli.output import console
from kvd_cli.top_view import TopView

if TYPE_CHECKING:  # `kvd --help` needs no client
    from kvd.client.cluster.observer import Observer

EVERY_S: Final = 1.0
ANSWER_WITHIN_S: Final = 5.0
KEYS_EVERY_S: Final = 0.1
OVER: Final = ("ended", "failed", "gone")
"""Phases of runs that are over."""


@click.command()
@click.option("-n", "--count", type=click.IntRange(min=1), help="end after so many looks")
@common_options(output_flags=())
def top(count: int | None) -> None:
    """Show the cluster as it runs: rates, memory, and the oldest wait.

    On a terminal, q ends it, s sorts the rows by node, traffic or memory, and the arrows scroll. Elsewhere each second
    is a line. If the cluster ends, it waits for the next one. Exits with 3 if there never was one.
    """
    loaded = current().load_client()
    view = TopView(f"{loaded.config.scheduler}  job {loaded.config.job}")
    looks = Looks(loaded, current().timeout_s or ANSWER_WITHIN_S)
    with looks:
        if sys.stdout.isatty() and sys.stdin.isatty():
            _draw(view, looks, count)
        else:
            _print(view, looks, count)
    if not looks.has_seen_any:
        click.get_current_context().exit(ExitCode.NO_CONNECTION)


class Looks:
    """Asks a cluster for its status once a second, in a thread, and opens a new connection if one has failed.

    Args:
        loaded: the settings.
        within_s: how long nodes have to answer.

    Attributes:
        has_seen_any: whether there was an answer.
    """

    def __init__(self, loaded: Loaded, within_s: float) -> None:
        self.has_seen_any = False
        self._config = with_deadline(loaded.config, within_s)
        self._scheduler_given = loaded.is_given("scheduler")
        self._news: queue.Queue[Report | KvdError] = queue.Queue(1)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvd-top", daemon=True)
        with interrupts.nothing_begun():
            import kvd.client.cluster.observer  # noqa: F401  here, where an interrupt ends the process at once

    def __enter__(self) -> Looks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(EVERY_S)

    def next(self, timeout_s: float) -> Report | KvdError | None:
        """Return the next look, the error instead of it, or None if neither came in time.

        Raises:
            ConfigError: the settings allow no look.
        """
        try:
            news = self._news.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(news, ConfigError):
            raise news
        self.has_seen_any = self.has_seen_any or not isinstance(news, KvdError)
        return news

    def _run(self) -> None:
        observer: Observer | None = None
        while not self._stopped.is_set():
            begun = time.monotonic()
            try:
                observer = observer or self._open()
                report = observer.status(self._config.request_timeout_s / 2)
                self._give(report)
                is_over = self._is_of_an_old_run(observer, report)
            except KvdError as error:
                self._give(error)
                is_over = True
            if is_over and observer is not None:
                observer.close()
                observer = None
            self._stopped.wait(max(0.0, begun + EVERY_S - time.monotonic()))
        if observer is not None:
            observer.close()

    def _give(self, news: Report | KvdError) -> None:
        with contextlib.suppress(queue.Full):
            self._news.put_nowait(news)

    def _open(self) -> Observer:
        from kvd.client.cluster.joining import Arrival
        from kvd.client.cluster.observer import Observer

        arrival = Arrival(
            wait_for_workers=False,
            tell=lambda _text: None,
            scheduler_given=self._scheduler_given,
            patience_s=NOBODY_THERE_S,
        )
        return Observer(self._config, arrival)

    def _is_of_an_old_run(self, observer: Observer, report: Report) -> bool:
        """Whether the job has a run under way which is not the one that is looked at."""
        under_way = [
            run["run"] for run in report["jobs"] if run["job"] == self._config.job and run["phase"] not in OVER
        ]
        return bool(under_way) and observer.run not in under_way


def _take(view: TopView, news: Report | KvdError) -> None:
    if not isinstance(news, KvdError):
        view.take(news, time.monotonic())
    elif isinstance(news, ConnectError):
        view.trouble = f"no cluster: {news}"
    else:
        view.trouble = f"no answer: {news}"


def _print(view: TopView, looks: Looks, count: int | None) -> None:
    seen = 0
    while count is None or seen < count:
        news = looks.next(EVERY_S)
        if news is not None:
            seen += 1
            _take(view, news)
            click.echo(view.line())
            sys.stdout.flush()


def _draw(view: TopView, looks: Looks, count: int | None) -> None:
    screen, seen, drawn = console(), 0, (0, 0)
    with _keys() as pressed, Live(console=screen, screen=True, auto_refresh=False) as live:
        while count is None or seen < count:
            key = pressed(KEYS_EVERY_S)
            news = looks.next(0.001)
            width, height = os.get_terminal_size(sys.stdout.fileno())  # COLUMNS would not follow a resize
            if key in ("q", "Q"):
                return
            if key in ("s", "S"):
                view.order = view.order.following()
            elif key in ("\x1b[A", "\x1b[B"):
                view.scroll(-1 if key == "\x1b[A" else 1, height)
            if news is not None:
                seen += 1
                _take(view, news)
            if key or news is not None or drawn != (width, height):
                drawn = width, height
                screen.size = ConsoleDimensions(width, height)
                live.update(view.picture(width, height), refresh=True)


@contextlib.contextmanager
def _keys() -> Iterator[_Pressed]:
    """Keys as they are pressed, without Enter and without an echo."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield _Pressed(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


class _Pressed:
    """Reads one key, or the bytes of a special one."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __call__(self, timeout_s: float) -> str:
        if not select.select([self._descriptor], [], [], timeout_s)[0]:
            return ""
        return os.read(self._descriptor, 16).decode("utf-8", "replace")
