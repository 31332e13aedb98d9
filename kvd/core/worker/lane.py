"""The lane: a short way through the machine for the call that a training loop makes again and again.

It takes a push, or a push and pull, of keys that are all at rest and fit into one message, whose batch the server
knows. Such a call needs no queue, no retry and no place among other calls, as nothing else is under way.

While the call is in flight, the lane changes nothing in the machine: it only remembers the call, and what it sent in
its name. When the expected answer comes, the keys move on by one clock. Whatever else happens first (another call, a
tick, a refusal) makes the call an ordinary one before it is looked at: the machine begins it the general way. As the
machine is what it was, it gets the same clock, step and request number, so its message is the one that was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvd.core import requests
from kvd.core.machine import Complete, Copy, Effect, LocalCall, Peer, Received, Send, Span
from kvd.core.membership import ViewState
from kvd.core.outbox import RETRY_FIRST_S, Outbox
from kvd.core.requests import Item, Versions
from kvd.core.session import SchedulerSession
from kvd.core.worker.asking import Asker
from kvd.core.worker.calls import CallBook
from kvd.core.worker.keys import KeyState, KeyTable, WorkerKey
from kvd.core.worker.message_plans import MessagePlan, MessagePlans
from kvd.core.worker.open_pushes import OpenPushes
from kvd.core.worker.participation import Participation
from kvd.core.worker.push_window import PushWindow, count_rounds
from kvd.core.worker.servers import Servers
from kvd.core.worker.steps import StepCounter
from kvd.core.worker.waits import Waits
from kvd.protocol.messages import ABSENT, Done, PushBatch, Values

READY = KeyState.READY


class Flight(NamedTuple):
    """A call in flight, and what was sent in its name."""

    event: LocalCall
    transfer: requests.Transfer
    begun: float
    peer: Peer
    request: int
    step: int
    windows: tuple[PushWindow, ...]
    plan: MessagePlan


class Lane:
    """At most one call is in flight.

    Attributes:
        due_at: when the call becomes an ordinary one at the latest; infinity without one.
    """

    def __init__(
        self,
        session: SchedulerSession,
        servers: Servers,
        participation: Participation,
        keys: KeyTable,
        plans: MessagePlans,
        outbox: Outbox,
        asker: Asker,
        calls: CallBook,
        pushes: OpenPushes,
        steps: StepCounter,
        waits: Waits,
        emit: Callable[[Effect], None],
    ) -> None:
        self.due_at = float("inf")
        self._session = session
        self._view: ViewState = session.view
        self._servers = servers
        self._participation = participation
        self._keys = keys
        self._plans = plans
        self._outbox = outbox
        self._asker = asker
        self._calls = calls
        self._pushes = pushes
        self._steps = steps
        self._waits = waits
        self._emit = emit
        self._flight: Flight | None = None

    @property
    def is_busy(self) -> bool:
        return self._flight is not None

    def pushes(self, name: str) -> bool:
        """Whether the call in flight pushes this key."""
        return self._flight is not None and any(item.key == name for item in self._flight.transfer.items)

    def begin(self, event: LocalCall, transfer: requests.Transfer, now: float) -> bool:
        """Takes the call and sends its message, if it may. False: nothing was done, and it goes the general way."""
        if self._flight is not None or not transfer.push or not self._is_clear():
            return False
        if transfer.cast or transfer.some_encoded or transfer.some_rows or transfer.sets_out is not None:
            return False
        known = self._keys.by_name
        keys = tuple([known.get(item.key) for item in transfer.items])
        plan = self._plans.known_of(keys)
        if plan is None or not plan.batch or plan.is_alone:
            return False
        peer = self._servers.peer_of(plan.partition)
        if plan.declared_to != peer or not _are_at_rest(keys, transfer.items):
            return False
        windows = tuple([key.window for key in keys if key is not None])
        clock = windows[0].clock + 1
        steps = self._steps.alone(clock)
        request = self._asker.next_number
        message = PushBatch(
            request,
            plan.batch,
            clock,
            transfer.how,
            transfer.samples,
            transfer.pull,
            step=steps.step,
            settled=steps.settled,
            place=transfer.place,
        )
        items = transfer.items
        spans = zip(plan.items, plan.ranges, strict=True)
        payload = tuple([Span(items[item].source, offset, nbytes) for item, (offset, nbytes) in spans])
        self._flight = Flight(event, transfer, now, peer, request, steps.step, windows, plan)
        self.due_at = min(now + RETRY_FIRST_S, self._waits.first_look(now, event.deadline, event.answer_s))
        self._emit(Send(peer, message, () if transfer.how == ABSENT else payload))
        return True

    def _is_clear(self) -> bool:
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

    def take(self, event: Received) -> bool:
        """Completes the call, if this is the answer that it expects. False: nothing was done."""
        flight = self._flight
        assert flight is not None
        message, transfer, plan = event.message, flight.transfer, flight.plan
        if (
            type(message) is not (Values if transfer.pull else Done)
            or message.request != flight.request
            or event.peer != flight.peer
            or event.epoch > self._view.epoch
        ):
            return False
        versions: list[Versions | None] = [None] * len(flight.windows)
        if type(message) is Values:
            if event.nbytes != plan.nbytes or message.coding is not None or event.fault or len(message.versions) > 1:
                return False
            versions = [Versions(message.versions[0], message.versions[0])] * len(flight.windows)
            self._emit(Copy(event.payload, tuple([transfer.items[item].target for item in plan.items]), plan.rows))
        self._asker.number()
        count_rounds(flight.windows)
        self._steps.passed(flight.step)
        self._outbox.activity += 1
        self._calls.activity += 1
        self._emit(Complete(flight.event.call, versions))
        self._end()
        return True

    def give_up(self) -> Flight:
        """Lets go of the call, which goes the general way from its beginning."""
        flight = self._flight
        assert flight is not None
        self._end()
        return flight

    def _end(self) -> None:
        self._flight, self.due_at = None, float("inf")

    def validate(self) -> None:
        """Raises AssertionError if anything else is under way beside the call in flight."""
        assert self._flight is None or self._is_clear(), f"more is under way than the call in flight: {self._flight}"


def _are_at_rest(keys: Sequence[WorkerKey | None], items: Sequence[Item]) -> bool:
    """Whether each key takes a push at once, all of them under the same clock, and no value need be checked."""
    if len(keys) > 1 and len(set(keys)) < len(keys):
        return False
    clock = -1
    for key, item in zip(keys, items, strict=True):
        if key is None or key.state is not READY or key.queue or item.spec is None or item.spec is not key.checked_spec:
            return False
        window = key.window
        if window.is_in_use or window.partial_failure is not None or clock not in (-1, window.clock):
            return False
        clock = window.clock
    return clock >= 0
