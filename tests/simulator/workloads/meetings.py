"""Meetings: who has come to a barrier that a worker passes, while workers die, are restarted and try again."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from kvd.core.requests import Barrier, Depart, JoinCluster
from kvd.errors import BarrierBroken
from kvd.protocol.messages import Departure
from tests.simulator.process import Coroutine, Sleep
from tests.simulator.simulator import Me, World
from tests.simulator.workloads.steps import MAX_ATTEMPTS, RETRY_S

NAMES = ("early", "late")


@dataclass
class Meetings:
    """Every worker passes each barrier `steps` times; one that broke is entered again until it is passed.

    Attributes:
        entered: how often each (rank, name) was entered by the most eager of its lives, retries apart.
        passed: how often each (rank, name) was passed by its latest life.
        broken: how often a worker was told that a barrier broke.
    """

    workers: int
    steps: int
    pace_s: float = 0.25
    entered: dict[tuple[int, str], int] = field(default_factory=dict)
    passed: dict[tuple[int, str], int] = field(default_factory=dict)
    broken: int = 0

    def program(self, me: Me) -> Coroutine:
        yield JoinCluster()
        for step in range(1, self.steps + 1):
            for name in NAMES:
                yield from self.meet(me, name, step)
                yield Sleep(self.pace_s * (1 + me.rank) / self.workers)
        yield Depart(Departure.LEFT)

    def meet(self, me: Me, name: str, step: int) -> Generator[Any, Any, None]:
        """Passes a barrier for the `step`-th time."""
        place = me.rank, name
        self.entered[place] = max(step, self.entered.get(place, 0))
        for _ in range(MAX_ATTEMPTS):
            try:
                yield Barrier(name)
            except BarrierBroken:
                self.broken += 1
                yield Sleep(RETRY_S)
                continue
            self.passed[place] = step
            late = [rank for rank in range(self.workers) if self.entered.get((rank, name), 0) < step]
            if late:
                me.world.fail(f"worker {me.rank} passed barrier {name!r} {step} times; {late} have not come so often")
            return
        raise AssertionError(f"barrier {name!r} broke {MAX_ATTEMPTS} times")

    def check(self, world: World) -> None:
        expected = {(rank, name): self.steps for rank in range(self.workers) for name in NAMES}
        if self.passed != expected:
            world.fail(f"the barriers were passed {self.passed} times, not {self.steps} times each")
