"""Ledgers: nothing that was acknowledged is lost, and nothing counts twice."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvd.core.requests import Depart, Flush, Item, Transfer
from kvd.errors import KvdError, RequestTimeout
from kvd.optimizer import SGD
from kvd.protocol.messages import Departure
from tests.simulator.process import Coroutine, PendingCall, Process, Sleep
from tests.simulator.simulator import Me, World
from tests.simulator.workloads.forms import VALUES, Forms
from tests.simulator.workloads.steps import (
    MANY_KEYS,
    SIZE,
    Floats,
    Grouping,
    Keys,
    begin_push,
    begin_with,
    mostly_together,
    one_by_one,
)


@dataclass
class Ledger:
    """Each push adds 1 to its own place, which belongs to (rank, clock), in both slices of the key.

    Attributes:
        grouping: which keys of a step go into one push.
        timeout_s: of a push; None: the cluster's.
        forms: which keys are tables.
        outcomes: what became of the pushes, by key and place.
    """

    workers: int
    steps: int
    keys: Keys = ("a", "b")
    grouping: Grouping = one_by_one
    timeout_s: float | None = None
    pace_s: float = 0.25
    size: int = SIZE
    forms: Forms = VALUES
    outcomes: dict[tuple[str, int], set[str]] = field(default_factory=dict)
    _pushes: dict[PendingCall, tuple[Keys, int]] = field(default_factory=dict)

    def place(self, me: Me, clock: int) -> int:
        return me.rank * self.steps + clock - 1

    def gradient(self, place: int) -> Floats:
        values = np.zeros(self.size, np.float32)
        values[[place, self.size - 1 - place]] = -1.0
        return values

    def program(self, me: Me) -> Coroutine:
        """Pushes without waiting for each, so that several are under way; then flushes and leaves the rounds."""
        self.watch(me.world)
        step = yield from begin_with(me, self.keys, self.make, SGD(learning_rate=1.0))
        yield from self.begun(me)
        calls: list[PendingCall] = []
        for clock in range(step + 1, self.steps + 1):
            for keys in self.grouping(self.keys, me.rank, clock):
                place = self.place(me, clock)
                for key in keys:
                    self.note(key, place, "begun")
                push = self.push(keys, place)
                call = yield from begin_push(push, clock, self.timeout_s)
                self._pushes[call] = (keys, place)
                calls.append(call)
            yield Sleep(self.pace_s)
        for call in calls:
            with suppress(KvdError):
                yield call
        yield Flush()
        yield Depart(Departure.DONE)

    def begun(self, me: Me) -> Generator[Any, Any, None]:
        """What a kind of ledger does before its first push."""
        yield from ()

    def make(self, key: str) -> Item:
        """The key as it is made."""
        return self.forms.first(key, self.size)

    def push(self, keys: Keys, place: int, made_at: int = 0) -> Transfer:
        """The push of a place in these keys; `made_at`: where the program is."""
        return self.forms.push(keys, [self.gradient(place) for _ in keys], made_at)

    def value(self, world: World, key: str) -> Floats:
        """The committed floats of a key."""
        return self.forms.value(world, key, self.size)

    def reaches_all(self, world: World, key: str, place: int, holds: Callable[[float], bool]) -> bool:
        """Whether that holds of this float, with all who must have what was acknowledged."""
        return self.forms.reaches_all(world, key, self.size, place, holds)

    def note(self, key: str, place: int, outcome: str) -> None:
        self.outcomes.setdefault((key, place), set()).add(outcome)

    def watch(self, world: World) -> None:
        """Looks at each push when it ends: what is acknowledged must be there by then."""
        if self.ended not in world.call_watchers:
            world.call_watchers.append(self.ended)

    def ended(self, world: World, process: Process, call: PendingCall) -> None:
        keys, place = self._pushes.get(call, ((), 0))
        for key in keys:
            if call.error is None:
                self.note(key, place, "acked")
                self.check_acked(world, process, key, place)
            elif isinstance(call.error, RequestTimeout):
                self.note(key, place, call.error.outcome)
            else:
                self.note(key, place, "unknown")

    def check_acked(self, world: World, process: Process, key: str, place: int) -> None:
        both = (place, self.size - 1 - place)
        if not all(self.reaches_all(world, key, each, lambda value: value == 1) for each in both):
            world.fail(f"{process.name} has an ack for a push to place {place} of {key!r}, which is not there")

    def check(self, world: World) -> None:
        """An acknowledged push counts once, any other at most once, and a place that nobody pushed to is 0."""
        for key in self.keys:
            value = self.value(world, key)
            for place, count in enumerate(value[: self.workers * self.steps]):
                outcomes = self.outcomes.get((key, place), set())
                low = 1 if "acked" in outcomes else 0
                high = 0 if outcomes in (set(), {"begun", "not_sent"}) else 1
                if not low <= count <= high:
                    world.fail(f"place {place} of {key!r}, {sorted(outcomes)}, counts {count} times")
            if not np.isin(value, (0.0, 1.0)).all():
                world.fail(f"key {key!r} holds {sorted(set(value.tolist()))}")


def list_ledger(workers: int, steps: int, seed: int, timeout_s: float | None = None) -> Ledger:
    """A ledger of many small keys, which servers fuse while they are pushed together."""
    return Ledger(workers, steps, MANY_KEYS, mostly_together(seed), timeout_s, size=61)
