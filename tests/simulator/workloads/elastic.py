"""Elastic jobs: workers come when others train, take part from a step on, and leave after one."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from kvd.core.requests import Barrier, Control, Depart
from kvd.core.worker.return_pause import ReturnPause
from kvd.core.worker.step_loops import StepLoops
from kvd.optimizer import SGD, to_wire
from kvd.protocol.messages import Departure, MemberState, SetOptimizer
from tests.simulator.process import Coroutine, Process
from tests.simulator.simulator import Me, World
from tests.simulator.workloads.losses import LossLedger
from tests.simulator.workloads.steps import insist

COME_WITHIN_S = 20.0
AWAY_S = (0.5, 8.0)
MEET_EACH = 6  # steps


@dataclass
class ElasticLedger(LossLedger):
    """A LossLedger of `first` workers, to which others come until `workers` are there. All but worker 0 may leave after
    a step, and come again later. At times they meet at a barrier within a step.

    Attributes:
        came_in: how many times a worker took part that came when the job was under way.
        left: how many times one left.
    """

    least: int = 0  # when all are lost at once, they may come in in later steps only
    first: int = 3
    came_in: int = 0
    left: int = 0
    _leaving: set[Process] = field(default_factory=set)
    _has_begun: bool = False

    def program(self, me: Me) -> Coroutine:
        self._invite(me.world)
        yield from super().program(me)
        if me.process in self._leaving:
            yield Depart(Departure.LEFT)
            self.left += 1
            away_s = Random(me.world.seed + self.left).uniform(*AWAY_S)
            me.world.clock.after(away_s, partial(self._come_again, me))

    def _invite(self, world: World) -> None:
        """Workers that nobody waits for come later."""
        if self._has_begun:
            return
        self._has_begun = True
        random = Random(world.seed * 17 + 3)
        for number in range(self.first, self.workers):
            world.clock.after(random.uniform(0.0, COME_WITHIN_S), partial(self._come, world, number))

    def _come(self, world: World, number: int) -> None:
        world.start_worker(number, self.program)

    def _come_again(self, me: Me) -> None:
        if me.world.processes[me.process.name] is me.process:
            me.world.start_worker(me.number)

    def pushed(self, me: Me, loops: StepLoops, step: int) -> Coroutine:
        """At times all workers set what they have set, or meet."""
        if step % MEET_EACH == 1:
            yield from insist(Control((SetOptimizer(0, to_wire(SGD(learning_rate=1.0))),)))
        if step % MEET_EACH == 2:
            yield from insist(Barrier(f"user 1.{step}:", place=loops.place))

    def leaves(self, me: Me, step: int) -> bool:
        random = Random(f"{me.world.seed} {me.number} {me.life} {step}")
        if me.number == 0 or me.machine.is_apart or random.random() > 0.05:
            return False
        self._leaving.add(me.process)
        return True

    def come_back(self, me: Me, loops: StepLoops, pause: ReturnPause, total: int) -> Generator[Any, Any, int | None]:
        step = yield from super().come_back(me, loops, pause, total)
        self.came_in += step is not None and me.machine.session.predecessor is MemberState.BACK
        return step
