"""Counters of a daemon: totals since its process began, kept as plain integers where things happen.

Each place adds with one statement. Status reports copy the totals (`Counters.report`), and readers take differences.
The table below says what each one counts.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import Any, Final

from kvd.protocol.messages import PushBatch, Values

TIMED_OF: Final = 16
"""One update in so many is timed: a clock costs as much as the rest of the counting."""

_HUMP: Final = re.compile(r"(?<=[a-z])(?=[A-Z])")


class Counters:
    """Totals of one process.

    Attributes:
        received: messages by their class, except pushes that are held.
        received_bytes: bytes of their payloads.
        sent: messages by their class, except answers to pushes that are held.
        sent_bytes: bytes of their payloads.
        held: pushes of the express way of a server, by the bytes of their value.
        unpulled: those of them that are not answered with the value there. An answer that leaves the general way after
            all counts twice.
        refused: refusals sent, by error code.
        postponed: answers "not yet" sent, by reason.
        invalid_frames: frames that were no messages.
        updates: updates of values.
        timed_update_s: seconds that one update in `TIMED_OF` took.
    """

    __slots__ = (
        "held",
        "invalid_frames",
        "postponed",
        "received",
        "received_bytes",
        "refused",
        "sent",
        "sent_bytes",
        "timed_update_s",
        "unpulled",
        "updates",
    )

    def __init__(self) -> None:
        self.received: defaultdict[type[Any], int] = defaultdict(int)
        self.received_bytes = 0
        self.sent: defaultdict[type[Any], int] = defaultdict(int)
        self.sent_bytes = 0
        self.held: defaultdict[int, int] = defaultdict(int)
        self.unpulled: defaultdict[int, int] = defaultdict(int)
        self.refused: defaultdict[str, int] = defaultdict(int)
        self.postponed: defaultdict[str, int] = defaultdict(int)
        self.invalid_frames = 0
        self.updates = 0
        self.timed_update_s = 0.0

    def report(self) -> dict[str, object]:
        """Return the totals as plain data; messages by names such as ``push_batch``, held pushes included.

        `update_s` is an estimate from the updates that were timed.
        """
        received, sent = Counter(self.received), Counter(self.sent)
        received[PushBatch] += sum(self.held.values())
        answered = {nbytes: held - self.unpulled.get(nbytes, 0) for nbytes, held in self.held.items()}
        sent[Values] += sum(answered.values())
        return {
            "received": {kind_name(kind): count for kind, count in received.items() if count},
            "received_bytes": self.received_bytes + sum(nbytes * held for nbytes, held in self.held.items()),
            "sent": {kind_name(kind): count for kind, count in sent.items() if count},
            "sent_bytes": self.sent_bytes + sum(nbytes * count for nbytes, count in answered.items()),
            "refused": dict(self.refused),
            "postponed": dict(self.postponed),
            "invalid_frames": self.invalid_frames,
            "updates": self.updates,
            "update_s": round(self.timed_update_s * TIMED_OF, 6),
        }


def kind_name(kind: type[Any]) -> str:
    """Return the name of a class of messages, such as ``push_batch``."""
    return _HUMP.sub("_", kind.__name__).lower()
