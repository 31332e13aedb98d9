"""What Ctrl-C does: it ends the process at once while nothing has begun, and raises KeyboardInterrupt in a command.

An interrupt must not raise in the middle of an import: in the callbacks of the import system, Python can only print a
traceback and go on.
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
    """From here on an interrupt ends the process at once, unless interrupts are ignored from the start."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
        # The interpreter removes handlers before it is done; an interrupt would then change the exit code.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


def command_begins() -> None:
    """From here on an interrupt raises."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def command_ended() -> None:
    """From here on an interrupt ends the process at once."""
    _end_at_once()


@contextlib.contextmanager
def nothing_begun() -> Iterator[None]:
    """For the imports of a command: an interrupt ends the process at once."""
    changed = _end_at_once()
    try:
        yield
    finally:
        if changed:
            command_begins()


def _end_at_once() -> bool:
    """True if an interrupt would have raised."""
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if raises and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _leave)
        return True
    return False


def _leave(*_: object) -> NoReturn:
    os._exit(INTERRUPTED)
