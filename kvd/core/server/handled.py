"""Which requests of a sender were carried out: the newest ones, since a late copy of an older one changes nothing."""

from __future__ import annotations

from collections import deque

MOST_KEPT = 1 << 14


class Handled:
    """Request numbers of one sender. They grow, but do not arrive in order."""

    def __init__(self) -> None:
        self._numbers: set[int] = set()
        self._in_order: deque[int] = deque()
        self._floor = 0  # those up to it are so old that they must be late copies

    def __contains__(self, request: int) -> bool:
        return request <= self._floor or request in self._numbers

    def add(self, request: int) -> None:
        if request not in self:
            self._numbers.add(request)
            self._in_order.append(request)
            if len(self._in_order) > MOST_KEPT:
                oldest = self._in_order.popleft()
                self._numbers.discard(oldest)
                self._floor = max(self._floor, oldest)
