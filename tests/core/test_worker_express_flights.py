"""Many calls in flight whose messages the shell has made: which ones may begin, and what ends them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvd.core.machine import Send, ServerPeer, Tick
from kvd.core.requests import Versions
from kvd.core.worker.express_flights import ExpressFlights
from kvd.core.worker.flights import Trip
from kvd.protocol.messages import Epoch, Values
from tests.core.test_worker_flights import KEYS, push, repeated, values
from tests.core.worker_harness import Harness, number
from tests.simulator.express import ExpressSteps


class Seen:
    """How many calls began and ended by themselves."""

    def __init__(self) -> None:
        self.begun = self.ended = 0


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    seen, begin, end = Seen(), ExpressFlights.begin, ExpressFlights.end

    def beginning(*arguments: object) -> bool:
        begun = begin(*arguments)  # type: ignore[arg-type]
        seen.begun += begun
        return begun

    def ending(*arguments: object) -> Trip | None:
        trip = end(*arguments)  # type: ignore[arg-type]
        seen.ended += trip is not None
        return trip

    monkeypatch.setattr(ExpressFlights, "begin", beginning)
    monkeypatch.setattr(ExpressFlights, "end", ending)
    return seen


def in_flight(*keys: str) -> tuple[Harness, list[Send]]:
    harness = repeated()
    harness._express = ExpressSteps(every=1, waits=False)
    return harness, [push(harness, key) for key in keys]


def test_calls_begin_and_end_by_themselves(seen: Seen) -> None:
    harness, sends = in_flight(*KEYS)
    assert seen.begun == 4
    for send in reversed(sends):
        values(harness, send)
    assert seen.ended == 4
    assert [harness.result(harness._calls - place) for place in range(4)] == [[Versions(3, 3)]] * 4


def test_none_of_them_is_on_a_key_in_flight(seen: Seen) -> None:
    harness, _ = in_flight("a", "b", "b")
    assert seen.begun == 2
    assert len(harness.machine._lane) == 0


def test_none_is_at_another_place_than_those_in_flight(seen: Seen) -> None:
    harness, _ = in_flight("a", "b")
    harness.push("c", pull=True, place=8)
    assert seen.begun == 2


def test_as_many_are_in_flight_as_are_allowed(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.core.worker.express_flights.MOST_FLIGHTS", 2)
    in_flight("a", "b", "c")
    assert seen.begun == 2


def test_what_was_found_out_is_found_out_again_after_other_events(seen: Seen) -> None:
    harness, sends = in_flight("a", "b")
    for send in sends:
        values(harness, send)
    harness.step(Tick())
    again = [push(harness, "a"), push(harness, "b")]
    assert seen.begun == 4
    for send in again:
        harness.say(send.peer, Values(number(send), (4,)), b"x")
    assert seen.ended == 4
    assert harness.result(harness._calls) == [Versions(4, 4)]


@pytest.mark.parametrize(
    "ends",
    [
        lambda flights, send: flights.end(ServerPeer(7), Epoch(1, 1), number(send), 1, 0.0),
        lambda flights, send: flights.end(send.peer, Epoch(1, 9), number(send), 1, 0.0),
        lambda flights, send: flights.end(send.peer, Epoch(1, 1), number(send), 2, 0.0),
        lambda flights, send: flights.end(send.peer, Epoch(1, 1), number(send) + 1, 1, 0.0),
        lambda flights, send: flights.end(send.peer, Epoch(1, 1), number(send), 1, 2.5),
    ],
    ids=["of somebody else", "of a newer view", "of another size", "to nothing", "when it has become an ordinary call"],
)
def test_other_answers_end_nothing(ends: Callable[[ExpressFlights, Send], Trip | None]) -> None:
    harness, sends = in_flight("a", "b")
    assert ends(harness.machine.express.flights, sends[1]) is None
    harness.say(sends[1].peer, Values(number(sends[1]), (3,)), b"x")
    assert harness.result(harness._calls) == [Versions(3, 3)]
