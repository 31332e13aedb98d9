"""Workers that share their steps: each step counts once, however often its workers died."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvd.core.requests import ClockOf, Control, Depart, Flush
from kvd.core.worker.step_loops import StepLoops
from kvd.optimizer import SGD
from kvd.protocol.messages import NO_STEP, Departure, Rest, StepIs, StepsLeft, TakeStep
from tests.simulator.process import Coroutine, Sleep
from tests.simulator.simulator import Me, World
from tests.simulator.workloads.forms import VALUES, Forms
from tests.simulator.workloads.steps import SIZE, Floats, Keys, begin_push, enter_with, insist


@dataclass
class SharedLedger:
    """Two loops over shared steps. Each push adds 1 to the places of its step, in both slices of the key.

    Attributes:
        steps: of both loops together.
        forms: which keys are tables.
        makers: how often each step was begun, by its number among all; for tests of the tests.
    """

    steps: int
    keys: Keys = ("a", "b")
    pace_s: float = 0.25
    forms: Forms = VALUES
    makers: dict[int, int] = field(default_factory=dict)

    def program(self, me: Me) -> Coroutine:
        yield from enter_with(me, self.keys, lambda key: self.forms.first(key, SIZE), SGD(learning_rate=1.0))
        loops = StepLoops(me.machine.stopped(), is_strict=False)
        half = self.steps // 2
        for total in (half, self.steps - half):
            if loops.begin(total, self.keys, shared=True) < total:
                yield from self.loop(me, loops, total)
            loops.end()
            loops.validate()
        yield Flush()
        yield Depart(Departure.DONE)

    def loop(self, me: Me, loops: StepLoops, total: int) -> Coroutine:
        """Makes steps until there are none; the same as `kvd.client.cluster.steps`."""
        done, rests = NO_STEP, False
        while True:
            answer = yield from self.ask(loops.first, total, done)
            if answer.left is StepsLeft.SOME:
                loops.enter(answer.step)
                yield from self.step(me, loops, loops.first + answer.step)
                loops.leave()
                done = answer.step
                continue
            if not rests:
                rests = True
                yield from insist(Control((Rest(0),)))
            if answer.left is StepsLeft.NONE:
                return
            yield Sleep(self.pace_s)

    def ask(self, first: int, total: int, done: int) -> Generator[Any, Any, StepIs]:
        ((answer, _, _),) = yield from insist(Control((TakeStep(0, first, total, done),), partitions=(0,)))
        assert isinstance(answer, StepIs)
        return answer

    def step(self, me: Me, loops: StepLoops, number: int) -> Coroutine:
        """Pushes the keys one by one, and returns when the pushes have counted."""
        self.makers[number] = self.makers.get(number, 0) + 1
        yield Sleep(self.pace_s * (1 + me.rank))
        for key in self.keys:
            loops.take_pushes([key])
            clock = yield from insist(ClockOf(key))
            push = self.forms.push((key,), (self.gradient(number),), loops.place)
            yield from begin_push(push, clock + 1)
        yield from insist(Flush())

    def gradient(self, number: int) -> Floats:
        values = np.zeros(SIZE, np.float32)
        values[[number, SIZE - 1 - number]] = -1.0
        return values

    def check(self, world: World) -> None:
        """Every step counts once in every slice."""
        for key in self.keys:
            value = self.forms.value(world, key, SIZE)
            for counts in (value[: self.steps], value[::-1][: self.steps]):
                if not (counts == 1).all():
                    world.fail(f"the shared steps of {key!r} count {counts.tolist()} times")
