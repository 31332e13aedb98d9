"""Ctrl-C at the wrong moment."""

from __future__ import annotations

import threading
from collections.abc import Callable
from signal import SIGINT
from types import FrameType, TracebackType
from typing import Any

try:  # what the module `signal` wraps: the wrapping, into enums, takes longer than the calls
    from _signal import getsignal as _getsignal
    from _signal import signal as _signal
except ImportError:
    from signal import getsignal as _getsignal
    from signal import signal as _signal

_SIGINT = int(SIGINT)
_MAIN_THREAD = threading.main_thread().ident


class Uninterrupted:
    """Holds Ctrl-C back until the end of the block, on the main thread, the only one that it interrupts.

    A KeyboardInterrupt in the middle of a step would leave the machine of this worker half changed.

    Args:
        tell: called when it comes, in the signal handler: for a block that waits for something.
    """

    __slots__ = ("_before", "_came", "_tell")

    def __init__(self, tell: Callable[[], None] | None = None) -> None:
        self._tell = tell
        self._before: Any = None
        self._came: FrameType | None = None

    @property
    def came(self) -> bool:
        """Whether Ctrl-C was pressed meanwhile."""
        return self._came is not None

    def __enter__(self) -> Uninterrupted:
        if threading.get_ident() == _MAIN_THREAD:
            before = _getsignal(_SIGINT)
            if callable(before):
                _signal(_SIGINT, self._note)
                self._before = before
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = frame
        if self._tell is not None:
            self._tell()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._before is not None:
            _signal(_SIGINT, self._before)
            if self._came is not None:
                self._before(_SIGINT, self._came)
