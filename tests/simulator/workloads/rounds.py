"""Rounds: who took part in each, and in which order their values were added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvd.core.requests import Depart, Item, Transfer, Versions
from kvd.protocol.messages import Departure
from tests.simulator.process import Coroutine, Sleep
from tests.simulator.simulator import Me, World
from tests.simulator.workloads.steps import (
    MANY_KEYS,
    SIZE,
    Floats,
    Grouping,
    Keys,
    all_together,
    begin_push,
    begin_with,
    insist,
    item,
    mostly_together,
    pushpull,
)


@dataclass
class Rounds:
    """Sync without an optimizer: a pulled value is the sum of exactly its round, added in rank order.

    Attributes:
        grouping: which keys of a step go into one call.
        pushpull: push and pull in one call.
        casts: some pushes of a worker travel as float64, and the servers make float32 of them again.
        merges: of keys that have one of their own. The others are summed.
    """

    workers: int
    steps: int
    keys: Keys = ("a", "b")
    grouping: Grouping = all_together
    pushpull: bool = True
    pace_s: float = 0.25
    size: int = SIZE
    casts: bool = False
    merges: Mapping[str, str] = field(default_factory=dict)

    def contribution(self, key: str, rank: int, clock: int) -> Floats:
        """Element 0 is a power of two, element 1 the clock; the sum of the others depends on the order."""
        values = np.random.default_rng((ord(key), rank, clock)).normal(size=self.size).astype(np.float32)
        values *= np.float32(10.0) ** np.arange(self.size, dtype=np.float32).__mod__(7)
        for first in (0, self.size - 2):
            values[first], values[first + 1] = 2.0**rank, clock
        return values

    def expected(self, key: str, clock: int) -> bytes:
        total = self.contribution(key, 0, clock)
        for rank in range(1, self.workers):
            total = total + self.contribution(key, rank, clock)
        if self.merges.get(key) == "mean":
            total = total / np.float32(self.workers)
        return total.tobytes()

    def program(self, me: Me) -> Coroutine:
        step = yield from begin_with(me, self.keys, self.make, None)
        for clock in range(step + 1, self.steps + 1):
            for keys in self.grouping(self.keys, me.rank, clock):
                yield from self.transfer(me, keys, clock)
            yield Sleep(self.pace_s)
        yield Depart(Departure.DONE)

    def make(self, key: str) -> Item:
        """The key as it is made."""
        made = item(key, np.zeros(self.size, np.float32))
        assert made.spec is not None
        return made._replace(spec=replace(made.spec, merge=self.merges.get(key, "")))

    def transfer(self, me: Me, keys: Sequence[str], clock: int) -> Coroutine:
        """The push and the pull of some keys."""
        values = [self.contribution(key, me.rank, clock) for key in keys]
        casts = self.casts and (me.rank + clock) % 3 == 0
        pushed = as_float64 if casts else item
        targets = [np.full(self.size, np.nan, np.float32) for _ in keys]
        if self.pushpull:
            items = tuple(pushed(*entry) for entry in zip(keys, values, targets, strict=True))
            versions = yield from pushpull(Transfer(items, push=True, pull=True, cast=casts), clock)
        else:
            pushes = tuple(pushed(key, value) for key, value in zip(keys, values, strict=True))
            yield from begin_push(Transfer(pushes, push=True, pull=False, cast=casts), clock)
            pulls = tuple(item(key, None, target) for key, target in zip(keys, targets, strict=True))
            versions = yield from insist(Transfer(pulls, push=False, pull=True))
        for key, target, version in zip(keys, targets, versions, strict=True):
            self.pulled(me.world, key, clock, target, version)

    def pulled(self, world: World, key: str, clock: int, value: Floats, versions: Versions) -> None:
        if versions != (clock, clock):
            world.fail(f"a pull of version {clock} of {key!r} brought {versions}")
        if value.tobytes() != self.expected(key, clock):
            ranks = [rank for rank in range(self.workers) if int(np.nan_to_num(value[0])) >> rank & 1]
            text = f"version {clock} of {key!r} has other bits than its round: ranks {ranks}, clocks {value[1]}"
            world.fail(text)

    def check(self, world: World) -> None:
        for key in self.keys:
            if world.value(key).tobytes() != self.expected(key, self.steps):
                world.fail(f"key {key!r} does not end with the bits of its last round")


def mixed_rounds(workers: int, steps: int, seed: int, *, pushpull: bool, casts: bool = False) -> Rounds:
    """Rounds of many small keys, which servers fuse while they are pushed together."""
    return Rounds(workers, steps, MANY_KEYS[:6], mostly_together(seed), pushpull, size=101, casts=casts)


def merged_rounds(workers: int, steps: int, seed: int) -> Rounds:
    """Rounds of small keys, every second of which has a merge of its own. Servers fuse those of one merge."""
    keys = MANY_KEYS[:6]
    merges = {key: ("mean", "sum")[number // 2 % 2] for number, key in enumerate(keys) if number % 2 == 0}
    return Rounds(workers, steps, keys, mostly_together(seed), seed % 2 == 0, size=101, merges=merges)


def as_float64(key: str, source: Floats, target: Floats | None = None) -> Item:
    """The same item; its source travels as float64."""
    same = item(key, source, target)
    assert same.spec is not None
    return same._replace(spec=replace(same.spec, dtype="float64"), source=source.astype(np.float64).view(np.uint8))
