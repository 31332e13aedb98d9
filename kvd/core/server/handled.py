"""Which requests of a sender were carried out, so that a late copy of one changes nothing."""

from __future__ import annotations

from collections import deque

MOST_KEPT = 1 << 14


class Handled:
    """Request numbers of one sender. They grow, but do not arrive in order.

    Attributes:
        floor: of numbers up to this one nothing is known any more.
    """

    def __init__(self) -> None:
        self.floor = 0
        self._numbers: set[int] = set()
        self._in_order: deque[int] = deque()

    def __contains__(self, request: int) -> bool:
        return request in self._numbers

    def add(self, request: int) -> None:
        if request not in self._numbers:
            self._numbers.add(request)
            self._in_order.append(request)
            if len(self._in_order) > MOST_KEPT:
                oldest = self._in_order.popleft()
                self._numbers.discard(oldest)
                self.floor = max(self.floor, oldest)
