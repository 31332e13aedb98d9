"""The express way: the shortest way through the machine, for one small push and pull that a training loop repeats.

The shell has a frame for such a call, of which only numbers change. So it asks for these numbers with `begin`, sends the
frame, and says `end` when the expected answer is there. In between the machine does nothing at all.

What the lane (`kvd.core.worker.lane`) finds out about a call, that nothing else is under way and that its key is at
rest, stays true until the machine takes an event the general way. So it is found out once, and then asked for by a
number, the lane's `generation`. The call in flight is one of the lane: whatever comes before its end makes it an
ordinary call there, which has sent what the shell has sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kvd.core.machine import LocalCall, Peer
from kvd.core.membership import ViewState
from kvd.core.outbox import RETRY_FIRST_S
from kvd.core.requests import Item, Transfer
from kvd.core.worker.asking import Asker
from kvd.core.worker.keys import WorkerKey
from kvd.core.worker.lane import Flight, Lane
from kvd.core.worker.message_plans import MessagePlan
from kvd.core.worker.steps import StepCounter
from kvd.core.worker.waits import Waits


class PushNumbers(NamedTuple):
    """What changes in the message of a repeated call: fields of its PushBatch."""

    request: int
    batch: int
    clock: int
    step: int
    settled: int


@dataclass(slots=True, eq=False)
class Repeated:
    """A call that may go the express way: what was found out about it, and where it is while it is in flight.

    Attributes:
        item: its key and spec; a call of another key or spec is another one.
        peer: the server that leads all slices of the key.
        nbytes: of the payload.
        generation: of the lane, when this was found out.
        make_call: gives the call in flight as an ordinary one.
    """

    item: Item
    key: WorkerKey
    plan: MessagePlan
    peer: Peer
    nbytes: int
    generation: int
    make_call: Callable[[], LocalCall] | None = None
    request: int = 0
    step: int = 0
    begun: float = 0.0

    @property
    def name(self) -> str:
        return self.item.key

    def flight(self) -> Flight:
        """The call in flight as the lane knows calls."""
        assert self.make_call is not None
        event = self.make_call()
        assert isinstance(event.request, Transfer)
        flight = Flight(event, event.request, self.begun, self.step, (self.key.window,), [None], 1)
        flight.awaited[self.request] = self.plan, self.peer
        return flight


class Express:
    """Calls of one key whose slices travel in one message. At most one is in flight.

    Whoever uses it holds what keeps others from stepping the machine.
    """

    def __init__(self, lane: Lane, view: ViewState, asker: Asker, steps: StepCounter, waits: Waits) -> None:
        self._lane = lane
        self._view = view
        self._asker = asker
        self._steps = steps
        self._waits = waits

    def recognise(self, item: Item) -> Repeated | None:
        """What is known of pushpulls of this item. None: they go another way, for now at least.

        Args:
            item: with the spec that an earlier call on the key had; what is None is not looked at.
        """
        found = self._lane.single(item)
        if found is None:
            return None
        key, plan, peer = found
        return Repeated(item, key, plan, peer, plan.nbytes, self._lane.generation)

    def begin(
        self,
        repeated: Repeated,
        make_call: Callable[[], LocalCall],
        deadline: float,
        answer_s: float | None,
        now: float,
    ) -> PushNumbers | None:
        """Begins a call; its message must leave before the machine's next step. None: nothing was done, and the call
        goes the general way.

        Args:
            make_call: gives the call as an ordinary one.
            deadline, answer_s: of that.
        """
        lane = self._lane
        others_due_at = lane.others_due_at
        if others_due_at is None or now >= others_due_at or lane.is_busy:
            return None
        if repeated.generation != lane.generation and not self._is_still(repeated):
            return None
        clock = repeated.key.window.clock + 1
        repeated.step, settled = self._steps.alone(clock)
        repeated.request = request = self._asker.next_number
        repeated.begun = now
        repeated.make_call = make_call
        lane.enter(repeated, min(now + RETRY_FIRST_S, self._waits.first_look(now, deadline, answer_s)))
        return PushNumbers(request, repeated.plan.batch, clock, repeated.step, settled)

    def _is_still(self, repeated: Repeated) -> bool:
        """Whether what was found out holds again, after other events."""
        found = self._lane.single(repeated.item)
        if found is None or found[0] is not repeated.key:
            return False
        _, repeated.plan, repeated.peer = found
        repeated.nbytes, repeated.generation = repeated.plan.nbytes, self._lane.generation
        return True

    def end(self, repeated: Repeated, version: int, now: float) -> bool:
        """Its server has answered with this version. False: it has become an ordinary call, which waits for its answer.

        The values are copied by the caller; their number was that of the bytes of the key.
        """
        lane = self._lane
        if not lane.is_express(repeated) or now >= lane.due_at or lane.others_are_due(now):
            return False
        if self._view.is_sync and version != repeated.key.window.clock + 1:
            return False
        repeated.make_call = None
        lane.leave(repeated, (repeated.key.window,))
        return True
