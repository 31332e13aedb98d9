"""Uneven data: in each epoch the workers have different numbers of steps, and wait for each other at its end."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvd.core.requests import ComeTo, Depart, Flush, Request, StandBy
from kvd.core.worker.step_loops import StepLoops
from kvd.errors import BarrierBroken, KvdError, NodeLost, RequestTimeout
from kvd.optimizer import SGD
from kvd.protocol.messages import Departure
from tests.simulator.process import Coroutine, Process, Sleep
from tests.simulator.simulator import Me, World
from tests.simulator.workloads.ledger import Ledger
from tests.simulator.workloads.steps import MAX_ATTEMPTS, RETRY_S, begin_push, enter_with

PER_EPOCH = (2, 3, 5)  # steps; who has how many differs from epoch to epoch


@dataclass
class UnevenLedger(Ledger):
    """With the merge "mean", a push leaves 1/k in its own place if k pushes were in its round. Who takes part in a step
    is known beforehand, so at the end every place has one value that it may have, whoever died, and whenever.

    Attributes:
        steps: of all epochs, as the worker with the most data counts them.
    """

    epochs: int = 3
    seed: int = 0
    sync: bool = True

    def has(self, rank: int, epoch: int) -> int:
        """How many steps this worker has in this epoch."""
        return PER_EPOCH[(rank + epoch + self.seed) % len(PER_EPOCH)]

    def program(self, me: Me) -> Coroutine:
        self.watch(me.world)
        yield from enter_with(me, self.keys, self.make, SGD(learning_rate=1.0))
        loops = StepLoops(me.machine.stopped(), is_strict=self.sync)
        for epoch in range(self.epochs):
            total = self.has(me.rank, epoch)
            for step in range(loops.begin(total, None), total):
                loops.enter(step)
                yield from self.step(me, loops, loops.first + step)
                loops.leave()
                loops.validate()
                yield Sleep(self.pace_s * ((3 * step + 5 * me.rank) % 4))
            loops.end()
            steps = yield from come_together(loops, epoch)
            if steps != (epoch + 1) * max(PER_EPOCH):
                me.world.fail(f"worker {me.rank} is to go on with step {steps} after epoch {epoch}")
        yield Flush()
        yield Depart(Departure.DONE)

    def step(self, me: Me, loops: StepLoops, number: int) -> Coroutine:
        if self.sync:
            yield from self.forms.weights_before(me, self.keys, self.size, number + 1)
        calls = []
        for key in self.keys:
            loops.take_pushes([key])
            place = me.rank * self.steps + number
            self.note(key, place, "begun")
            push = self.push((key,), place, loops.place)
            call = yield from begin_push(push, number + 1 if self.sync else 0, self.timeout_s)
            self._pushes[call] = ((key,), place)
            calls.append(call)
        for call in calls:
            with suppress(KvdError):
                yield call

    def check_acked(self, world: World, process: Process, key: str, place: int) -> None:
        there = [self.reaches_all(world, key, each, lambda value: value > 0) for each in self.both(place)]
        if not all(there):
            world.fail(f"{process.name} has an ack for a push to place {place} of {key!r}, which is not there")

    def both(self, place: int) -> tuple[int, int]:
        """Where a push leaves something in each of the two slices."""
        return place, self.size - 1 - place

    def check(self, world: World) -> None:
        expected = np.zeros(self.size, np.float32)
        for number in range(self.epochs * max(PER_EPOCH)):
            epoch, step = divmod(number, max(PER_EPOCH))
            ranks = [rank for rank in range(self.workers) if step < self.has(rank, epoch)]
            for rank in ranks:
                expected[list(self.both(rank * self.steps + number))] = 1 / len(ranks) if self.sync else 1
        for key in self.keys:
            value = self.value(world, key)
            wrong = np.flatnonzero(np.abs(value - expected) > 1e-6)
            if wrong.size:
                shown = {int(place): (float(value[place]), float(expected[place])) for place in wrong[:6]}
                world.fail(f"key {key!r} holds, and should hold, by place: {shown}")


def come_together(loops: StepLoops, epoch: int) -> Generator[Any, Any, int]:
    """Waits for all at the end of an epoch. The number of steps after which they go on."""
    yield from again(Flush())
    if loops.is_at_news:
        yield from again(ComeTo(loops.place))
    steps: int = yield from again(StandBy(f"until:epoch {epoch}", loops.steps_made))
    loops.go_on_at(steps)
    return steps


def again(request: Request) -> Generator[Any, Any, Any]:
    """A request that is made again while a node is lost, or others do not come."""
    for _ in range(MAX_ATTEMPTS):
        try:
            return (yield request)
        except (NodeLost, BarrierBroken, RequestTimeout):
            yield Sleep(RETRY_S)
    raise AssertionError(f"{MAX_ATTEMPTS} attempts at {type(request).__name__} failed")
