"""The pushes that are accepted and not settled, the flushes that wait for them, and the pushes of the next place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvd.core import requests
from kvd.core.worker.calls import CallBook
from kvd.core.worker.in_flight import WAITING, InFlight
from kvd.core.worker.keys import WorkerKey
from kvd.errors import KvdError, NodeLost


@dataclass(slots=True, eq=False)
class _Flush:
    """A flush, and how many of its pushes are still open."""

    call: InFlight
    request: requests.Flush
    remaining: int


class OpenPushes:
    """A push is open from its acceptance until all its messages are answered, or until it fails before its start.

    The deadline of its call does not end it: what was sent may still be committed.

    Pushes that a program makes at one place (`kvd.core.places`) wait until those of earlier places are settled.

    Args:
        wake: a key lets more calls start.

    Attributes:
        oldest: the open push that was accepted first.
    """

    def __init__(self, calls: CallBook, wake: Callable[[WorkerKey], None]) -> None:
        self._calls = calls
        self._wake = wake
        self._holds_back = False  # a push may wait for those of an earlier place
        self._flushes: dict[InFlight, tuple[_Flush, ...]] = {}  # of every open push: who waits for it
        self.oldest: InFlight | None = None

    def __len__(self) -> int:
        return len(self._flushes)

    def any_waiting(self) -> bool:
        """Whether a push was not started yet: it waits for earlier calls on its keys."""
        return any(push.state is WAITING for push in self._flushes)

    def open(self) -> list[InFlight]:
        """All of them, in the order of their acceptance."""
        return list(self._flushes)

    def awaited_by(self, flush: InFlight) -> list[InFlight]:
        """Those that a flush still waits for."""
        return [push for push, flushes in self._flushes.items() if any(entry.call is flush for entry in flushes)]

    def accept(self, push: InFlight) -> None:
        self._flushes[push] = ()
        if self.oldest is None:
            self.oldest = push

    def settle(self, push: InFlight) -> None:
        """The push is answered, or was never started: completes the flushes that waited for it alone, and lets the
        pushes of the next place start if it was the last of its own."""
        flushes = self._flushes.pop(push, ())
        if push is self.oldest:
            self.oldest = next(iter(self._flushes), None)
        for flush in flushes:
            self._done(flush)
        if self._holds_back:
            self._release(push.place)

    def keep(self, push: InFlight, error: KvdError) -> None:
        """The servers keep the push, and refused to let its caller wait with `error`, a NodeLost if a worker of its
        round is dead: flushes that do not wait for such pushes go on, or end."""
        push.is_kept = True
        flushes = self._flushes.get(push, ())
        self._flushes[push] = tuple([flush for flush in flushes if flush.request.kept])
        for flush in flushes:
            if not flush.request.kept:
                self._done(flush)
            elif isinstance(error, NodeLost) and not flush.request.past_deaths:
                self._calls.complete(flush.call, error=error)

    # ── one place after the other ──

    def holds_back(self, push: InFlight) -> bool:
        """Whether the push waits for one that was made at an earlier place."""
        first = next(iter(self._flushes))  # it is open itself
        if first.place == push.place:
            return False
        self._holds_back = True
        return True

    def _release(self, settled_place: int) -> None:
        """A push of this place is settled: those of the next place start if it was the last."""
        place = next((push.place for push in self._flushes), settled_place)
        if place == settled_place:
            self._holds_back = bool(self._flushes)
            return
        self._holds_back = False  # calls that still wait say so again
        for push in list(self._flushes):
            if push.place != place:
                self._holds_back = True
                break
            for key in push.keys if push.state is WAITING else ():
                self._wake(key)

    # ── flushes ──

    def flush(self, call: InFlight, request: requests.Flush) -> None:
        """Completes the call when every push that is open now is settled."""
        pushes = [push for push in self._flushes if request.kept or not push.is_kept]
        if not pushes:
            self._calls.complete(call)
            return
        flush = _Flush(call, request, len(pushes))
        for push in pushes:
            self._flushes[push] = (*self._flushes[push], flush)

    def _done(self, flush: _Flush) -> None:
        """One of its pushes is."""
        flush.remaining -= 1
        if flush.remaining == 0:
            self._calls.complete(flush.call)

    def validate(self, keys: Iterable[WorkerKey]) -> None:
        """Raises AssertionError unless the window of each key counts exactly the started pushes that are open."""
        started = Counter(key.name for push in self._flushes if push.state is not WAITING for key in push.keys)
        for key in keys:
            window = key.own_window if key.group is None else key.group.window
            assert window.open_pushes == started[key.name], (
                f"{started[key.name]} pushes of {key.name!r} are open: {window}"
            )
