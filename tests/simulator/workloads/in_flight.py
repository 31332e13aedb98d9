"""Rounds of many small keys, each in a call of its own, with many calls in flight at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvd.core.requests import ClockOf, Depart, Transfer
from kvd.errors import NodeLost
from kvd.protocol.messages import Departure
from tests.simulator.process import Coroutine, PendingCall, Sleep, Start
from tests.simulator.simulator import Me, World
from tests.simulator.workloads.rounds import Rounds
from tests.simulator.workloads.steps import MANY_KEYS, RETRY_S, Floats, Keys, begin_with, insist, item, pushpull


class _Call(NamedTuple):
    """A call in flight: a pushpull, or the pull behind a push."""

    key: str
    clock: int
    pending: PendingCall
    target: Floats


@dataclass
class RoundsInFlight:
    """Each worker makes its calls one after the other, and waits for the oldest when so many are in flight.

    Attributes:
        rounds: what is pushed, and what must come of it.
        whim: which calls are a push and a pull, in place of a pushpull, and which steps begin late.
        most: calls in flight.
    """

    rounds: Rounds
    whim: int
    keys: Keys
    most: int

    def program(self, me: Me) -> Coroutine:
        rounds, flying = self.rounds, deque[_Call]()
        step = yield from begin_with(me, self.keys, rounds.make, None)
        for clock in range(step + 1, rounds.steps + 1):
            for number, key in enumerate(self.keys):
                if len(flying) == self.most:
                    yield from self._land(me, flying.popleft())
                flying.append((yield from self._begin(me, key, clock, number)))
            if (clock + me.rank + self.whim) % 3 == 0:
                yield Sleep(rounds.pace_s)
        while flying:
            yield from self._land(me, flying.popleft())
        yield Depart(Departure.DONE)

    def _begin(self, me: Me, key: str, clock: int, number: int) -> Generator[Any, Any, _Call]:
        value, target = self.rounds.contribution(key, me.rank, clock), self._target()
        if (5 * clock + number + me.rank + self.whim) % 13:
            pending = yield Start(Transfer((item(key, value, target),), push=True, pull=True))
        else:
            yield Start(Transfer((item(key, value),), push=True, pull=False))
            pending = yield Start(Transfer((item(key, None, target),), push=False, pull=True))
        return _Call(key, clock, pending, target)

    def _land(self, me: Me, call: _Call) -> Coroutine:
        """Waits for a call. If a node was lost before its push began, it is made again."""
        key, clock, _, target = call
        try:
            (versions,) = yield call.pending
        except NodeLost:
            yield Sleep(RETRY_S)
            target = self._target()
            if (yield from insist(ClockOf(key))) < clock:
                value = self.rounds.contribution(key, me.rank, clock)
                again = Transfer((item(key, value, target),), push=True, pull=True)
                (versions,) = yield from pushpull(again, clock)
            else:
                (versions,) = yield from insist(Transfer((item(key, None, target),), push=False, pull=True))
        self.rounds.pulled(me.world, key, clock, target, versions)

    def _target(self) -> Floats:
        return np.full(self.rounds.size, np.nan, np.float32)

    def check(self, world: World) -> None:
        self.rounds.check(world)


def rounds_in_flight(workers: int, steps: int, seed: int) -> RoundsInFlight:
    """All keys of a step are in flight at once, or some of them."""
    keys = MANY_KEYS[:8]
    return RoundsInFlight(Rounds(workers, steps, keys, size=101), seed, keys, len(keys) - 3 * (seed % 2))
