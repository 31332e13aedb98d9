"""Keys that are deleted and made again under the same names, in another shape: nothing of one counts in the next."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvd.core.requests import ClockOf, Control, DeleteKeys, Depart, DescribeKey, InitKeys, Item, JoinCluster, Transfer
from kvd.errors import KeyExists, KeyNotFound, NodeLost
from kvd.optimizer import SGD, to_wire
from kvd.protocol.messages import Departure, SetOptimizer
from tests.simulator.process import Coroutine, PendingCall, Sleep
from tests.simulator.simulator import Me, World, slices_of
from tests.simulator.workloads.forms import VALUES, Forms
from tests.simulator.workloads.steps import SIZE, Floats, begin_push, insist, item

NAMES = ("a", "b", "c", "big")
PHASE = "phase"


@dataclass
class Generations:
    """In each generation the keys are made, each worker adds the number of the generation to a place of its own in each
    step, and all delete the keys.

    A restarted worker asks the clock of a key that stays how far its predecessor came: each worker pushes to it when it
    has found the keys of a generation, and when it has deleted them.
    """

    workers: int
    sync: bool
    generations: int = 4
    steps: int = 3
    pace_s: float = 0.2
    forms: Forms = VALUES

    def size(self, name: str, generation: int) -> int:
        return (SIZE if name == "big" else self.workers * self.steps) + generation // 2  # some stay alike

    def program(self, me: Me) -> Coroutine:
        yield JoinCluster()
        if me.rank == 0:
            yield from insist(Control((SetOptimizer(0, to_wire(SGD(learning_rate=1.0))),)))
        yield from self.make((item(PHASE, np.zeros(1, np.float32)),))
        phase = (yield from insist(ClockOf(PHASE))) if me.machine.session.predecessor else 0
        for generation in range(phase // 2, self.generations):
            if phase == 2 * generation:
                if me.rank == 0:
                    yield from self.wait_until_all_have_deleted(generation)
                yield from self.make(tuple([self.forms.first(name, self.size(name, generation)) for name in NAMES]))
                phase = yield from self.pass_phase(phase)
            pushes = yield from self.use(me, generation)
            yield from insist(DeleteKeys(NAMES))
            for push in pushes:
                if not push.done or not isinstance(push.error, NodeLost | None):
                    me.world.fail(f"worker {me.rank} deleted the keys before a push was done: {push.error}")
            phase = yield from self.pass_phase(phase)
        yield Depart(Departure.DONE)

    def make(self, items: tuple[Item, ...]) -> Generator[Any, Any, None]:
        """All in one call, or one by one if that fails on the way."""
        fresh = tuple(entry._replace(source=entry.source.copy()) for entry in items)
        try:
            yield InitKeys(fresh)
        except NodeLost:
            for entry in items:
                with suppress(KeyExists):  # the first went through after all
                    yield from insist(InitKeys((entry,)))

    def pass_phase(self, phase: int) -> Generator[Any, Any, int]:
        """Pushes to the key that stays, and waits until the push is committed."""
        push = Transfer((item(PHASE, np.full(1, -1.0, np.float32)),), push=True, pull=False)
        call = yield from begin_push(push, phase + 1)
        try:
            yield call
        except NodeLost:  # the push is kept; a pull waits for it
            target = np.full(1, np.nan, np.float32)
            yield from insist(Transfer((item(PHASE, None, target),), push=False, pull=True))
        return phase + 1

    def wait_until_all_have_deleted(self, generation: int) -> Generator[Any, Any, None]:
        """The keys of a generation must not be taken for those before by a worker that was restarted there."""
        target = np.zeros(1, np.float32)
        while target[0] < 2 * generation * self.workers:
            pull = Transfer((item(PHASE, None, target),), push=False, pull=True, any_version=True)
            yield from insist(pull)
            yield Sleep(self.pace_s)

    def use(self, me: Me, generation: int) -> Generator[Any, Any, list[PendingCall]]:
        """Makes the pushes that are still to be made. In some generations, waits for them and looks at the values."""
        pushes = []
        clocks: dict[str, int] = {}
        for name in NAMES:
            with suppress(KeyNotFound):  # the predecessor has deleted it, and all others have, too
                spec = yield from insist(DescribeKey(name))
                if not self.forms.is_made_so(name, self.size(name, generation), spec):
                    me.world.fail(f"worker {me.rank} finds {name!r} as {spec} in generation {generation}")
                clocks[name] = yield from insist(ClockOf(name))
        for clock in range(1, self.steps + 1):
            names = [name for name, before in clocks.items() if before < clock]
            if names:
                gradients = [self.gradient(name, generation, me.rank, clock) for name in names]
                pushes.append((yield from begin_push(self.forms.push(names, gradients), clock)))
                yield Sleep(self.pace_s)
        if clocks and generation % 3:
            for size in sorted({self.size(name, generation) for name in clocks}):
                names = [name for name in clocks if self.size(name, generation) == size]
                found, _ = yield from self.forms.pull(names, size)
                for name, value in found.items():
                    self.look_at(me, name, generation, value)
        return pushes

    def gradient(self, name: str, generation: int, rank: int, clock: int) -> Floats:
        values = np.zeros(self.size(name, generation), np.float32)
        values[rank * self.steps + clock - 1] = -1.0 - generation
        return values

    def look_at(self, me: Me, name: str, generation: int, value: Floats) -> None:
        """Every push of this worker counts, in sync mode those of all; nothing else does."""
        places = self.workers * self.steps
        own = slice(me.rank * self.steps, (me.rank + 1) * self.steps)
        counted = value[:places] if self.sync else value[own]
        if not (counted == 1.0 + generation).all() or not np.isin(value[:places], (0.0, 1.0 + generation)).all():
            me.world.fail(f"worker {me.rank} finds {value[:places].tolist()} in {name!r} of generation {generation}")
        if value[places:].any():
            me.world.fail(f"worker {me.rank} finds {name!r} of generation {generation} changed where nobody pushed")

    def check(self, world: World) -> None:
        """Only the key that stays is there."""
        for rank, server in enumerate(world.servers()):
            left = sorted({slice_.key for slice_ in slices_of(server)} - {PHASE})
            if left:
                world.fail(f"server {rank} still has {left}")
            runners = world.processes[f"server {rank}"].runners.values()
            kept = {slice_id for runner in runners for slice_id in runner.slices} - {(PHASE, 0)}
            if kept:
                world.fail(f"server {rank} still has states of {sorted(kept)}")
        if world.value(PHASE)[0] != 2 * self.generations * self.workers:
            world.fail(f"the phase is {world.value(PHASE)[0]}")
