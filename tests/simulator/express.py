"""The express ways of a worker in a simulator: what `kvd.client.cluster.express` and
`kvd.client.cluster.express_flights` do, with messages in place of frames."""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from kvd.core.machine import (
    Complete,
    Copy,
    Effect,
    Event,
    LocalCall,
    Machine,
    Received,
    Row,
    Send,
)
from kvd.core.requests import Item, Transfer, Versions
from kvd.core.worker.express import Repeated
from kvd.core.worker.express_flights import Route
from kvd.core.worker.machine import WorkerMachine
from kvd.protocol.codec import encode
from kvd.protocol.fixed import PUSH_NBYTES, put_push
from kvd.protocol.messages import ADD, PushBatch, Values


class _Trip(NamedTuple):
    """One of many calls in flight."""

    event: LocalCall
    rows: tuple[Row, ...]

    def local_call(self) -> LocalCall:
        return self.event


class _Worker:
    """What the shell of one worker knows.

    Attributes:
        known, routes: the calls that were recognised, by key, which it waits for, and of which many are in flight.
        event, repeated: the call in flight; None: there is none.
    """

    def __init__(self) -> None:
        self.known: dict[str, Repeated] = {}
        self.routes: dict[str, Route] = {}
        self.event: LocalCall | None = None
        self.repeated: Repeated | None = None


class ExpressSteps:
    """Steps machines.

    Args:
        every: of so many calls of a worker one goes an express way, if it can; the others go by its lane.
        waits: whether the program waits for such a call, if no other is in flight; else all have handles.
    """

    def __init__(self, every: int = 2, *, waits: bool = True) -> None:
        self._every = every
        self._waits = waits
        self._workers: WeakKeyDictionary[WorkerMachine, _Worker] = WeakKeyDictionary()

    def step(self, machine: Machine, event: Event, now: float) -> list[Effect]:
        """As `machine.step`."""
        effects = None
        if isinstance(machine, WorkerMachine):
            worker = self._workers.setdefault(machine, _Worker())
            if isinstance(event, LocalCall) and event.call % self._every == 0:
                effects = self._begin(machine, worker, event, now) or self._begin_flight(machine, worker, event, now)
            elif isinstance(event, Received) and isinstance(event.message, Values):
                effects = self._end(machine, worker, event, now) or self._end_flight(machine, event, now)
        return machine.step(event, now) if effects is None else effects

    def _begin(self, machine: WorkerMachine, worker: _Worker, event: LocalCall, now: float) -> list[Effect] | None:
        transfer = event.request
        if not self._waits or not isinstance(transfer, Transfer) or not _is_plain(transfer):
            return None
        item = transfer.items[0]
        repeated = worker.known.get(item.key)
        if repeated is None or repeated.item.spec is not item.spec:
            repeated = machine.express.recognise(
                Item(item.key, item.spec), event.deadline - now, event.answer_s or event.deadline - now
            )
            if repeated is None:
                return None
            worker.known[item.key] = repeated
        if not machine.express.begin(repeated, lambda: event, now):
            return None
        worker.event, worker.repeated = event, repeated
        message = repeated.message(transfer.place)
        _check_frame(machine, message)
        return [Send(repeated.peer, message, repeated.plan.payload_of(transfer.items))]

    def _end(self, machine: WorkerMachine, worker: _Worker, event: Received, now: float) -> list[Effect] | None:
        call, repeated, message = worker.event, worker.repeated, event.message
        if call is None or repeated is None or machine.express.in_flight is not repeated:
            return None
        assert isinstance(message, Values)
        is_expected = (
            (event.peer, event.sender, event.epoch, event.run)
            == (repeated.peer, repeated.peer, machine.epoch, machine.run)
            and message.request == repeated.request
            and len(message.versions) == 1
            and message.coding is None
            and event.nbytes == repeated.plan.nbytes
        )
        if not is_expected or not machine.express.end(repeated, message.versions[0], now):
            return None
        worker.event = worker.repeated = None
        request: Any = call.request
        version = message.versions[0]
        copy = Copy(event.payload, (request.items[0].target,), repeated.plan.rows)
        return [copy, Complete(call.call, [Versions(version, version)])]

    def _begin_flight(
        self, machine: WorkerMachine, worker: _Worker, event: LocalCall, now: float
    ) -> list[Effect] | None:
        transfer = event.request
        if machine.express.in_flight is not None or not isinstance(transfer, Transfer) or not _is_plain(transfer):
            return None
        item, place = transfer.items[0], transfer.place
        route = worker.routes.get(item.key)
        if route is None or route.item.spec is not item.spec:
            route = machine.express.flights.recognise(
                Item(item.key, item.spec), place, event.deadline - now, event.answer_s or event.deadline - now
            )
            if route is None:
                return None
            worker.routes[item.key] = route
        (plan,) = route.plans
        if not machine.express.flights.begin(route, event.call, _Trip(event, plan.rows), place, now):
            return None
        message = route.message(place)
        _check_frame(machine, message)
        return [Send(route.peer, message, plan.payload_of(transfer.items))]

    def _end_flight(self, machine: WorkerMachine, event: Received, now: float) -> list[Effect] | None:
        message: Any = event.message
        is_expected = event.run == machine.run and message.coding is None and len(message.versions) == 1
        if not is_expected or event.fault or machine.express.in_flight is not None:
            return None
        trip: Any = machine.express.flights.end(event.peer, event.epoch, message.request, event.nbytes, now)
        if trip is None:
            return None
        version, request = message.versions[0], trip.event.request
        copy = Copy(event.payload, (request.items[0].target,), trip.rows)
        return [copy, Complete(trip.event.call, [Versions(version, version)])]


def _is_plain(transfer: Transfer) -> bool:
    return (
        transfer.push
        and transfer.pull
        and len(transfer.items) == 1
        and transfer.samples == 1
        and (transfer.priority, transfer.how) == (0, ADD)
        and not (transfer.any_version or transfer.cast or transfer.some_encoded or transfer.some_rows)
        and transfer.takes is None
        and transfer.sets_out is None
        and transfer.finds is None
    )


def _check_frame(machine: WorkerMachine, push: PushBatch) -> None:
    """The header that a prepared frame has is that of the message."""
    frame = bytearray(PUSH_NBYTES)
    put_push(
        frame,
        0,
        machine.incarnation,
        machine.epoch,
        machine.run,
        push.request,
        push.batch,
        push.clock,
        push.step,
        push.settled,
        push.place,
    )
    assert frame == encode(push, machine.incarnation, machine.epoch, machine.run), f"another frame for {push}"
