"""Room for the private copies of what is pushed: a worker holds so many bytes of them, and who wants more waits."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from kvd.client.calls.values import Source
from kvd.errors import RequestTimeout


class Ticket:
    """For a call that must not block its thread. If there was no room for it, it may stand in the line with this.

    Attributes:
        room: where it was turned away; None: it was not.
        nbytes: how much it asked for.
    """

    __slots__ = ("_called", "_loop", "nbytes", "room")

    def __init__(self) -> None:
        self.room: Room | None = None
        self.nbytes = 0
        self._called = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def call(self) -> None:
        """Look whether it is your turn. From any thread."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits there
                self._loop.call_soon_threadsafe(self._called.set)

    async def until_called(self) -> None:
        await self._called.wait()

    def listen(self) -> None:
        """What comes from now on counts as a call."""
        self._loop = asyncio.get_running_loop()
        self._called.clear()


class Room:
    """First come, first served: threads and coroutines stand in one line.

    Args:
        limit_bytes: how much there is. A call that wants more than that gets it when nobody else has anything.
        patience_s: how long one waits.
    """

    def __init__(self, limit_bytes: int, patience_s: float) -> None:
        self._limit_bytes = limit_bytes
        self._patience_s = patience_s
        self._held_bytes = 0
        self._line: deque[object] = deque()
        self._changed = threading.Condition()

    def take(self, sources: Sequence[Source], ticket: Ticket | None = None) -> None:
        """Counts private copies until nothing needs them any more. All of one call at a time, so that a call does not
        wait for itself. Without a ticket it waits for room, in this thread.

        Raises:
            RequestTimeout: there is none; with a ticket, at once.
        """
        nbytes = sum(source.data.nbytes for source in sources)
        with self._changed:
            if self._line or not self._fits(nbytes):
                self._take_turn(nbytes, ticket)
            self._held_bytes += nbytes
        for source in sources:
            weakref.finalize(source.data, self._release, source.data.nbytes)

    def _fits(self, nbytes: int) -> bool:
        return self._held_bytes == 0 or self._held_bytes + nbytes <= self._limit_bytes

    def _is_turn_of(self, who: object, nbytes: int) -> bool:
        return bool(self._line) and self._line[0] is who and self._fits(nbytes)

    def _take_turn(self, nbytes: int, ticket: Ticket | None) -> None:
        if ticket is not None:
            if not self._is_turn_of(ticket, nbytes):
                ticket.room, ticket.nbytes = self, nbytes
                raise self._full()
            return
        me = object()
        self._line.append(me)
        try:
            if not self._changed.wait_for(lambda: self._is_turn_of(me, nbytes), self._patience_s):
                raise self._full()
        finally:
            self._line.remove(me)
            self._call_next()

    @asynccontextmanager
    async def turn(self, ticket: Ticket) -> AsyncIterator[None]:
        """Waits in the line, and the loop goes on. Within, there is room for the call with this ticket.

        Raises:
            RequestTimeout: it never came to that.
        """
        with self._changed:
            self._line.append(ticket)
        try:
            try:
                async with asyncio.timeout(self._patience_s):
                    await self._come_first(ticket)
            except TimeoutError:
                raise self._full() from None
            yield
        finally:
            with self._changed:
                self._line.remove(ticket)
                self._call_next()

    async def _come_first(self, ticket: Ticket) -> None:
        while True:
            ticket.listen()
            with self._changed:
                if self._is_turn_of(ticket, ticket.nbytes):
                    return
            await ticket.until_called()

    def _release(self, nbytes: int) -> None:
        with self._changed:
            self._held_bytes -= nbytes
            self._call_next()

    def _call_next(self) -> None:
        self._changed.notify_all()
        if self._line and isinstance(self._line[0], Ticket):
            self._line[0].call()

    def _full(self) -> RequestTimeout:
        return RequestTimeout(
            f"{self._held_bytes >> 20} MiB of pushes are under way, the limit is {self._limit_bytes >> 20} "
            f"MiB: wait for their handles, or raise memory_limit_bytes",
            outcome="not_sent",
        )
