"""The largest messages about waits fit in a header, however long the names are."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core.scheduler.barriers.deadlocks import MAX_LINE_CHARS
from kvd.protocol.codec import MAX_HEADER_BYTES, decode, encode
from kvd.protocol.messages import (
    BIGGEST,
    MAX_ABSENT,
    MAX_ASKED_ABOUT,
    MAX_ASKED_BARRIERS,
    MAX_STUCK_LINES,
    MAX_TEXT_CHARS,
    MOST_PID,
    BarrierWait,
    Epoch,
    NodeFact,
    NodeName,
    WaitNews,
    WaitReport,
)
from kvd.protocol.specs import MAX_KEY_CHARS

WIDE = "\U0010ffff"  # four bytes
NAMES = tuple(f"{number:02d}" + WIDE * (MAX_KEY_CHARS - 2) for number in range(MAX_ASKED_BARRIERS))
FACT = NodeFact("worker", BIGGEST, WIDE * 64, MOST_PID, 1e300, WIDE * 80)


@pytest.mark.parametrize(
    "message",
    [
        WaitReport(
            BIGGEST,
            (NodeName("worker", BIGGEST),) * MAX_ASKED_ABOUT,
            NAMES,
            True,
            BIGGEST,
            BIGGEST,
            (WIDE * MAX_TEXT_CHARS,) * 4,
        ),
        WaitNews(
            BIGGEST,
            (FACT,) * MAX_ASKED_ABOUT,
            tuple(BarrierWait(name, (BIGGEST,) * MAX_ABSENT) for name in NAMES),
        ),
        WaitNews(0, stamp=BIGGEST, deadlock=(WIDE * MAX_LINE_CHARS,) * MAX_STUCK_LINES),
    ],
    ids=["report", "facts", "deadlock"],
)
def test_the_largest_fits(message: Any) -> None:
    header = encode(message, BIGGEST, Epoch(BIGGEST, BIGGEST))
    assert len(header) <= MAX_HEADER_BYTES
    assert decode(header).message == message
