"""Rate limit of connections that prove no key: how many may come from one place, and whom to refuse for a while.

A connection costs this process up to 0.4 ms until its other end has proven a key, and the other end almost nothing. So
each place has so many newcomers that may be unproven, and gets more at a rate that costs a small part of a processor.
Those who prove one are not counted. A place beyond that is refused for most of the time and not for all of it, so that
an honest newcomer at the same place, who tries again and again, gets in.

Of some connections nobody knows where they came from. When there are too many of these, the place from which most of
the others came is refused for them; if they do not end with that, all newcomers are.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NewType

UNPROVEN_LIMIT: Final = 512  # of one place: a job whose workers all come at once is within it
FORGIVEN_PER_S: Final = 50.0
SUSPICIOUS: Final = UNPROVEN_LIMIT // 16  # who has so many is held to be where the unknown ones came from
REFUSED_S: Final = 0.5  # after the last one has come
OPEN_S: Final = 0.1  # at least, between two refusals: a sixth of the time
MAX_PLACES: Final = 1024  # that are counted apart

Place = NewType("Place", bytes)
"""Where connections come from: an IPv4 address (4 bytes), or the first half of an IPv6 address (8 bytes), since who has
one of its addresses has them all. The addresses of IPv4 that stay within this host are one."""

ANYWHERE: Final = Place(b"")
"""Of connections that ended before anybody looked. To refuse it is to refuse all newcomers."""

THIS_HOST: Final = Place(bytes([127, 0, 0, 0]))


def place_of(host: str) -> Place:
    """The place of an address in numbers, as sockets give them."""
    address: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return Place(address.packed[:8])
        address = address.ipv4_mapped
    return THIS_HOST if address.is_loopback else Place(address.packed)


@dataclass(slots=True)
class _Standing:
    """Of one place."""

    unproven: float  # connections, less what was forgiven
    at: float  # when that was so
    is_refused: bool = False
    open_until: float = 0.0  # not to be refused before, however many come


class ConnectionRateLimit:
    """Counts, for each place, connections whose other end has proven no key.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._standings: dict[Place, _Standing] = {}
        self._blamed_until = 0.0  # until then, unknown ones may have come before their place was refused

    def came(self, place: Place) -> None:
        """A connection was accepted."""
        if place == ANYWHERE and self._clock() < self._blamed_until:
            return
        standing = self._standing(place)
        standing.unproven = min(standing.unproven + 1, UNPROVEN_LIMIT + 1)
        if standing.unproven > UNPROVEN_LIMIT and not standing.is_refused and standing.at >= standing.open_until:
            self._refuse(standing)

    def proved(self, place: Place) -> None:
        """One of them has proven a key."""
        standing = self._standing(place)
        standing.unproven = max(0.0, standing.unproven - 1)

    def refused(self) -> frozenset[Place]:
        """The places from which no new connections are to come now."""
        now = self._clock()
        for place, standing in list(self._standings.items()):
            self._forgive(standing, now)
            if standing.is_refused and standing.unproven <= UNPROVEN_LIMIT - REFUSED_S * FORGIVEN_PER_S:
                standing.is_refused = False
                standing.open_until = now + OPEN_S
            if not standing.unproven:
                del self._standings[place]
        return frozenset(place for place, standing in self._standings.items() if standing.is_refused)

    def _refuse(self, standing: _Standing) -> None:
        unknown = self._standings.get(ANYWHERE)
        if standing is unknown:
            known = [other for other in self._standings.values() if other is not unknown and not other.is_refused]
            suspect = max(known, key=lambda other: other.unproven, default=unknown)
            if suspect.unproven >= SUSPICIOUS:
                suspect.unproven = unknown.unproven
                standing = suspect
        if unknown is not None and standing is not unknown:
            unknown.unproven = 0.0  # it is held to have been the same one
            self._blamed_until = self._clock() + REFUSED_S
        standing.is_refused = True

    def _standing(self, place: Place) -> _Standing:
        now = self._clock()
        standing = self._standings.get(place)
        if standing is None:
            if len(self._standings) >= MAX_PLACES:
                self.refused()  # forgets places that have nothing to be forgiven
            if len(self._standings) >= MAX_PLACES:
                place = ANYWHERE
            standing = self._standings.setdefault(place, _Standing(0.0, now))
        self._forgive(standing, now)
        return standing

    @staticmethod
    def _forgive(standing: _Standing, now: float) -> None:
        standing.unproven = max(0.0, standing.unproven - FORGIVEN_PER_S * (now - standing.at))
        standing.at = now
