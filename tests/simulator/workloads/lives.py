"""Ledgers of lives: what counts is what an acknowledged push brought, whichever incarnation made it."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvd.core.requests import ClockOf
from tests.simulator.process import Process
from tests.simulator.simulator import Me, World, slices_of
from tests.simulator.workloads.ledger import Ledger
from tests.simulator.workloads.steps import MANY_KEYS, Floats, Keys, insist


@dataclass
class LifeLedger(Ledger):
    """Each incarnation has places of its own: what an acknowledged push brought is what counts.

    Clocks that had counted when the incarnation started are exempt: they are its predecessor's.

    Attributes:
        started: the clock that each (rank, life) started from.
    """

    keys: Keys = ("a",)
    size: int = 1000  # one slice
    lives: int = 8
    started: dict[tuple[int, int], int] = field(default_factory=dict)

    def place(self, me: Me, clock: int) -> int:
        return (me.rank * self.steps + clock - 1) * self.lives + min(me.life, self.lives - 1)

    def gradient(self, place: int) -> Floats:
        values = np.zeros(self.size, np.float32)
        values[place] = -1.0
        return values

    def begun(self, me: Me) -> Generator[Any, Any, None]:
        self.started[me.rank, me.life] = yield from insist(ClockOf(self.keys[0]))

    def check_acked(self, world: World, process: Process, key: str, place: int) -> None:
        push, life = divmod(place, self.lives)
        rank, clock = divmod(push, self.steps)
        if clock + 1 > self.started[rank, life] and not self.reaches_all(world, key, place, lambda value: value == 1):
            world.fail(f"{process.name}, life {life}, has an ack for push {clock + 1}, which is not there")

    def check(self, world: World) -> None:
        for key in self.keys:
            value = self.value(world, key)[: self.workers * self.steps * self.lives]
            counts = value.reshape(-1, self.lives).sum(axis=1)
            if not (counts == 1).all():
                world.fail(f"pushes of {key!r} count {counts.tolist()} times")


@dataclass
class ListLives(LifeLedger):
    """A ledger of many small keys where each incarnation has places of its own."""

    keys: Keys = MANY_KEYS[:6]
    size: int = 250

    def begun(self, me: Me) -> Generator[Any, Any, None]:
        """The keys may have reached different clocks; the servers know the largest that its predecessor reached."""
        logs = [slice_.log for server in me.world.servers() for slice_ in slices_of(server)]
        self.started[me.rank, me.life] = max([log.counted_clock(me.rank) for log in logs], default=0)
        yield from ()
