"""Delay compensation: each gradient counts for what has happened to its weights since its worker has pulled them.

Every rank has elements of its own, to which it alone adds: so they depend on its own pushes and pulls, and on nothing
that others do meanwhile. What they may be is calculated in float64, by the formula of `kvd.optimizer.DCASGD`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import TypeAlias

import numpy as np

from kvd.core.requests import ClockOf, Depart, Flush, Rewind, Transfer
from kvd.optimizer import DCASGD
from kvd.protocol.messages import Departure
from tests.simulator.process import Coroutine, Sleep
from tests.simulator.simulator import Me, World
from tests.simulator.workloads.steps import (
    MANY_KEYS,
    Floats,
    Keys,
    begin_push,
    enter,
    insist,
    item,
    mostly_together,
)

RATE, LAMBDA = 0.25, 0.5
PULL_EACH = 3  # pushes
TOLERANCE = 1e-4

Past: TypeAlias = tuple[float, ...]  # what an element was since it was pulled


@dataclass
class Delays:
    """Asynchronous training with DCASGD.

    Attributes:
        is_exact: nothing happens that makes a server forget what a worker has, or send it twice. Else a worker may be
            taken for one that has pulled later than it did: it is compensated for less then.
        pulled: by key and rank, the pushes after which it has pulled.
    """

    workers: int
    steps: int
    seed: int
    is_exact: bool
    keys: Keys = MANY_KEYS[:4]
    size: int = 60
    pace_s: float = 0.2
    pulled: dict[tuple[str, int], set[int]] = field(default_factory=dict)

    def program(self, me: Me) -> Coroutine:
        yield from enter(me, self.keys, np.ones(self.size, np.float32), DCASGD(RATE, compensation=LAMBDA))
        reached = dict.fromkeys(self.keys, 0)
        if me.machine.session.predecessor:
            for key in self.keys:
                reached[key] = yield from insist(ClockOf(key))
        step = min(reached.values())
        yield Rewind(step)
        yield from self.pull(me, reached)
        group = mostly_together(self.seed)
        for clock in range(step + 1, self.steps + 1):
            for keys in group(self.keys, me.rank, clock):
                items = tuple([item(key, self.gradient(key, me.rank, clock)) for key in keys])
                yield from begin_push(Transfer(items, push=True, pull=False), clock)
            yield Sleep(self.pace_s)
            if clock % PULL_EACH == 0:
                yield from self.pull(me, dict.fromkeys(self.keys, clock))
        yield Flush()
        yield Depart(Departure.DONE)

    def pull(self, me: Me, clocks: Mapping[str, int]) -> Coroutine:
        """All keys, after these pushes."""
        targets = [np.full(self.size, np.nan, np.float32) for _ in self.keys]
        pulls = tuple([item(key, None, target) for key, target in zip(self.keys, targets, strict=True)])
        yield from insist(Transfer(pulls, push=False, pull=True))
        for key, target in zip(self.keys, targets, strict=True):
            self.pulled.setdefault((key, me.rank), set()).add(clocks[key])
            self.look_at(me.world, f"what worker {me.rank} finds in {key!r}", key, target, {me.rank: clocks[key]})

    def number(self, key: str, rank: int, clock: int) -> float:
        """What a push brings to each of its own elements."""
        return Random(f"{self.seed} {key} {rank} {clock}").choice((-1.0, -0.5, 0.75, 1.5))

    def gradient(self, key: str, rank: int, clock: int) -> Floats:
        values = np.zeros(self.size, np.float32)
        values[rank :: self.workers] = self.number(key, rank, clock)
        return values

    # ── what may be there ──

    def possible(self, key: str, rank: int, clock: int) -> set[float]:
        """What the elements of a rank may be after so many pushes of it."""
        pasts: set[Past] = {(1.0,)}
        for number in range(1, clock + 1):
            given = self.number(key, rank, number)
            after: set[Past] = set()
            for past in pasts:
                for had in past[:1] if self.is_exact else past:
                    compensated = given + LAMBDA * given**2 * (past[-1] - had)
                    after.add((*past, round(past[-1] - RATE * compensated, 9)))
            has_pulled = number in self.pulled.get((key, rank), ())
            pasts = {past[-1:] for past in after} if has_pulled else after
        return {past[-1] for past in pasts}

    def look_at(self, world: World, name: str, key: str, value: Floats, clocks: dict[int, int]) -> None:
        for rank, clock in clocks.items():
            own = value[rank :: self.workers]
            possible = self.possible(key, rank, clock)
            if (own != own[0]).any() or min(abs(number - float(own[0])) for number in possible) > TOLERANCE:
                wanted = sorted(possible)[:8]
                world.fail(f"{name}: elements of rank {rank} are {own.tolist()} after {clock} pushes, not {wanted}")

    def check(self, world: World) -> None:
        everything = dict.fromkeys(range(self.workers), self.steps)
        for key in self.keys:
            self.look_at(world, f"key {key!r} in the end", key, world.value(key), everything)
