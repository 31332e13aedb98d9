"""Holds Ctrl-C back while a step is under way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from signal import SIGINT
from types import FrameType, TracebackType
from typing import Any

try:  # `signal` converts to enums around these two, which takes longer than the calls themselves
    from _signal import getsignal as _getsignal
    from _signal import signal as _signal
except ImportError:
    from signal import getsignal as _getsignal
    from signal import signal as _signal

_SIGINT = int(SIGINT)
_MAIN_THREAD = threading.main_thread().ident


class Uninterrupted:
    """Holds Ctrl-C back until the end of the block. Only the main thread gets Ctrl-C; on others this does nothing.

    A KeyboardInterrupt in the middle of a step would leave this worker's machine half changed.

    Args:
        tell: called in the signal handler when Ctrl-C comes, so that a block that waits can end early.
    """

    __slots__ = ("_before", "_came", "_tell")

    def __init__(self, tell: Callable[[], None] | None = None) -> None:
        self._tell = tell
        self._before: Any = None
        self._came: FrameType | None = None

    @property
    def came(self) -> bool:
        """Whether Ctrl-C was pressed since the block began."""
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
