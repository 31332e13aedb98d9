"""Points by name and generation, at which workers wait until all have come (`kv.join(until=…)`).

As with barriers, a worker's n-th point of a name is generation n, counted from 0 by each incarnation, and a generation
that breaks stays open. Unlike them, the rounds go on without those who wait, and each generation that was released is
remembered with the number of the step that came after it: a restarted program asks for all points that its predecessor
has passed.

Who waits is not in the record: it asks again. The members' states are, so the rounds go on without it meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvd.core.machine import Peer, Send
from kvd.core.membership import name_of
from kvd.protocol.messages import ErrorCode, NodeName, NotYet, NotYetReason, Refused, StandBy, Standing, Together

MAX_POINTS = 10_000  # of a run, all generations and names counted
OF_PROGRAMS = "until:"  # what the names begin with that programs gave
NOT_KNOWN = -1  # in place of a number of steps: a scheduler before this one released the generation


class Waiting(NamedTuple):
    """One request of one incarnation, which numbers its requests in their order."""

    rank: int
    incarnation: int
    peer: Peer
    request: int
    steps: int


class SettledPoint(NamedTuple):
    """A generation that is released, or that has broken.

    Attributes:
        steps: with which step the next loops begin.
        missing: the ranks of the dead that broke it; empty if it is released.
        waiting: who is to be told.
    """

    name: str
    steps: int
    missing: tuple[int, ...]
    waiting: tuple[Waiting, ...]

    def answers(self) -> list[Send]:
        """What each worker that waits for it is told."""
        if self.missing:
            return [Send(who.peer, _broken(who.request, self.name, self.missing)) for who in self.waiting]
        return [Send(who.peer, Together(who.request, self.steps, True)) for who in self.waiting]


class _Told(NamedTuple):
    """The latest request of a rank that a break of the open generation has ended."""

    incarnation: int
    request: int
    missing: tuple[int, ...]


@dataclass(slots=True)
class _Point:
    released: list[int] = field(default_factory=list)  # by generation: the steps after it, or NOT_KNOWN
    waiting: dict[int, Waiting] = field(default_factory=dict)  # by rank, at the generation that is open
    broken: dict[int, _Told] = field(default_factory=dict)  # by rank, at the same


class Points:
    """All points of a run. A worker waits at one at a time."""

    def __init__(self, record: Iterable[Any] = (), latest: Collection[int] = ()) -> None:
        """Both come from a record: see `record` and `latest`."""
        self._points: dict[str, _Point] = {}
        self._latest = frozenset(latest)
        self._learned: list[SettledPoint] = []  # that were released by a scheduler before this one
        for name, released, broken in record:
            told = {rank: _Told(incarnation, request, tuple(ranks)) for rank, incarnation, request, ranks in broken}
            self._points[name] = _Point(list(released), {}, told)
        self._size = len(self._points) + sum(len(point.released) for point in self._points.values())

    def record(self) -> list[object]:
        """What was settled, as plain data."""
        return [
            [
                name,
                list(point.released),
                [[rank, told.incarnation, told.request, list(told.missing)] for rank, told in point.broken.items()],
            ]
            for name, point in self._points.items()
        ]

    @property
    def latest(self) -> list[int]:
        """The incarnations that waited at the point that was released last: some may not have heard of it."""
        return sorted(self._latest)

    # ── what workers say ──

    def take(self, rank: int, incarnation: int, peer: Peer, message: StandBy) -> Together | NotYet | Refused | None:
        """The answer to a worker; None if it waits now. Settle after that: the others may have waited for this."""
        name, generation, request = message.name, message.generation, message.request
        refused = self._open(name, generation, request)
        if refused is not None:
            return refused
        point = self._points[name]
        if generation < len(point.released):
            if message.standing is Standing.KNOWS and point.released[generation] == NOT_KNOWN:
                point.released[generation] = message.steps
            return self._passed(point.released[generation], message, incarnation)
        if message.standing is Standing.KNOWS:
            if generation == len(point.released) and point.waiting:
                self._learned.append(SettledPoint(name, message.steps, (), tuple(point.waiting.values())))
                self._latest = frozenset(who.incarnation for who in point.waiting.values())
            self._fill(point, generation + 1)
            point.released[generation] = message.steps
            return Together(request, message.steps, False)
        if message.standing is Standing.ASKS:
            return _forgotten(request, name)
        self._fill(point, generation)
        told = point.broken.get(rank)
        if told is not None and told.incarnation == incarnation and request <= told.request:
            return _broken(request, name, told.missing)
        present = point.waiting.get(rank)
        if present is None or present.incarnation != incarnation or present.request <= request:
            self.withdraw(rank)
            point.waiting[rank] = Waiting(rank, incarnation, peer, request, message.steps)
        return None

    def _passed(self, steps: int, message: StandBy, incarnation: int) -> Together | NotYet:
        if steps == NOT_KNOWN:
            return _forgotten(message.request, message.name)
        return Together(message.request, steps, incarnation in self._latest)

    def _open(self, name: str, generation: int, request: int) -> Refused | None:
        """Makes the point if it is new; or says why it cannot be."""
        point = self._points.get(name)
        released = 0 if point is None else len(point.released)
        if generation >= released and self._size + (point is None) + generation - released >= MAX_POINTS:
            text = (
                f"the workers of this run have met at {MAX_POINTS} points, and no more are kept: call join less often"
            )
            return Refused(request, ErrorCode.NOT_ALLOWED, text)
        if point is None:
            self._points[name] = _Point()
            self._size += 1
        return None

    def _fill(self, point: _Point, generation: int) -> None:
        """A scheduler whose record is lost released the earlier ones. Those who wait there ask again, until somebody
        has come who knows more."""
        missing = generation - len(point.released)
        if missing > 0:
            point.released += [NOT_KNOWN] * missing
            self._size += missing
            point.waiting, point.broken = {}, {}

    # ── what follows ──

    def settle(self, required: Collection[int], breaking: Collection[int]) -> list[SettledPoint]:
        """Releases the points to which all `required` ranks have come, and breaks those to which a `breaking` one has
        not."""
        settled, self._learned = self._learned, []
        for name, point in self._points.items():
            if not point.waiting:
                continue
            missing = [rank for rank in required if rank not in point.waiting]
            lost = tuple(sorted(rank for rank in missing if rank in breaking))
            if missing and not lost:
                continue
            waiting = tuple(point.waiting.values())
            point.waiting = {}
            if lost:
                for who in waiting:
                    point.broken[who.rank] = _Told(who.incarnation, who.request, lost)
                settled.append(SettledPoint(name, 0, lost, waiting))
                continue
            steps = max(who.steps for who in waiting)
            point.released.append(steps)
            point.broken = {}
            self._size += 1
            self._latest = frozenset(who.incarnation for who in waiting)
            settled.append(SettledPoint(name, steps, (), waiting))
        return settled

    def would_settle(self, required: Collection[int], breaking: Collection[int]) -> bool:
        """Whether `settle` has anything to do."""
        if self._learned:
            return True
        for point in self._points.values():
            missing = [rank for rank in required if rank not in point.waiting]
            if point.waiting and (not missing or any(rank in breaking for rank in missing)):
                return True
        return False

    def withdraw(self, rank: int) -> None:
        """The worker of this rank waits nowhere any more: it has left, was replaced, or has come to another point."""
        for point in self._points.values():
            point.waiting.pop(rank, None)

    # ── for reading ──

    def has(self, rank: int, incarnation: int) -> bool:
        """Whether this process waits at a point."""
        return any(
            who is not None and who.incarnation == incarnation
            for who in (point.waiting.get(rank) for point in self._points.values())
        )

    def open(self) -> dict[str, list[int]]:
        """The points at which workers wait, with their ranks."""
        return {name: sorted(point.waiting) for name, point in self._points.items() if point.waiting}

    def generations(self) -> dict[str, int]:
        """The points at which workers wait, with the generation that is open."""
        return {name: len(point.released) for name, point in self._points.items() if point.waiting}

    def validate(self, required: Collection[int], breaking: Collection[int]) -> None:
        """Raises AssertionError if a point is open that should be settled, or a rank waits at two."""
        assert not self.would_settle(required, breaking), f"a point should be settled: {self.open()}"
        ranks = [rank for entered in self.open().values() for rank in entered]
        assert len(ranks) == len(set(ranks)), f"a worker waits at two points: {self.open()}"
        assert self._size == len(self._points) + sum(len(point.released) for point in self._points.values())


def _broken(request: int, name: str, missing: tuple[int, ...]) -> Refused:
    nodes = tuple(NodeName("worker", rank) for rank in missing)
    names = ", ".join(name_of(*node) for node in nodes)
    text = (
        f"the workers cannot come together at {name.removeprefix(OF_PROGRAMS)!r}: {names} died before it; start the "
        "dead again and then call join again with the same name, or start the whole job again"
    )
    return Refused(request, ErrorCode.BARRIER_BROKEN, text, nodes=nodes)


def _forgotten(request: int, name: str) -> NotYet:
    text = (
        f"workers have passed the point {name.removeprefix(OF_PROGRAMS)!r}, and the scheduler has lost the record that "
        "says with which step they went on: give the scheduler a state_dir, and start the job again"
    )
    return NotYet(request, NotYetReason.BUSY, text)
