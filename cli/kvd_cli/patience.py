"""What a person who waits for a cluster is told."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Final

import click

from kvd.config import Config

SILENT_FOR_S: Final = 2.0
"""How long a command may wait before it says so."""


@contextlib.contextmanager
def told_when_slow(config: Config) -> Iterator[None]:
    """Say on stderr what the command waits for, once that has taken a while.

    In scripts too: a reader of their log wants to know where the time went.
    """
    text = (
        f"waiting for an answer from the cluster at {config.scheduler}, for up to {config.request_timeout_s:g} s "
        "(--timeout); Ctrl-C ends it"
    )
    timer = threading.Timer(SILENT_FOR_S, click.echo, [text], {"err": True})
    timer.daemon = True
    if config.request_timeout_s > SILENT_FOR_S:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
