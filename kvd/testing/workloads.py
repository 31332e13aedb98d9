"""Programs for simulated workers, each with the check that tells whether anything was lost, doubled or mixed up.

They are written as restartable programs should be: a new incarnation asks for its clocks, rewinds to the smallest, and
goes on from there.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvd.core.requests import (
    ClockOf,
    Control,
    Flush,
    InitKeys,
    Item,
    JoinCluster,
    LeaveRounds,
    Request,
    Rewind,
    Transfer,
    Versions,
)
from kvd.core.worker.machine import WorkerMachine
from kvd.errors import KeyExists, KvdError, NodeLost, RequestTimeout
from kvd.optimizer import SGD, to_wire
from kvd.protocol.messages import Departure, SetOptimizer, UpdateOptimizer
from kvd.protocol.specs import KeySpec
from kvd.testing.process import Coroutine, Process, Sleep, Start, Ticket
from kvd.testing.simulator import Me, World, slices_of

Floats = np.ndarray[Any, np.dtype[np.float32]]

SIZE = 1100  # floats of a key: two slices of the smallest size
LAST = SIZE - 1


def spec_of(size: int) -> KeySpec:
    return KeySpec("float32", (size,), 4096)


def item(key: str, source: Floats | None = None, target: Floats | None = None) -> Item:
    """A key with the bytes of arrays."""
    given = source if source is not None else target
    assert given is not None
    return Item(
        key,
        spec_of(given.size),
        None if source is None else source.view(np.uint8),
        None if target is None else target.view(np.uint8),
    )


def begin(me: Me, keys: Sequence[str], initial: Floats, optimizer: SGD | None) -> Generator[Any, Any, int]:
    """Joins, makes the keys, and finds the step to go on from."""
    yield JoinCluster()
    if optimizer is not None and me.rank == 0:
        yield from insist(Control((SetOptimizer(0, to_wire(optimizer)),)))
    requests = [InitKeys((item(key, initial.copy()),)) for key in keys]
    tickets = []
    for request in requests:
        tickets.append((yield Start(request)))  # noqa: PERF401  no comprehension can wait
    for request, ticket in zip(requests, tickets, strict=True):
        try:
            yield ticket
        except NodeLost:
            with suppress(KeyExists):  # the first went through after all
                yield from insist(request)
    step = 0
    if me.machine.session.predecessor:
        clocks: list[int] = []
        for key in keys:
            clocks.append((yield from insist(ClockOf(key))))  # noqa: PERF401  no comprehension can wait
        step = min(clocks)
        yield Rewind(step)
    return step


def insist(request: Request, attempts: int = 60) -> Generator[Any, Any, Any]:
    """A request that is made again where a node was lost, as a program does whose supervisor restarts nodes."""
    for _ in range(attempts):
        try:
            return (yield request)
        except NodeLost:
            yield Sleep(1.0)
    raise AssertionError(f"{attempts} attempts at {type(request).__name__} failed")


def begin_push(move: Transfer, clock: int, timeout_s: float | None = None) -> Generator[Any, Any, Ticket]:
    """Starts a push, again if it is refused before it has begun; later ones must not take its clock."""
    for _ in range(60):
        ticket = yield Start(move, timeout_s)
        assert isinstance(ticket, Ticket)
        if (yield from insist(ClockOf(move.items[0].key))) >= clock:
            return ticket
        yield Sleep(1.0)
    raise AssertionError(f"a push of {move.items[0].key!r} does not begin: {ticket.error}")


def grouped(keys: tuple[str, ...], rank: int, clock: int, seed: int) -> list[tuple[str, ...]]:
    """The keys of a step, as they go into one call each: mostly all together, sometimes in another order, or one by
    one, and not by all workers at the same time."""
    whim = (7 * clock + 3 * rank + seed) % 11
    if whim == 0:
        return [(key,) for key in keys]
    if whim == 1:
        return [tuple(reversed(keys))]
    if whim == 2:
        return [keys[:2], keys[2:]]
    return [keys]


# ── the ledger: nothing acknowledged is lost, nothing counts twice ────────────────────────────────────────────────────


@dataclass
class Ledger:
    """Each push adds 1 to its own place, which belongs to (rank, clock), in both slices of the key."""

    workers: int
    steps: int
    keys: tuple[str, ...] = ("a", "b")
    timeout_s: float | None = None
    pace_s: float = 0.25
    size: int = SIZE
    outcomes: dict[tuple[str, int], set[str]] = field(default_factory=dict)  # by key and place
    _labels: dict[Ticket, tuple[tuple[str, ...], int]] = field(default_factory=dict)

    def groups(self, rank: int, clock: int) -> list[tuple[str, ...]]:
        """The keys of a step, as they go into one push each."""
        return [(key,) for key in self.keys]

    def place(self, me: Me, clock: int) -> int:
        return me.rank * self.steps + clock - 1

    def gradient(self, place: int) -> Floats:
        values = np.zeros(self.size, np.float32)
        values[[place, self.size - 1 - place]] = -1.0
        return values

    def program(self, me: Me) -> Coroutine:
        """Pushes without waiting for each, so that several are under way; then flushes, and leaves the rounds."""
        self.watch(me.world)
        step = yield from begin(me, self.keys, np.zeros(self.size, np.float32), SGD(learning_rate=1.0))
        yield from self.begun(me)
        tickets: list[Ticket] = []
        for clock in range(step + 1, self.steps + 1):
            for keys in self.groups(me.rank, clock):
                place = self.place(me, clock)
                for key in keys:
                    self.note(key, place, "begun")
                push = Transfer(tuple([self.item(key, place) for key in keys]), push=True, pull=False)
                ticket = yield from begin_push(push, clock, self.timeout_s)
                self._labels[ticket] = (keys, place)
                tickets.append(ticket)
            yield Sleep(self.pace_s)
        for ticket in tickets:
            with suppress(KvdError):
                yield ticket
        yield Flush()
        yield LeaveRounds(Departure.DONE)

    def begun(self, me: Me) -> Generator[Any, Any, None]:
        """What a kind of ledger does first."""
        yield from ()

    def item(self, key: str, place: int) -> Item:
        return item(key, self.gradient(place))

    def note(self, key: str, place: int, outcome: str) -> None:
        self.outcomes.setdefault((key, place), set()).add(outcome)

    def watch(self, world: World) -> None:
        """Looks at each push when it ends: what is acknowledged has to be there by then."""
        if self.ended not in world.on_end:
            world.on_end.append(self.ended)

    def ended(self, world: World, process: Process, ticket: Ticket) -> None:
        keys, place = self._labels.get(ticket, ((), 0))
        for key in keys:
            if ticket.error is None:
                self.note(key, place, "acked")
                self.check_acked(world, process, key, place)
            elif isinstance(ticket.error, RequestTimeout):
                self.note(key, place, ticket.error.outcome)
            else:
                self.note(key, place, "unknown")

    def check_acked(self, world: World, process: Process, key: str, place: int) -> None:
        if not world.value(key)[[place, self.size - 1 - place]].all():
            world.fail(f"{process.name} has an ack for a push to place {place} of {key!r}, which is not there")

    def check(self, world: World) -> None:
        """Acknowledged: 1. Anything else: 0 or 1. What nobody pushed: 0."""
        for key in self.keys:
            for place, count in enumerate(world.value(key)[: self.workers * self.steps]):
                outcomes = self.outcomes.get((key, place), set())
                low = 1 if "acked" in outcomes else 0
                high = 0 if outcomes in (set(), {"begun", "not_sent"}) else 1
                if not low <= count <= high:
                    world.fail(f"place {place} of {key!r}, {sorted(outcomes)}, counts {count} times")
            if not np.isin(world.value(key), (0.0, 1.0)).all():
                world.fail(f"key {key!r} holds {sorted(set(world.value(key).tolist()))}")


@dataclass
class LifeLedger(Ledger):
    """Each incarnation has slice_ids of its own: what a push that was acknowledged brought is what counts.

    Only for clocks that had counted when the incarnation came; those are its predecessor's.
    """

    keys: tuple[str, ...] = ("a",)
    size: int = 1000  # one slice
    lives: int = 8
    started: dict[tuple[int, int], int] = field(default_factory=dict)  # (rank, life) → clock

    def place(self, me: Me, clock: int) -> int:
        return (me.rank * self.steps + clock - 1) * self.lives + min(me.life, self.lives - 1)

    def gradient(self, place: int) -> Floats:
        values = np.zeros(self.size, np.float32)
        values[place] = -1.0
        return values

    def begun(self, me: Me) -> Generator[Any, Any, None]:
        self.started[me.rank, me.life] = yield from insist(ClockOf(self.keys[0]))

    def check_acked(self, world: World, process: Process, key: str, place: int) -> None:
        push, life = divmod(place, self.lives)
        rank, clock = divmod(push, self.steps)
        if clock + 1 > self.started[rank, life] and world.value(key)[place] != 1:
            text = f"{process.name}, life {life}, has an ack for push {clock + 1}, which is not there"
            world.fail(text)

    def check(self, world: World) -> None:
        for key in self.keys:
            counts = world.value(key)[: self.workers * self.steps * self.lives].reshape(-1, self.lives).sum(axis=1)
            if not (counts == 1).all():
                world.fail(f"pushes of {key!r} count {counts.tolist()} times")


MANY = tuple("abcdefghijkl")


@dataclass
class ListLedger(Ledger):
    """Many small keys, which servers treat as one as long as they are pushed together."""

    keys: tuple[str, ...] = MANY
    size: int = 61
    seed: int = 0

    def groups(self, rank: int, clock: int) -> list[tuple[str, ...]]:
        return grouped(self.keys, rank, clock, self.seed)


@dataclass
class ListLives(LifeLedger):
    """The same, where each incarnation has slice_ids of its own."""

    keys: tuple[str, ...] = MANY[:6]
    size: int = 250
    seed: int = 0

    def groups(self, rank: int, clock: int) -> list[tuple[str, ...]]:
        return grouped(self.keys, rank, clock, self.seed)

    def begun(self, me: Me) -> Generator[Any, Any, None]:
        """The keys may have come to different clocks; the servers know the largest that its predecessor reached."""
        logs = [slice_.log for server in me.world.servers() for slice_ in slices_of(server)]
        self.started[me.rank, me.life] = max([log.counted_clock(me.rank) for log in logs], default=0)
        yield from ()


# ── rounds: who took part, and in which order it was added ────────────────────────────────────────────────────────────


@dataclass
class Rounds:
    """Sync without an optimizer: a pulled value is the sum of exactly its round, added in rank order."""

    workers: int
    steps: int
    keys: tuple[str, ...] = ("a", "b")
    pushpull: bool = True
    pace_s: float = 0.25
    size: int = SIZE

    def contribution(self, key: str, rank: int, clock: int) -> Floats:
        """Element 0 is a power of two, element 1 the clock; the sum of the others depends on the order."""
        values = np.random.default_rng((ord(key), rank, clock)).normal(size=self.size).astype(np.float32)
        values *= np.float32(10.0) ** np.arange(self.size, dtype=np.float32).__mod__(7)
        for first in (0, self.size - 2):
            values[first], values[first + 1] = 2.0**rank, clock
        return values

    def expected(self, key: str, clock: int) -> bytes:
        total = self.contribution(key, 0, clock)
        for rank in range(1, self.workers):
            total = total + self.contribution(key, rank, clock)
        return total.tobytes()

    def groups(self, rank: int, clock: int) -> list[tuple[str, ...]]:
        """The keys of a step, as they go into one call each."""
        return [self.keys]

    def program(self, me: Me) -> Coroutine:
        step = yield from begin(me, self.keys, np.zeros(self.size, np.float32), None)
        for clock in range(step + 1, self.steps + 1):
            for keys in self.groups(me.rank, clock):
                yield from self.move(me, keys, clock)
            yield Sleep(self.pace_s)
        yield LeaveRounds(Departure.DONE)

    def move(self, me: Me, keys: Sequence[str], clock: int) -> Coroutine:
        """The push and the pull of some keys."""
        values = [self.contribution(key, me.rank, clock) for key in keys]
        targets = [np.full(self.size, np.nan, np.float32) for _ in keys]
        if self.pushpull:
            items = tuple(item(*entry) for entry in zip(keys, values, targets, strict=True))
            versions = yield from pushpull(Transfer(items, push=True, pull=True), clock)
        else:
            pushes = tuple(item(key, value) for key, value in zip(keys, values, strict=True))
            yield from begin_push(Transfer(pushes, push=True, pull=False), clock)
            pulls = tuple(item(key, None, target) for key, target in zip(keys, targets, strict=True))
            versions = yield from insist(Transfer(pulls, push=False, pull=True))
        for key, target, version in zip(keys, targets, versions, strict=True):
            self.pulled(me.world, key, clock, target, version)

    def pulled(self, world: World, key: str, clock: int, value: Floats, versions: Versions) -> None:
        if versions != (clock, clock):
            world.fail(f"a pull of version {clock} of {key!r} brought {versions}")
        if value.tobytes() != self.expected(key, clock):
            ranks = [rank for rank in range(self.workers) if int(np.nan_to_num(value[0])) >> rank & 1]
            text = f"version {clock} of {key!r} has other bits than its round: ranks {ranks}, clocks {value[1]}"
            world.fail(text)

    def check(self, world: World) -> None:
        for key in self.keys:
            if world.value(key).tobytes() != self.expected(key, self.steps):
                world.fail(f"key {key!r} does not end with the bits of its last round")


@dataclass
class MixedRounds(Rounds):
    """Many small keys, which servers treat as one as long as they are pushed together."""

    keys: tuple[str, ...] = MANY[:6]
    size: int = 101
    seed: int = 0

    def groups(self, rank: int, clock: int) -> list[tuple[str, ...]]:
        return grouped(self.keys, rank, clock, self.seed)


def pushpull(move: Transfer, clock: int) -> Generator[Any, Any, Any]:
    """A pushpull. Where a node was lost: once more if it had not begun; else its push counts, and a pull does."""
    reached = clock - 1
    while reached == clock - 1:
        try:
            return (yield move)
        except NodeLost:
            yield Sleep(1.0)
            reached = yield from insist(ClockOf(move.items[0].key))
    pulls = tuple(entry._replace(source=None) for entry in move.items)
    return (yield from insist(Transfer(pulls, push=False, pull=True)))


# ── replay: the bits of an undisturbed run ────────────────────────────────────────────────────────────────────────────


@dataclass
class Training:
    """Sync with momentum: gradients depend on the weights that were pulled, so any mistake spreads."""

    steps: int
    keys: tuple[str, ...] = ("a", "b")
    optimizer: SGD = field(default_factory=lambda: SGD(learning_rate=0.1, momentum=0.9, wd=0.01))
    pace_s: float = 0.25
    size: int = SIZE
    rates: dict[int, float] = field(default_factory=dict)  # step → learning rate from then on, as worker 0 says

    def gradient(self, key: str, weights: Floats, rank: int, clock: int) -> Floats:
        noise = np.random.default_rng((ord(key), rank, clock)).normal(size=self.size).astype(np.float32)
        return weights * np.float32(0.3) + noise

    def groups(self, rank: int, clock: int) -> list[tuple[str, ...]]:
        """The keys of a step, as they go into one push each."""
        return [(key,) for key in self.keys]

    def program(self, me: Me) -> Coroutine:
        step = yield from begin(me, self.keys, np.linspace(-1, 1, self.size, dtype=np.float32), self.optimizer)
        for clock in range(step + 1, self.steps + 1):
            if clock in self.rates and me.rank == 0:
                change = UpdateOptimizer(0, {"learning_rate": self.rates[clock]})
                yield from insist(Control((change,), staged_first=True))
            weights = {key: np.full(self.size, np.nan, np.float32) for key in self.keys}
            pulls = tuple(item(key, None, target) for key, target in weights.items())
            versions = yield from insist(Transfer(pulls, push=False, pull=True))
            if versions != [(clock - 1, clock - 1)] * len(self.keys):
                me.world.fail(f"worker {me.rank} asked for version {clock - 1} of {self.keys}, got {versions}")
            yield Sleep(self.pace_s)
            for keys in self.groups(me.rank, clock):
                items = tuple([item(key, self.gradient(key, weights[key], me.rank, clock)) for key in keys])
                yield from begin_push(Transfer(items, push=True, pull=False), clock)
        yield Flush()
        yield LeaveRounds(Departure.DONE)

    def bits(self, world: World) -> bytes:
        return b"".join(world.value(key).tobytes() for key in self.keys)


@dataclass
class ListTraining(Training):
    """Small keys in lists, or, with `apart`, in the same steps one by one; the learning rate changes on the way."""

    keys: tuple[str, ...] = MANY[:6]
    size: int = 19  # a push of them all is a small one
    seed: int = 0
    rates: dict[int, float] = field(default_factory=lambda: {3: 0.05, 6: 0.2, 7: 0.01})
    apart: bool = False

    def groups(self, rank: int, clock: int) -> list[tuple[str, ...]]:
        return [(key,) for key in self.keys] if self.apart else grouped(self.keys, rank, clock, self.seed)


def worker_of(world: World, rank: int) -> WorkerMachine:
    """The machine of the newest incarnation of a worker."""
    machine = world.processes[f"worker {rank}"].machine
    assert isinstance(machine, WorkerMachine)
    return machine
