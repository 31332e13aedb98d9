"""A slow network for one node: its messages leave at a limited rate in bytes per second, first in, first out.

It stands between a driver and its transport and counts the bytes of headers and payloads, wherever the payload lies.
Incoming messages are not delayed, unless the link is slow both ways.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Generic, TypeVar
from unittest import mock

from kvd.client.cluster import engine
from kvd.core.machine import Peer, PeerPath, Span
from kvd.core.principals import Principal
from kvd.node.shell.driver import Driver
from kvd.transport.base import UNKNOWN_PATH, HeaderOfPath, OnGarbage, OnMessage, Transport

QUEUE_BYTES = 256 << 20

T = TypeVar("T")


class Pipe(Generic[T]):
    """Outgoing things, and when each has left; time is an argument.

    Args:
        bytes_per_s: the rate.
        queue_bytes: how much may wait; a single message may always wait, however large.
    """

    def __init__(self, bytes_per_s: float, queue_bytes: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._queue_bytes = queue_bytes
        self._waiting: deque[tuple[float, int, T]] = deque()  # (when its last byte has left, its size, what)
        self._waiting_bytes = 0
        self._free_at = 0.0

    def put(self, what: T, nbytes: int, now: float) -> bool:
        """Queues it behind the others; returns False if there is no room."""
        if self._waiting and self._waiting_bytes + nbytes > self._queue_bytes:
            return False
        self._free_at = max(now, self._free_at) + nbytes / self._bytes_per_s
        self._waiting.append((self._free_at, nbytes, what))
        self._waiting_bytes += nbytes
        return True

    def take(self, now: float) -> list[T]:
        """Removes and returns what has left by now, in order."""
        left = []
        while self._waiting and self._waiting[0][0] <= now:
            _, nbytes, what = self._waiting.popleft()
            self._waiting_bytes -= nbytes
            left.append(what)
        return left

    def next_at(self) -> float | None:
        """When the next thing will have left."""
        return self._waiting[0][0] if self._waiting else None


class _Delayed(Generic[T]):
    """A pipe whose contents are handed on, by the loop, when they have left."""

    def __init__(self, bytes_per_s: float, queue_bytes: int, hand_on: Callable[[T], object]) -> None:
        self._pipe: Pipe[T] = Pipe(bytes_per_s, queue_bytes)
        self._hand_on = hand_on
        self._lock = threading.Lock()  # around the pipe: things come from several threads
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None  # of the loop's thread
        self._closed = False

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._take_due()

    def put(self, what: T, nbytes: int) -> bool:
        """Queues it. False: too much is queued."""
        with self._lock:
            is_first = self._pipe.next_at() is None
            if self._closed or not self._pipe.put(what, nbytes, time.monotonic()):
                return False
        if is_first and self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: nothing is sent any more
                self._loop.call_soon_threadsafe(self._take_due)
        return True

    def close(self) -> None:
        with self._lock:
            self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _take_due(self) -> None:
        """Hands on what has left by now, and schedules itself for the next. Runs on the loop."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        with self._lock:
            if self._closed:
                return
            left = self._pipe.take(time.monotonic())
            next_at = self._pipe.next_at()
        for what in left:
            self._hand_on(what)
        if next_at is not None and self._loop is not None:
            self._timer = self._loop.call_later(max(0.0, next_at - time.monotonic()), self._take_due)


class SlowLink:
    """A transport whose messages leave one by one at a limited rate. `close` drops those that still wait.

    Args:
        both_ways: messages also arrive at that rate. No more than `queue_bytes` of them may be on their way.
    """

    def __init__(
        self, inner: Transport, bytes_per_s: float, queue_bytes: int = QUEUE_BYTES, *, both_ways: bool = False
    ) -> None:
        self._inner = inner
        self._leaving = _Delayed[tuple[Peer, bytes, Sequence[Span]]](
            bytes_per_s, queue_bytes, lambda what: inner.send(*what)
        )
        self._coming = _Delayed[Callable[[], None]](bytes_per_s, queue_bytes, lambda what: what())
        self._both_ways = both_ways

    def start(self, on_message: OnMessage, on_garbage: OnGarbage) -> None:
        def comes(peer: Peer, header: bytes, payload: memoryview | None, principal: Principal) -> None:
            nbytes = len(header) + (0 if payload is None else payload.nbytes)
            assert self._coming.put(partial(on_message, peer, header, payload, principal), nbytes), "too much comes"

        self._coming.start()
        self._inner.start(comes if self._both_ways else on_message, on_garbage)
        self._leaving.start()

    def listen(self, address: str) -> str:
        return self._inner.listen(address)

    def connect(self, peer: Peer, address: str, key: str = "") -> None:
        self._inner.connect(peer, address, key)

    def disconnect(self, peer: Peer) -> None:
        self._inner.disconnect(peer)

    def send(self, peer: Peer, header: bytes, payload: Sequence[Span]) -> bool:
        """Queues the message. False: too much is queued."""
        return self._leaving.put((peer, header, payload), len(header) + sum(span.nbytes for span in payload))

    def send_with_path(self, peer: Peer, header: HeaderOfPath, payload: Sequence[Span]) -> bool:
        return self.send(peer, header(self.paths().get(peer, UNKNOWN_PATH)), payload)

    def paths(self) -> Mapping[Peer, PeerPath]:
        return self._inner.paths()

    def close(self, linger_s: float) -> None:
        self._coming.close()
        self._leaving.close()
        self._inner.close(linger_s)


@contextmanager
def slow_links(bytes_per_s: float, queue_bytes: int = QUEUE_BYTES, *, both_ways: bool = False) -> Iterator[None]:
    """Stores created inside the block send at this rate, each over a link of its own; `both_ways`: they also receive
    at this rate."""

    def driver(machine: Any, transport: Transport, **settings: Any) -> Driver:
        return Driver(machine, SlowLink(transport, bytes_per_s, queue_bytes, both_ways=both_ways), **settings)

    make: Callable[..., Driver] = driver
    with mock.patch.object(engine, "Driver", make):
        yield
