"""Barriers by name and generation.

A worker's n-th call for a name enters generation n, counted from 0 by each incarnation. A generation is settled once,
released or broken, and gives everyone who asks later the same answer: a restarted worker that runs its program again
passes the barriers that its predecessor passed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvd.core.machine import Peer, Send
from kvd.core.membership import name_of
from kvd.protocol.messages import Done, ErrorCode, NodeName, Refused

MAX_NAMES = 4096
MAX_BROKEN = 16  # broken generations remembered per name


class Verdict(NamedTuple):
    """How a generation was settled: broken if anyone is missing."""

    missing: tuple[int, ...]

    def answer(self, request: int, name: str) -> Done | Refused:
        """What a worker that entered the barrier is told."""
        if not self.missing:
            return Done(request)
        nodes = tuple(NodeName("worker", rank) for rank in self.missing)
        names = ", ".join(name_of(*node) for node in nodes)
        text = f"barrier {name!r} cannot be reached: {names} died before it; restart the dead, or the job"
        return Refused(request, ErrorCode.BARRIER_BROKEN, text, nodes=nodes)


class Settled(NamedTuple):
    """A generation that has just been settled, and who waits for the answer."""

    name: str
    generation: int
    verdict: Verdict
    waiting: tuple[tuple[Peer, int], ...]  # (peer, request)

    def answers(self) -> list[Send]:
        """The verdict, to each worker that waits for it."""
        return [Send(peer, self.verdict.answer(request, self.name)) for peer, request in self.waiting]


@dataclass(slots=True)
class _Barrier:
    generation: int = 0  # the one that is open
    entered: dict[int, tuple[Peer, int]] = field(default_factory=dict)  # rank → (peer, request)
    broken: OrderedDict[int, Verdict] = field(default_factory=OrderedDict)


class Barriers:
    """All barriers of a cluster. Beyond MAX_NAMES names, the least recently used one that nobody waits at goes."""

    def __init__(self, record: Iterable[Any] = ()) -> None:
        self._barriers: OrderedDict[str, _Barrier] = OrderedDict()
        for name, generation, broken in record:
            verdicts = OrderedDict((settled, Verdict(tuple(missing))) for settled, missing in broken)
            self._barriers[name] = _Barrier(generation, {}, verdicts)

    def record(self) -> list[object]:
        """The settled generations as plain data: `Barriers(record)` gives the same answers. Who waits asks again."""
        return [
            [
                name,
                barrier.generation,
                [[settled, list(verdict.missing)] for settled, verdict in barrier.broken.items()],
            ]
            for name, barrier in self._barriers.items()
        ]

    def enter(self, name: str, generation: int, rank: int, peer: Peer, request: int) -> Verdict | str | None:
        """The verdict if the generation is settled, None if the worker now waits, or a text why it cannot enter."""
        barrier = self._barriers.get(name)
        if barrier is None:
            if len(self._barriers) >= MAX_NAMES and not self._forget_one():
                return f"workers wait at {MAX_NAMES} barriers, and no more can be opened: use fewer names"
            barrier = self._barriers[name] = _Barrier()
        self._barriers.move_to_end(name)
        if generation < barrier.generation:
            return barrier.broken.get(generation, Verdict(()))
        if generation > barrier.generation:
            # A scheduler whose record is lost settled the earlier ones. Workers that wait there ask again and pass.
            barrier.generation = generation
            barrier.entered = {}
        barrier.entered[rank] = (peer, request)
        return None

    def settle(self, required: Collection[int], dead: Collection[int]) -> list[Settled]:
        """Releases the barriers that all `required` ranks have entered, and breaks those that a `dead` one has not."""
        settled = []
        for name, barrier in self._barriers.items():
            if not barrier.entered:
                continue
            missing = [rank for rank in required if rank not in barrier.entered]
            lost = tuple(sorted(rank for rank in missing if rank in dead))
            if missing and not lost:
                continue
            verdict = Verdict(lost)
            settled.append(Settled(name, barrier.generation, verdict, tuple(barrier.entered.values())))
            if lost:
                barrier.broken[barrier.generation] = verdict
                while len(barrier.broken) > MAX_BROKEN:
                    barrier.broken.popitem(last=False)
            barrier.generation += 1
            barrier.entered = {}
        return settled

    def withdraw(self, rank: int) -> None:
        """The worker of this rank was replaced: its predecessor no longer waits anywhere."""
        for barrier in self._barriers.values():
            barrier.entered.pop(rank, None)

    def open(self) -> dict[str, list[int]]:
        """The barriers at which workers wait, with their ranks."""
        return {name: sorted(barrier.entered) for name, barrier in self._barriers.items() if barrier.entered}

    def validate(self, required: Collection[int]) -> None:
        """Raises AssertionError if workers wait at a barrier that all `required` ranks have entered."""
        for name, barrier in self._barriers.items():
            is_reached = bool(barrier.entered) and barrier.entered.keys() >= set(required)
            assert not is_reached, f"all workers are at barrier {name!r}, and nobody is told"

    def _forget_one(self) -> bool:
        for name, barrier in self._barriers.items():
            if not barrier.entered:
                del self._barriers[name]
                return True
        return False
