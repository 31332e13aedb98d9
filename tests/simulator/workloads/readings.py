"""Readers beside a training: whatever happens, all keys of one read are what they were after one step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any, NamedTuple

import numpy as np

from kvd.core.cuts import Chooser, available
from kvd.core.requests import (
    Depart,
    DescribeKey,
    Flush,
    InitKeys,
    JoinCluster,
    Read,
    StopReading,
    Survey,
    Transfer,
    Versions,
)
from kvd.errors import KeyNotFound, NodeLost
from kvd.protocol.messages import Departure
from tests.simulator.process import Coroutine, Sleep, Start
from tests.simulator.simulator import Me, World
from tests.simulator.workloads.rounds import Rounds
from tests.simulator.workloads.steps import MANY_KEYS, Floats, Keys, begin, insist, item, mostly_together

PAUSE_S = 0.15
RARE_EVERY = 2
MADE_LATE = 3  # the last step before the late key is made


class Seen(NamedTuple):
    """One read."""

    step: int
    keys: Keys
    versions: list[Versions]
    values: list[Floats]


@dataclass
class Readers:
    """Programs that read some keys again and again, until all workers have ended and the last step was read.

    Attributes:
        steps: how many the workers make.
        seed: draws which keys are read together.
    """

    keys: Keys
    size: int
    steps: int
    seed: int
    seen: list[Seen] = field(default_factory=list)

    def program(self, me: Me) -> Coroutine:
        random, numbers = Random(self.seed * 17 + me.number), count(1)
        yield JoinCluster()
        while not me.machine.view.is_up_to_date:
            yield Sleep(PAUSE_S)
        reached = 0
        while reached < self.steps:
            live = yield from live_keys(self.keys)
            some = self.keys if have_ended(me.world) else random.sample(live, random.randint(0, len(live)))
            if some:
                self.seen.append((yield from self.read(tuple(some), numbers)))
            if some == self.keys:
                reached = self.seen[-1].step  # the servers may not know yet that all have ended
            yield Sleep(random.uniform(0.0, PAUSE_S))

    def read(self, keys: Keys, numbers: Iterator[int]) -> Generator[Any, Any, Seen]:
        """One read, as an observer makes it."""
        targets = [np.full(self.size, np.nan, np.float32) for _ in keys]
        items = tuple(item(key, None, target) for key, target in zip(keys, targets, strict=True))
        chooser = Chooser()
        while True:
            there = available((yield from insist(Survey(items))), one_key=len(keys) == 1)
            choice = chooser.choose(there)
            number = next(numbers)
            call = yield Start(Read(items, number, choice.step, choice.is_over))
            has_waited = False
            while choice.patience_s is not None and not call.done and not has_waited:
                yield Sleep(choice.patience_s)
                has_waited = yield StopReading(number)
            versions = yield call
            if versions is not None:
                return Seen(choice.step, keys, versions, targets)
            if has_waited:
                chooser.has_waited()
            else:
                chooser.was_too_late()


def live_keys(keys: Keys) -> Generator[Any, Any, list[str]]:
    """Those that were made."""
    live = []
    for key in keys:
        with suppress(KeyNotFound, NodeLost):
            yield DescribeKey(key)
            live.append(key)
    return live


def have_ended(world: World) -> bool:
    """Whether the programs of all workers have."""
    return all(process.finished for name, process in world.processes.items() if name.startswith("worker"))


@dataclass
class WatchedRounds:
    """Rounds, whose values are known for each clock, and readers of them.

    Attributes:
        worker: the program of the workers.
        clock_after: how often a key was pushed up to a step.
    """

    rounds: Rounds
    readers: Readers
    worker: Callable[[Me], Coroutine]
    clock_after: Callable[[str, int], int]

    def program(self, me: Me) -> Coroutine:
        return self.worker(me)

    def reader(self, me: Me) -> Coroutine:
        return self.readers.program(me)

    def check(self, world: World) -> None:
        for step, keys, versions, values in self.readers.seen:
            for key, seen, value in zip(keys, versions, values, strict=True):
                clock = seen.newest if len(keys) == 1 else self.clock_after(key, step)  # of one key, any is complete
                if seen != (clock, clock):
                    world.fail(f"a read of {keys} after step {step} brought the versions {versions}")
                if value.tobytes() != self.expected(key, clock):
                    world.fail(f"a read of {keys} after step {step} brought other bits of {key!r}")

    def expected(self, key: str, clock: int) -> bytes:
        """The value of a key after so many rounds."""
        return self.rounds.expected(key, clock) if clock else np.zeros(self.rounds.size, np.float32).tobytes()


def watched_rounds(workers: int, steps: int, seed: int) -> WatchedRounds:
    """Every key is pushed in every step, mostly in one call."""
    rounds = Rounds(workers, steps, MANY_KEYS[:4], mostly_together(seed), pushpull=seed % 2 == 0)
    readers = Readers(rounds.keys, rounds.size, steps, seed)
    return WatchedRounds(rounds, readers, rounds.program, lambda key, step: step)


def uneven_rounds(workers: int, steps: int, seed: int) -> WatchedRounds:
    """One key is pushed in every other step, and one is made late. Some workers do not wait for their pushes."""
    rounds = Rounds(workers, steps, ("a", "r", "b", "l"))
    program = _Uneven(rounds, waits=seed % 2 == 0)
    return WatchedRounds(rounds, Readers(rounds.keys, rounds.size, steps, seed), program, program.clock_after)


@dataclass
class _Uneven:
    """The program of a worker that pushes its keys one by one."""

    rounds: Rounds
    waits: bool

    def clock_after(self, key: str, step: int) -> int:
        if key == "r":
            return step // RARE_EVERY
        return max(0, step - MADE_LATE) if key == "l" else step

    def __call__(self, me: Me) -> Coroutine:
        rounds = self.rounds
        yield from begin(me, rounds.keys[:3], np.zeros(rounds.size, np.float32), None)
        for step in range(1, rounds.steps + 1):
            for key in rounds.keys:
                if self.clock_after(key, step) == self.clock_after(key, step - 1):
                    continue
                if key == "l" and step == MADE_LATE + 1:
                    yield from insist(InitKeys((item(key, np.zeros(rounds.size, np.float32)),)))
                yield from self._push(me, key, self.clock_after(key, step))
            yield Sleep(rounds.pace_s)
        yield Flush()
        yield Depart(Departure.DONE)

    def _push(self, me: Me, key: str, clock: int) -> Coroutine:
        if self.waits:
            yield from self.rounds.transfer(me, (key,), clock)
        else:
            source = self.rounds.contribution(key, me.rank, clock)
            yield Start(Transfer((item(key, source),), push=True, pull=False))
