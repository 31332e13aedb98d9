"""Barriers by name and generation.

The n-th time that a worker enters a name it enters generation n, counted from 0 by each incarnation. A generation is
settled once, released or broken, and gives the same answer to everyone who asks later: a worker that is restarted and
runs through its program again passes the barriers that were passed before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvd.core.machine import Peer

MAX_NAMES = 4096
MAX_BROKEN = 16  # broken generations remembered per name


class Verdict(NamedTuple):
    """How a generation was settled: broken if anyone is missing."""

    missing: tuple[int, ...]


class Settled(NamedTuple):
    """A generation that has just been settled, and who waits for the answer."""

    name: str
    generation: int
    verdict: Verdict
    waiting: tuple[tuple[Peer, int], ...]  # (peer, request)


@dataclass(slots=True)
class _Barrier:
    generation: int = 0  # the one that is open
    entered: dict[int, tuple[Peer, int]] = field(default_factory=dict)  # rank → (peer, request)
    broken: OrderedDict[int, Verdict] = field(default_factory=OrderedDict)


class Barriers:
    """All barriers of a cluster. The oldest name that nobody waits at is forgotten beyond MAX_NAMES names."""

    def __init__(self, record: Iterable[Any] = ()) -> None:
        self._barriers: OrderedDict[str, _Barrier] = OrderedDict()
        for name, generation, broken in record:
            verdicts = OrderedDict((settled, Verdict(tuple(missing))) for settled, missing in broken)
            self._barriers[name] = _Barrier(generation, {}, verdicts)

    def record(self) -> list[object]:
        """What is settled, in plain data: `Barriers(record)` gives the same answers. Who waits asks again."""
        return [
            [
                name,
                barrier.generation,
                [[settled, list(verdict.missing)] for settled, verdict in barrier.broken.items()],
            ]
            for name, barrier in self._barriers.items()
        ]

    def enter(self, name: str, generation: int, rank: int, peer: Peer, request: int) -> Verdict | str | None:
        """The verdict of a settled generation, None if the worker now waits, or a text that says why it cannot."""
        barrier = self._barriers.get(name)
        if barrier is None:
            if len(self._barriers) >= MAX_NAMES and not self._forget_one():
                return f"{MAX_NAMES} barriers are being waited at, no more can be opened"
            barrier = self._barriers[name] = _Barrier()
        self._barriers.move_to_end(name)
        if generation < barrier.generation:
            return barrier.broken.get(generation, Verdict(()))
        if generation > barrier.generation:
            # The one before was settled by a scheduler whose record is lost; who waits there asks again and is let go.
            barrier.generation = generation
            barrier.entered = {}
        barrier.entered[rank] = (peer, request)
        return None

    def settle(self, required: Collection[int], dead: Collection[int]) -> list[Settled]:
        """Releases what all `required` ranks have entered, and breaks what a `dead` one is missing from."""
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
        """The worker of this rank was replaced: its predecessor waits nowhere any more."""
        for barrier in self._barriers.values():
            barrier.entered.pop(rank, None)

    def open(self) -> dict[str, list[int]]:
        """The barriers that someone waits at, with the ranks that are there."""
        return {name: sorted(barrier.entered) for name, barrier in self._barriers.items() if barrier.entered}

    def _forget_one(self) -> bool:
        for name, barrier in self._barriers.items():
            if not barrier.entered:
                del self._barriers[name]
                return True
        return False
