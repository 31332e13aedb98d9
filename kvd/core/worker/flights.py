"""The calls that are in flight in the lane of a worker (`kvd.core.worker.lane`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from kvd.core.machine import LocalCall, Peer, Received
from kvd.core.worker.in_flight import Steps
from kvd.core.worker.loads import Load
from kvd.core.worker.message_plans import MessagePlan


class Trip(Protocol):
    """What the shell knows of a call whose message it has made itself."""

    def local_call(self) -> LocalCall:
        """The call as an ordinary one: the same object each time."""


@dataclass(slots=True, eq=False)
class Flight:
    """A call in flight, and what was sent in its name.

    Attributes:
        call: its number.
        due_at: when it becomes an ordinary call at the latest.
        push, pull: which of the two it is, or both.
        place: of a push: where the program was, see `kvd.core.places`.
        load: what it moves.
        first_request: the number of its first message.
        steps: what its messages say of steps, if it pushes.
        unanswered: how many of its messages are.
        event: the call as the shell gave it; None: it has a trip instead.
        answers: all that were taken in so far, and when; without their payloads, which are where they belong.
    """

    call: int
    begun: float
    due_at: float
    push: bool
    pull: bool
    place: int
    load: Load
    first_request: int
    steps: Steps
    unanswered: int
    event: LocalCall | None
    trip: Trip | None = None
    answers: list[tuple[Received, float]] = field(default_factory=list)

    def local_call(self) -> LocalCall:
        """The call as an ordinary one."""
        if self.event is not None:
            return self.event
        assert self.trip is not None
        return self.trip.local_call()


Awaited: TypeAlias = tuple[Flight, MessagePlan, Peer]


class Flights:
    """The calls in flight, in their order. No two have a key in common.

    Attributes:
        by_call: all of them, by the number of the call.
        pushing: those that push.
        awaited: their messages that are not answered, by request.
        has_large: whether the only one takes credit.
    """

    def __init__(self) -> None:
        self.by_call: dict[int, Flight] = {}
        self.pushing: dict[int, Flight] = {}
        self.awaited: dict[int, Awaited] = {}
        self.has_large = False
        self._by_key: dict[str, Flight] = {}  # those of one key
        self._of_many: dict[int, Flight] = {}  # those of several keys, as `by_call`

    def add(self, flight: Flight, *, is_large: bool) -> None:
        number, names = flight.call, flight.load.names
        self.by_call[number] = flight
        if flight.push:
            self.pushing[number] = flight
        if len(names) == 1:
            for name in names:
                self._by_key[name] = flight
        else:
            self._of_many[number] = flight
        self.has_large = is_large

    def remove(self, flight: Flight) -> None:
        number, names = flight.call, flight.load.names
        del self.by_call[number]
        if flight.push:
            del self.pushing[number]
        if len(names) == 1:
            for name in names:
                del self._by_key[name]
        else:
            del self._of_many[number]
        self.has_large = False

    def take_all(self) -> list[Flight]:
        """Forgets all of them. Returns them in their order."""
        flights = list(self.by_call.values())
        self.by_call, self.pushing, self.awaited, self.has_large = {}, {}, {}, False
        self._by_key, self._of_many = {}, {}
        return flights

    @property
    def oldest_push(self) -> Flight | None:
        """The push that was begun first."""
        for flight in self.pushing.values():
            return flight
        return None

    @property
    def oldest_step(self) -> int:
        """That of the push that was begun first; 0: there is none."""
        push = self.oldest_push
        return 0 if push is None else push.steps.step

    def has_any_of(self, names: Sequence[str]) -> bool:
        """Whether any of the keys is in flight."""
        if self._by_key and not self._by_key.keys().isdisjoint(names):
            return True
        return any(not flight.load.names.isdisjoint(names) for flight in self._of_many.values())

    def has(self, name: str) -> bool:
        """Whether this key is in flight."""
        return name in self._by_key or (bool(self._of_many) and self.has_any_of((name,)))

    def pushes(self, name: str) -> bool:
        """Whether this key is being pushed. Any thread may ask: the call may end meanwhile."""
        flight = self._by_key.get(name)
        if flight is not None:
            return flight.push
        return any(flight.push and name in flight.load.names for flight in list(self._of_many.values()))
