"""Barriers by name and generation.

A worker's n-th barrier of a name that it passes is generation n, counted from 0 by each incarnation. A generation stays
open until it is released, and a released one lets everyone pass who asks later: a restarted worker that runs its
program again passes the barriers that its predecessor passed.

A generation that breaks stays open as well. The verdict binds the requests that had entered it: they get the same
answer however often they come. A rank that enters after that, a successor or one that tries again, waits for all.

A worker that came in at a later step of a loop than the one that a barrier is in never comes to that barrier, so nobody
waits for it there.

A worker may leave a note at the generation that is open. Whoever asks gets it, until the next generation is released as
well; a barrier that nobody enters keeps the latest note.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from kvd.core.machine import Peer, Send
from kvd.core.membership import name_of
from kvd.protocol.messages import Done, ErrorCode, NodeName, Refused

MAX_NAMES = 4096
MAX_OF_RANK = 1024  # names at which one rank may wait, once half of all are in use
OF_PROGRAMS = "user:"  # what the names begin with that programs gave
NOBODY: Mapping[int, int] = MappingProxyType({})


class Entrant(NamedTuple):
    """One request of one incarnation, which numbers its requests in their order."""

    rank: int
    incarnation: int
    peer: Peer
    request: int
    place: int = 0  # where its program is; 0: nobody came too late for that


class Verdict(NamedTuple):
    """How a generation was settled: broken if anyone is missing."""

    missing: tuple[int, ...]

    def answer(self, request: int, name: str) -> Done | Refused:
        """What a worker that entered the barrier is told."""
        if not self.missing:
            return Done(request)
        nodes = tuple(NodeName("worker", rank) for rank in self.missing)
        names = ", ".join(name_of(*node) for node in nodes)
        text = (
            f"barrier {name.removeprefix(OF_PROGRAMS)!r} cannot be reached: {names} died before it; start the dead "
            "again and then enter it again, or start the whole job again"
        )
        return Refused(request, ErrorCode.BARRIER_BROKEN, text, nodes=nodes)


class Settled(NamedTuple):
    """A generation that has just been settled, and who waits for the answer."""

    name: str
    generation: int
    verdict: Verdict
    waiting: tuple[Entrant, ...]

    def answers(self) -> list[Send]:
        """The verdict, to each worker that waits for it."""
        return [Send(who.peer, self.verdict.answer(who.request, self.name)) for who in self.waiting]


class Note(NamedTuple):
    """What was said at a generation; empty if nothing was, or if that is forgotten."""

    is_released: bool
    text: str


class _Told(NamedTuple):
    """The latest request of a rank that a break of the open generation has ended."""

    incarnation: int
    request: int
    verdict: Verdict


@dataclass(slots=True)
class _Barrier:
    generation: int = 0  # the one that is open; all earlier ones were released
    entered: dict[int, Entrant] = field(default_factory=dict)  # by rank
    broken: dict[int, _Told] = field(default_factory=dict)  # by rank
    note: str = ""  # for those who pass the generation that is open
    last_note: str = ""  # of the one before

    def missing(self, required: Iterable[int], came_in: Mapping[int, int]) -> list[int]:
        """Who has yet to enter it; `came_in`: rank → the place from which on its program takes part."""
        place = max((who.place for who in self.entered.values()), default=0)
        return [rank for rank in required if rank not in self.entered and not (place and came_in.get(rank, 0) > place)]

    def open(self, generation: int) -> None:
        self.last_note = self.note if generation == self.generation + 1 else ""
        self.note = ""
        self.generation = generation
        self.entered = {}
        self.broken = {}


class Barriers:
    """All barriers of a cluster. Beyond MAX_NAMES names, the least recently used one that nobody waits at goes."""

    def __init__(self, record: Iterable[Any] = ()) -> None:
        self._barriers: OrderedDict[str, _Barrier] = OrderedDict()
        for name, generation, broken, note, last_note in record:
            told = {
                rank: _Told(incarnation, request, Verdict(tuple(missing)))
                for rank, incarnation, request, missing in broken
            }
            self._barriers[name] = _Barrier(generation, {}, told, note, last_note)

    def record(self) -> list[object]:
        """What was settled, as plain data: `Barriers(record)` gives the same answers. Who waits asks again."""
        return [
            [
                name,
                barrier.generation,
                [
                    [rank, told.incarnation, told.request, list(told.verdict.missing)]
                    for rank, told in barrier.broken.items()
                ],
                barrier.note,
                barrier.last_note,
            ]
            for name, barrier in self._barriers.items()
        ]

    def enter(self, name: str, generation: int, who: Entrant) -> Verdict | str | None:
        """The verdict if this request has one, None if the worker now waits, or a text why it cannot enter."""
        barrier = self._opened(name, generation, who.rank)
        if isinstance(barrier, str):
            return barrier
        if generation < barrier.generation:
            return Verdict(())
        told = barrier.broken.get(who.rank)
        if told is not None and told.incarnation == who.incarnation and who.request <= told.request:
            return told.verdict
        present = barrier.entered.get(who.rank)
        if present is None or present.incarnation != who.incarnation or present.request <= who.request:
            barrier.entered[who.rank] = who
        return None

    def say(self, name: str, generation: int, rank: int, note: str) -> bool | str:
        """Leaves a note. False: it is there already, or the barrier was released; a text: why it cannot be left."""
        barrier = self._opened(name, generation, rank)
        if isinstance(barrier, str):
            return barrier
        if generation < barrier.generation or barrier.note == note:
            return False
        barrier.note = note
        return True

    def said(self, name: str, generation: int) -> Note:
        """The note of a generation, and whether that was released."""
        barrier = self._barriers.get(name)
        if barrier is None or generation > barrier.generation:
            return Note(False, "")
        if generation == barrier.generation:
            return Note(False, barrier.note)
        return Note(True, barrier.last_note if generation == barrier.generation - 1 else "")

    def _opened(self, name: str, generation: int, rank: int) -> _Barrier | str:
        """The barrier, at this generation or a later one; or a text why this rank cannot open it."""
        barrier = self._barriers.get(name)
        if barrier is None:
            if len(self._barriers) >= MAX_NAMES // 2 and self._waits_of(rank) >= MAX_OF_RANK:
                return f"this worker waits at {MAX_OF_RANK} barriers already: use fewer names"
            if len(self._barriers) >= MAX_NAMES and not self._forget_one():
                return f"workers wait at {MAX_NAMES} barriers, and no more can be opened: use fewer names"
            barrier = self._barriers[name] = _Barrier()
        self._barriers.move_to_end(name)
        if generation > barrier.generation:
            # A scheduler whose record is lost released the earlier ones. Workers that wait there ask again and pass.
            barrier.open(generation)
        return barrier

    def is_far_from_reached(self, name: str, required: Collection[int], came_in: Mapping[int, int]) -> bool:
        """Whether so few have entered that somebody is missing for sure."""
        barrier = self._barriers.get(name)
        return barrier is not None and len(barrier.entered) + len(came_in) < len(required)

    def settle(
        self, required: Collection[int], dead: Collection[int], came_in: Mapping[int, int] = NOBODY
    ) -> list[Settled]:
        """Releases the barriers that all `required` ranks have entered, and breaks those that a `dead` one has not.

        Args:
            came_in: see `missing`.
        """
        settled = []
        for name, barrier in self._barriers.items():
            if not barrier.entered:
                continue
            missing = barrier.missing(required, came_in)
            lost = tuple(sorted(rank for rank in missing if rank in dead))
            if missing and not lost:
                continue
            verdict = Verdict(lost)
            settled.append(Settled(name, barrier.generation, verdict, tuple(barrier.entered.values())))
            if lost:
                for rank, who in barrier.entered.items():
                    barrier.broken[rank] = _Told(who.incarnation, who.request, verdict)
                barrier.entered = {}
            else:
                barrier.open(barrier.generation + 1)
        return settled

    def withdraw(self, rank: int) -> None:
        """The worker of this rank was replaced: its predecessor no longer waits anywhere."""
        for barrier in self._barriers.values():
            barrier.entered.pop(rank, None)

    def open(self) -> dict[str, list[int]]:
        """The barriers at which workers wait, with their ranks."""
        return {name: sorted(barrier.entered) for name, barrier in self._barriers.items() if barrier.entered}

    def generations(self) -> dict[str, int]:
        """The barriers at which workers wait, with the generation that is open."""
        return {name: barrier.generation for name, barrier in self._barriers.items() if barrier.entered}

    def missing(self, required: Collection[int], came_in: Mapping[int, int]) -> dict[str, list[int]]:
        """Who is missing at the barriers at which workers wait.

        Args:
            came_in: of workers that took part later than others, rank → the place from which on their programs do.
        """
        return {name: barrier.missing(required, came_in) for name, barrier in self._barriers.items() if barrier.entered}

    def validate(self, required: Collection[int], dead: Collection[int], came_in: Mapping[int, int] = NOBODY) -> None:
        """Raises AssertionError if workers wait at a barrier that is reached, or that a `dead` one cannot reach, or if
        a request waits that has its verdict."""
        for name, barrier in self._barriers.items():
            missing = set(barrier.missing(required, came_in))
            assert missing or not barrier.entered, f"all workers are at barrier {name!r}, and nobody is told"
            assert not barrier.entered or missing.isdisjoint(dead), f"barrier {name!r} waits for the dead"
            for rank, who in barrier.entered.items():
                told = barrier.broken.get(rank)
                is_told = told is not None and told.incarnation == who.incarnation and told.request >= who.request
                assert not is_told, f"worker {rank} waits at barrier {name!r}, which has broken for it"

    def _waits_of(self, rank: int) -> int:
        return sum(rank in barrier.entered for barrier in self._barriers.values())

    def _forget_one(self) -> bool:
        for name, barrier in self._barriers.items():
            if not barrier.entered:
                del self._barriers[name]
                return True
        return False
