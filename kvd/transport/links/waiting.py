"""Messages to one server that wait until it is known whether they travel over a link: none may overtake another."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from kvd.core.machine import Span
from kvd.transport.base import HeaderOfPath
from kvd.transport.links.outgoing import COST_OF_ENTRY_BYTES, QUEUE_LIMIT_BYTES
from kvd.transport.memory.leases import payload_nbytes


class Waiting:
    """Any thread may add messages."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: deque[tuple[bytes | HeaderOfPath, Sequence[Span]]] = deque()
        self._nbytes = 0
        self._ended = False

    def add(self, header: bytes | HeaderOfPath, payload: Sequence[Span]) -> bool | None:
        """False: too much waits. None: nothing waits any more, so the message can be sent."""
        with self._lock:
            if self._ended:
                return None
            if self._nbytes > QUEUE_LIMIT_BYTES:
                return False
            self._entries.append((header, payload))
            self._nbytes += payload_nbytes(payload) + COST_OF_ENTRY_BYTES
            return True

    def end(self, send: Callable[[bytes | HeaderOfPath, Sequence[Span]], object]) -> None:
        """Sends all messages in their order. Threads that add one wait until this is done, and are told to send it."""
        with self._lock:
            self._ended = True
            entries, self._entries = self._entries, deque()
            for header, payload in entries:
                send(header, payload)

    def drop(self) -> None:
        """Forgets all messages."""
        self.end(lambda header, payload: None)

    def copy(self) -> None:
        """The messages wait as copies from now on: the program takes its memory back."""
        with self._lock:
            self._entries = deque((header, [_copied(span) for span in payload]) for header, payload in self._entries)


def _copied(span: Span) -> Span:
    view = memoryview(span.buffer).cast("B") if span.nbytes else memoryview(b"")
    return Span(bytes(view[span.offset : span.offset + span.nbytes]), 0, span.nbytes)
