"""The express way of a worker: one small push and pull that a program repeats, and waits for.

Such a call is a frame that was prepared once (`kvd.client.cluster.express_frames`). The program's thread asks the
machine for the numbers that change, writes them and the value into the frame, sends it, waits for the bytes that the
answer must begin with, and copies the value out. No message, event, effect, promise or handle is made on the way.

Whatever is unexpected makes the call an ordinary one, in the machine (`kvd.core.worker.express`) and here
(`kvd.client.cluster.trips`): its promise is kept then, as that of any other call.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from typing import Any
from weakref import WeakSet

import numpy as np

from kvd.client.calls.handle import Handle
from kvd.client.calls.held_signals import signals
from kvd.client.calls.values import Array, spec_of
from kvd.client.cluster.bound_keys import BoundKeys
from kvd.client.cluster.express_frames import PreparedCall
from kvd.client.cluster.prepared_calls import PreparedCalls
from kvd.client.cluster.trips import OrdinaryCall, OrdinaryCalls, Trip
from kvd.client.cluster.users import StoreUsers
from kvd.core.machine import Send
from kvd.core.requests import Item
from kvd.core.worker.machine import WorkerMachine
from kvd.node.shell.driver import Driver
from kvd.node.shell.threads import LinkWaiter
from kvd.transport.host import HostTransport
from kvd.transport.links.frames import INLINE_BELOW_BYTES
from kvd.transport.links.link import Link

_LISTS = (list, tuple)
OFTEN_S = 0.005  # the loop stays paused between calls that follow each other so soon

_ways: WeakSet[ExpressWay] = WeakSet()  # of this process


def single_of(key: Any, value: Any, out: Any) -> tuple[str | int, Array, Array] | None:
    """The call as one on a single key with arrays of NumPy, if it is one, such as `pushpull("w", value)` or
    `pushpull([3], [value])`."""
    kind = type(key)
    if kind is list or kind is tuple:
        if type(value) not in _LISTS or type(out) not in _LISTS or not len(key) == len(value) == len(out) == 1:
            return None
        key, value, out = key[0], value[0], out[0]
        kind = type(key)
    if (kind is str or kind is int) and type(value) is np.ndarray and type(out) is np.ndarray:
        return key, value, out
    return None


class ExpressWay:
    """The express calls of one store. Any thread of the program may make them. A child process has none.

    Args:
        users: the threads that use the store.
        bound: the keys whose arrays are the store's.
        ordinary: the calls that express ones become.
        slice_bytes: the size of the slices in this cluster.
    """

    def __init__(
        self,
        machine: WorkerMachine,
        driver: Driver,
        transport: HostTransport,
        waiter: LinkWaiter,
        users: StoreUsers,
        bound: BoundKeys,
        ordinary: OrdinaryCalls,
        *,
        slice_bytes: int,
    ) -> None:
        self._express = machine.express
        self._session = machine.session
        self._driver = driver
        self._stepper = driver.stepper
        self._transport = transport
        self._pause = transport.reader.pause
        self._waiter = waiter
        self._nudge = waiter.nudge
        self._users = users
        self._bound = bound
        self._ordinary = ordinary
        self._slice_bytes = slice_bytes
        self._prepared: PreparedCalls[PreparedCall] = PreparedCalls()
        self._ended = -math.inf  # the last call, by the clock of the machine
        _ways.add(self)

    # ── which calls go this way ──

    def is_prepared(self, key: str | int) -> bool:
        """Whether a call on the key may go the express way, if its arrays fit."""
        return key in self._prepared.by_key

    def find(self, key: str | int, value: Array, out: Array) -> PreparedCall | None:
        """The call, if it may go the express way."""
        call = self._prepared.by_key.get(key)
        if call is None or not call.fits(value, out):
            return None
        changes = self._bound.changes
        if call.bound_changes != changes:
            if self._bound.has(call.item.key):
                return None
            call.bound_changes = changes
        return call

    def prepare(self, key: str | int, value: Array) -> None:
        """A call on the key has ended, which pushed this value: the next one may go the express way."""
        if not 0 < value.nbytes <= INLINE_BELOW_BYTES or not value.dtype.isnative or not self._transport.has_links:
            return
        name, changes = str(key), self._bound.changes
        if self._bound.has(name) or not self._stepper.enter():
            return
        try:
            item = Item(name, spec_of(value.dtype, value.shape, self._slice_bytes))
            repeated = self._express.recognise(item, self._ordinary.round_s, self._ordinary.answer_s)
        finally:
            self._stepper.leave(math.inf)
        if repeated is not None:
            self._prepared.keep(key, PreparedCall(key, item, value, repeated, changes), 2 * value.nbytes)

    def forget(self, names: Collection[str]) -> None:
        """Keys with these names are deleted: a call on them is prepared again."""
        self._prepared.forget(names)

    def forget_all(self) -> None:
        """No call goes this way until it is prepared again."""
        self._prepared.clear()

    # ── the way ──

    def run(self, call: PreparedCall, value: Array, out: Array, place: int, priority: int) -> Handle | None:
        """Pushes `value` and pulls into `out`. None: it is done. Otherwise it has become an ordinary call, whose handle
        must be waited for.

        Args:
            place: where the program is, see `kvd.core.places`.
            priority: of the ordinary call.
        """
        ordinary: OrdinaryCall | None = None
        user, now, waiter = self._users.this_thread(), self._stepper.now(), self._waiter
        trip = Trip(self._ordinary, call.item, value, out, place, priority, user, now)
        is_begun = is_over = False
        is_free = user.duty is None  # else it takes the general way, whose waits look whether there is work
        if is_free and waiter.begin():
            interrupt = signals.begin_wait(self._nudge)
            try:
                is_begun = self._send(call, trip)
                link = call.link
                if is_begun and link is not None and waiter.wait_for(link, call.expected, trip, interrupt):
                    is_over = self._take(call, link, out)
            finally:
                if is_begun and not is_over:
                    ordinary = trip.become_ordinary()
                    trip.stop_waiting()
                interrupt.end_wait()
                waiter.end()
        if not is_begun:
            if is_free:
                self._prepared.drop(call.key)
            ordinary = self._ordinary.submit(trip.transfer())
        return None if ordinary is None else self._ordinary.handle(ordinary)

    def _send(self, call: PreparedCall, trip: Trip) -> bool:
        """Begins the call and sends its frame. False: nothing was done."""
        stepper, express, repeated = self._stepper, self._express, call.repeated
        if not stepper.enter():
            return False
        try:
            if not express.begin(repeated, trip.local_call, trip.begun):
                return False
            link = call.link
            if link is None or link.peer != repeated.peer or not link.is_up:
                link = call.link = self._transport.link_to(repeated.peer)
            call.fill(self._session, trip.value, trip.place)
            if link is None or not link.send_prepared(call.frame):
                call.link = None
                self._send_message(call, trip)
            return True
        finally:
            stepper.leave(express.due_at)

    def _send_message(self, call: PreparedCall, trip: Trip) -> None:
        """Sends what the frame would have brought in another way."""
        repeated = call.repeated
        payload = repeated.plan.payload_of(trip.become_ordinary().transfer.items)
        self._driver.sender.send_own(Send(repeated.peer, repeated.message(trip.place), payload))

    def _take(self, call: PreparedCall, link: Link, out: Array) -> bool:
        """Takes the answer in, as it was expected. False: the call has become an ordinary one, which it answers."""
        version, stepper, repeated = call.version(), self._stepper, call.repeated
        if version is not None and stepper.enter():
            now = stepper.now()
            try:
                is_over = self._express.end(repeated, version, now)
                if is_over and repeated.begun - self._ended < OFTEN_S:
                    self._pause.may_stay = True  # nothing is under way
            finally:
                stepper.leave(math.inf)
            if is_over:
                self._ended = now
                out[...] = call.answer
                return True
        self._driver.receiver.receive(link.peer, *call.message(), link.proven.principal)
        return False


def _forget_all() -> None:
    for way in list(_ways):
        way.forget_all()


os.register_at_fork(after_in_child=_forget_all)
