"""The steps of a program as its servers see them: announced, and given out where all workers share them."""

from __future__ import annotations

import asyncio
import time

from kvd.client.calls.program_steps import ProgramSteps
from kvd.client.calls.promise import Promise
from kvd.client.cluster.engine import Engine
from kvd.client.cluster.optimizer_states import fetch_optimizer
from kvd.core import requests
from kvd.core.membership import name_of
from kvd.core.worker.return_pause import ReturnPause
from kvd.core.worker.step_loops import StepLoops
from kvd.errors import RequestTimeout
from kvd.protocol.messages import NO_STEP, Rest, StepIs, StepsLeft, TakeStep

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.2


def program_steps(engine: Engine, *, is_sync: bool) -> ProgramSteps:
    """The loops of a program that continues the one of a dead predecessor, if there is one."""
    loops = StepLoops(engine.machine.stopped(), is_strict=is_sync)
    servers = ServersOfSteps(engine, loops)
    if not is_sync:
        return ProgramSteps(loops, servers.has_optimizer, servers.announce, servers.share)
    return ProgramSteps(
        loops, servers.has_optimizer, servers.announce, None, servers.come_back, lambda: engine.machine.is_apart
    )


async def take_part_again(engine: Engine, loop: requests.Loop | None = None) -> requests.Returned:
    """Asks until the rounds wait for this worker again, or the others are past the loop.

    Raises:
        RequestTimeout: the others do not get past the first step of the loop within `round_timeout_s`.
    """
    limit_s, pause_s = engine.config.round_timeout_s, FIRST_PAUSE_S
    deadline = time.monotonic() + limit_s
    while True:
        await engine.call(requests.Flush())
        returned: requests.Returned = await engine.call(requests.TakePartAgain(loop))
        if returned.how is not requests.Return.LATER:
            return returned
        if time.monotonic() >= deadline:
            text = (
                f"the others went on without this worker, and it could not take part again within {limit_s:g} s: they "
                f"did not get past the first step of this loop over kv.steps; kvd status shows who is there"
            )
            raise RequestTimeout(text, outcome="not_sent")
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class ServersOfSteps:
    """Each call is a promise; see `ProgramSteps`."""

    def __init__(self, engine: Engine, loops: StepLoops) -> None:
        self._engine = engine
        self._loops = loops
        self._pause = ReturnPause(engine.machine.view)

    def has_optimizer(self) -> Promise:
        async def work() -> bool:
            return await fetch_optimizer(self._engine) is not None

        return self._engine.run(work())

    def announce(self, place: int) -> Promise:
        async def work() -> None:
            await self._engine.call(requests.Flush())
            await self._engine.call(requests.ComeTo(place))

        return self._engine.run(work())

    def come_back(self, first: int, total: int) -> Promise:
        pause_s = self._pause.next_s(self._loops.place)
        return self._engine.run(self._come_back(requests.Loop(first, first + total), pause_s))

    async def _come_back(self, loop: requests.Loop, pause_s: float) -> int | None:
        """Waits until the others are past the loop's first step, and goes on with them; None: they are past its end."""
        await self._stay_out(pause_s)
        returned = await take_part_again(self._engine, loop)
        if returned.how is requests.Return.OVER or returned.step >= loop.end:
            return None
        self._pause.came_into(returned.step)
        return returned.step - loop.first

    async def _stay_out(self, pause_s: float) -> None:
        while pause_s > 0 and not self._pause.is_needed:
            await asyncio.sleep(min(pause_s, LONGEST_PAUSE_S))
            pause_s -= LONGEST_PAUSE_S

    def share(self, first: int, total: int, done: int) -> Promise:
        return self._engine.run(self._next_step(first, total, done))

    async def _next_step(self, first: int, total: int, done: int) -> int | None:
        """The step `done` has counted, and another begins. Where there is none, the others do not wait for this worker;
        it waits for them, since the step of one that dies is given out again."""
        if done != NO_STEP:
            await self._engine.call(requests.Flush())
        answer = await self._ask(first, total, done)
        if answer.left is StepsLeft.SOME:
            return answer.step
        await self._engine.call(requests.Control((Rest(0),)))
        limit_s, pause_s = self._engine.config.round_timeout_s, FIRST_PAUSE_S
        deadline, held_by = time.monotonic() + limit_s, answer.held_by
        while answer.left is StepsLeft.OTHERS:
            if answer.held_by != held_by:  # one of them is done
                deadline, held_by = time.monotonic() + limit_s, answer.held_by
            if time.monotonic() >= deadline:
                names = tuple(name_of("worker", rank) for rank in held_by)
                text = (
                    f"all steps of kv.steps are given out, and {', '.join(names)} did not finish theirs within "
                    f"{limit_s:g} s: kvd status shows who is there"
                )
                raise RequestTimeout(text, outcome="not_sent", waiting_for=names)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            answer = await self._ask(first, total, done)
        return None if answer.step == NO_STEP else answer.step

    async def _ask(self, first: int, total: int, done: int) -> StepIs:
        home = (self._engine.machine.view.first_partition,)
        question = requests.Control((TakeStep(0, first, total, done),), partitions=home)
        ((answer, _, _),) = await self._engine.call(question)
        assert isinstance(answer, StepIs)
        return answer
