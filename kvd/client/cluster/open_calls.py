"""The promises of the calls that the machine has taken, by number."""

from __future__ import annotations

from contextlib import suppress
from itertools import count
from typing import Any, Protocol

from kvd.client.calls.keys import WrittenKeys
from kvd.client.calls.promise import Promise
from kvd.client.cluster.users import Coroutines, StoreUsers
from kvd.core.machine import CensusTaken, Complete
from kvd.errors import KvdError


class Ending(Protocol):
    """What is told the end of a call: a Promise, or an object that makes one when somebody needs it.

    Attributes:
        promise: that one.
    """

    @property
    def promise(self) -> Promise | None: ...
    def done(self) -> bool: ...
    def set_result(self, result: Any) -> None: ...
    def set_exception(self, error: BaseException) -> None: ...


class OpenCalls:
    """Each call is ended once, on any thread.

    Attributes:
        written: how the program writes its keys; the errors of calls name them so.
    """

    def __init__(self) -> None:
        self.written = WrittenKeys()
        self._promises: dict[int, Promise | Ending] = {}
        self._failure: KvdError | None = None  # of all calls, from now on
        self._numbers = count(1)

    def begin(self, promise: Promise | Ending) -> int:
        """The number of a new call. It fails at once after `fail_all`."""
        number = next(self._numbers)
        self._promises[number] = promise
        if self._failure is not None and self._promises.pop(number, None) is promise:
            promise.set_exception(self._failure)
        return number

    def forget(self, number: int) -> None:
        """The call has not become one of the machine, or has ended without it."""
        self._promises.pop(number, None)

    def keep(self, number: int) -> bool:
        """The call has ended well without the machine. False if it has ended before."""
        promise = self._promises.pop(number, None)
        if promise is None:
            return False
        promise.set_result(None)
        return True

    def end(self, complete: Complete) -> bool:
        """Ends the call as the machine says. False if it has ended before."""
        promise = self._promises.pop(complete.call, None)
        if promise is None:
            return False
        if complete.error is not None:
            promise.set_exception(self.written.restored(complete.error))
        else:
            promise.set_result(complete.result)
        return True

    def fail_all(self, error: KvdError) -> None:
        """Ends all calls, and those that begin later, with this error or an earlier one."""
        self._failure = self._failure or error
        while self._promises:
            with suppress(KeyError):  # another thread has just taken the last one
                self._promises.popitem()[1].set_exception(error)

    def census(self, users: StoreUsers, coroutines: Coroutines) -> CensusTaken:
        """Who waits, and for which of these calls."""
        entered, awaited = users.census()
        numbers: dict[object, int] = {}
        for number, ending in list(self._promises.items()):
            numbers[ending] = number
            if not isinstance(ending, Promise) and ending.promise is not None:
                numbers[ending.promise] = number
        everyone = bool(awaited)
        calls = []
        for promise in awaited:
            known = None if promise is None else numbers.get(promise)
            if known is not None:
                calls.append(known)
            if promise is None or promise.done() or (known is None and not coroutines.runs(promise)):
                everyone = False
        return CensusTaken(everyone, entered, tuple(sorted(set(calls))))
