"""The one deadline of a call that has several parts."""

from __future__ import annotations

import time


class Deadline:
    """Counts from its creation.

    Args:
        seconds: how long all parts together may take.
    """

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def left_s(self) -> float:
        """Seconds that the next part may take; 0 once the deadline has passed."""
        return max(0.0, self._at - time.monotonic())
