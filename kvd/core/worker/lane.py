"""The lane: a short way through the machine for the call that a training loop makes again and again.

It takes a push, a pull, or both, of keys that are all at rest, whose batches the servers know. Such a call needs no
queue, no retry and no place among other calls, as nothing else is under way.

While the call is in flight, the lane changes nothing in the machine: it only remembers the call, and what it sent in
its name. When the expected answers are there, the keys move on. Whatever else happens first (another call, a refusal,
a retry that is due) makes the call an ordinary one before it is looked at: the machine begins it the general way. As
the machine is what it was, the call gets the same clock, step and request numbers, so its messages are those that were
sent. Only the heartbeats to the scheduler and their answers pass by: they change nothing that a call depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvd.core import requests
from kvd.core.machine import SCHEDULER, Complete, Effect, Event, LocalCall, Peer, Received, Send, ServerPeer, Tick
from kvd.core.membership import ViewState
from kvd.core.outbox import RETRY_FIRST_S, Outbox
from kvd.core.requests import Item
from kvd.core.session import SchedulerSession
from kvd.core.worker.asking import Asker
from kvd.core.worker.calls import CallBook
from kvd.core.worker.keys import KeyTable, WorkerKey
from kvd.core.worker.loads import Load, Loads
from kvd.core.worker.looks import NEVER
from kvd.core.worker.message_plans import MessagePlan, MessagePlans
from kvd.core.worker.open_pushes import OpenPushes
from kvd.core.worker.participation import Participation
from kvd.core.worker.servers import Servers
from kvd.core.worker.steps import StepCounter
from kvd.core.worker.waits import Waits
from kvd.protocol.messages import ABSENT, Done, HeartbeatAck, PullBatch, PushBatch, Staged, Values

MAX_ANSWERS = 4096  # kept of one call, until it is completed


@dataclass(slots=True)
class Flight:
    """A call in flight, and what was sent in its name.

    Attributes:
        requests: the number of the messages.
        awaited: the plans and peers of the messages that are not answered, by request.
        answers: all that were taken in so far, and when; without their payloads, which are where they belong.
    """

    event: LocalCall
    transfer: requests.Transfer
    begun: float
    step: int
    load: Load
    requests: int
    awaited: dict[int, tuple[MessagePlan, Peer]] = field(default_factory=dict)
    answers: list[tuple[Received, float]] = field(default_factory=list)


class Stillness:
    """Whether nothing is under way in the machine of a worker, besides what the lane has sent."""

    def __init__(
        self,
        session: SchedulerSession,
        servers: Servers,
        participation: Participation,
        outbox: Outbox,
        calls: CallBook,
        pushes: OpenPushes,
    ) -> None:
        self._session = session
        self._servers = servers
        self._participation = participation
        self._outbox = outbox
        self._calls = calls
        self._pushes = pushes

    def is_total(self) -> bool:
        """Whether nothing at all is under way, and this worker takes part as usual."""
        part = self._participation
        return (
            not self._calls
            and not self._outbox
            and not self._pushes
            and part.in_rounds
            and not part.is_apart
            and not self._servers.orphans
            and self._session.failure is None
        )

    def disturb(self) -> None:
        """A call was made and answered: who looks for activity sees it."""
        self._outbox.activity += 1
        self._calls.activity += 1


class Lane:
    """At most one call is in flight.

    Args:
        is_on: otherwise it takes no call.

    Attributes:
        due_at: when the call becomes an ordinary one at the latest; NEVER without one.
        generation: how often the machine has taken an event the general way. As long as it stays, nothing is under way
            but what the lane knows, and no view or key has changed.
        others_due_at: when any other part of the machine has something to do, but for the session with the scheduler;
            None: that is not worked out yet. What is due is done first, so the lane takes nothing then.
        session_due_at: when the session has; worked out with it.
    """

    def __init__(
        self,
        stillness: Stillness,
        view: ViewState,
        servers: Servers,
        keys: KeyTable,
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
        self.session_due_at = NEVER
        self._is_on = is_on
        self._stillness = stillness
        self._view = view
        self._servers = servers
        self._outbox = outbox
        self._asker = asker
        self._steps = steps
        self._waits = waits
        self._emit = emit
        self._loads = Loads(keys, plans)
        self._flight: Flight | None = None

    @property
    def is_busy(self) -> bool:
        return self._flight is not None

    def pushes(self, name: str) -> bool:
        """Whether the call in flight pushes this key. Any thread may ask: the call may end meanwhile."""
        flight = self._flight
        return flight is not None and flight.transfer.push and name in flight.load.names()

    def begin(self, event: LocalCall, request: requests.Transfer | requests.ListTransfer, now: float) -> bool:
        """Takes the call and sends its messages, if it may. False: nothing was done, and it goes the general way."""
        listed: requests.Listed | None = None
        if isinstance(request, requests.ListTransfer):
            listed, transfer = request
        else:
            transfer = request
        if not self._is_on or not _is_plain(transfer) or self._others_are_due(now) or not self._stillness.is_total():
            return False
        load = self._loads.of(transfer) if listed is None else self._loads.of_list(listed)
        if load is None or not self._may_send(load.plans):
            return False
        if transfer.finds is not None:
            transfer.finds(load.specs())
        plans, clock = load.plans, load.clock
        step, settled = self._steps.alone(clock + 1) if transfer.push else (0, 0)
        flight = Flight(event, transfer, now, step, load, len(plans))
        sends = []
        for number, plan in enumerate(plans, self._asker.next_number):
            peer = self._servers.peer_of(plan.partition)
            flight.awaited[number] = plan, peer
            if transfer.push:
                how, samples, place = transfer.how, transfer.samples, transfer.place
                message: PushBatch | PullBatch = PushBatch(
                    number, plan.batch, clock + 1, how, samples, transfer.pull, False, step, settled, place
                )
                sends.append(Send(peer, message, load.payload_of(plan) if how != ABSENT else ()))
            else:
                sends.append(Send(peer, PullBatch(number, plan.batch, clock)))
        for send in sends if len(sends) == 1 else self._outbox.in_order(sends):
            self._emit(send)
        self._flight = flight
        self.due_at = min(now + RETRY_FIRST_S, self._waits.first_look(now, event.deadline, event.answer_s))
        return True

    def _may_send(self, plans: Sequence[MessagePlan]) -> bool:
        """Whether each message may name a batch that its server knows, and all of them may leave now."""
        for plan in plans:
            if plan.is_alone or not plan.batch or plan.declared_to != self._servers.peer_of(plan.partition):
                return False
        return len(plans) == 1 or sum([plan.nbytes for plan in plans]) <= self._outbox.credit_bytes

    def _others_are_due(self, now: float) -> bool:
        return self.others_due_at is None or now >= self.others_due_at

    def lets_pass(self, event: Event, now: float) -> bool:
        """Whether the event does not concern the call in flight: a tick when nothing is due, or a sign of life of the
        scheduler."""
        if now >= self.due_at or self._others_are_due(now):
            return False
        if isinstance(event, Received):
            is_sign = type(event.message) is HeartbeatAck and event.peer == SCHEDULER
            return is_sign and event.epoch <= self._view.epoch
        return isinstance(event, Tick)

    def take(self, event: Received, now: float) -> bool:
        """Takes an expected answer in, and completes the call with the last one. False: nothing was done."""
        flight = self._flight
        assert flight is not None
        if now >= self.due_at or self._others_are_due(now):
            return False
        message: Any = event.message
        plan, peer = flight.awaited.get(getattr(message, "request", 0), (None, None))
        if plan is None or peer != event.peer or event.epoch > self._view.epoch or len(flight.answers) >= MAX_ANSWERS:
            return False
        kind = type(message)
        if kind is not Staged:
            if kind is not (Values if flight.transfer.pull else Done):
                return False
            if kind is Values:
                if event.nbytes != plan.nbytes or message.coding is not None or event.fault:
                    return False
                if len(message.versions) not in (1, len(plan.slice_ids)):
                    return False
                self._emit(flight.load.take(plan, event.payload, message.versions))
            del flight.awaited[message.request]
        if flight.awaited:
            flight.answers.append((event._replace(payload=None), now))
        else:
            self._complete(flight)
        return True

    def _complete(self, flight: Flight) -> None:
        """All are answered: what the general way would have counted is counted."""
        self._asker.skip(flight.requests)
        if flight.transfer.push:
            flight.load.pushed()
            self._steps.passed(flight.step)
        self._stillness.disturb()
        self._emit(Complete(flight.event.call, flight.load.result()))
        self._end()

    def single(self, item: Item) -> tuple[WorkerKey, MessagePlan, ServerPeer] | None:
        """The key of the item, the plan of the message in which its one slice travels, and its server, if a call on it
        may be taken now."""
        if not self._is_on or self.is_busy or not self._stillness.is_total():
            return None
        found = self._loads.of_slice(item)
        if found is None or not self._may_send((found[1],)):
            return None
        key, plan = found
        return key, plan, self._servers.peer_of(plan.partition)

    def is_due(self, now: float) -> bool:
        """Whether any part of the machine has something to do, the session with the scheduler too."""
        return self.others_due_at is None or now >= self.others_due_at or now >= self.session_due_at

    def is_free(self, now: float) -> bool:
        """Whether no call is in flight, and no part of the machine has something to do."""
        due_at = self.others_due_at
        return self._flight is None and due_at is not None and now < due_at and now < self.session_due_at

    def adopt(self, flight: Flight, due_at: float) -> None:
        """Goes on with a call that was begun elsewhere, while nothing else is in flight."""
        self._flight, self.due_at = flight, due_at

    def disturb(self) -> None:
        """A call was made and answered elsewhere: who looks for activity sees it."""
        self._stillness.disturb()

    def give_up(self) -> Flight:
        """Lets go of the call, which goes the general way from its beginning."""
        flight = self._flight
        assert flight is not None
        self._end()
        return flight

    def _end(self) -> None:
        self._flight, self.due_at = None, NEVER

    def validate(self) -> None:
        """Raises AssertionError if anything else is under way beside the call in flight."""
        assert self._flight is None or self._stillness.is_total(), (
            f"more is under way than the call in flight: {self._flight}"
        )


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
