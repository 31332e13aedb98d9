"""Where a worker is in its rounds, and where it meets the others."""

from __future__ import annotations

from typing import Any

from kvd.client.calls import checks
from kvd.client.calls.deadline import Deadline
from kvd.client.calls.handle import Handle
from kvd.client.calls.program_steps import ProgramSteps
from kvd.client.calls.promise import Promise
from kvd.client.calls.unobserved_errors import UnobservedErrors
from kvd.client.cluster.engine import Engine
from kvd.client.cluster.steps import take_part_again
from kvd.core import requests
from kvd.errors import NotAllowed
from kvd.protocol.messages import ClockQuery, Departure


class ClusterRounds:
    """Flush, barriers, clocks and versions."""

    def __init__(self, engine: Engine, unobserved: UnobservedErrors, steps: ProgramSteps) -> None:
        self._engine = engine
        self._unobserved = unobserved
        self._steps = steps

    def flush(self, timeout: float | None) -> Handle:
        async def work() -> None:
            await self._engine.call(requests.Flush(past_deaths=False), timeout)
            self._unobserved.raise_for(None)

        return Handle(self._engine.run(work()), what="flush")

    def barrier(self, name: str, timeout: float | None) -> Handle:
        self._steps.check_not_updating("a barrier")
        full = checks.barrier_name(self._steps.meeting("user"), name)
        return Handle(self._engine.submit(requests.Barrier(full, place=self._steps.place), timeout), what="barrier")

    def meet(self, name: str, says: str | None) -> Handle:
        full = checks.barrier_name(self._steps.meeting("kvd:meet"), name)
        request = requests.Barrier(full, says=says, listens=True, place=self._steps.place)
        return Handle(self._engine.submit(request), lambda note: note or "", "a meeting of all workers")

    def join(self, until: object = None) -> Handle:
        deadline = Deadline(self._engine.config.round_timeout_s)
        if until is not None:
            return self._stand_by(checks.barrier_name("until", until, "the point until which join waits"), deadline)

        async def work() -> None:
            await self._engine.call(requests.Flush(past_deaths=False), within=deadline)
            await self._engine.call(requests.Depart(Departure.DONE), within=deadline)

        return Handle(self._engine.run(work()), what="join")

    def _stand_by(self, name: str, deadline: Deadline) -> Handle:
        point = self._steps.point()

        async def work() -> None:
            await self._engine.call(requests.Flush(past_deaths=False), within=deadline)
            if point.place is not None:
                await self._engine.call(requests.ComeTo(point.place), within=deadline)
            steps = await self._engine.call(requests.StandBy(name, point.steps), within=deadline)
            self._steps.go_on_at(steps)

        return Handle(self._engine.run(work()), what="join")

    def rewind(self, clock: int) -> Handle:
        return Handle(self._go_on(requests.Rewind(checks.clock_number(clock))), what="rewind")

    def resume(self) -> Handle:
        return Handle(self._go_on(requests.Resume()), what="resume")

    def _go_on(self, request: requests.Rewind | requests.Resume) -> Promise:
        self._steps.check_may_resume()

        async def work() -> None:
            if self._engine.machine.is_apart:
                if isinstance(request, requests.Rewind):
                    text = "the others went on without this worker, and do not go back: call kv.resume() to join them"
                    raise NotAllowed(text)
                await take_part_again(self._engine)
            await self._engine.call(request)
            self._steps.resume()

        return self._engine.run(work())

    def clock(self, key: Any) -> Handle:
        return Handle(self._engine.submit(requests.ClockOf(self._engine.written.name(key))), what="clock")

    def version(self, key: Any) -> Handle:
        name = self._engine.written.name(key)

        async def work() -> int:
            spec = await self._engine.call(requests.DescribeKey(name))
            view = self._engine.machine.view
            there = tuple(sorted({view.partition_of(name, index) for index in range(spec.num_slices)}))
            answers = await self._engine.call(requests.Control((ClockQuery(0, name),) * len(there), partitions=there))
            return min(int(message.oldest_version) for message, _, _ in answers)

        return Handle(self._engine.run(work()), what="version")
