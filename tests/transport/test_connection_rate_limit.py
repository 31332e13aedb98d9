"""How many connections may come from one place without a key."""

from __future__ import annotations

import pytest

from kvd.transport.limits import connection_rate_limit as limits
from kvd.transport.limits.connection_rate_limit import (
    ANYWHERE,
    SUSPICIOUS,
    THIS_HOST,
    UNPROVEN_LIMIT,
    ConnectionRateLimit,
    Place,
    place_of,
)

HERE, THERE = place_of("192.0.2.1"), place_of("192.0.2.2")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def come(newcomers: ConnectionRateLimit, place: Place, count: int) -> None:
    for _ in range(count):
        newcomers.came(place)


def test_a_place_is_what_one_party_has() -> None:
    assert place_of("127.0.0.1") == place_of("127.3.2.1") == THIS_HOST
    assert place_of("192.0.2.1") == place_of("::ffff:192.0.2.1") != place_of("192.0.2.2")
    assert place_of("2001:db8::1") == place_of("2001:db8::ffff:1") != place_of("2001:db8:0:1::1")
    assert place_of("fe80::1%eth0") == place_of("fe80::2")
    assert place_of("::1") not in (THIS_HOST, ANYWHERE)


def test_newcomers_beyond_the_limit_are_refused_and_only_those_of_their_place() -> None:
    newcomers = ConnectionRateLimit(Clock())
    come(newcomers, HERE, UNPROVEN_LIMIT)
    come(newcomers, THERE, UNPROVEN_LIMIT)
    assert newcomers.refused() == frozenset()
    newcomers.came(HERE)
    assert newcomers.refused() == {HERE}


def test_those_that_prove_a_key_are_never_too_many() -> None:
    newcomers = ConnectionRateLimit(Clock())
    for _ in range(20 * UNPROVEN_LIMIT):
        newcomers.came(HERE)
        newcomers.proved(HERE)
    assert newcomers.refused() == frozenset()


def test_a_job_that_comes_at_once_is_not_too_many() -> None:
    newcomers = ConnectionRateLimit(Clock())
    come(newcomers, HERE, UNPROVEN_LIMIT)
    for _ in range(UNPROVEN_LIMIT):
        newcomers.proved(HERE)
    come(newcomers, HERE, UNPROVEN_LIMIT)
    assert newcomers.refused() == frozenset()


def test_a_refusal_ends_after_a_while_and_lasts_that_long() -> None:
    clock = Clock()
    newcomers = ConnectionRateLimit(clock)
    come(newcomers, HERE, 100 * UNPROVEN_LIMIT)
    clock.now += 0.9 * limits.REFUSED_S
    assert newcomers.refused() == {HERE}
    clock.now += 0.2 * limits.REFUSED_S
    assert newcomers.refused() == frozenset()


def test_between_two_refusals_a_place_is_open_for_a_while() -> None:
    clock = Clock()
    newcomers = ConnectionRateLimit(clock)
    come(newcomers, HERE, UNPROVEN_LIMIT + 1)
    clock.now += 1.1 * limits.REFUSED_S
    assert newcomers.refused() == frozenset()
    clock.now += 0.9 * limits.OPEN_S
    come(newcomers, HERE, UNPROVEN_LIMIT)
    assert newcomers.refused() == frozenset()
    clock.now += 0.2 * limits.OPEN_S
    newcomers.came(HERE)
    assert newcomers.refused() == {HERE}


def test_what_one_place_may_cost_is_bounded_and_others_there_get_in() -> None:
    """Whoever comes whenever he may, for a minute; and somebody who tries once a second."""
    clock = Clock()
    newcomers = ConnectionRateLimit(clock)
    open_looks, entries = 0, 0
    for look in range(6000):
        clock.now += 0.0101
        is_open = HERE not in newcomers.refused()
        if is_open:
            come(newcomers, HERE, 50)
        open_looks += is_open
        entries += is_open and look % 99 == 0
    assert 0.15 < open_looks / 6000 < 0.25
    assert entries >= 5


def test_connections_of_which_nobody_knows_are_laid_to_who_came_most() -> None:
    newcomers = ConnectionRateLimit(Clock())
    come(newcomers, HERE, SUSPICIOUS)
    come(newcomers, THERE, SUSPICIOUS - 1)
    come(newcomers, ANYWHERE, UNPROVEN_LIMIT + 1)
    assert newcomers.refused() == {HERE}


def test_all_are_refused_when_nobody_can_be_blamed() -> None:
    newcomers = ConnectionRateLimit(Clock())
    come(newcomers, HERE, SUSPICIOUS - 1)
    come(newcomers, ANYWHERE, UNPROVEN_LIMIT + 1)
    assert newcomers.refused() == {ANYWHERE}


def test_those_that_came_before_a_place_was_blamed_are_no_reason_to_blame_others() -> None:
    newcomers = ConnectionRateLimit(Clock())
    come(newcomers, HERE, SUSPICIOUS)
    come(newcomers, THERE, SUSPICIOUS - 1)
    come(newcomers, ANYWHERE, 10 * UNPROVEN_LIMIT)
    assert newcomers.refused() == {HERE}


def test_the_unknown_ones_of_a_place_that_is_refused_are_no_reason_to_refuse_all() -> None:
    newcomers = ConnectionRateLimit(Clock())
    for _ in range(UNPROVEN_LIMIT):
        newcomers.came(HERE)
        newcomers.came(ANYWHERE)
    newcomers.came(HERE)
    come(newcomers, ANYWHERE, UNPROVEN_LIMIT)
    assert newcomers.refused() == {HERE}


def test_all_are_refused_when_it_was_not_who_was_blamed() -> None:
    clock = Clock()
    newcomers = ConnectionRateLimit(clock)
    come(newcomers, HERE, SUSPICIOUS)
    come(newcomers, ANYWHERE, UNPROVEN_LIMIT + 1)
    clock.now += limits.REFUSED_S
    come(newcomers, ANYWHERE, UNPROVEN_LIMIT + 1)
    assert ANYWHERE in newcomers.refused()


def test_places_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    newcomers = ConnectionRateLimit(clock)
    for number in range(3 * limits.MAX_PLACES):
        newcomers.came(Place(number.to_bytes(4, "big")))
    assert len(newcomers._standings) <= limits.MAX_PLACES + 1
    assert newcomers.refused() == {ANYWHERE}
    clock.now += 3 * limits.MAX_PLACES / limits.FORGIVEN_PER_S
    assert newcomers.refused() == frozenset()
    assert not newcomers._standings
