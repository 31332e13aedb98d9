"""Handling of Ctrl-C: it ends the process at once before a command begins, and raises KeyboardInterrupt in it.

An interrupt must not raise in the middle of an import: in the callbacks of the import system, Python can only print a
traceback and continue.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import NoReturn

from kvd_cli.exit_codes import INTERRUPTED


def prepare() -> None:
    """Let an interrupt end the process at once from now on, unless interrupts were ignored at the start."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
        # The interpreter removes handlers before it is done; an interrupt would then change the exit code.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


def command_begins() -> None:
    """Let an interrupt raise KeyboardInterrupt from now on."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def command_ended() -> None:
    """Let an interrupt end the process at once from now on."""
    _end_at_once()


@contextlib.contextmanager
def nothing_begun() -> Iterator[None]:
    """Let an interrupt end the process at once inside the block: the imports of a command."""
    changed = _end_at_once()
    try:
        yield
    finally:
        if changed:
            command_begins()


def _end_at_once() -> bool:
    """Let an interrupt end the process at once. Return whether it would have raised before."""
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if raises and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _leave)
        return True
    return False


def _leave(*_: object) -> NoReturn:
    os._exit(INTERRUPTED)
