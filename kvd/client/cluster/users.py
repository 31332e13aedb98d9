"""Who uses a store: the program's threads, and the coroutines that the engine runs for them; and which of them wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Protocol

from kvd.client.calls.duties import Duty
from kvd.client.calls.keys import WrittenKeys
from kvd.client.calls.promise import Promise


class Awaited(Protocol):
    """The end of a call."""

    def done(self) -> bool: ...


class User:
    """A thread or a coroutine. Only itself writes to it. As a context, it waits: see `waiting`.

    Attributes:
        awaited: the end of a call that it waits for, without a timeout; None: it does something else.
        entered: how often it has begun to wait.
        duty: what a thread does while it waits.
    """

    __slots__ = ("awaited", "duty", "entered", "is_there")

    def __init__(self, is_there: Callable[[], bool]) -> None:
        self.is_there = is_there
        self.awaited: Awaited | None = None
        self.entered = 0
        self.duty: Duty | None = None

    def waiting(self, promise: Promise) -> User:
        """A context in which it waits, without a timeout."""
        self.awaited = promise
        self.entered += 1
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.awaited = None


class StoreUsers:
    """A thread is a user from its first call on, until it ends; a coroutine while it runs.

    Threads are told apart by a thread-local mark, not by their numbers, which are used again.
    """

    def __init__(self) -> None:
        self._here = threading.local()
        self._users: list[User] = []
        self._entered_before = 0  # by users that are gone
        self._lock = threading.Lock()

    def this_thread(self) -> User:
        """This thread uses the store."""
        user: User | None = getattr(self._here, "user", None)
        if user is None:
            user = self._here.user = User(threading.current_thread().is_alive)
            self.add(user)
        return user

    def exempt_this_thread(self) -> None:
        """This thread works for the users, and is none of them."""
        self._here.user = User(lambda: False)

    def waiting(self, promise: Promise) -> User:
        """A context in which this thread waits, without a timeout."""
        return self.this_thread().waiting(promise)

    def duty(self) -> Duty | None:
        """What this thread does while it waits."""
        user: User | None = getattr(self._here, "user", None)
        return None if user is None else user.duty

    def add(self, user: User) -> None:
        """One more user. Those that are gone are forgotten."""
        with self._lock:
            self._forget_the_gone()
            self._users.append(user)

    def _forget_the_gone(self) -> None:
        there = [user for user in self._users if user.is_there()]
        if len(there) < len(self._users):
            self._entered_before += sum(user.entered for user in self._users if user not in there)
            self._users = there

    def census(self) -> tuple[int, list[Awaited | None]]:
        """How often any user has begun to wait, and what each of them waits for; None: it does something else."""
        with self._lock:
            self._forget_the_gone()
            entered = self._entered_before + sum(user.entered for user in self._users)
            return entered, [user.awaited for user in self._users]


_COROUTINE: ContextVar[User] = ContextVar("the coroutine of an engine")


class Coroutines:
    """The coroutines of several calls that run on the engine's loop. `written` restores the keys in their errors."""

    def __init__(self, users: StoreUsers, written: WrittenKeys) -> None:
        self._users = users
        self._written = written
        self._tasks: dict[Promise, asyncio.Task[None]] = {}

    def start(self, coroutine: Coroutine[Any, Any, Any], promise: Promise) -> None:
        """Runs it. On the loop; the promise tells its end."""
        user = User(lambda: promise in self._tasks)
        self._tasks[promise] = asyncio.get_running_loop().create_task(self._run(coroutine, promise, user))
        self._users.add(user)

    async def _run(self, coroutine: Coroutine[Any, Any, Any], promise: Promise, user: User) -> None:
        _COROUTINE.set(user)
        try:
            result = await coroutine
        except BaseException as error:  # noqa: BLE001  the promise raises it
            promise.set_exception(self._written.restored(error))
        else:
            promise.set_result(result)
        finally:
            self._tasks.pop(promise, None)

    def runs(self, promise: object) -> bool:
        """Whether this is the promise of a coroutine that has not ended."""
        return promise in self._tasks

    @staticmethod
    async def result_of(promise: Promise) -> Any:
        """Lets the present coroutine wait for a call."""
        with _COROUTINE.get().waiting(promise):
            return await promise

    async def end(self) -> None:
        """Waits until all have ended."""
        while self._tasks:
            await asyncio.wait(list(self._tasks.values()))
