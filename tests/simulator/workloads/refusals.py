"""A ledger of pushes whose updates fail at times: a refused push never counts, and leaves its clock to the next."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvd.core.requests import ClockOf, Depart, Flush, TakeBack, Transfer
from kvd.errors import KvdError, RemoteError
from kvd.optimizer import SGD
from kvd.protocol.messages import Departure
from tests.simulator.copies import is_counted
from tests.simulator.process import Coroutine, PendingCall, Process, Sleep, Start
from tests.simulator.shell import UPDATE_FAILS
from tests.simulator.simulator import Me, World
from tests.simulator.workloads.steps import Floats, begin, insist, item

KEY = "a"
SIZE = 1000  # one slice: what is refused is refused as a whole
MAX_ATTEMPTS = 40


@dataclass
class RefusalLedger:
    """Each attempt at a push adds 1 to a place of its own, which belongs to (rank, clock, life, attempt)."""

    workers: int
    steps: int
    pace_s: float = 0.05
    timeout_s: float | None = None  # of a push
    refused: set[int] = field(default_factory=set)  # places
    _places: dict[tuple[int, int, int, int], int] = field(default_factory=dict)
    _pushes: dict[PendingCall, int] = field(default_factory=dict)

    def program(self, me: Me) -> Coroutine:
        """Pushes each clock until it counts; then leaves the rounds."""
        if self.ended not in me.world.call_watchers:
            me.world.call_watchers.append(self.ended)
        step = yield from begin(me, [KEY], np.zeros(SIZE, np.float32), SGD(learning_rate=1.0))
        for clock in range(step + 1, self.steps + 1):
            yield from self._push(me, clock)
            yield Sleep(self.pace_s)
        yield Depart(Departure.DONE)

    def _push(self, me: Me, clock: int) -> Generator[Any, Any, None]:
        for attempt in range(MAX_ATTEMPTS):
            place = self._places.setdefault((me.rank, clock, me.life, attempt), len(self._places))
            gradient = np.zeros(SIZE, np.float32)
            gradient[place] = -1.0
            pushed = item(KEY, gradient)
            call = yield Start(Transfer((pushed,), push=True, pull=False), self.timeout_s)
            self._pushes[call] = place
            with suppress(KvdError):
                yield call
            if call.error is None:
                return
            yield TakeBack(((pushed.source, pushed.source.copy()),))
            gradient[:] = -1000.0  # it is the program's again
            with suppress(RemoteError):  # what the push ended with
                yield from insist(Flush())
            if (yield from insist(ClockOf(KEY))) >= clock:
                return
            yield Sleep(self.pace_s)
        raise AssertionError(f"{MAX_ATTEMPTS} attempts at push {clock} failed")

    def ended(self, world: World, process: Process, call: PendingCall) -> None:
        """A push that is acknowledged counts by then."""
        place = self._pushes.get(call)
        if place is None:
            return
        if call.error is None and not is_counted(world, KEY, place):
            world.fail(f"{process.name} has an ack for a push to place {place}, which is not there")
        if UPDATE_FAILS in str(call.error):  # the push of a node that was replaced may count
            self.refused.add(place)

    def check(self, world: World) -> None:
        """Of all attempts at a push one counts, once; none that was refused does."""
        value: Floats = world.value(KEY)
        if not np.isin(value, (0.0, 1.0)).all():
            world.fail(f"the key holds {sorted(set(value.tolist()))}")
        counts = np.zeros((self.workers, self.steps), np.float32)
        for (rank, clock, _, _), place in self._places.items():
            counts[rank, clock - 1] += value[place]
        if not (counts == 1).all():
            world.fail(f"pushes count {counts.tolist()} times")
        wrong = [place for place in sorted(self.refused) if value[place] != 0]
        if wrong:
            world.fail(f"places {wrong} were refused, and count")
