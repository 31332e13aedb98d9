"""Virtual time: things happen in the order of their times, and time passes only between them."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

Act = Callable[[], None]


class VirtualClock:
    """The time of a simulated run in seconds, and everything that is scheduled for later."""

    def __init__(self) -> None:
        self.now = 0.0
        self._scheduled: list[tuple[float, int, int, Act]] = []  # a heap: time, turn, order of scheduling, what happens
        self._order = 0

    def at(self, time: float, act: Act, turn: int = 0) -> None:
        """Schedules `act`. What is scheduled for the same time happens in the order of its turns, and what has the same
        turn in the order in which it was scheduled."""
        self._order += 1
        heappush(self._scheduled, (max(time, self.now), turn, self._order, act))

    def after(self, seconds: float, act: Act) -> None:
        """Schedules `act` for `seconds` from now."""
        self.at(self.now + seconds, act)

    def run(self, seconds: float, until: Callable[[], bool] | None = None) -> None:
        """Lets `seconds` pass, or fewer if `until` becomes true earlier."""
        end = self.now + seconds
        while self._scheduled and self._scheduled[0][0] <= end:
            if until is not None and until():
                return
            self.now, _, _, act = heappop(self._scheduled)
            act()
        self.now = end
