"""The express way of calls with handles: small pushes and pulls that a program repeats, many of them in flight at once.

As on the express way of a call that a program waits for (`kvd.client.cluster.express`), the call is a frame that was
prepared once for its key. Its value is copied into the frame, so the program may change it at once, and the frame stays
as it is while the call is in flight. The expected answer is read by whichever thread reads the links: it copies the
value out and keeps the promise of the call.

Whatever is unexpected makes the call an ordinary one, in the machine (`kvd.core.worker.express_flights`) and here: it
takes its value out of the frame, and its promise is kept as that of any other call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from kvd.client.calls.handle import Handle
from kvd.client.calls.promise import Promise
from kvd.client.calls.values import BYTE, Array, spec_of
from kvd.client.cluster.bound_keys import BoundKeys
from kvd.client.cluster.express_frames import HEADER_AT, PUSHED_AT
from kvd.client.cluster.open_calls import OpenCalls
from kvd.client.cluster.prepared_calls import PreparedCalls
from kvd.client.cluster.users import StoreUsers
from kvd.core.machine import LocalCall, Peer, Send
from kvd.core.requests import Item, Transfer
from kvd.core.worker.express_flights import Route
from kvd.core.worker.machine import WorkerMachine
from kvd.node.shell.driver import Driver
from kvd.node.shell.threads import LinkWaiter
from kvd.protocol.fixed import PUSH_NBYTES, VALUES_NBYTES, put_push, read_values
from kvd.transport.host import HostTransport
from kvd.transport.links.frames import INLINE_BELOW_BYTES, inline_frame


class PreparedFlight:
    """What the calls of one key have in common.

    Args:
        value: an array of the key's dtype and shape.
        route: what the machine knows of these calls.

    Attributes:
        frame: what is sent.
        payload: the place of the value in the frame.
    """

    __slots__ = ("dtype", "frame", "payload", "route", "shape")

    def __init__(self, value: Array, route: Route) -> None:
        self.route = route
        self.dtype, self.shape = value.dtype, value.shape
        self.frame = inline_frame(PUSH_NBYTES, value.nbytes)
        payload: Array = np.frombuffer(self.frame, value.dtype, value.size, PUSHED_AT)
        self.payload = payload.reshape(value.shape)


class FlyingCall:
    """One call, and what it is as an ordinary one.

    Attributes:
        number: under which its promise is known.
        place: where the program is, see `kvd.core.places`.
        out: where the sum belongs.
    """

    __slots__ = ("_answer_s", "_deadline", "_event", "_prepared", "number", "out", "place")

    def __init__(
        self, number: int, prepared: PreparedFlight, out: Array, place: int, deadline: float, answer_s: float
    ) -> None:
        self.number = number
        self.out = out
        self.place = place
        self._prepared = prepared
        self._deadline = deadline
        self._answer_s = answer_s
        self._event: LocalCall | None = None

    def local_call(self) -> LocalCall:
        """To be asked for the first time before another call of the key begins, which changes the frame."""
        if self._event is None:
            prepared = self._prepared
            item = prepared.route.item._replace(
                source=prepared.payload.copy().ravel().view(BYTE), target=self.out.ravel().view(BYTE)
            )
            transfer = Transfer((item,), push=True, pull=True, place=self.place)
            self._event = LocalCall(self.number, transfer, self._deadline, self._answer_s)
        return self._event


class ExpressFlightWay:
    """The express calls with handles of one store. Any thread of the program may make them.

    The frames (see `PreparedCalls`) do not count against the memory of pushes.

    Args:
        bound: the keys whose arrays are the store's.
        wait: see `Engine`.
        slice_bytes: the size of the slices in this cluster.
        answer_s, round_s: the default deadlines of a call, see `Engine.submit`.
    """

    def __init__(
        self,
        machine: WorkerMachine,
        driver: Driver,
        transport: HostTransport,
        waiter: LinkWaiter,
        calls: OpenCalls,
        users: StoreUsers,
        bound: BoundKeys,
        wait: Callable[[Promise, float | None], None],
        *,
        slice_bytes: int,
        answer_s: float,
        round_s: float,
    ) -> None:
        self._machine = machine
        self._incarnation = machine.incarnation
        self._driver = driver
        self._transport = transport
        self._waiter = waiter
        self._calls = calls
        self._users = users
        self._bound = bound
        self._wait = wait
        self._slice_bytes = slice_bytes
        self._answer_s = answer_s
        self._round_s = round_s
        self._prepared: PreparedCalls[PreparedFlight] = PreparedCalls()

    # ── which calls go this way ──

    def find(self, name: str, value: Any, out: Any) -> PreparedFlight | None:
        """The call, if it may go the express way."""
        call = self._prepared.by_key.get(name)
        if call is None or type(value) is not np.ndarray or type(out) is not np.ndarray:
            return None
        dtype, shape = call.dtype, call.shape
        if value.dtype != dtype or out.dtype != dtype or value.shape != shape or out.shape != shape:
            return None
        return None if not out.flags.carray or self._bound.has(name) else call

    def prepare(self, name: str, value: Array, place: int) -> None:
        """A call on the key is about to be made, which pushes this value, and is like an earlier one: the next one may
        go the express way."""
        if (
            not 0 < value.nbytes <= INLINE_BELOW_BYTES
            or not self._transport.has_links
            or not self._driver.stepper.enter()
        ):
            return
        try:
            item = Item(name, spec_of(value.dtype, value.shape, self._slice_bytes))
            route = self._machine.express.flights.recognise(item, place, self._round_s, self._answer_s)
        finally:
            self._driver.stepper.leave(math.inf)
        if route is not None:
            self._prepared.keep(name, PreparedFlight(value, route), value.nbytes)

    def forget(self, names: Collection[str]) -> None:
        """Keys with these names are deleted: a call on them is prepared again."""
        self._prepared.forget(names)

    # ── the way out ──

    def begin(self, prepared: PreparedFlight, value: Array, out: Array, place: int) -> Handle | None:
        """Pushes `value`, of which nothing is read any more when this returns, and pulls into `out`. None: nothing was
        done.

        Args:
            place: where the program is, see `kvd.core.places`.
        """
        self._users.this_thread()
        machine, stepper, route = self._machine, self._driver.stepper, prepared.route
        promise = Promise(self._users)
        if not stepper.enter():
            return None
        try:
            now = stepper.now()
            number = self._calls.begin(promise)
            call = FlyingCall(number, prepared, out, place, now + self._round_s, self._answer_s)
            if not machine.express.flights.begin(route, number, call, place, now):
                self._calls.forget(number)
                return None
            session, (step, settled) = machine.session, route.steps
            # fmt: off
            put_push(
                prepared.frame, HEADER_AT, self._incarnation, session.view.epoch, session.run, route.request,
                route.batch, route.clock + 1, step, settled, place,
            )
            # fmt: on
            prepared.payload[...] = value
            link = self._transport.link_to(route.peer)
            if link is None or not link.send_prepared(prepared.frame):
                self._send_message(route, call)
        finally:
            stepper.leave(machine.next_deadline() or math.inf)
        return Handle(promise, lambda _: out, "pushpull", self._wait)

    def _send_message(self, route: Route, call: FlyingCall) -> None:
        """Sends what the frame would have brought in another way."""
        request: Any = call.local_call().request
        payload = route.plans[0].payload_of(request.items)
        self._driver.sender.send_own(Send(route.peer, route.message(call.place), payload))

    # ── the way back ──

    def take(self, peer: Peer, header: bytes, payload: memoryview) -> bool:
        """Takes an answer in, on the thread that reads it, if a call expects it. False: nothing was done."""
        answer = read_values(header) if len(header) == VALUES_NBYTES else None
        if answer is None or not self._driver.stepper.enter():
            return False
        epoch, run, request = answer
        machine = self._machine
        call: Any = None
        try:
            if run == machine.run:
                call = machine.express.flights.end(peer, epoch, request, len(payload), self._driver.stepper.now())
        finally:
            self._driver.stepper.leave(math.inf)
        if call is None:
            return False
        out: Array = call.out
        out[...] = np.frombuffer(payload, out.dtype).reshape(out.shape)
        if self._calls.keep(call.number):
            self._waiter.wake()
        return True
