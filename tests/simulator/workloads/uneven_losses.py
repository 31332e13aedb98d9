"""Uneven data while workers are lost and come back: epochs that end at points, with rounds that shrink."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvd.core.requests import Depart, Flush
from kvd.core.worker.return_pause import ReturnPause
from kvd.core.worker.step_loops import StepLoops
from kvd.optimizer import SGD
from kvd.protocol.messages import Departure
from tests.simulator.process import Coroutine
from tests.simulator.simulator import Me, World
from tests.simulator.workloads.forms import VALUES, Forms
from tests.simulator.workloads.losses import LossLedger
from tests.simulator.workloads.steps import enter_with
from tests.simulator.workloads.uneven import PER_EPOCH, come_together

MOST_AHEAD = 20  # steps by which a lost worker may number its own beyond those of the others


@dataclass
class UnevenLossLedger(LossLedger):
    """A LossLedger whose workers have different numbers of steps in each epoch, and wait for each other at its end.

    A lost worker may number its steps differently, so nobody knows which pushes are in one round. But each of k pushes
    in a round leaves 1/k: the number of places that hold 1/k is a multiple of k, and a place holds nothing else.
    """

    epochs: int = 6
    seed: int = 0

    def program(self, me: Me) -> Coroutine:
        self.watch(me.world)
        yield from enter_with(me, self.keys, self.make, SGD(learning_rate=1.0))
        loops = StepLoops(me.machine.stopped(), is_strict=True)
        pause = ReturnPause(me.machine.view)
        for epoch in range(self.epochs):
            yield from self.train(me, loops, pause, PER_EPOCH[(me.rank + epoch + self.seed) % len(PER_EPOCH)])
            steps = yield from come_together(loops, epoch)
            if steps > self.steps - max(PER_EPOCH):
                me.world.fail(f"worker {me.rank} is to go on with step {steps} after epoch {epoch}")
        yield Flush()
        yield Depart(Departure.DONE)

    def check(self, world: World) -> None:
        for key in self.keys:
            value = self.value(world, key)
            places = range(self.workers * self.steps)
            for slice_index in range(2):
                held = Counter(float(value[self.both(place)[slice_index]]) for place in places)
                del held[0.0]
                for part, count in held.items():
                    members = round(1 / part)
                    if abs(part - 1 / members) > 1e-6 or not 1 <= members <= self.workers or count % members:
                        world.fail(f"{count} places of {key!r} hold {part} in slice {slice_index}: {dict(held)}")
            for place in places:
                self.check_place(world, key, place, [float(value[each]) > 0 for each in self.both(place)])


def uneven_losses(workers: int, epochs: int, seed: int, forms: Forms = VALUES) -> UnevenLossLedger:
    """Workers with uneven data, some of which are lost."""
    most_steps = epochs * max(PER_EPOCH) + MOST_AHEAD
    return UnevenLossLedger(workers, most_steps, forms=forms, epochs=epochs, seed=seed)
