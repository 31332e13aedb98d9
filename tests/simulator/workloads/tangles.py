"""Programs whose workers push keys in orders of their own, and meet at barriers: some of them end in a deadlock.

A model of the store, in which nothing takes time and nothing gets lost, says who ends and who is stuck for ever. The
workers must find out the same: exactly those that are stuck get Deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

import numpy as np

from kvd.core.requests import Barrier, Depart, Flush, Transfer
from kvd.errors import Deadlock, RequestTimeout
from kvd.protocol.messages import Departure
from tests.simulator.process import Coroutine, Sleep, Start
from tests.simulator.simulator import Me, World
from tests.simulator.workloads.steps import Keys, begin, item

SIZE = 40  # floats of a key


class Step(NamedTuple):
    """What a program does next: "push" goes on at once; the others wait."""

    what: str  # "push", "pushpull", "flush", "barrier" or "sleep"
    name: str = ""


class Script(NamedTuple):
    """The steps of one worker. At the end it flushes, and leaves."""

    steps: tuple[Step, ...]


def draw(random: Random, keys: Keys, length: int) -> list[Step]:
    """Steps that end if every worker takes them in the same order."""
    steps = []
    for _ in range(length):
        what = random.choice(("push", "pushpull", "pushpull", "flush", "barrier", "sleep"))
        name = random.choice(keys) if what in ("push", "pushpull") else random.choice("xy") if what == "barrier" else ""
        steps.append(Step(what, name))
    return steps


def tangle(random: Random, workers: int, keys: Keys, length: int) -> list[Script]:
    """A script for each worker: the same steps, but some workers take one earlier, leave one out, or stop early."""
    common = draw(random, keys, length)
    scripts = []
    for _ in range(workers):
        steps = list(common)
        for _ in range(random.choice((0, 0, 1, 2))):
            position = random.randrange(len(steps) - 1)
            steps[position], steps[position + 1] = steps[position + 1], steps[position]
        if random.random() < 0.15:
            del steps[random.randrange(len(steps))]
        if random.random() < 0.15:
            del steps[random.randrange(1, len(steps)) :]
        scripts.append(Script(tuple(steps)))
    return scripts


@dataclass
class _Place:
    """How far a worker of the model is."""

    position: int = 0
    pushed: dict[str, int] = field(default_factory=dict)
    at: str = ""  # the barrier that it has entered
    waits: bool = False  # its present step is begun
    gone: bool = False


def stuck_ranks(scripts: Sequence[Script], lead: int = 0) -> list[int]:
    """Who never ends, in the model: it takes any step that can be taken, until there is none.

    Args:
        lead: how many pushes of a key a worker may be ahead of the slowest one when its push counts: the staleness, or
            0 where workers share rounds.
    """
    places = [_Place() for _ in scripts]
    while any(_advance(scripts[rank], places[rank], places, lead) for rank in range(len(scripts))):
        pass
    return [rank for rank, place in enumerate(places) if not place.gone]


def _advance(script: Script, me: _Place, places: Sequence[_Place], lead: int) -> bool:
    """Takes one step of a worker, or begins it; False if it can do nothing."""
    if me.gone:
        return False
    staying = [place for place in places if not place.gone]
    step = script.steps[me.position] if me.position < len(script.steps) else Step("leave")
    if not me.waits:
        me.waits = True
        if step.what in ("push", "pushpull"):
            me.pushed[step.name] = me.pushed.get(step.name, 0) + 1
        if step.what == "barrier":
            me.at = step.name
        return True

    def is_counted(key: str) -> bool:
        return all(place.pushed.get(key, 0) + lead >= me.pushed.get(key, 0) for place in staying)

    if step.what == "pushpull" and not is_counted(step.name):
        return False
    if step.what in ("flush", "leave") and not all(map(is_counted, me.pushed)):
        return False
    if step.what == "barrier" and me.at:
        if any(place.at != step.name for place in staying):
            return False
        for place in staying:
            place.at = ""
    me.position, me.waits, me.gone = me.position + 1, False, step.what == "leave"
    return True


@dataclass
class Tangles:
    """Runs the scripts.

    Attributes:
        lead: see `stuck_ranks`.
        stuck: the ranks that were told of a deadlock.
        untold: the ranks whose calls ended at their deadlines: the others knew of the deadlock, but the news to these
            got lost, and the scheduler that could repeat it was restarted.
    """

    scripts: list[Script]
    keys: Keys
    lead: int = 0
    stuck: set[int] = field(default_factory=set)
    untold: set[int] = field(default_factory=set)

    def program(self, me: Me) -> Coroutine:
        yield from begin(me, self.keys, np.zeros(SIZE, np.float32), None)
        random = Random(me.world.seed * 100 + me.rank)
        try:
            for step in self.scripts[me.rank].steps:
                if step.what == "sleep":
                    yield Sleep(random.choice((0.1, 1.0, 12.0)))
                elif step.what == "flush":
                    yield Flush()
                elif step.what == "barrier":
                    yield Barrier(step.name)
                elif step.what == "push":
                    yield Start(Transfer((item(step.name, np.ones(SIZE, np.float32)),), push=True, pull=False))
                else:
                    values = item(step.name, np.ones(SIZE, np.float32), np.zeros(SIZE, np.float32))
                    yield Transfer((values,), push=True, pull=True)
            yield Flush()
        except Deadlock:
            self.stuck.add(me.rank)  # it stays: the others must find out by themselves
            return
        except RequestTimeout:
            self.untold.add(me.rank)
            return
        yield Depart(Departure.LEFT)

    def check(self, world: World) -> None:
        """Exactly those are stuck that are stuck in the model."""
        expected = stuck_ranks(self.scripts, self.lead)
        may_lose_news = bool(self.stuck) and world.processes["scheduler"].life > 0
        if sorted(self.stuck | self.untold) != expected or (self.untold and not may_lose_news):
            world.fail(f"workers {sorted(self.stuck)} were told of a deadlock, {expected} are stuck in {self.scripts}")


def tangled(workers: int, length: int, seed: int, lead: int = 0) -> Tangles:
    """The tangle of a seed."""
    keys = ("a", "b")
    return Tangles(tangle(Random(seed), workers, keys, length), keys, lead)
