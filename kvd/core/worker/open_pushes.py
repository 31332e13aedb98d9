"""The pushes that are accepted and not settled, and the flushes that wait for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from kvd.core import requests
from kvd.core.worker.calls import WAITING, Call, CallBook
from kvd.core.worker.keys import WorkerKey


@dataclass(slots=True, eq=False)
class _Flush:
    """A flush, and how many of its pushes are still open."""

    call: Call
    remaining: int


class OpenPushes:
    """A push is open from its acceptance until all its messages are answered, or until it fails before its start.

    The deadline of its call does not end it: what was sent may still be committed.
    """

    def __init__(self, calls: CallBook) -> None:
        self._calls = calls
        self._flushes: dict[Call, tuple[_Flush, ...]] = {}  # of every open push: who waits for it

    def __len__(self) -> int:
        return len(self._flushes)

    def any_waiting(self) -> bool:
        """Whether a push was not started yet: it waits for earlier calls on its keys."""
        return any(push.state is WAITING for push in self._flushes)

    def open(self) -> list[Call]:
        """All of them, in the order of their acceptance."""
        return list(self._flushes)

    def awaited_by(self, flush: Call) -> list[Call]:
        """Those that a flush still waits for."""
        return [push for push, flushes in self._flushes.items() if any(entry.call is flush for entry in flushes)]

    def accept(self, push: Call) -> None:
        self._flushes[push] = ()

    def settle(self, push: Call) -> None:
        """The push is answered, or was never started: completes the flushes that waited for it alone."""
        for flush in self._flushes.pop(push, ()):
            flush.remaining -= 1
            if flush.remaining == 0:
                self._calls.complete(flush.call)

    def flush(self, call: Call, request: requests.Flush) -> None:
        """Completes the call when every push that is open now is settled."""
        if not self._flushes:
            self._calls.complete(call)
            return
        flush = _Flush(call, len(self._flushes))
        for push, flushes in self._flushes.items():
            self._flushes[push] = (*flushes, flush)

    def validate(self, keys: Iterable[WorkerKey]) -> None:
        """Raises AssertionError unless the window of each key counts exactly the started pushes that are open."""
        started = Counter(key.name for push in self._flushes if push.state is not WAITING for key in push.keys)
        for key in keys:
            open_pushes = key.window.open_pushes
            assert open_pushes == started[key.name], (
                f"{started[key.name]} pushes of {key.name!r} are open: {key.window}"
            )
