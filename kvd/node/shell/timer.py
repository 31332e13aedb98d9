"""The timer behind a machine's deadline."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class DeadlineTimer:
    """Belongs to the loop's thread, except `due_at`, which any thread may read.

    Args:
        on_due: called on the loop at the earliest deadline that was set.

    Attributes:
        due_at: when it will fire, in seconds of the loop's clock; infinity while it is not set.
    """

    def __init__(self, on_due: Callable[[], None]) -> None:
        self.due_at = math.inf
        self._on_due = on_due
        self._not_before = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handle: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def set(self, deadline: float) -> None:
        """Fires at the deadline, unless it fires earlier anyway."""
        if self.due_at <= deadline:
            return
        if self._handle is not None:
            self._handle.cancel()
        assert self._loop is not None
        self.due_at = max(deadline, self._not_before)
        self._handle = self._loop.call_at(self.due_at, self._fire)

    def hold_until(self, time: float) -> None:
        """Deadlines before this time wait until then."""
        self._not_before = time

    def stop(self) -> None:
        """It fires no more, and cannot be set again."""
        self.due_at = -math.inf
        if self._handle is not None:
            self._handle.cancel()

    def _fire(self) -> None:
        self._handle = None
        self.due_at = math.inf
        self._on_due()
