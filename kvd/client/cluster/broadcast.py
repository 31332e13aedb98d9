"""Values that one worker of a cluster has and all take: rank 0 in a broadcast, any worker in an assignment."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvd.client.calls import checks
from kvd.client.calls.deadline import Deadline
from kvd.client.calls.handle import Handle
from kvd.client.calls.memory_budget import Reservation
from kvd.client.calls.program_steps import ProgramSteps
from kvd.client.calls.tables import check_whole
from kvd.client.calls.unobserved_errors import UnobservedErrors
from kvd.client.calls.values import Array, Source, Target, first_unlike
from kvd.client.cluster.arguments import Arguments
from kvd.client.cluster.engine import Engine
from kvd.client.cluster.tables import ClusterTables
from kvd.client.cluster.transfers import absence, assignment, nothing, pull_into, pulled
from kvd.core import requests
from kvd.core.membership import in_words, name_of
from kvd.core.requests import Item
from kvd.core.worker.step_loops import Replay
from kvd.core.worker.transfer import say_unpushed
from kvd.errors import KvdError, NodeLost, NotAllowed, RemoteError
from kvd.protocol.messages import MemberState

VIEW_PAUSE_S, VIEW_CHECKS = 0.01, 500
FINISHED = (MemberState.DONE, MemberState.LEFT, MemberState.GONE)


class Here(NamedTuple):
    """Where a broadcast was called: what it is in a restarted program, the place of the program, the kinds of the
    barriers of asynchronous workers, and when all of it ends."""

    replay: Replay
    place: int
    written: str
    read: str
    deadline: Deadline


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
        steps: ProgramSteps,
        rank: int,
        sync: bool,
        absence_counts: bool,
        tables: ClusterTables,
    ) -> None:
        self._engine = engine
        self._arguments = arguments
        self._watched = unobserved.watch
        self._steps = steps
        self._rank = rank
        self._sync = sync
        self._absence_counts = absence_counts
        self._tables = tables
        self._replays: dict[str, int] = {}  # by key: how many broadcasts this process has made there

    def assign(self, values: Mapping[str, Array], absent: Sequence[str]) -> None:
        names = self._arguments.named(list(values)).names
        sources = self._arguments.given_sources(list(values.values()))
        self._send(names, assignment(names, sources, None, 0, self._steps.place))
        if absent and self._absence_counts:
            self._send(list(absent), absence(absent, None, 0, self._steps.place))

    def keep_error(self, names: Sequence[str], error: KvdError) -> None:
        self._watched(names, Handle.failed(error))

    def has_assigned(self, key: str) -> bool:
        return self._engine.machine.has_pushed(key)

    def forget(self, names: Sequence[str]) -> None:
        """The keys are deleted: broadcasts of keys of their names are counted from 0."""
        for name in names:
            self._replays.pop(name, None)

    def _send(self, names: list[str], transfer: requests.Transfer) -> None:
        self._watched(names, Handle(self._engine.submit(transfer), nothing, "assign"))

    def broadcast(self, key: Any, value: Any, out: Any, priority: int, reservation: Reservation | None) -> Handle:
        keys = self._arguments.named(key)
        keys.check_distinct("broadcast")
        check_whole(keys, value, "broadcast", self._tables.is_table)
        names, in_place = keys.names, "broadcast" if out is None else ""
        out = value if out is None else out
        priority, _ = checks.priority_and_samples(priority)
        sources: list[Source] | None = None
        try:
            targets = self._arguments.targets(keys, out, in_place=in_place)
            if self._rank == 0:
                sources = self._arguments.sources(keys, value, copy=True, reservation=reservation)
        except RemoteError as error:
            say_unpushed(error, self._engine.machine.view)
            raise
        if sources is not None:
            unlike = first_unlike(keys, sources, targets)
            if unlike is not None:
                return self._watched(names, self._arguments.mismatch(unlike, makes_key=True))
        self._check_place(names)
        replay = self._steps.take_broadcasts(names)
        written, read = self._steps.meeting("kvd:broadcast"), self._steps.meeting("kvd:broadcast read")
        here = Here(replay, self._steps.place, written, read, Deadline(self._engine.config.round_timeout_s))
        work = self._broadcast(names, sources, targets, priority, here)
        promise = self._steps.add_broadcast(self._engine.run(work))
        return self._watched(names, Handle(promise, pulled(keys, targets, out), "broadcast"))

    def _check_place(self, names: list[str]) -> None:
        """Raises NotAllowed in a step of a loop, if workers may come in that have missed some there."""
        if self._sync and self._steps.is_in_step and self._engine.machine.view.settings.is_elastic:
            raise NotAllowed(
                f"a step of kv.steps cannot broadcast {names[0]!r} in a job with max_workers, since workers that come "
                "in later do not know how many broadcasts they missed: broadcast it before the loop",
                key=names[0],
            )

    async def _broadcast(
        self,
        names: list[str],
        sources: list[Source] | None,
        targets: list[Target],
        priority: int,
        here: Here,
    ) -> None:
        """Rank 0 makes the keys that are new. Then comes a round in which only its values count, and all pull them."""
        deadline = here.deadline
        await self._make(names, sources, deadline)
        counted, replays = await self._replayed(names, deadline) if here.replay is Replay.PERHAPS else (0, 0)
        is_past = here.replay is Replay.PASSED or (self._sync and self._engine.machine.is_apart)
        if self._sync and (is_past or counted > replays):
            await self._pull(names, targets, priority, deadline)  # the predecessor was past this, or the others are
        elif self._sync:
            await self._round(names, sources, targets, priority, here)
        else:
            # The last clock of rank 0 may be that of an assignment that no worker has read yet.
            is_met = is_past or (counted > replays + 1 if sources is not None else counted > 0 and replays == 0)
            if sources is not None and not is_past and counted <= replays:
                await self._engine.call(assignment(names, sources, None, priority, here.place), within=deadline)
            await self._meet(here.written, names, is_met, deadline)
            await self._pull(names, targets, priority, deadline)
            await self._meet(here.read, names, is_met, deadline)  # until then nobody writes: some have yet to read

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
        """How many pushes of these keys a dead predecessor made where it stopped (0 without one, and once this process
        has pushed), and how many broadcasts of them this process has repeated there before this one."""
        clocks = [
            await self._engine.call(requests.ClockOf(name), within=deadline) - self._made_before(name) for name in names
        ]
        replays = max((self._replays.get(name, 0) for name in names), default=0)
        self._replays.update(dict.fromkeys(names, replays + 1))
        is_new = self._engine.session.predecessor != MemberState.DEAD or any(
            map(self._engine.machine.has_pushed, names)
        )
        return 0 if is_new else min(clocks, default=0), replays

    def _made_before(self, name: str) -> int:
        """How many pushes of the key the predecessor had made before it came to the place where it stopped."""
        left = self._engine.machine.inherited(name)
        return 0 if left is None else min(left.begun, left.counted)

    async def _meet(self, kind: str, names: list[str], passed: bool, deadline: Deadline) -> None:
        for name in names:
            await self._engine.call(requests.Barrier(checks.barrier_name(kind, name), passed), within=deadline)

    async def _round(
        self, names: list[str], sources: list[Source] | None, targets: list[Target], priority: int, here: Here
    ) -> None:
        if sources is not None:
            transfer = assignment(names, sources, targets, priority, here.place)
        else:
            transfer = absence(names, targets, priority, here.place)
        self._check_rank_0(*FINISHED)  # one that has left was here with everyone, or does not come
        await self._engine.call(transfer, within=here.deadline)
        view = self._engine.machine.view
        for _ in range(VIEW_CHECKS):  # a server may know more of worker 0
            if view.is_up_to_date:
                break
            await asyncio.sleep(VIEW_PAUSE_S)
        self._check_rank_0()

    def _check_rank_0(self, *others: MemberState) -> None:
        """Raises NodeLost or NotAllowed if the rounds go on without worker 0, who has the values, or if it is in one of
        the other states."""
        root = self._engine.machine.view.worker(0)
        if self._rank != 0 and root is not None and root.state is MemberState.IDLE:
            text = "nobody has values to broadcast: worker 0, whose values they are, waits at the end of its data"
            raise NotAllowed(f"{text} (join(until=…)); broadcast before it comes there, or after all have")
        if self._rank != 0 and root is not None and root.state in (MemberState.LOST, MemberState.BACK, *others):
            text = f"nobody has values to broadcast: worker 0, whose values they are, {in_words(root.state)}"
            raise NodeLost(text, node=name_of("worker", 0), last_seen_s=root.last_seen_s, reason=root.reason)

    async def _pull(self, names: list[str], targets: list[Target], priority: int, deadline: Deadline) -> None:
        await self._engine.call(pull_into(names, targets, priority), within=deadline)
