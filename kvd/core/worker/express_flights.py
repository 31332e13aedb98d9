"""Small pushes and pulls that a program repeats, many of them in flight at once, whose frames the shell has prepared.

What the express way (`kvd.core.worker.express`) is for a call that a program waits for, this is for calls with handles.
They are in flight in the lane like all others there: so whatever concerns one of them finds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvd.core.machine import Copy, Peer, ServerPeer, Span
from kvd.core.membership import ViewState
from kvd.core.outbox import RETRY_FIRST_S
from kvd.core.requests import Item, Versions
from kvd.core.worker.asking import Asker
from kvd.core.worker.flights import Flight, Flights, Trip
from kvd.core.worker.in_flight import NO_STEPS
from kvd.core.worker.keys import WorkerKey
from kvd.core.worker.lane import MOST_FLIGHTS, Lane
from kvd.core.worker.message_plans import MessagePlan
from kvd.core.worker.pulled_versions import note_versions
from kvd.core.worker.push_window import count_rounds
from kvd.core.worker.steps import StepCounter
from kvd.core.worker.waits import Waits
from kvd.protocol.messages import ADD, Epoch, PushBatch
from kvd.protocol.specs import KeySpec


class Route:
    """What was found out about the pushpulls of one key whose value is one small slice; and what the one in flight
    moves (`kvd.core.worker.loads.Load`).

    Attributes:
        item: the key and its spec.
        peer: the server that leads its slice.
        generation, place: of the lane and of the program, when this was found out.
        ordinary_s: seconds after which a call in flight becomes an ordinary one at the latest.
        clock: of the key, when the call in flight began.
        request, batch, steps: of its message.
        trip: of that call.
    """

    __slots__ = (
        "_versions",
        "batch",
        "clock",
        "generation",
        "item",
        "keys",
        "names",
        "ordinary_s",
        "peer",
        "place",
        "plans",
        "request",
        "steps",
        "trip",
    )

    def __init__(
        self,
        item: Item,
        key: WorkerKey,
        plan: MessagePlan,
        peer: ServerPeer,
        generation: int,
        place: int,
        ordinary_s: float,
    ) -> None:
        self.item = item
        self.keys = (key,)
        self.names = frozenset((key.name,))
        self.plans = [plan]
        self.peer = peer
        self.generation = generation
        self.place = place
        self.ordinary_s = ordinary_s
        self.clock = self.request = self.batch = 0
        self.steps = NO_STEPS
        self.trip: Trip | None = None
        self._versions: list[Versions | None] = [None]

    def message(self, place: int) -> PushBatch:
        """That of the call in flight, which was made at this place of the program."""
        step, settled = self.steps
        return PushBatch(
            self.request, self.batch, self.clock + 1, ADD, 1, True, step=step, settled=settled, place=place
        )

    def specs(self) -> list[KeySpec]:
        return [key.spec for key in self.keys if key.spec is not None]

    def payload_of(self, plan: MessagePlan) -> tuple[Span, ...]:
        return plan.payload_of(self._items())

    def take(self, plan: MessagePlan, payload: Any, versions: Sequence[int]) -> Copy:
        note_versions(self._versions, plan, versions)
        return Copy(payload, (self._items()[0].target,), plan.rows)

    def pushed(self) -> None:
        count_rounds((self.keys[0].window,))

    def result(self) -> list[Versions | None]:
        return self._versions[:]

    def _items(self) -> Sequence[Item]:
        assert self.trip is not None
        request: Any = self.trip.local_call().request
        items: Sequence[Item] = request.items
        return items


class ExpressFlights:
    """Calls whose messages the shell makes itself. Who uses it keeps others from stepping the machine meanwhile."""

    def __init__(
        self, lane: Lane, flights: Flights, view: ViewState, asker: Asker, steps: StepCounter, waits: Waits
    ) -> None:
        self._lane = lane
        self._flights = flights
        self._view = view
        self._asker = asker
        self._steps = steps
        self._waits = waits

    def recognise(self, item: Item, place: int, deadline_s: float, answer_s: float) -> Route | None:
        """What is known of pushpulls of this item. None: they go another way, for now at least.

        Args:
            item: with the spec that an earlier call on the key had; source and target are not looked at.
            place: where the program is, see `kvd.core.places`.
            deadline_s, answer_s: of the calls, in seconds from their beginning, see LocalCall.
        """
        found = None if self._flights.has(item.key) else self._lane.single_push(item, place)
        if found is None:
            return None
        ordinary_s = min(RETRY_FIRST_S, self._waits.first_look(0.0, deadline_s, answer_s))
        return Route(item, *found, self._lane.generation, place, ordinary_s)

    def begin(self, route: Route, call: int, trip: Trip, place: int, now: float) -> bool:
        """Begins a call, whose numbers are in `route`; its message must leave before the machine's next step. False:
        nothing was done, and the call goes the general way."""
        lane, flights = self._lane, self._flights
        others_due_at, first = lane.others_due_at, flights.oldest_push
        if others_due_at is None or now >= others_due_at or (now >= lane.due_at and lane.is_due(now)):
            return False
        if flights.by_call and not self._may_join(route.item.key, place, first):
            return False
        if (route.generation != lane.generation or route.place != place) and not self._is_still(route, place):
            return False
        (key,) = route.keys
        route.clock = clock = key.window.clock
        route.trip, route.batch = trip, route.plans[0].batch
        oldest_step = 0 if first is None else first.steps.step
        route.steps = steps = self._steps.begin_in_lane(clock + 1, oldest_step)
        route.request = request = self._asker.take(1)
        flight = Flight(call, now, now + route.ordinary_s, True, True, place, route, request, steps, 1, None, trip)
        lane.adopt(flight, route.peer)
        return True

    def _may_join(self, name: str, place: int, first: Flight | None) -> bool:
        """Whether a push may begin while others are in flight, as far as these say; `first` pushes, too."""
        flights = self._flights
        if flights.has_large or len(flights.by_call) >= MOST_FLIGHTS or flights.has(name):
            return False
        return first is None or first.place == place

    def _is_still(self, route: Route, place: int) -> bool:
        """Whether what was found out holds again, after other events."""
        found = self._lane.single_push(route.item, place)
        if found is None or found[0] is not route.keys[0]:
            return False
        _, route.plans[0], route.peer = found
        route.generation, route.place = self._lane.generation, place
        return True

    def end(self, peer: Peer, epoch: Epoch, request: int, nbytes: int, now: float) -> Trip | None:
        """A server has answered this request with a value of so many bytes, which is at its place when the machine is
        stepped next. Returns the call that has ended; None: nothing was done, and the answer goes the general way."""
        lane = self._lane
        awaited = self._flights.awaited.get(request)
        others_due_at = lane.others_due_at
        if awaited is None or others_due_at is None or now >= others_due_at:
            return None
        if now >= lane.due_at and lane.is_due(now):
            return None
        flight, plan, asked = awaited
        if flight.trip is None or asked != peer or nbytes != plan.nbytes or epoch > self._view.epoch:
            return None
        del self._flights.awaited[request]
        lane.land(flight)
        return flight.trip
