"""The store of a cluster: calls become requests of the worker machine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvd.client.calls import checks
from kvd.client.calls.backend import Node, StoreType
from kvd.client.calls.bound_arrays import Bound, Seal, bound_together
from kvd.client.calls.handle import Handle
from kvd.client.calls.memory_budget import Room, Ticket
from kvd.client.calls.promise import Promise
from kvd.client.calls.unobserved_errors import Unheard
from kvd.client.calls.values import Source, Target, fresh_target, key_list, key_name, paired, source_of, target_of
from kvd.client.cluster.engine import Engine
from kvd.client.cluster.optimizer_states import fetch_states, store_states
from kvd.config import Loaded
from kvd.core import requests
from kvd.core.membership import DEAD, GONE
from kvd.core.requests import Item
from kvd.errors import ConfigError, KvdError
from kvd.node.pieces import Pieces
from kvd.optimizer import Optimizer, changes_to_wire, to_wire
from kvd.protocol.messages import (
    ABSENT,
    ASSIGN,
    ClockQuery,
    Command,
    SetOptimizer,
    Settings,
    UpdateOptimizer,
)

EXIT_BARRIER = "kvd:exit"
ABANDON_S = 1.0  # for a word to the scheduler when a program leaves with an error


def cluster_settings(loaded: Loaded, kind: StoreType) -> Settings:
    """What this worker insists on: its type, and the settings that were given to it; the rest is the cluster's."""
    config = loaded.config

    def given(name: str, value: int) -> int:
        return value if loaded.origin.get(name, "default") != "default" else 0

    if config.staleness is not None and kind.mode == "sync":
        raise ConfigError("staleness bounds asynchronous workers: use it with dist_async", setting="staleness")
    return Settings(
        mode="" if kind.mode == "any" else kind.mode,
        merge=config.merge if loaded.origin.get("merge", "default") != "default" else "",
        staleness=-1 if config.staleness is None else config.staleness,
        rounds_ahead=given("rounds_ahead", config.rounds_ahead),
        slice_bytes=given("slice_bytes", config.slice_bytes),
        num_workers=config.num_workers,
        num_servers=config.num_servers,
        num_shards=given("num_shards", config.num_shards),
    )


class DistBackend:
    """A worker of a cluster. Joins when it is made.

    Raises:
        ConnectError, RequestTimeout, ConfigError, NotAllowed: see `Engine.join`.
    """

    def __init__(self, kind: StoreType, loaded: Loaded) -> None:
        self.type = kind.name
        self._config = loaded.config
        self._engine = Engine(loaded.config, "worker", cluster_settings(loaded, kind))
        self._unheard = Unheard()
        self._watched = self._unheard.watch
        self._raise_failed = self._unheard.tell
        self._lock = threading.Lock()
        self._room = Room(loaded.config.memory_bound_bytes(), loaded.config.request_timeout_s)
        self._bound: dict[str, Bound] = {}
        self._replays: dict[str, int] = {}  # broadcasts by key
        try:
            self.rank = self._engine.join()
        except BaseException:
            self._engine.stop()
            raise
        settings = self._engine.machine.view.settings
        self.num_workers = settings.num_workers
        self.num_servers = settings.num_servers
        self.local_rank = loaded.config.local_rank
        self._slice_bytes = settings.slice_bytes
        self._sync = settings.mode != "async"
        self.merge = (settings.merge or "sum") if self._sync else ""
        self.restarted = self._engine.session.predecessor == DEAD

    # ── values ──

    def init(self, key: Any, value: Any) -> Handle:
        names, many = self._keys(key)
        values = paired(names, many, value, "values")
        items = []
        for name, entry in zip(names, values, strict=True):
            data, spec = source_of(entry, self._slice_bytes, private=self.rank == 0)  # the others' are not sent
            items.append(Item(name, spec, data))
        return self._watched(names, Handle(self._engine.submit(requests.InitKeys(tuple(items))), what="init"))

    def push(self, key: Any, value: Any, priority: int, samples: int, ticket: Ticket | None = None) -> Handle:
        names, many = self._keys(key)
        priority, samples = checks.priority_and_samples(priority, samples)
        sources = self._sources(names, many, value, private=True, ticket=ticket)
        if not names:
            return Handle.of(None)
        items = tuple(Item(name, spec, data) for name, (data, spec) in zip(names, sources, strict=True))
        transfer = requests.Transfer(items, push=True, pull=False, priority=priority, samples=samples)
        return self._watched(names, Handle(self._begin_push(transfer), _nothing, "push", self._engine.wait))

    def pull(self, key: Any, out: Any, priority: int) -> Handle:
        names, many = self._keys(key)
        priority, _ = checks.priority_and_samples(priority)
        if out is None or not names:
            return self._pull_fresh(names, many, priority)
        targets = self._targets(names, many, out)
        items = tuple(Item(name, spec, None, data) for name, (data, spec, _) in zip(names, targets, strict=True))
        transfer = requests.Transfer(items, push=False, pull=True, priority=priority)
        return Handle(self._engine.submit(transfer), _finisher(targets, many), "pull", self._engine.wait)

    def _pull_fresh(self, names: list[str], many: bool, priority: int) -> Handle:
        """Into new arrays. Their shapes may still be unknown here, but the call must keep its place among the others
        on its keys: so it is made at once, and the bytes become arrays when there is somebody who takes them."""
        if not names:
            return Handle.of([])
        specs = [
            self._engine.submit(requests.DescribeKey(name)) for name in names
        ]  # each is known before the bytes are
        pieces = [Pieces() for _ in names]
        items = tuple(Item(name, None, None, piece) for name, piece in zip(names, pieces, strict=True))
        transfer = requests.Transfer(items, push=False, pull=True, priority=priority)

        def finish(_: Any) -> Any:
            targets = [fresh_target(spec.result()) for spec in specs]
            for target, piece in zip(targets, pieces, strict=True):
                piece.move_to(target.data)
            return _finisher(targets, many)(None)

        return Handle(self._engine.submit(transfer), finish, "pull", self._engine.wait)

    def bind(self, key: Any) -> Handle:
        names, many = self._keys(key)

        async def work() -> list[Bound]:
            specs = [await self._engine.call(requests.DescribeKey(name)) for name in names]
            with self._lock:
                fresh = {name: spec for name, spec in zip(names, specs, strict=True) if name not in self._bound}
                self._bound.update(bound_together(fresh, self._engine.memory))
            if fresh:
                targets = [target_of(self._bound[name].weight, self._slice_bytes) for name in fresh]
                await self._pull_items(list(fresh), targets, 0)
            return [self._bound[name] for name in names]

        def finish(bound: list[Bound]) -> Any:
            if not many:
                return bound[0].gradient, bound[0].weight
            return [entry.gradient for entry in bound], [entry.weight for entry in bound]

        return Handle(self._engine.run(work()), finish, "bind")

    def pushpull(
        self,
        key: Any,
        value: Any,
        out: Any,
        priority: int,
        samples: int,
        *,
        private: bool,
        ticket: Ticket | None = None,
    ) -> Handle:
        names, many = self._keys(key)
        priority, samples = checks.priority_and_samples(priority, samples)
        targets = self._targets(names, many, value if out is None else out)
        sources = self._sources(names, many, value, private=private, ticket=ticket)
        if not names:
            return Handle.of([])
        items = tuple(
            Item(name, spec, data, target.data)
            for name, (data, spec), target in zip(names, sources, targets, strict=True)
        )
        for (_, spec), target, name in zip(sources, targets, names, strict=True):
            spec.check_same(target.spec, name)
        transfer = requests.Transfer(items, push=True, pull=True, priority=priority, samples=samples)
        lent = None if private else partial(self._engine.take_back, [data for data, _ in sources])
        handle = Handle(self._begin_push(transfer), _finisher(targets, many), "pushpull", self._engine.wait, lent)
        return self._watched(names, handle)

    def broadcast(self, key: Any, value: Any, out: Any, priority: int, ticket: Ticket | None = None) -> Handle:
        names, many = self._keys(key)
        priority, _ = checks.priority_and_samples(priority)
        targets = self._targets(names, many, value if out is None else out)
        sources: list[Source] | None = None
        if self.rank == 0:
            sources = self._sources(names, many, value, private=True, ticket=ticket)
        work = self._broadcast(names, sources, targets, priority)
        return self._watched(names, Handle(self._engine.run(work), _finisher(targets, many), "broadcast"))

    async def _broadcast(
        self, names: list[str], sources: list[Source] | None, targets: list[Target], priority: int
    ) -> None:
        """Rank 0 makes what is new; then a round in which only its values count, and everyone takes them."""
        for position, name in enumerate(names):
            if sources is not None:
                data, spec = sources[position]
                try:
                    await self._engine.call(requests.DescribeKey(name))
                except KeyError:
                    await self._engine.call(requests.InitKeys((Item(name, spec, data),)))
            else:
                await self._engine.call(requests.DescribeKey(name, wait=True))
        counted, replays = await self._replayed(names)
        if self._sync and counted > replays:
            await self._pull_items(names, targets, priority)  # the predecessor was past this
        elif self._sync:
            await self._broadcast_round(names, sources, targets, priority)
        else:
            # The last clock of rank 0 may be that of an assignment that nobody has read yet.
            passed = counted > replays + 1 if sources is not None else counted > 0 and replays == 0
            if sources is not None and counted <= replays:
                await self._engine.call(self._assignment(names, sources, None, priority))
            await self._meet("kvd:broadcast", names, passed)
            await self._pull_items(names, targets, priority)
            await self._meet("kvd:broadcast read", names, passed)  # before, nobody may write: some have yet to read

    async def _replayed(self, names: list[str]) -> tuple[int, int]:
        """How many pushes of these keys a predecessor made that died, 0 once this process has pushed, or if there was
        none; and how many broadcasts of them this process has made again before this one."""
        clocks = [await self._engine.call(requests.ClockOf(name)) for name in names]
        replays = max((self._replays.get(name, 0) for name in names), default=0)
        self._replays.update(dict.fromkeys(names, replays + 1))
        is_new = self._engine.session.predecessor != DEAD or any(map(self._engine.machine.has_pushed, names))
        return 0 if is_new else min(clocks, default=0), replays

    async def _meet(self, kind: str, names: list[str], passed: bool) -> None:
        for name in names:
            await self._engine.call(requests.Barrier(checks.barrier_name(kind, name), passed))

    async def _broadcast_round(
        self, names: list[str], sources: list[Source] | None, targets: list[Target], priority: int
    ) -> None:
        if sources is not None:
            await self._engine.call(self._assignment(names, sources, targets, priority))
            return
        items = tuple(Item(name, spec, None, data) for name, (data, spec, _) in zip(names, targets, strict=True))
        await self._engine.call(requests.Transfer(items, push=True, pull=True, priority=priority, how=ABSENT))

    def _assignment(
        self, names: list[str], sources: list[Source], targets: list[Target] | None, priority: int
    ) -> requests.Transfer:
        goals = [None] * len(names) if targets is None else [target.data for target in targets]
        items = tuple(
            Item(name, spec, data, goal) for name, (data, spec), goal in zip(names, sources, goals, strict=True)
        )
        return requests.Transfer(items, push=True, pull=targets is not None, priority=priority, how=ASSIGN)

    async def _pull_items(self, names: list[str], targets: list[Target], priority: int) -> None:
        items = tuple(Item(name, spec, None, data) for name, (data, spec, _) in zip(names, targets, strict=True))
        await self._engine.call(requests.Transfer(items, push=False, pull=True, priority=priority))

    # ── rounds and barriers ──

    def flush(self, timeout: float | None) -> Handle:
        async def work() -> None:
            await self._engine.call(requests.Flush(), timeout)
            self._raise_failed(None)

        return Handle(self._engine.run(work()), what="flush")

    def barrier(self, name: str, timeout: float | None) -> Handle:
        return Handle(self._engine.submit(requests.Barrier(checks.barrier_name("user", name)), timeout), what="barrier")

    def join(self) -> Handle:
        async def work() -> None:
            await self._engine.call(requests.Flush())
            await self._engine.call(requests.LeaveRounds("done"))

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

    # ── servers ──

    def send_command(self, head: int | str, body: bytes | str) -> Handle:
        name, data = checks.command_head(head), checks.command_body(body)
        control = requests.Control((Command(0, name),), payload=data, nbytes=len(data))
        return Handle(self._engine.submit(control), lambda answers: [_body(answer) for answer in answers], "command")

    def set_optimizer(self, optimizer: Optimizer | None) -> Handle:
        known = checks.known_optimizer(optimizer)
        message = SetOptimizer(0, None if known is None else to_wire(known))
        checks.check_sendable("the optimizer", message)
        return Handle(self._engine.submit(requests.Control((message,))), _nothing, "set_optimizer")

    def update_optimizer(self, changes: dict[str, Any]) -> Handle:
        message = UpdateOptimizer(0, changes_to_wire(checks.hyperparameters(changes)))
        control = requests.Control((message,), staged_first=True)
        return Handle(self._engine.submit(control), _nothing, "update_optimizer")

    def save_optimizer_states(self, path: Any, dump_optimizer: bool) -> Handle:
        return Handle(self._engine.run(fetch_states(self._engine, checks.file_path(path), dump_optimizer)), what="save")

    def load_optimizer_states(self, path: Any) -> Handle:
        return Handle(self._engine.run(store_states(self._engine, checks.file_path(path))), what="load")

    # ── who is dead ──

    def dead_nodes(self, timeout_s: float) -> Sequence[Node]:
        self._engine.check_usable()
        view, quiet = self._engine.machine.view, self._engine.session.quiet
        silent = {(entry.role, entry.rank): entry.age_s for entry in quiet if entry.age_s > timeout_s > 0}
        nodes = []
        for member in sorted(view.members.values(), key=lambda member: (member.role, member.rank)):
            age_s = silent.get((member.role, member.rank))
            if member.state in (DEAD, GONE):
                nodes.append(Node(member.role, member.rank, member.node_id, member.reason, member.last_seen_s))
            elif age_s is not None:
                nodes.append(Node(member.role, member.rank, member.node_id, f"silent for {age_s:g} s", age_s))
        return nodes

    def is_scheduler_dead(self, timeout_s: float) -> bool:
        return self._engine.scheduler_silence_s() > timeout_s > 0

    # ── the end ──

    def begin_close(self, barrier: bool) -> Handle:
        """Flush, leave the rounds, meet the others; the first error ends it."""

        async def work() -> None:
            await self._engine.call(requests.Flush())
            await self._engine.call(requests.LeaveRounds("done"))
            if barrier:
                await self._engine.call(requests.Barrier(EXIT_BARRIER))

        return Handle(self._engine.run(work()), what="close")

    def end_close(self, leaving: Handle) -> None:
        """Goes when that is done. The first error is raised when this worker has gone."""
        error: KvdError | None = None
        try:
            leaving.wait()
        except KvdError as failure:
            error = failure
        except BaseException:  # Ctrl-C: go at once
            self.abandon(failed=True)
            raise
        self._engine.stop()
        try:
            self._raise_failed(None)
        except KvdError as first:
            if error is not None and error is not first:
                first.add_note(f"also: {error}")
            raise
        if error is not None:
            raise error

    def abandon(self, *, failed: bool) -> None:
        self._engine.stop(ABANDON_S, failed=failed)

    # ── helpers ──

    def _keys(self, key: Any) -> tuple[list[str], bool]:
        names, many = key_list(key)
        self._raise_failed(names)
        return names, many

    def _sources(
        self, names: list[str], many: bool, value: Any, *, private: bool, ticket: Ticket | None = None
    ) -> list[Source]:
        """What is to be sent. Private copies count against the memory limit, see `Room.take`."""
        values = paired(names, many, value, "values")
        sources, copies = [], []
        for name, entry in zip(names, values, strict=True):
            source = self._bound_source(name, entry)
            if source is None:
                source = source_of(entry, self._slice_bytes, private=private, memory=self._engine.memory)
                copies.append(source)
            sources.append(source)
        if private and copies:
            self._room.take(copies, ticket)
        return sources

    def _bound_source(self, name: str, value: Any) -> Source | None:
        """The bound gradient of the key, if that is what is pushed, by whatever view."""
        bound = self._bound.get(name)
        if bound is None or value is bound.gradient:
            return None if bound is None else bound.source
        if isinstance(value, list | tuple):  # of devices: their sum is another array
            return None
        source = source_of(value, self._slice_bytes, private=False)
        return source if bound.owns(source.data) else None

    def _begin_push(self, transfer: requests.Transfer) -> Promise:
        """Hands a push to the machine. With `check_bound` its end tells whether bound gradients stayed as they were;
        those that the answer is written into are not looked at."""
        if not self._config.check_bound:
            return self._engine.submit(transfer)
        pushed = {}
        for item in transfer.items:
            bound = self._bound.get(item.key)
            if bound is not None and bound.owns(item.source) and not bound.overlaps(item.target):
                pushed[item.key] = bound
        return Seal(pushed).checked(self._engine.submit(transfer))

    def _targets(self, names: list[str], many: bool, out: Any) -> list[Target]:
        return [target_of(entry, self._slice_bytes) for entry in paired(names, many, out, "outs")]


def _finisher(targets: Sequence[Target], many: bool) -> Callable[[Any], Any]:
    """What turns the end of a pull into what the caller gets: his arrays."""

    def finish(_: Any) -> Any:
        arrays = [target.finish() for target in targets]
        return arrays if many else arrays[0]

    return finish


def _nothing(_: Any) -> None:
    return None


def _body(answer: Any) -> bytes:
    _, payload, nbytes = answer
    return bytes(payload[:nbytes]) if nbytes else b""
