"""Places that many take, and nobody alone: who has more than twice as many as are left gets no more.

So one alone may have two thirds of all, and another one who comes then two thirds of the rest. A few are free for each,
as long as there is room at all.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from kvd.core.machine import Received


def owner_of(event: Received) -> Hashable:
    """Whose share a message takes: that of its key, however many connections its holder has. Under the key of a cluster
    each connection has one of its own."""
    return event.principal.name or event.peer


class Shares:
    """How many places each owner has.

    Args:
        few: places that each may have, as long as there is room at all.
    """

    def __init__(self, few: int) -> None:
        self._few = few
        self._of: dict[Hashable, int] = {}
        self._taken = 0

    def has_room(self, owner: Hashable, count: int, limit: int) -> bool:
        """Whether the owner may take so many more of `limit` places."""
        left = limit - self._taken - count
        return left >= 0 and self._of.get(owner, 0) + count <= max(self._few, 2 * left)

    def take_if_room(self, owner: Hashable, count: int, limit: int) -> bool:
        """Take so many places, if the owner may."""
        left, mine = limit - self._taken - count, self._of.get(owner, 0) + count
        if left < 0 or mine > max(self._few, 2 * left):
            return False
        self._of[owner] = mine
        self._taken += count
        return True

    def take(self, owner: Hashable, count: int) -> None:
        self._of[owner] = self._of.get(owner, 0) + count
        self._taken += count

    def give_back(self, owner: Hashable, count: int) -> None:
        self._of[owner] -= count
        self._taken -= count
        if not self._of[owner]:
            del self._of[owner]

    def validate(self, expected: Mapping[Hashable, int]) -> None:
        """Raises AssertionError unless these are counted."""
        assert self._of == dict(expected), f"{dict(expected)} places are taken, {self._of} are counted"
        assert self._taken == sum(expected.values()), f"{sum(expected.values())} places, {self._taken} are counted"
