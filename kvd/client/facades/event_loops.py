"""Which blocking calls are refused while an event loop is running on the thread."""

from __future__ import annotations

import asyncio
import inspect
import sys
from types import FrameType

from kvd.errors import NotAllowed

COROUTINES = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE
SHELLS = ("IPython", "ipykernel")  # their coroutines run cells and the callbacks of widgets, one after the other


def check_may_block(refusal: str) -> None:
    """Raises NotAllowed with this text for a call from a coroutine or a callback of a running event loop.

    Code that a person enters may block: a cell of a notebook (Jupyter, Colab), a line of IPython or of
    ``python -m asyncio``, and the functions that it calls. Their shells run a loop, too, and wait for the code anyway.
    """
    if asyncio._get_running_loop() is not None and not _is_entered_by_hand(sys._getframe(1)):
        raise NotAllowed(refusal)


def _is_entered_by_hand(frame: FrameType | None) -> bool:
    """Whether the innermost caller that the loop, or a shell, runs is a shell's, or code that a shell runs."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if _is_entered_code(frame, module):
            return True
        if frame.f_code.co_flags & COROUTINES:
            return module.partition(".")[0] in SHELLS
        if module == asyncio.events.__name__:  # a callback
            return False
        frame = frame.f_back
    return False


def _is_entered_code(frame: FrameType, module: str) -> bool:
    """Whether the frame is code of ``__main__``, outside of functions and classes, that other Python code runs."""
    is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED
    return module == "__main__" and not is_function and frame.f_back is not None and frame.f_locals is frame.f_globals
