"""Trainings: whatever happens, the weights end with the bits of an undisturbed run."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvd.core.requests import Control, Depart, Flush, Transfer
from kvd.optimizer import SGD
from kvd.protocol.messages import Departure, UpdateOptimizer
from tests.simulator.process import Coroutine, Sleep
from tests.simulator.simulator import Me, World
from tests.simulator.workloads.steps import (
    MANY_KEYS,
    SIZE,
    Floats,
    Grouping,
    Keys,
    begin,
    begin_push,
    insist,
    item,
    one_by_one,
    weights_before,
)

SMALL = 19  # floats of a key: a push of all keys of a list is a small one


@dataclass
class Training:
    """Sync with momentum: gradients depend on the weights that were pulled, so any mistake spreads.

    Attributes:
        grouping: which keys of a step go into one push.
        rates: a step → the learning rate from then on, set by worker 0.
        expected: the weights at the end, as bytes; for `check`.
    """

    steps: int
    keys: Keys = ("a", "b")
    grouping: Grouping = one_by_one
    optimizer: SGD = field(default_factory=lambda: SGD(learning_rate=0.1, momentum=0.9, wd=0.01))
    pace_s: float = 0.25
    size: int = SIZE
    rates: dict[int, float] = field(default_factory=dict)
    expected: bytes = b""

    def gradient(self, key: str, weights: Floats, rank: int, clock: int) -> Floats:
        noise = np.random.default_rng((ord(key), rank, clock)).normal(size=self.size).astype(np.float32)
        return weights * np.float32(0.3) + noise

    def program(self, me: Me) -> Coroutine:
        step = yield from begin(me, self.keys, np.linspace(-1, 1, self.size, dtype=np.float32), self.optimizer)
        for clock in range(step + 1, self.steps + 1):
            if clock in self.rates and me.rank == 0:
                change = UpdateOptimizer(0, {"learning_rate": self.rates[clock]})
                yield from insist(Control((change,), staged_first=True))
            weights = yield from weights_before(me, self.keys, self.size, clock)
            yield Sleep(self.pace_s)
            for keys in self.grouping(self.keys, me.rank, clock):
                items = tuple([item(key, self.gradient(key, weights[key], me.rank, clock)) for key in keys])
                yield from begin_push(Transfer(items, push=True, pull=False), clock)
        yield Flush()
        yield Depart(Departure.DONE)

    def weights(self, world: World) -> bytes:
        """The bytes of all keys."""
        return b"".join(world.value(key).tobytes() for key in self.keys)

    def check(self, world: World) -> None:
        """The weights are the expected ones."""
        if self.weights(world) != self.expected:
            world.fail("the weights differ from those of an undisturbed run")


def list_training(steps: int, grouping: Grouping, expected: bytes = b"") -> Training:
    """A training of small keys whose learning rate changes on the way."""
    rates = {3: 0.05, 6: 0.2, 7: 0.01}
    return Training(steps, MANY_KEYS[:6], grouping, size=SMALL, rates=rates, expected=expected)
