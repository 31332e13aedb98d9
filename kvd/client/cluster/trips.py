"""Express calls as ordinary ones: what they become when something unexpected happens.

An express call has no promise, no number and no item of its own until it needs them. The machine may ask for it as an
ordinary call at any time, on any thread (`Trip.local_call`); so may the thread that makes it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from kvd.client.calls.handle import Handle
from kvd.client.calls.promise import Promise
from kvd.client.calls.values import BYTE, Array
from kvd.client.cluster.open_calls import OpenCalls
from kvd.client.cluster.users import StoreUsers, User
from kvd.core.machine import LocalCall
from kvd.core.requests import Item, Transfer


class OrdinaryCall(NamedTuple):
    """What an express call has become.

    Attributes:
        number: under which its promise is known; 0: it was submitted.
    """

    promise: Promise
    transfer: Transfer
    number: int = 0


class Trip:
    """One call.

    Args:
        item: the key and its spec.
        value, out: the arrays of the program.
        place: where the program is, see `kvd.core.places`.
        priority: as in a Transfer; an express call is alone.
        user: the thread that makes it.
        begun: when that was, by the clock of the machine.

    Attributes:
        ordinary: what it has become; None as long as it is nothing but an express call.
    """

    __slots__ = ("_item", "_of", "_out", "_priority", "_user", "begun", "ordinary", "place", "value")

    def __init__(
        self,
        of: OrdinaryCalls,
        item: Item,
        value: Array,
        out: Array,
        place: int,
        priority: int,
        user: User,
        begun: float,
    ) -> None:
        self.ordinary: OrdinaryCall | None = None
        self._of = of
        self._item = item
        self.value = value
        self._out = out
        self.place = place
        self._priority = priority
        self._user = user
        self.begun = begun

    def done(self) -> bool:
        """Whether it has ended as an ordinary call."""
        return self.ordinary is not None and self.ordinary.promise.done()

    def transfer(self) -> Transfer:
        """A new one each time, and so is the source in it: the memory that a call uses is told apart by identity."""
        source, target = self.value.ravel().view(BYTE), self._out.ravel().view(BYTE)
        item = self._item._replace(source=source, target=target)
        return Transfer((item,), push=True, pull=True, priority=self._priority, place=self.place)

    def become_ordinary(self) -> OrdinaryCall:
        """What it has become, now at the latest. Any thread may ask. The thread that makes it waits for the promise
        from now on, see `stop_waiting`."""
        with self._of.lock:
            if self.ordinary is None:
                self.ordinary = self._of.begin(self.transfer())
                self._user.waiting(self.ordinary.promise)
            return self.ordinary

    def stop_waiting(self) -> None:
        """The thread that makes the call does something else."""
        self._user.awaited = None

    def local_call(self) -> LocalCall:
        """The call for the machine, which asks once at most."""
        ordinary, of = self.become_ordinary(), self._of
        return LocalCall(ordinary.number, ordinary.transfer, self.begun + of.round_s, of.answer_s)


class OrdinaryCalls:
    """Begins, submits and takes back ordinary calls in place of express ones.

    Args:
        submit: makes a call the general way.
        wait, take_back: see `Engine`.
        answer_s, round_s: the default deadlines of a call, see `Engine.submit`.

    Attributes:
        lock: held while a trip becomes an ordinary call.
    """

    def __init__(
        self,
        calls: OpenCalls,
        users: StoreUsers,
        submit: Callable[[Transfer], Promise],
        wait: Callable[[Promise, float | None], None],
        take_back: Callable[[list[Array]], None],
        *,
        answer_s: float,
        round_s: float,
    ) -> None:
        self.lock = threading.Lock()
        self.answer_s = answer_s
        self.round_s = round_s
        self._calls = calls
        self._users = users
        self._submit = submit
        self._wait = wait
        self._take_back = take_back

    def begin(self, transfer: Transfer) -> OrdinaryCall:
        """One that the machine has begun already, or will hear of."""
        promise = Promise(self._users)
        return OrdinaryCall(promise, transfer, self._calls.begin(promise))

    def submit(self, transfer: Transfer) -> OrdinaryCall:
        """Makes the call the general way from its beginning."""
        return OrdinaryCall(self._submit(transfer), transfer)

    def handle(self, ordinary: OrdinaryCall) -> Handle:
        return Handle(
            ordinary.promise, what="pushpull", drive=self._wait, reclaim=lambda: self.take_back(ordinary.transfer)
        )

    def take_back(self, transfer: Transfer) -> None:
        """Returns when the program may write to the arrays of the call again."""
        self._take_back([item.source for item in transfer.items])
