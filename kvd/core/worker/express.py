"""The express way: the shortest way through the machine, for one small push and pull that a training loop repeats.

The shell has a frame for such a call, of which only numbers change. So it asks for these numbers with `begin`, sends
the frame, and says `end` when the expected answer is there. In between the machine does nothing at all.

What the lane (`kvd.core.worker.lane`) finds out about a call, that nothing else is under way and that its key is at
rest, stays true until the machine takes an event the general way. So it is found out once, and then asked for by a
number, the lane's `generation`. Whatever comes before the end of the call hands it over to the lane first, as if that
had sent its message (`give_up`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvd.core.machine import LocalCall, ServerPeer
from kvd.core.membership import ViewState
from kvd.core.outbox import RETRY_FIRST_S
from kvd.core.requests import Item, Transfer
from kvd.core.worker.asking import Asker
from kvd.core.worker.express_flights import ExpressFlights
from kvd.core.worker.flights import Flight
from kvd.core.worker.in_flight import Steps
from kvd.core.worker.keys import WorkerKey
from kvd.core.worker.lane import Lane
from kvd.core.worker.loads import ItemLoad
from kvd.core.worker.looks import NEVER
from kvd.core.worker.message_plans import MessagePlan
from kvd.core.worker.push_window import count_rounds
from kvd.core.worker.steps import StepCounter
from kvd.core.worker.waits import Waits
from kvd.protocol.messages import ADD, PushBatch


@dataclass(slots=True, eq=False)
class Repeated:
    """The calls of one key that may go the express way: what was found out about them, and the one in flight.

    Attributes:
        item: the key and its spec.
        peer: the server that leads its one slice.
        generation: of the lane, when this was found out last.
        becomes_ordinary_s: seconds after which a call in flight becomes an ordinary one at the latest.
        request, clock, step, settled: of the message of the call that began last; its batch is that of `plan`.
        begun: when that was.
        make_call: gives it as an ordinary call.
    """

    item: Item
    key: WorkerKey
    plan: MessagePlan
    peer: ServerPeer
    generation: int
    becomes_ordinary_s: float
    request: int = 0
    clock: int = 0
    step: int = 0
    settled: int = 0
    begun: float = 0.0
    make_call: Callable[[], LocalCall] | None = None

    def message(self, place: int) -> PushBatch:
        """That of the call that began last, made at this place of the program."""
        step, settled = self.step, self.settled
        return PushBatch(
            self.request, self.plan.batch, self.clock, ADD, 1, True, step=step, settled=settled, place=place
        )


class Express:
    """Calls of one key whose value is one slice. At most one is in flight.

    Who uses it keeps others from stepping the machine meanwhile.

    Args:
        flights: the same for calls that nobody waits for, many of which may be in flight.

    Attributes:
        flights: as it was given.
        due_at: when the call in flight becomes an ordinary one at the latest; NEVER without one.
        in_flight: the call, if there is one.
    """

    def __init__(
        self, lane: Lane, flights: ExpressFlights, view: ViewState, asker: Asker, steps: StepCounter, waits: Waits
    ) -> None:
        self.flights = flights
        self.due_at = NEVER
        self.in_flight: Repeated | None = None
        self._lane = lane
        self._view = view
        self._asker = asker
        self._steps = steps
        self._waits = waits

    def recognise(self, item: Item, deadline_s: float, answer_s: float) -> Repeated | None:
        """What is known of pushpulls of this item. None: they go another way, for now at least.

        Args:
            item: with the spec that an earlier call on the key had; source and target are not looked at.
            deadline_s, answer_s: of the calls, in seconds from their beginning, see LocalCall.
        """
        found = None if self.in_flight is not None else self._lane.single(item)
        if found is None:
            return None
        ordinary_s = min(RETRY_FIRST_S, self._waits.first_look(0.0, deadline_s, answer_s))
        return Repeated(item, *found, self._lane.generation, ordinary_s)

    def begin(self, repeated: Repeated, make_call: Callable[[], LocalCall], now: float) -> bool:
        """Begins a call, whose numbers are in `repeated`; its message must leave before the machine's next step. False:
        nothing was done, and the call goes the general way."""
        lane = self._lane
        if self.in_flight is not None or not lane.is_free(now):
            return False
        if repeated.generation != lane.generation and not self._is_still(repeated):
            return False
        repeated.clock = clock = repeated.key.clock + 1
        repeated.step, repeated.settled = self._steps.alone(clock)
        repeated.request = self._asker.next_number
        repeated.begun, repeated.make_call = now, make_call
        self.in_flight, self.due_at = repeated, now + repeated.becomes_ordinary_s
        return True

    def _is_still(self, repeated: Repeated) -> bool:
        """Whether what was found out holds again, after other events."""
        found = self._lane.single(repeated.item)
        if found is None or found[0] is not repeated.key:
            return False
        _, repeated.plan, repeated.peer = found
        repeated.generation = self._lane.generation
        return True

    def end(self, repeated: Repeated, version: int, now: float) -> bool:
        """The server has answered with the value in this version. False: the call is an ordinary one by now, or becomes
        one, and waits for this answer."""
        if self.in_flight is not repeated or now >= self.due_at or self._lane.others_are_due(now):
            return False
        if version != repeated.clock and self._view.is_sync:
            return False
        self._asker.take(1)
        count_rounds((repeated.key.window,))
        self._steps.passed(repeated.step)
        self._lane.disturb()
        self.in_flight, self.due_at, repeated.make_call = None, NEVER, None
        return True

    def give_up(self) -> tuple[Flight, ServerPeer]:
        """The call in flight, as the lane knows calls, and the server that was asked; its numbers are taken."""
        repeated, due_at = self.in_flight, self.due_at
        assert repeated is not None
        assert repeated.make_call is not None
        event = repeated.make_call()
        assert isinstance(event.request, Transfer)
        self.in_flight, self.due_at, repeated.make_call = None, NEVER, None
        load = ItemLoad((repeated.key,), (repeated.key.window,), [repeated.plan], event.request.items)
        self._asker.take(1)
        self._steps.passed(repeated.step)
        steps = Steps(repeated.step, repeated.settled)
        begun, place = repeated.begun, event.request.place
        flight = Flight(event.call, begun, due_at, True, True, place, load, repeated.request, steps, 1, event)
        return flight, repeated.peer

    def pushes(self, name: str) -> bool:
        """Whether the call in flight pushes this key. Any thread may ask: the call may end meanwhile."""
        repeated = self.in_flight
        return repeated is not None and repeated.item.key == name
