"""Look-ups that wait until all their keys are live."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Hashable, Sequence
from dataclasses import dataclass

from kvd.core.machine import Peer
from kvd.core.shares import Shares

MAX_WAITING = 1 << 20  # names in look-ups that wait
FEW = 256  # names that each owner may wait for, as long as there is room at all


@dataclass(slots=True, eq=False)
class WaitingLookup:
    """A Lookup that waits at the first of its keys that is not live.

    Attributes:
        owner: whose share it takes.
    """

    peer: Peer
    request: int
    keys: Sequence[str]
    owner: Hashable
    position: int = 0  # of the key that it waits at

    @property
    def key(self) -> str:
        """The key that it waits at."""
        return self.keys[self.position]

    def move_on(self, live: Container[str]) -> bool:
        """Goes to the first key that is not live, and says whether there is one."""
        while self.position < len(self.keys) and self.keys[self.position] in live:
            self.position += 1
        return self.position < len(self.keys)


class WaitingLookups:
    """A look-up of many keys takes one place, whatever the number of its keys.

    Args:
        live: the keys that are live.
    """

    def __init__(self, live: Container[str]) -> None:
        self._live = live
        self._waiting: dict[str, dict[tuple[Peer, int], WaitingLookup]] = {}  # by the key that they wait at
        self._names = Shares(FEW)  # in all of them

    def add(self, lookup: WaitingLookup) -> bool:
        """Lets a look-up wait, once. False if too many names wait already, of all or of its owner."""
        here = self._waiting.setdefault(lookup.key, {})
        if (lookup.peer, lookup.request) in here:
            return True
        if not self._names.has_room(lookup.owner, len(lookup.keys), MAX_WAITING):
            if not here:
                del self._waiting[lookup.key]
            return False
        here[lookup.peer, lookup.request] = lookup
        self._names.take(lookup.owner, len(lookup.keys))
        return True

    def published(self, key: str) -> list[WaitingLookup]:
        """The key is live. Returns the look-ups that wait for nothing any more."""
        ended = []
        for lookup in self._waiting.pop(key, {}).values():
            if not lookup.move_on(self._live):
                lookup.position = 0  # keys may have been deleted meanwhile
            if lookup.move_on(self._live):
                self._waiting.setdefault(lookup.key, {})[lookup.peer, lookup.request] = lookup
            else:
                self._names.give_back(lookup.owner, len(lookup.keys))
                ended.append(lookup)
        return ended

    def first_key(self) -> str | None:
        """A key that a look-up waits at, the same as long as it does; None if none waits."""
        return next(iter(self._waiting), None)

    def of(self, peer: Peer) -> list[tuple[str, int]]:
        """The look-ups of this peer, as (key that it waits at, request)."""
        found = (lookup for here in self._waiting.values() for lookup in here.values())
        return [(lookup.key, lookup.request) for lookup in found if lookup.peer == peer]

    def drop(self, is_gone: Callable[[str], bool]) -> None:
        """Forgets the look-ups that have one of these keys."""
        for at, here in list(self._waiting.items()):
            for name, lookup in list(here.items()):
                if any(map(is_gone, lookup.keys)):
                    del here[name]
                    self._names.give_back(lookup.owner, len(lookup.keys))
            if not here:
                del self._waiting[at]

    def give_up(self) -> list[WaitingLookup]:
        """Forgets all, and returns them: rank 0 will not come."""
        given_up = [lookup for here in self._waiting.values() for lookup in here.values()]
        self._waiting = {}
        self._names = Shares(FEW)
        return given_up

    def validate(self) -> None:
        """Raises AssertionError unless each waits at its first key that is not live, and the names are counted."""
        names: Counter[Hashable] = Counter()
        for key, here in self._waiting.items():
            assert here, f"nothing waits at {key!r}"
            for lookup in here.values():
                names[lookup.owner] += len(lookup.keys)
                assert lookup.key == key, f"request {lookup.request} waits at {lookup.key!r}, not at {key!r}"
                assert key not in self._live, f"request {lookup.request} waits for {key!r}, which is live"
        self._names.validate(names)
