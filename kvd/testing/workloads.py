"""Programs for simulated workers, each with the check that tells whether anything was lost, doubled or mixed up.

They are written as restartable programs should be: a new incarnation asks for its clocks, rewinds to the smallest, and
goes on from there.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvd.core.calls import (
    ClockOf,
    Control,
    Flush,
    InitKeys,
    Item,
    JoinCluster,
    LeaveRounds,
    Move,
    Request,
    Rewind,
    Versions,
)
from kvd.core.worker import WorkerMachine
from kvd.errors import KvdError, NodeLost, RequestTimeout
from kvd.optimizer import SGD, to_wire
from kvd.protocol.messages import SetOptimizer
from kvd.protocol.specs import KeySpec
from kvd.testing.process import Coroutine, Sleep, Start, Ticket
from kvd.testing.simulator import Me, World

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
    yield from insist(InitKeys(tuple(item(key, initial.copy()) for key in keys)))
    step = 0
    if me.machine.link.predecessor:
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


# ── the ledger: nothing acknowledged is lost, nothing counts twice ────────────────────────────────────────────────────


@dataclass
class Ledger:
    """Each push adds 1 to its own place, which belongs to (rank, clock), in both slices of the key."""

    workers: int
    steps: int
    keys: tuple[str, ...] = ("a", "b")
    timeout_s: float | None = None
    pace_s: float = 0.25
    outcomes: dict[tuple[str, int, int], set[str]] = field(default_factory=dict)

    def places(self, rank: int, clock: int) -> tuple[int, int]:
        place = rank * self.steps + clock - 1
        return place, LAST - place

    def gradient(self, rank: int, clock: int) -> Floats:
        values = np.zeros(SIZE, np.float32)
        for place in self.places(rank, clock):
            values[place] = -1.0
        return values

    def program(self, me: Me) -> Coroutine:
        """Pushes without waiting for each, so that several are under way; then flushes, and leaves the rounds."""
        step = yield from begin(me, self.keys, np.zeros(SIZE, np.float32), SGD(learning_rate=1.0))
        tickets: list[tuple[str, int, Ticket]] = []
        for clock in range(step + 1, self.steps + 1):
            for key in self.keys:
                self.note(key, me.rank, clock, "begun")
                push = Move((item(key, self.gradient(me.rank, clock)),), push=True, pull=False)
                ticket = yield Start(push, self.timeout_s)
                tickets.append((key, clock, ticket))
            yield Sleep(self.pace_s)
        for key, clock, ticket in tickets:
            try:
                yield ticket
            except RequestTimeout as error:
                self.note(key, me.rank, clock, error.outcome)
            except KvdError:
                self.note(key, me.rank, clock, "unknown")
            else:
                self.note(key, me.rank, clock, "acked")
        yield Flush()
        yield LeaveRounds("done")

    def note(self, key: str, rank: int, clock: int, outcome: str) -> None:
        self.outcomes.setdefault((key, rank, clock), set()).add(outcome)

    def check(self, world: World) -> None:
        """Acknowledged: 1. Anything else: 0 or 1. Places of nobody: 0."""
        for key in self.keys:
            value = world.value(key)
            for rank in range(self.workers):
                for clock in range(1, self.steps + 1):
                    self._check_push(world, key, value, rank, clock)
            if not np.isin(value, (0.0, 1.0)).all():
                world.fail(f"key {key!r} holds {sorted(set(value.tolist()))}")

    def _check_push(self, world: World, key: str, value: Floats, rank: int, clock: int) -> None:
        outcomes = self.outcomes.get((key, rank, clock), set())
        low, high = 0, 1 if outcomes else 0
        if "acked" in outcomes:
            low = 1
        elif outcomes == {"begun", "not_sent"}:
            high = 0
        for place in self.places(rank, clock):
            if not low <= value[place] <= high:
                text = f"push {clock} of {key!r} by worker {rank} ({sorted(outcomes)}) counts {value[place]} times"
                world.fail(text)


# ── rounds: who took part, and in which order it was added ────────────────────────────────────────────────────────────


@dataclass
class Rounds:
    """Sync without an optimizer: a pulled value is the sum of exactly its round, added in rank order."""

    workers: int
    steps: int
    keys: tuple[str, ...] = ("a", "b")
    pushpull: bool = True
    pace_s: float = 0.25

    def contribution(self, rank: int, clock: int) -> Floats:
        """Element 0 is a power of two, element 1 the clock; the sum of the others depends on the order."""
        values = np.random.default_rng(rank * 1009 + clock).normal(size=SIZE).astype(np.float32)
        values *= np.float32(10.0) ** np.arange(SIZE, dtype=np.float32).__mod__(7)
        for first in (0, LAST - 1):
            values[first], values[first + 1] = 2.0**rank, clock
        return values

    def expected(self, clock: int) -> bytes:
        total = self.contribution(0, clock)
        for rank in range(1, self.workers):
            total = total + self.contribution(rank, clock)
        return total.tobytes()

    def program(self, me: Me) -> Coroutine:
        step = yield from begin(me, self.keys, np.zeros(SIZE, np.float32), None)
        for clock in range(step + 1, self.steps + 1):
            values = [self.contribution(me.rank, clock) for _ in self.keys]
            targets = [np.full(SIZE, np.nan, np.float32) for _ in self.keys]
            if self.pushpull:
                items = tuple(item(*entry) for entry in zip(self.keys, values, targets, strict=True))
                versions = yield from pushpull(Move(items, push=True, pull=True), clock)
            else:
                pushes = tuple(item(key, value) for key, value in zip(self.keys, values, strict=True))
                yield Start(Move(pushes, push=True, pull=False))
                pulls = tuple(item(key, None, target) for key, target in zip(self.keys, targets, strict=True))
                versions = yield from insist(Move(pulls, push=False, pull=True))
            yield Sleep(self.pace_s)
            for key, target, version in zip(self.keys, targets, versions, strict=True):
                self.pulled(me.world, key, clock, target, version)
        yield LeaveRounds("done")

    def pulled(self, world: World, key: str, clock: int, value: Floats, versions: Versions) -> None:
        if versions != (clock, clock):
            world.fail(f"a pull of version {clock} of {key!r} brought {versions}")
        if value.tobytes() != self.expected(clock):
            ranks = [rank for rank in range(self.workers) if int(np.nan_to_num(value[0])) >> rank & 1]
            text = f"version {clock} of {key!r} has other bits than its round: ranks {ranks}, clocks {value[1]}"
            world.fail(text)

    def check(self, world: World) -> None:
        for key in self.keys:
            if world.value(key).tobytes() != self.expected(self.steps):
                world.fail(f"key {key!r} does not end with the bits of its last round")


def pushpull(move: Move, clock: int) -> Generator[Any, Any, Any]:
    """A pushpull. Where a node was lost: once more if it had not begun; else its push counts, and a pull does."""
    try:
        return (yield move)
    except NodeLost:
        reached = yield from insist(ClockOf(move.items[0].key))
    if reached == clock - 1:
        return (yield from pushpull(move, clock))
    pulls = tuple(entry._replace(source=None) for entry in move.items)
    return (yield from insist(Move(pulls, push=False, pull=True)))


# ── replay: the bits of an undisturbed run ────────────────────────────────────────────────────────────────────────────


@dataclass
class Training:
    """Sync with momentum: gradients depend on the weights that were pulled, so any mistake spreads."""

    workers: int
    steps: int
    keys: tuple[str, ...] = ("a", "b")
    optimizer: SGD = field(default_factory=lambda: SGD(learning_rate=0.1, momentum=0.9, wd=0.01))
    pace_s: float = 0.25

    def gradient(self, weights: Floats, rank: int, clock: int) -> Floats:
        noise = np.random.default_rng(rank * 7919 + clock).normal(size=SIZE).astype(np.float32)
        return weights * np.float32(0.3) + noise

    def program(self, me: Me) -> Coroutine:
        step = yield from begin(me, self.keys, np.linspace(-1, 1, SIZE, dtype=np.float32), self.optimizer)
        for clock in range(step + 1, self.steps + 1):
            weights = [np.full(SIZE, np.nan, np.float32) for _ in self.keys]
            pulls = tuple(item(key, None, target) for key, target in zip(self.keys, weights, strict=True))
            versions = yield from insist(Move(pulls, push=False, pull=True))
            if versions != [(clock - 1, clock - 1)] * len(self.keys):
                me.world.fail(f"worker {me.rank} asked for version {clock - 1} of {self.keys}, got {versions}")
            yield Sleep(self.pace_s)
            for key, value in zip(self.keys, weights, strict=True):
                push = Move((item(key, self.gradient(value, me.rank, clock)),), push=True, pull=False)
                yield Start(push)
        yield Flush()
        yield LeaveRounds("done")

    def bits(self, world: World) -> bytes:
        return b"".join(world.value(key).tobytes() for key in self.keys)


def worker_of(world: World, rank: int) -> WorkerMachine:
    """The machine of the newest incarnation of a worker."""
    machine = world.processes[f"worker {rank}"].machine
    assert isinstance(machine, WorkerMachine)
    return machine
