"""Ticks at the deadlines of a machine."""

from __future__ import annotations

import asyncio
import math

from kvd.core.machine import (
    Effect,
    Event,
    Tick,
)
from kvd.node.shell.threads import DeadlineTimer
from tests.node.driver_harness import DriverHarness, call, nothing, run
from tests.waiting import eventually


def test_a_tick_that_always_fails_does_not_spin() -> None:
    def react(event: Event) -> list[Effect]:
        raise RuntimeError("a bug")

    async def program() -> None:
        await asyncio.sleep(0.3)  # time itself: it could have failed thousands of times
        assert len(harness.machine.events) < 20

    harness = DriverHarness(react)
    harness.machine.deadline = 0.0
    run(harness, program)


def test_a_tick_comes_at_the_deadline_even_if_it_moves_forward() -> None:
    async def program() -> None:
        loop = asyncio.get_running_loop()
        harness.machine.deadline = loop.time() + 60
        harness.driver.feed(call(1))
        harness.machine.deadline = loop.time() + 0.05
        await asyncio.to_thread(harness.driver.feed, call(2))
        before = len(harness.machine.events)

        def settle(event: Event) -> list[Effect]:
            harness.machine.deadline = None
            return []

        harness.machine.react = settle
        await eventually(lambda: len(harness.machine.events) > before)
        assert harness.machine.events[-1] == Tick()

    harness = DriverHarness(nothing)
    run(harness, program)


def test_the_timer_fires_once_at_the_earliest_deadline() -> None:
    async def main() -> None:
        fired: list[float] = []
        loop = asyncio.get_running_loop()
        timer = DeadlineTimer(lambda: fired.append(loop.time()))
        timer.start(loop)
        assert timer.due_at == math.inf
        deadline = loop.time() + 0.02
        timer.set(deadline + 60)
        timer.set(deadline)
        timer.set(deadline + 1)
        assert timer.due_at == deadline
        await eventually(lambda: fired)
        assert fired[0] >= deadline - 0.001
        assert timer.due_at == math.inf
        timer.hold_until(loop.time() + 60)
        timer.set(0.0)
        await asyncio.sleep(0.01)  # time itself: nothing fires
        assert len(fired) == 1
        timer.stop()
        timer.set(0.0)
        await asyncio.sleep(0.01)  # time itself: nothing fires
        assert len(fired) == 1

    asyncio.run(main())
