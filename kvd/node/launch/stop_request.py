"""The request to end a job: made once, the job ends in good order; made again, it ends at once."""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import Final


class Urgency(Enum):
    """How urgently a job was asked to end."""

    NOT_ASKED = "not asked"
    IN_ORDER = "in order"  # every process gets SIGTERM and its grace
    AT_ONCE = "at once"  # everything is killed


NEXT: Final = {
    Urgency.NOT_ASKED: Urgency.IN_ORDER,
    Urgency.IN_ORDER: Urgency.AT_ONCE,
    Urgency.AT_ONCE: Urgency.AT_ONCE,
}
"""The urgency after one more request."""


class StopRequest:
    """Whether a job was asked to end, and how urgently. Used on the loop of the job only.

    Attributes:
        urgency: how urgently.
        code: done at the first request, with the exit code of the job.
        at_once: done at the second request.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.urgency = Urgency.NOT_ASKED
        self.code: asyncio.Future[int] = loop.create_future()
        self.at_once: asyncio.Future[None] = loop.create_future()

    def make(self, code: int) -> None:
        """Ask once more. The first exit code counts."""
        before, self.urgency = self.urgency, NEXT[self.urgency]
        if before is Urgency.NOT_ASKED:
            self.code.set_result(code)
        elif before is Urgency.IN_ORDER:
            self.at_once.set_result(None)
