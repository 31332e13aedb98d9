"""Calls on one small value that a program repeats: pushed and pulled as a frame that was prepared once for its key.

The program's thread begins the call in the machine (`WorkerMachine.begin`), writes its numbers and the value into the
frame, and sends that: no message is encoded. Whichever thread reads the answer tells the machine (`answered`), copies
the value out and keeps the promise. A thread that waits for its call knows the bytes that the answer begins with, and
reads them itself.

For the machine it is a call like any other from its beginning. If the answer is another one, or the request has to be
sent again, the general way goes on with it. The frame has the value, so the program may change its array at once; the
frame stays as it is until the call has ended.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakSet

import numpy as np

from kvd.client.calls.handle import Handle
from kvd.client.calls.held_signals import signals
from kvd.client.calls.promise import Promise
from kvd.client.calls.values import BYTE, Array, spec_of
from kvd.client.cluster.bound_keys import BoundKeys
from kvd.client.cluster.open_calls import OpenCalls
from kvd.client.cluster.small_frames import HEADER_AT, REQUEST_AT, VERSION_AT, PreparedCall, PreparedCalls, PushFrame
from kvd.client.cluster.users import StoreUsers
from kvd.core.machine import Complete, Peer
from kvd.core.outbox import SENT
from kvd.core.requests import Item, Transfer
from kvd.core.worker.in_flight import InFlight
from kvd.core.worker.machine import WorkerMachine
from kvd.node.shell.driver import Driver
from kvd.node.shell.threads import LinkWaiter, report_failed_effect
from kvd.protocol.fixed import VALUES_NBYTES, put_number, put_push_numbers, read_values, version_of
from kvd.protocol.messages import NO_VIEW
from kvd.transport.host import HostTransport
from kvd.transport.links.frames import INLINE_BELOW_BYTES
from kvd.transport.links.link import Link

_LISTS = (list, tuple)
_PUSHPULL = Transfer((), push=True, pull=True)
OFTEN_S = 0.005  # the loop stays paused between calls that follow each other so soon

_stores: WeakSet[SmallCalls] = WeakSet()  # of this process


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


class SmallCall:
    """One call: what the machine asks its shell for, and what the shell needs at its end.

    Args:
        prepared: of its key.
        frame: has the value; nobody else has the frame.
        out: where the sum belongs.
        promise: tells the end; None: nobody needs it yet.

    Attributes:
        number: under which it is known to the machine.
        request_number: of its message.
        link: by which the frame went; None: it went as a message, or waits.
        is_free: whether the next call of the key may have the frame at the end: no message was made from it.
    """

    # What an instance does not set, the class has.
    number = 0
    request_number = 0
    link: Link | None = None
    is_free = True
    _request: Transfer | None = None
    _is_done = False
    _error: BaseException | None = None

    def __init__(
        self,
        prepared: PreparedCall,
        frame: PushFrame,
        out: Array,
        place: int,
        priority: int,
        promise: Promise | None,
    ) -> None:
        self.prepared = prepared
        self.frame = frame
        self.out = out
        self.place = place
        self.priority = priority
        self.promise = promise
        self._lock = threading.Lock()

    def request(self) -> Transfer:
        """See `kvd.core.worker.in_flight.CallOwner`."""
        with self._lock:  # a thread that gives the call up asks, too
            if self._request is None:
                self.is_free = False
                source, target = self.frame.payload.ravel().view(BYTE), self.out.ravel().view(BYTE)
                item = self.prepared.item._replace(source=source, target=target)
                self._request = Transfer((item,), push=True, pull=True, priority=self.priority, place=self.place)
            return self._request

    # ── its end ──

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._is_done

    def set_result(self, result: Any) -> None:
        """It has ended well, and somebody else may wait for it."""
        with self._lock:
            self._is_done = True
            promise = self.promise
        if self.is_free:
            self.prepared.spare = self.frame
        if promise is not None:
            promise.set_result(result)

    def set_exception(self, error: BaseException) -> None:
        """It has failed."""
        with self._lock:
            self._is_done = True
            self._error = error
            promise = self.promise
        if promise is not None:
            promise.set_exception(error)

    def promised(self, users: StoreUsers) -> Promise:
        """A promise of its end, for those who wait for it in another way."""
        with self._lock:
            if self.promise is not None:
                return self.promise
            self.promise = promise = Promise(users)
            is_done = self._is_done
        if is_done and self._error is None:
            promise.set_result(None)
        elif self._error is not None:
            promise.set_exception(self._error)
        return promise


class SmallCalls:
    """The small calls of one store. Any thread of the program may make them. A child process has none.

    Args:
        calls: the promises of all calls.
        users: the threads that use the store.
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
        self._session = machine.session
        self._driver = driver
        self._stepper = driver.stepper
        self._transport = transport
        self._pause = transport.reader.pause
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
        self._ends_s = min(answer_s, round_s)
        self._prepared = PreparedCalls()
        self._ended_at = -math.inf  # the last call that a thread waited for, by the clock of the machine
        _stores.add(self)

    # ── which calls are prepared ──

    def is_prepared(self, key: str | int) -> bool:
        """Whether a call on the key is prepared, if its arrays fit."""
        return key in self._prepared.by_key

    def find(self, key: str | int, value: Array, out: Array) -> PreparedCall | None:
        """The prepared call that these fit."""
        call = self._prepared.by_key.get(key)
        if call is None:
            return None
        dtype, shape = call.dtype, call.shape
        if out.dtype != dtype or out.shape != shape or not out.flags.carray:
            return None
        if value is not out and (value.dtype != dtype or value.shape != shape):
            return None
        changes = self._bound.changes
        if call.bound_changes != changes:
            if self._bound.has(call.item.key):
                return None
            call.bound_changes = changes
        return call

    def prepare(self, key: str | int, value: Array) -> None:
        """A call on the key was made, which pushed a value like this: prepare the next one."""
        if not 0 < value.nbytes <= INLINE_BELOW_BYTES or not value.dtype.isnative or not self._transport.has_links:
            return
        name, changes = str(key), self._bound.changes
        if self._bound.has(name) or not self._stepper.enter():
            return
        try:
            item = Item(name, spec_of(value.dtype, value.shape, self._slice_bytes))
            plan = None if item.spec is None else self._machine.plan_of(name, item.spec)
        finally:
            self._stepper.leave(math.inf)
        if plan is not None:
            self._prepared.keep(key, PreparedCall(key, item, value, plan, changes), 2 * value.nbytes)

    def forget(self, names: Collection[str]) -> None:
        """Keys with these names are deleted: a call on them is prepared again."""
        self._prepared.forget(names)

    def forget_all(self) -> None:
        """No call is prepared any more."""
        self._prepared.clear()

    # ── calls ──

    def run(self, prepared: PreparedCall, value: Array, out: Array, place: int, priority: int) -> Handle | None:
        """Pushes `value` and pulls into `out`, and waits for the end as long as this thread can read the links. None:
        it is done. Otherwise the handle must be waited for.

        Args:
            place: where the program is, see `kvd.core.places`.
        """
        user, waiter = self._users.this_thread(), self._waiter
        call: SmallCall | None = None
        is_over = False
        if user.duty is None and waiter.begin():  # waits of a thread with a duty look whether there is work
            interrupt = signals.begin_wait(waiter.nudge)
            try:
                call = self._begin(prepared, value, out, place, priority)
                if call is not None and call.link is not None:
                    user.awaited = call
                    user.entered += 1
                    answer, session = prepared.answer, self._session
                    is_known = answer.run == session.run and answer.server == call.link.peer
                    if not is_known or answer.epoch != session.view.epoch:
                        answer.write_view(session, call.link.peer)
                    put_number(answer.expected.head, REQUEST_AT, call.request_number)
                    if waiter.wait_for(call.link, answer.expected, call, interrupt):
                        is_over = self._take_expected(call, call.link)
            finally:
                user.awaited = None
                interrupt.end_wait()
                waiter.end()
        else:
            call = self._begin(prepared, value, out, place, priority)
        if is_over:
            return None
        return self._ordinary(prepared, value, out, place, priority) if call is None else self._handle_of(call)

    def begin(self, prepared: PreparedCall, value: Array, out: Array, place: int) -> Handle | None:
        """Pushes `value`, of which nothing is read any more when this returns, and pulls into `out`. None: nothing was
        done."""
        self._users.this_thread()
        promise, target = Promise(self._users), out[...]  # whatever the program makes of `out` meanwhile
        if self._begin(prepared, value, target, place, 0, promise) is None:
            return None
        return Handle(promise, lambda _: out, "pushpull", self._wait)  # who stops waiting may ask again

    def _begin(
        self,
        prepared: PreparedCall,
        value: Array,
        out: Array,
        place: int,
        priority: int,
        promise: Promise | None = None,
    ) -> SmallCall | None:
        machine, stepper = self._machine, self._stepper
        if not stepper.enter():
            return None
        try:
            now = stepper.now()
            frame, prepared.spare = prepared.spare or PushFrame(value), None
            small = SmallCall(prepared, frame, out, place, priority, promise)
            small.number = number = self._calls.begin(small)
            deadline, ends_at = now + self._round_s, now + self._ends_s
            call = InFlight(number, None, deadline, True, place, now, self._answer_s, ends_at, small)
            transfer = replace(_PUSHPULL, priority=priority) if priority else _PUSHPULL
            entry = machine.begin(prepared.plan, transfer, call, now)
            if entry is None:
                self._calls.forget(number)
                prepared.spare = frame
                if prepared.plan.is_forgotten:
                    self._prepared.drop(prepared.key)
                return None
            frame.payload[...] = value
            small.request_number = entry.request
            if entry.state is SENT:
                session = self._session
                if frame.epoch != session.view.epoch or frame.run != session.run:
                    frame.write_view(session)
                batch, (step, settled) = entry.topic.batch, call.steps
                put_push_numbers(frame.buffer, HEADER_AT, entry.request, batch, call.clock, step, settled, place)
                link = self._transport.link_to(entry.peer)
                if link is not None and link.send_prepared(frame.buffer):
                    small.link = link
                    if self._pause.may_stay:  # for a thread that reads it is not set
                        self._pause.end_stay()
                else:
                    self._driver.sender.send_own(entry.send)
        finally:
            stepper.leave(machine.due_at)
        return small

    def _handle_of(self, call: SmallCall) -> Handle:
        """A handle for a thread that waits for the call, and gives it up when it stops."""
        out = call.out
        promise = call.promised(self._users)
        return Handle(promise, lambda _: out, "pushpull", self._wait, partial(self._end_early, call))

    def _end_early(self, call: SmallCall) -> None:
        """The caller stops waiting: nothing is written to its array any more."""
        self._take_back([item.source for item in call.request().items])

    def _ordinary(self, prepared: PreparedCall, value: Array, out: Array, place: int, priority: int) -> Handle:
        """The same call as a message."""
        source, target = value.ravel().view(BYTE), out.ravel().view(BYTE)
        item = prepared.item._replace(source=source, target=target)
        transfer = Transfer((item,), push=True, pull=True, priority=priority, place=place)
        promise = self._submit(transfer)
        return Handle(promise, None, "pushpull", self._wait, lambda: self._take_back([source]))

    # ── answers ──

    def take(self, peer: Peer, header: bytes, payload: memoryview) -> bool:
        """Takes an answer in, on the thread that reads it, if a small call expects it. False: nothing was done."""
        answer = read_values(header) if len(header) == VALUES_NBYTES else None
        stepper, machine = self._stepper, self._machine
        if answer is None or not stepper.enter():
            return False
        epoch, run, request, _ = answer
        try:
            ended = run == machine.run and machine.answered(peer, epoch, request, len(payload), stepper.now())
            if not ended:
                return False
            call: Any = ended.owner
            out: Array = call.out
            out[...] = np.frombuffer(payload, out.dtype).reshape(out.shape)
            try:
                self._calls.keep(call.number)
            except Exception as error:  # noqa: BLE001  of a callback; what else there is to do is done all the same
                report_failed_effect(Complete(call.number, None, None), error)
            if machine.effects:
                stepper.carry_out(machine.take_effects())
        finally:
            stepper.leave(math.inf)
        self._waiter.wake()
        return True

    def _take_expected(self, call: SmallCall, link: Link) -> bool:
        """The same with the bytes that this thread has waited for. False: they went the general way."""
        answer, machine, stepper = call.prepared.answer, self._machine, self._stepper
        if version_of(answer.expected.buffer, VERSION_AT) is not None and stepper.enter():
            now = stepper.now()
            try:
                if machine.answered(link.peer, NO_VIEW, call.request_number, call.out.nbytes, now) is not None:
                    call.out[...] = answer.value
                    self._calls.forget(call.number)
                    if call.is_free:
                        call.prepared.spare = call.frame
                    if machine.effects:
                        stepper.carry_out(machine.take_effects())
                    if (
                        now - self._ended_at < OFTEN_S
                        and not machine.calls_by_number
                        and not machine.requests_by_number
                    ):
                        self._pause.may_stay = True
                    self._ended_at = now
                    return True
            finally:
                stepper.leave(math.inf)
        self._driver.receiver.receive(link.peer, *answer.message(), link.proven.principal)
        return False


def _forget_all() -> None:
    for calls in list(_stores):
        calls.forget_all()


os.register_at_fork(after_in_child=_forget_all)
