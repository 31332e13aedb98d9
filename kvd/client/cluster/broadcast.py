"""Values that one worker of a cluster has and all take: rank 0 in a broadcast, any worker in an assignment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvd.client.calls import checks
from kvd.client.calls.deadline import Deadline
from kvd.client.calls.handle import Handle
from kvd.client.calls.memory_budget import Reservation
from kvd.client.calls.unobserved_errors import UnobservedErrors
from kvd.client.calls.values import Array, Source, Target
from kvd.client.cluster.arguments import Arguments
from kvd.client.cluster.engine import Engine
from kvd.client.cluster.transfers import absence, assignment, nothing, pull_into, pulled
from kvd.core import requests
from kvd.core.requests import Item
from kvd.protocol.messages import MemberState


class ClusterAssignments:
    """Broadcasts take several requests, which a coroutine on the engine's loop makes; an assignment is one request.

    Args:
        rank: the rank of this worker.
        sync: whether the store has rounds that every worker takes part in.
        absence_counts: whether a worker without a value must say so: in rounds, and where staleness is bounded.
    """

    def __init__(
        self,
        engine: Engine,
        arguments: Arguments,
        unobserved: UnobservedErrors,
        rank: int,
        sync: bool,
        absence_counts: bool,
    ) -> None:
        self._engine = engine
        self._arguments = arguments
        self._watched = unobserved.watch
        self._rank = rank
        self._sync = sync
        self._absence_counts = absence_counts
        self._replays: dict[str, int] = {}  # how many broadcasts this process has made, by key

    def assign(self, values: Mapping[str, Array], absent: Sequence[str]) -> None:
        names, _ = self._arguments.names(list(values))
        sources = self._arguments.given_sources(list(values.values()))
        self._send(names, assignment(names, sources, None, 0))
        if absent and self._absence_counts:
            self._send(list(absent), absence(absent, None, 0))

    def _send(self, names: list[str], transfer: requests.Transfer) -> None:
        self._watched(names, Handle(self._engine.submit(transfer), nothing, "assign"))

    def broadcast(self, key: Any, value: Any, out: Any, priority: int, reservation: Reservation | None) -> Handle:
        names, many = self._arguments.names(key)
        priority, _ = checks.priority_and_samples(priority)
        targets = self._arguments.targets(names, many, value if out is None else out)
        sources: list[Source] | None = None
        if self._rank == 0:
            sources = self._arguments.sources(names, many, value, copy=True, reservation=reservation)
        deadline = Deadline(self._engine.config.round_timeout_s)
        work = self._broadcast(names, sources, targets, priority, deadline)
        return self._watched(names, Handle(self._engine.run(work), pulled(targets, many), "broadcast"))

    async def _broadcast(
        self, names: list[str], sources: list[Source] | None, targets: list[Target], priority: int, deadline: Deadline
    ) -> None:
        """Rank 0 makes the keys that are new. Then comes a round in which only its values count, and all pull them."""
        await self._make(names, sources, deadline)
        counted, replays = await self._replayed(names, deadline)
        if self._sync and counted > replays:
            await self._pull(names, targets, priority, deadline)  # the predecessor was past this
        elif self._sync:
            await self._round(names, sources, targets, priority, deadline)
        else:
            # The last clock of rank 0 may be that of an assignment that no worker has read yet.
            passed = counted > replays + 1 if sources is not None else counted > 0 and replays == 0
            if sources is not None and counted <= replays:
                await self._engine.call(assignment(names, sources, None, priority), within=deadline)
            await self._meet("kvd:broadcast", names, passed, deadline)
            await self._pull(names, targets, priority, deadline)
            await self._meet(
                "kvd:broadcast read", names, passed, deadline
            )  # until then nobody writes: some have yet to read

    async def _make(self, names: list[str], sources: list[Source] | None, deadline: Deadline) -> None:
        """Rank 0 inits the keys that do not exist; the others wait for them."""
        for position, name in enumerate(names):
            if sources is None:
                await self._engine.call(requests.DescribeKey(name, wait=True), within=deadline)
                continue
            data, spec = sources[position]
            try:
                await self._engine.call(requests.DescribeKey(name), within=deadline)
            except KeyError:
                await self._engine.call(requests.InitKeys((Item(name, spec, data),)), within=deadline)

    async def _replayed(self, names: list[str], deadline: Deadline) -> tuple[int, int]:
        """How many pushes of these keys a dead predecessor made (0 without one, and once this process has pushed), and
        how many broadcasts of them this process has repeated before this one."""
        clocks = [await self._engine.call(requests.ClockOf(name), within=deadline) for name in names]
        replays = max((self._replays.get(name, 0) for name in names), default=0)
        self._replays.update(dict.fromkeys(names, replays + 1))
        is_new = self._engine.session.predecessor != MemberState.DEAD or any(
            map(self._engine.machine.has_pushed, names)
        )
        return 0 if is_new else min(clocks, default=0), replays

    async def _meet(self, kind: str, names: list[str], passed: bool, deadline: Deadline) -> None:
        for name in names:
            await self._engine.call(requests.Barrier(checks.barrier_name(kind, name), passed), within=deadline)

    async def _round(
        self, names: list[str], sources: list[Source] | None, targets: list[Target], priority: int, deadline: Deadline
    ) -> None:
        if sources is not None:
            await self._engine.call(assignment(names, sources, targets, priority), within=deadline)
        else:
            await self._engine.call(absence(names, targets, priority), within=deadline)

    async def _pull(self, names: list[str], targets: list[Target], priority: int, deadline: Deadline) -> None:
        await self._engine.call(pull_into(names, targets, priority), within=deadline)
