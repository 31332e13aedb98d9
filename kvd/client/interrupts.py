"""Ctrl-C at the wrong moment."""

from __future__ import annotations

import threading
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
    """

    __slots__ = ("_before", "_came")

    def __enter__(self) -> None:
        self._before: Any = None
        self._came: FrameType | None = None
        if threading.get_ident() == _MAIN_THREAD:
            before = _getsignal(_SIGINT)
            if callable(before):
                _signal(_SIGINT, self._note)
                self._before = before

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = frame

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._before is not None:
            _signal(_SIGINT, self._before)
            if self._came is not None:
                self._before(_SIGINT, self._came)
