"""Where a worker is in its rounds, and where it meets the others."""

from __future__ import annotations

from typing import Any

from kvd.client.calls import checks
from kvd.client.calls.deadline import Deadline
from kvd.client.calls.handle import Handle
from kvd.client.calls.keys import key_name
from kvd.client.calls.unobserved_errors import UnobservedErrors
from kvd.client.cluster.engine import Engine
from kvd.core import requests
from kvd.protocol.messages import ClockQuery, Departure


class ClusterRounds:
    """Flush, barriers, clocks and versions."""

    def __init__(self, engine: Engine, unobserved: UnobservedErrors) -> None:
        self._engine = engine
        self._unobserved = unobserved

    def flush(self, timeout: float | None) -> Handle:
        async def work() -> None:
            await self._engine.call(requests.Flush(), timeout)
            self._unobserved.raise_for(None)

        return Handle(self._engine.run(work()), what="flush")

    def barrier(self, name: str, timeout: float | None) -> Handle:
        return Handle(self._engine.submit(requests.Barrier(checks.barrier_name("user", name)), timeout), what="barrier")

    def join(self) -> Handle:
        deadline = Deadline(self._engine.config.round_timeout_s)

        async def work() -> None:
            await self._engine.call(requests.Flush(), within=deadline)
            await self._engine.call(requests.Depart(Departure.DONE), within=deadline)

        return Handle(self._engine.run(work()), what="join")

    def rewind(self, clock: int) -> Handle:
        return Handle(self._engine.submit(requests.Rewind(checks.clock_number(clock))), what="rewind")

    def clock(self, key: Any) -> Handle:
        return Handle(self._engine.submit(requests.ClockOf(key_name(key))), what="clock")

    def version(self, key: Any) -> Handle:
        name = key_name(key)

        async def work() -> int:
            spec = await self._engine.call(requests.DescribeKey(name))
            view = self._engine.machine.view
            ranks = tuple(sorted({view.server_of(name, index) for index in range(spec.num_slices)}))
            answers = await self._engine.call(requests.Control((ClockQuery(0, name),) * len(ranks), ranks))
            return min(int(message.oldest_version) for message, _, _ in answers)

        return Handle(self._engine.run(work()), what="version")
