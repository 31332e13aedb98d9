"""Counters of a daemon: totals since its process began, kept as plain integers where things happen.

Each place adds with one statement. Status reports copy the totals (`Counters.report`), and readers take differences.
The table below says what each one counts.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any, Final

TIMED_OF: Final = 16
"""One update in so many is timed: a clock costs as much as the rest of the counting."""

_HUMP: Final = re.compile(r"(?<=[a-z])(?=[A-Z])")


class Counters:
    """Totals of one process.

    Attributes:
        received: messages by their class.
        received_bytes: bytes of their payloads.
        sent: messages by their class.
        sent_bytes: bytes of their payloads.
        refused: refusals sent, by error code.
        postponed: answers "not yet" sent, by reason.
        invalid_frames: frames that were no messages.
        updates: updates of values.
        timed_update_s: seconds that one update in `TIMED_OF` took.
    """

    __slots__ = (
        "invalid_frames",
        "postponed",
        "received",
        "received_bytes",
        "refused",
        "sent",
        "sent_bytes",
        "timed_update_s",
        "updates",
    )

    def __init__(self) -> None:
        self.received: defaultdict[type[Any], int] = defaultdict(int)
        self.received_bytes = 0
        self.sent: defaultdict[type[Any], int] = defaultdict(int)
        self.sent_bytes = 0
        self.refused: defaultdict[str, int] = defaultdict(int)
        self.postponed: defaultdict[str, int] = defaultdict(int)
        self.invalid_frames = 0
        self.updates = 0
        self.timed_update_s = 0.0

    def report(self) -> dict[str, object]:
        """Return the totals as plain data; messages by names such as ``push_batch``.

        `update_s` is an estimate from the updates that were timed.
        """
        return {
            "received": {kind_name(kind): count for kind, count in self.received.items()},
            "received_bytes": self.received_bytes,
            "sent": {kind_name(kind): count for kind, count in self.sent.items()},
            "sent_bytes": self.sent_bytes,
            "refused": dict(self.refused),
            "postponed": dict(self.postponed),
            "invalid_frames": self.invalid_frames,
            "updates": self.updates,
            "update_s": round(self.timed_update_s * TIMED_OF, 6),
        }


def kind_name(kind: type[Any]) -> str:
    """Return the name of a class of messages, such as ``push_batch``."""
    return _HUMP.sub("_", kind.__name__).lower()
