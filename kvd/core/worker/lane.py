"""The lane: a short way through the machine for the calls that a training loop makes again and again.

It takes a push, a pull, or both, of keys that are all at rest, whose batches the servers know. Such a call needs no
queue, no retry and no place among other calls, as nothing else is under way with its keys, and its messages may leave
at once. Many small calls may be in flight; a large one, whose bytes take credit, only by itself.

While a call is in flight, its numbers are taken: those of its requests and of its step. Nothing else in the machine
changes: the lane only remembers the call, and what it sent in its name. When the expected answers are there, the keys
move on. Whatever may concern a call in flight (a call on the same key, a refusal, a view, a retry that is due) makes
all of them ordinary ones, in their order, before it is looked at: the machine begins them the general way. As their
keys are what they were, the calls get the same clocks, and the lane gives them back the numbers that they had. So their
messages are those that were sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvd.core import requests
from kvd.core.machine import SCHEDULER, Complete, Effect, Event, LocalCall, Received, Send, ServerPeer, Tick
from kvd.core.membership import ViewState
from kvd.core.outbox import RETRY_FIRST_S, Outbox
from kvd.core.requests import Item
from kvd.core.worker.asking import Asker
from kvd.core.worker.flights import Flight, Flights
from kvd.core.worker.in_flight import NO_STEPS
from kvd.core.worker.keys import WorkerKey
from kvd.core.worker.loads import Loads
from kvd.core.worker.looks import NEVER
from kvd.core.worker.message_plans import MessagePlan, MessagePlans
from kvd.core.worker.servers import Servers
from kvd.core.worker.steps import StepCounter
from kvd.core.worker.stillness import Stillness
from kvd.core.worker.waits import Waits
from kvd.protocol.messages import ABSENT, Done, HeartbeatAck, PullBatch, PushBatch, Staged, Values

MAX_ANSWERS = 4096  # kept of one call, until it is completed
MOST_FLIGHTS = 1024  # calls at a time
PLAIN_ANSWERS = frozenset({Done, Staged, Values})


class Lane:
    """The calls that take it.

    Args:
        is_on: otherwise it takes no call.

    Attributes:
        due_at: not later than any call in flight becomes an ordinary one, see `is_due`; NEVER without one.
        generation: how often the machine has taken an event the general way. As long as it stays, nothing is under way
            but what the lane knows, and no view or key has changed.
        others_due_at: when any other part of the machine has something to do; None: that is not worked out yet.
    """

    def __init__(
        self,
        flights: Flights,
        stillness: Stillness,
        view: ViewState,
        servers: Servers,
        loads: Loads,
        plans: MessagePlans,
        outbox: Outbox,
        asker: Asker,
        steps: StepCounter,
        waits: Waits,
        emit: Callable[[Effect], None],
        *,
        is_on: bool = True,
    ) -> None:
        self.due_at = NEVER
        self.generation = 0
        self.others_due_at: float | None = None
        self._is_on = is_on
        self._stillness = stillness
        self._view = view
        self._servers = servers
        self._plans = plans
        self._outbox = outbox
        self._asker = asker
        self._steps = steps
        self._waits = waits
        self._emit = emit
        self._loads = loads
        self._flights = flights

    def __len__(self) -> int:
        """How many calls are in flight."""
        return len(self._flights.by_call)

    @property
    def is_busy(self) -> bool:
        return bool(self._flights.by_call)

    def pushes(self, name: str) -> bool:
        """Whether a call in flight pushes this key. Any thread may ask: the call may end meanwhile."""
        return self._flights.pushes(name)

    def is_due(self, now: float) -> bool:
        """Whether a call in flight has to become an ordinary one now."""
        if now < self.due_at:  # calls that have ended may have been due earlier
            return False
        self.due_at = min([flight.due_at for flight in self._flights.by_call.values()], default=NEVER)
        return now >= self.due_at

    def others_are_due(self, now: float) -> bool:
        """Whether any other part of the machine has something to do."""
        return self.others_due_at is None or now >= self.others_due_at

    def leaves_alone(self, event: Event, now: float) -> bool:
        """Whether an event that goes the general way changes nothing for the calls in flight, and asks nothing of them.

        So it is with what is due at other parts, the answer to a heartbeat, and plain answers to ordinary calls, which
        are all on other keys and were made before.
        """
        if self.is_due(now):
            return False
        if isinstance(event, Tick):
            return True
        if not isinstance(event, Received) or event.epoch > self._view.epoch:
            return False
        kind = type(event.message)
        if event.peer == SCHEDULER:
            return kind is HeartbeatAck
        return kind in PLAIN_ANSWERS and getattr(event.message, "request", 0) not in self._flights.awaited

    # ── calls ──

    def begin(self, event: LocalCall, request: requests.Transfer | requests.ListTransfer, now: float) -> bool:
        """Takes the call and sends its messages, if it may. False: nothing was done, and it goes the general way."""
        listed: requests.Listed | None = None
        if isinstance(request, requests.ListTransfer):
            listed, transfer = request
        else:
            transfer = request
        if not self._is_on or not _is_plain(transfer) or (now >= self.due_at and self.is_due(now)):
            return False
        flights = self._flights
        if flights.by_call and not self._may_join(transfer, listed):
            return False
        if transfer.push and not self._stillness.lets_leave(transfer.place):  # before the keys are looked at
            return False
        load = self._loads.of(transfer) if listed is None else self._loads.of_list(listed)
        if load is None or not self._may_send(load.plans):
            return False
        is_large = transfer.push and self._takes_credit(load.plans)
        if not self._lets_leave(transfer, is_large=is_large):
            return False
        if transfer.finds is not None:
            transfer.finds(load.specs())
        plans, clock, steps = load.plans, load.clock, NO_STEPS
        if transfer.push:
            steps = self._steps.begin_in_lane(clock + 1, flights.oldest_step)
        due_at = min(now + RETRY_FIRST_S, self._waits.first_look(now, event.deadline, event.answer_s))
        first = self._asker.take(len(plans))
        push, pull, place = transfer.push, transfer.pull, transfer.place
        flight = Flight(event.call, now, due_at, push, pull, place, load, first, steps, len(plans), event)
        flights.add(flight, is_large=is_large)
        if due_at < self.due_at:
            self.due_at = due_at
        sends = self._messages(flight, transfer)
        for send in sends if len(sends) == 1 else self._outbox.in_order(sends):
            self._emit(send)
        return True

    def _may_join(self, transfer: requests.Transfer, listed: requests.Listed | None) -> bool:
        """Whether the call may begin while others are in flight, as far as these say."""
        flights = self._flights
        if flights.has_large or len(flights.by_call) >= MOST_FLIGHTS:
            return False
        names = [item.key for item in transfer.items] if listed is None else listed.keys.names
        if flights.has_any_of(names):
            return False
        first = flights.oldest_push
        return not transfer.push or first is None or first.place == transfer.place

    def _lets_leave(self, transfer: requests.Transfer, *, is_large: bool) -> bool:
        """Whether nothing else that is under way holds the call back."""
        if is_large:
            return not self.is_busy and self._stillness.is_total()
        return self._stillness.lets_leave(transfer.place if transfer.push else None)

    def _takes_credit(self, plans: Sequence[MessagePlan]) -> bool:
        small = self._outbox.small_push_bytes
        return plans[0].nbytes > small or (len(plans) > 1 and max([plan.nbytes for plan in plans]) > small)

    def _may_send(self, plans: Sequence[MessagePlan]) -> bool:
        """Whether each message may name a batch that its server knows, and all of them may leave now."""
        for plan in plans:
            if plan.is_alone or not plan.batch or plan.declared_to != self._servers.peer_of(plan.partition):
                return False
        return len(plans) == 1 or sum([plan.nbytes for plan in plans]) <= self._outbox.credit_bytes

    def _messages(self, flight: Flight, transfer: requests.Transfer) -> list[Send]:
        """What is sent for a call that begins."""
        load, awaited, sends = flight.load, self._flights.awaited, []
        (step, settled), clock = flight.steps, load.clock
        for request, plan in enumerate(load.plans, flight.first_request):
            peer = self._servers.peer_of(plan.partition)
            awaited[request] = flight, plan, peer
            if transfer.push:
                how, samples, place = transfer.how, transfer.samples, transfer.place
                message: PushBatch | PullBatch = PushBatch(
                    request, plan.batch, clock + 1, how, samples, transfer.pull, False, step, settled, place
                )
                sends.append(Send(peer, message, load.payload_of(plan) if how != ABSENT else ()))
            else:
                sends.append(Send(peer, PullBatch(request, plan.batch, clock)))
        return sends

    # ── answers ──

    def take(self, event: Received, now: float) -> bool:
        """Takes an expected answer in, and completes its call with the last one. False: nothing was done."""
        message: Any = event.message
        awaited = self._flights.awaited.get(getattr(message, "request", 0))
        if awaited is None:
            return False
        flight, plan, peer = awaited
        if peer != event.peer or event.epoch > self._view.epoch or len(flight.answers) >= MAX_ANSWERS:
            return False
        if now >= self.due_at and self.is_due(now):
            return False
        kind = type(message)
        if kind is not Staged:
            if kind is not (Values if flight.pull else Done):
                return False
            if kind is Values:
                if event.nbytes != plan.nbytes or message.coding is not None or event.fault:
                    return False
                if len(message.versions) not in (1, len(plan.slice_ids)):
                    return False
                self._emit(flight.load.take(plan, event.payload, message.versions))
            del self._flights.awaited[message.request]
            flight.unanswered -= 1
        if flight.unanswered:
            flight.answers.append((event._replace(payload=None), now))
        else:
            self._complete(flight)
        return True

    def _complete(self, flight: Flight) -> None:
        """All are answered: what the general way would have counted is counted."""
        self.land(flight)
        self._emit(Complete(flight.call, flight.load.result()))

    def land(self, flight: Flight) -> None:
        """The call has ended, and its keys move on."""
        self._flights.remove(flight)
        if not self._flights.by_call:
            self.due_at = NEVER
        if flight.push:
            flight.load.pushed()
        self._stillness.disturb()

    # ── calls that were begun elsewhere ──

    def single(self, item: Item) -> tuple[WorkerKey, MessagePlan, ServerPeer] | None:
        """The key of the item, the plan of the message in which its one slice travels, and its server, if a call on it
        may be taken now, and nothing else is under way."""
        if self.is_busy or not self._stillness.is_total():
            return None
        return self._slice(item)

    def single_push(self, item: Item, place: int) -> tuple[WorkerKey, MessagePlan, ServerPeer] | None:
        """The same for a push of a small value that is made at this place, besides others that are under way. The key
        must not be in flight."""
        found = self._slice(item) if self._stillness.lets_leave(place) else None
        return None if found is None or self._takes_credit((found[1],)) else found

    def _slice(self, item: Item) -> tuple[WorkerKey, MessagePlan, ServerPeer] | None:
        found = self._loads.of_slice(item) if self._is_on else None
        if found is None or not self._may_send((found[1],)):
            return None
        key, plan = found
        return key, plan, self._servers.peer_of(plan.partition)

    def is_free(self, now: float) -> bool:
        """Whether no call is in flight, and no other part of the machine has something to do."""
        return not self.is_busy and not self.others_are_due(now)

    def adopt(self, flight: Flight, peer: ServerPeer) -> None:
        """Goes on with a call that was begun elsewhere, with one message to this server. It takes no credit, or nothing
        else is in flight."""
        (plan,) = flight.load.plans
        self._flights.add(flight, is_large=plan.nbytes > self._outbox.small_push_bytes)
        self._flights.awaited[flight.first_request] = flight, plan, peer
        if flight.due_at < self.due_at:
            self.due_at = flight.due_at

    def disturb(self) -> None:
        """A call was made and answered elsewhere: who looks for activity sees it."""
        self._stillness.disturb()

    # ── the end ──

    def give_up(self) -> list[Flight]:
        """Lets go of the calls, in their order. They go the general way from their beginning."""
        self.due_at = NEVER
        return self._flights.take_all()

    def repeat(self, flight: Flight) -> None:
        """The call starts the general way next: it says what it has said."""
        self._asker.give_next(flight.first_request)
        self._plans.keep(flight.load.keys, flight.load.plans)
        if flight.push:
            self._steps.repeat(flight.steps)

    def validate(self) -> None:
        """Raises AssertionError if a call in flight could not become an ordinary one that has sent the same."""
        next_number, flights = self._asker.next_number, self._flights
        for number, flight in flights.by_call.items():
            load = flight.load
            assert self._stillness.takes_part(), f"call {number} is in flight, but the rounds go on without this worker"
            assert flight.due_at >= self.due_at, f"call {number} is due at {flight.due_at}, the lane at {self.due_at}"
            assert flight.first_request + len(load.plans) <= next_number, f"the requests of call {number} are not taken"
            for key in load.keys:
                assert key.clock == load.clock, f"{key.name!r} has moved on, but call {number} is in flight"
                assert not key.queue, f"calls queue for {key.name!r}, but call {number} is in flight"
                assert not key.own_window.is_in_use, f"{key.name!r} is in use, but call {number} is in flight"
        assert not flights.has_large or len(flights.by_call) == 1, "a call that takes credit is not alone in flight"


def _is_plain(transfer: requests.Transfer) -> bool:
    """Whether the values travel as the keys have them, under the clocks of the keys."""
    return not (
        transfer.cast
        or transfer.some_encoded
        or transfer.some_rows
        or transfer.any_version
        or transfer.takes is not None
        or transfer.sets_out is not None
    )
