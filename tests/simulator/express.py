"""The express ways in a simulator: what `kvd.client.cluster.express`, `kvd.client.cluster.express_flights` and
`kvd.node.shell.server_express` do, with messages in place of frames. The update of a round is a job that takes
a while."""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from kvd.core.machine import (
    Complete,
    Copy,
    Effect,
    Event,
    InRun,
    JobDone,
    LocalCall,
    Machine,
    Received,
    Row,
    Send,
    Span,
)
from kvd.core.principals import HOLDER
from kvd.core.requests import Item, Transfer, Versions
from kvd.core.server.express import Round
from kvd.core.server.machine import ServerMachine
from kvd.core.server.router import ServerRouter
from kvd.core.worker.express import Repeated
from kvd.core.worker.express_flights import Route
from kvd.core.worker.machine import WorkerMachine
from kvd.protocol.codec import encode
from kvd.protocol.fixed import PUSH_HEAD_NBYTES, PUSH_NBYTES, PushNumbers, numbers_of, push_numbers, put_push
from kvd.protocol.messages import ADD, Done, PushBatch, Values


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


class ServerSteps:
    """The express way of one run in a server."""

    def __init__(self) -> None:
        self._rounds: dict[int, Round] = {}  # whose update is under way, by its job

    def step(self, machine: ServerMachine, event: Event, now: float) -> list[Effect] | None:
        """What the machine does with a push that is held, or with the end of a job that made a round. None: the event
        is for `machine.step`, as when a heartbeat is due: it goes with the event, as without the express way, where a
        real server waits for its timer."""
        if machine.session.is_due(now):
            return None
        if isinstance(event, JobDone):
            round_ = self._rounds.pop(event.job, None)
            if round_ is None or event.error is not None or not machine.fast.express.end(round_, event.result):
                return None
            return _answers(round_, event.result)
        if not isinstance(event, Received) or not isinstance(event.message, PushBatch) or event.principal is not HOLDER:
            return None
        numbers = push_numbers(event.message)
        if numbers is None or event.payload is None:
            return None
        _check_header(machine, event.message, numbers)
        round_ = machine.fast.lane.hold(event.peer, event.sender, numbers, event.payload, event.nbytes, None)
        if round_ is None or round_.update is None:
            return None if round_ is None else []
        self._rounds[round_.update.job] = round_
        return [round_.update]


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
        self._servers: WeakKeyDictionary[ServerMachine, ServerSteps] = WeakKeyDictionary()

    def step(self, machine: Machine, event: Event, now: float) -> list[Effect]:
        """As `machine.step`."""
        effects = None
        if isinstance(machine, WorkerMachine):
            worker = self._workers.setdefault(machine, _Worker())
            if isinstance(event, LocalCall) and event.call % self._every == 0:
                effects = self._begin(machine, worker, event, now) or self._begin_flight(machine, worker, event, now)
            elif isinstance(event, Received) and isinstance(event.message, Values):
                effects = self._end(machine, worker, event, now) or self._end_flight(machine, event, now)
        elif isinstance(machine, ServerRouter) and isinstance(event, Received | JobDone):
            of_run = machine.machine_of(event.run)
            if of_run is not None:
                own: Any = self._servers.setdefault(of_run, ServerSteps()).step(of_run, event, now)
                effects = own and [InRun(event.run, of_run.epoch, own)]
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


def _answers(round_: Round, value: Any) -> list[Effect]:
    """To those whose pushes the round has."""
    version, nbytes = round_.group.log.version, round_.group.nbytes
    return [
        Send(push.peer, Values(push.numbers.request, (version,)), (Span(value, 0, nbytes),))
        if push.numbers.pull
        else Send(push.peer, Done(push.numbers.request))
        for push in round_.held.values()
    ]


def _check_header(machine: ServerMachine, push: PushBatch, numbers: PushNumbers) -> None:
    """What the shell reads out of the header is what the message says."""
    header = encode(push, machine.incarnation, machine.epoch, machine.run)
    assert numbers_of(header[PUSH_HEAD_NBYTES:]) == numbers, f"other numbers in the header of {push}"


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
