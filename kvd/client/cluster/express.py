"""The express way of a worker: one small push and pull that a program repeats, and waits for.

Such a call is a frame that was prepared once. The program's thread asks the machine for the numbers that change, writes
them and the value into the frame, sends it, waits for the bytes that the answer must begin with, and copies the value
out. No message, event, effect or handle is made on the way.

Whatever is unexpected makes the call an ordinary one, in the machine (`kvd.core.worker.express`) and here: its promise
is kept then, as that of any other call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from kvd.client.calls.handle import Handle
from kvd.client.calls.promise import Promise
from kvd.client.calls.values import BYTE, Array, spec_of
from kvd.client.cluster.bound_keys import BoundKeys
from kvd.client.cluster.interrupts import Uninterrupted
from kvd.client.cluster.open_calls import OpenCalls
from kvd.client.cluster.users import StoreUsers
from kvd.core.machine import LocalCall, Send
from kvd.core.requests import Item, Transfer
from kvd.core.worker.express import Repeated
from kvd.core.worker.machine import WorkerMachine
from kvd.node.driver import Driver
from kvd.node.threads import LinkWaiter
from kvd.protocol.fixed import (
    PUSH_NBYTES,
    VALUES_HEAD_NBYTES,
    VALUES_NBYTES,
    VALUES_TAIL_NBYTES,
    put_push,
    put_values_head,
    version_of,
)
from kvd.transport.frames import INLINE_BELOW_BYTES, PREFIX, inline_frame
from kvd.transport.host import HostTransport
from kvd.transport.link import Link

MOST_PREPARED = 1024  # keys; one more, and all are prepared again
HEADER_AT = PREFIX.size
PAYLOAD_AT = HEADER_AT + PUSH_NBYTES


def single_of(key: Any, value: Any, out: Any) -> tuple[str, Array, Array] | None:
    """The call as one on a single key with arrays of NumPy, if it is one, such as `pushpull("w", value)` or
    `pushpull(["w"], [value])`."""
    if type(key) is list and type(value) is list and type(out) is list and len(key) == len(value) == len(out) == 1:
        key, value, out = key[0], value[0], out[0]
    if type(key) is str and type(value) is np.ndarray and type(out) is np.ndarray:
        return key, value, out
    return None


class Trip:
    """One call, and what it is as an ordinary one.

    Attributes:
        number: under which the promise of the ordinary call is known; 0 until it is.
        place: where the program is, see `kvd.core.places`.
        deadline: of the call.
    """

    __slots__ = ("_answer_s", "_item", "_out", "_transfer", "_value", "deadline", "number", "place")

    def __init__(
        self,
        item: Item,
        value: Array,
        out: Array,
        place: int,
        deadline: float,
        answer_s: float,
    ) -> None:
        self.number = 0
        self.place = place
        self.deadline = deadline
        self._item = item
        self._value = value
        self._out = out
        self._answer_s = answer_s
        self._transfer: Transfer | None = None

    def transfer(self) -> Transfer:
        """Always the same object: the memory that a call uses is told apart by identity."""
        if self._transfer is None:
            item = self._item._replace(source=self._value.ravel().view(BYTE), target=self._out.ravel().view(BYTE))
            self._transfer = Transfer((item,), push=True, pull=True, place=self.place)
        return self._transfer

    def sources(self) -> list[Array]:
        """The memory that the ordinary call sends from."""
        return [self.transfer().items[0].source]

    def local_call(self) -> LocalCall:
        return LocalCall(self.number, self.transfer(), self.deadline, self._answer_s)


class PreparedCall:
    """What the pushpulls of one key have in common.

    Args:
        item: the key and its spec.
        value: an array of that spec.
        repeated: what the machine knows of these calls.

    Attributes:
        link: by which the call went that began last; None: another way.
        frame: what is sent.
        payload: the place of the value in the frame.
        expected: what the answer begins with, up to its version.
        rest_nbytes: of the answer after that.
    """

    def __init__(self, item: Item, value: Array, repeated: Repeated) -> None:
        self.item = item
        self.repeated = repeated
        self.link: Link | None = None
        self.frame = inline_frame(PUSH_NBYTES, value.nbytes)
        payload: Array = np.frombuffer(self.frame, value.dtype, value.size, PAYLOAD_AT)
        self.payload = payload.reshape(value.shape)
        self.expected = inline_frame(VALUES_NBYTES, value.nbytes)[: HEADER_AT + VALUES_HEAD_NBYTES]
        self.rest_nbytes = VALUES_TAIL_NBYTES + value.nbytes
        self._dtype, self._shape = value.dtype, value.shape

    def fits(self, value: Array, out: Array) -> bool:
        """Whether these are arrays of the dtype and shape of the key, in memory that the general way could use."""
        dtype, shape = self._dtype, self._shape
        return (
            value.dtype == dtype
            and out.dtype == dtype
            and value.shape == shape
            and out.shape == shape
            and value.flags.c_contiguous
            and out.flags.carray
        )


class ExpressWay:
    """The express calls of one store. Any thread of the program may make them.

    Args:
        bound: the keys whose arrays are the store's.
        submit: makes a call the general way.
        wait, take_back: see `Engine`.
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
        submit: Callable[[Transfer], Promise],
        wait: Callable[[Promise, float | None], None],
        take_back: Callable[[list[Array]], None],
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
        self._submit = submit
        self._wait = wait
        self._take_back = take_back
        self._slice_bytes = slice_bytes
        self._answer_s = answer_s
        self._round_s = round_s
        self._prepared: dict[str, PreparedCall] = {}

    # ── which calls go this way ──

    def find(self, name: str, value: Array, out: Array) -> PreparedCall | None:
        """The call, if it may go the express way."""
        call = self._prepared.get(name)
        if call is None or not call.fits(value, out) or self._bound.has(name):
            return None
        return call

    def prepare(self, name: str, value: Array) -> None:
        """A call on the key has ended, which pushed this value: the next one may go the express way."""
        if not 0 < value.nbytes <= INLINE_BELOW_BYTES or not value.dtype.isnative or not self._transport.has_links:
            return
        stepper = self._driver.stepper
        if not stepper.enter():
            return
        try:
            item = Item(name, spec_of(value.dtype, value.shape, self._slice_bytes))
            repeated = self._machine.express.recognise(item, self._round_s, self._answer_s)
        finally:
            stepper.leave(math.inf)
        if repeated is not None:
            if len(self._prepared) >= MOST_PREPARED:
                self._prepared.clear()
            self._prepared[name] = PreparedCall(item, value, repeated)

    # ── the way ──

    def run(self, call: PreparedCall, value: Array, out: Array, place: int) -> Handle | None:
        """Pushes `value` and pulls into `out`. None: it is done. Otherwise it has become an ordinary call, whose handle
        must be waited for.

        Args:
            place: where the program is, see `kvd.core.places`.
        """
        promise = Promise(self._users.waiting)
        now = self._driver.stepper.now()
        trip = Trip(call.item, value, out, place, now + self._round_s, self._answer_s)
        try:
            with Uninterrupted(self._waiter.nudge) as ctrl_c:
                if self._waiter.begin():
                    trip.number = self._calls.begin(promise)
                    try:
                        if self._send(call, trip, value, now):
                            with self._users.waiting(promise):
                                is_over = self._receive(call, trip, out, promise, ctrl_c)
                            return None if is_over else self._handle(promise, trip)
                        self._calls.forget(trip.number)
                    finally:
                        self._waiter.end()
                self._prepared.pop(call.item.key, None)
                return self._handle(self._submit(trip.transfer()), trip)
        except BaseException:  # Ctrl-C
            self._take_back(trip.sources())
            raise

    def _handle(self, promise: Promise, trip: Trip) -> Handle:
        return Handle(promise, what="pushpull", drive=self._wait, reclaim=lambda: self._take_back(trip.sources()))

    def _send(self, call: PreparedCall, trip: Trip, value: Array, now: float) -> bool:
        """Begins the call and sends its frame. False: nothing was done."""
        machine, stepper, repeated = self._machine, self._driver.stepper, call.repeated
        if not stepper.enter():
            return False
        try:
            if not machine.express.begin(repeated, trip.local_call, now):
                return False
            call.link = self._transport.link_to(repeated.peer)
            if call.link is None or not self._send_frame(call, call.link, value, trip.place):
                call.link = None
                self._send_message(repeated, trip)
            return True
        finally:
            stepper.leave(machine.next_deadline() or math.inf)

    def _send_frame(self, call: PreparedCall, link: Link, value: Array, place: int) -> bool:
        repeated, session = call.repeated, self._machine.session
        epoch, run, request = session.view.epoch, session.run, repeated.request
        # fmt: off
        put_push(
            call.frame, HEADER_AT, self._incarnation, epoch, run, request, repeated.plan.batch, repeated.clock,
            repeated.step, repeated.settled, place,
        )
        # fmt: on
        call.payload[...] = value
        put_values_head(call.expected, HEADER_AT, repeated.peer, epoch, run, request)
        return link.send_prepared(call.frame)

    def _send_message(self, repeated: Repeated, trip: Trip) -> None:
        """Sends what the frame would have brought in another way."""
        payload = repeated.plan.payload_of(trip.transfer().items)
        self._driver.sender.send_own(Send(repeated.peer, repeated.message(trip.place), payload))

    def _receive(self, call: PreparedCall, trip: Trip, out: Array, promise: Promise, ctrl_c: Uninterrupted) -> bool:
        """Waits for the expected answer and takes it in. False: the call has become an ordinary one, or will."""
        link = call.link
        if link is None:
            return False
        rest = self._waiter.wait_for(link, call.expected, call.rest_nbytes, promise, ctrl_c)
        return rest is not None and self._take(call, link, trip, rest, out)

    def _take(self, call: PreparedCall, link: Link, trip: Trip, rest: bytes, out: Array) -> bool:
        """Takes the answer in, as it was expected. False: the call has become an ordinary one, which it answers."""
        version, stepper = version_of(rest), self._driver.stepper
        if version is not None and stepper.enter():
            try:
                is_over = self._machine.express.end(call.repeated, version, stepper.now())
            finally:
                stepper.leave(math.inf)
            if is_over:
                out[...] = np.frombuffer(rest, out.dtype, out.size, VALUES_TAIL_NBYTES).reshape(out.shape)
                self._calls.forget(trip.number)
                return True
        header = bytes(call.expected[HEADER_AT:]) + rest[:VALUES_TAIL_NBYTES]
        payload = memoryview(rest)[VALUES_TAIL_NBYTES:]
        self._driver.receiver.receive(link.peer, header, payload, link.proven.principal)
        return False
