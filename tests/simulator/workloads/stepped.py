"""Programs whose loops are over steps: a restarted one goes on by itself, with nothing but what the servers know."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from kvd.core.requests import Depart, Flush, Transfer
from kvd.core.worker.step_loops import StepLoops
from kvd.errors import KvdError
from kvd.optimizer import SGD
from kvd.protocol.messages import Departure
from tests.simulator.process import Coroutine, PendingCall, Sleep
from tests.simulator.simulator import Me, slices_of
from tests.simulator.workloads.lives import LifeLedger
from tests.simulator.workloads.steps import begin_push, enter, enter_with, item, weights_before
from tests.simulator.workloads.training import Training


@dataclass
class SteppedTraining(Training):
    """Ends with the bits of `Training`, in two loops: the second begins in the middle of the steps."""

    def program(self, me: Me) -> Coroutine:
        yield from enter(me, self.keys, np.linspace(-1, 1, self.size, dtype=np.float32), self.optimizer)
        loops = StepLoops(me.machine.stopped(), is_strict=True)
        half = self.steps // 2
        for before, total in ((0, half), (half, self.steps - half)):
            for step in range(loops.begin(total, self.keys), total):
                loops.enter(step)
                yield from self.step(me, loops, before + step + 1)
                loops.leave()
                loops.validate()
            loops.end()
        yield Flush()
        yield Depart(Departure.DONE)

    def step(self, me: Me, loops: StepLoops, clock: int) -> Coroutine:
        """Gradients of the weights of this step."""
        weights = yield from weights_before(me, self.keys, self.size, clock)
        yield Sleep(self.pace_s)
        for keys in self.grouping(self.keys, me.rank, clock):
            if not loops.take_pushes(keys):
                me.world.fail(f"step {clock} of worker {me.rank} does not push {keys}")
            items = tuple([item(key, self.gradient(key, weights[key], me.rank, clock)) for key in keys])
            yield from begin_push(Transfer(items, push=True, pull=False, place=loops.place), clock)


@dataclass
class SteppedLedger(LifeLedger):
    """Every step of every rank counts once, whichever of its incarnations made it."""

    def program(self, me: Me) -> Coroutine:
        self.watch(me.world)
        yield from enter_with(me, self.keys, self.make, SGD(learning_rate=1.0))
        logs = [slice_.log for server in me.world.servers() for slice_ in slices_of(server)]
        self.started[me.rank, me.life] = max([log.counted_clock(me.rank) for log in logs], default=0)
        loops = StepLoops(me.machine.stopped(), is_strict=False)
        calls: list[PendingCall] = []
        for step in range(loops.begin(self.steps, None), self.steps):
            loops.enter(step)
            place = self.place(me, step + 1)
            for key in self.keys:
                loops.take_pushes([key])
                self.note(key, place, "begun")
                call = yield from begin_push(self.push((key,), place, loops.place), step + 1, self.timeout_s)
                self._pushes[call] = ((key,), place)
                calls.append(call)
            loops.leave()
            yield Sleep(self.pace_s)
        loops.end()
        for call in calls:
            with suppress(KvdError):
                yield call
        yield Flush()
        yield Depart(Departure.DONE)
