"""Pushes to a table over a network that repeats them, with updates that fail: each is in one round, or was refused."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from kvd.core.machine import Apply
from kvd.errors import NotAllowed
from kvd.protocol.messages import Done, Part, Push, Refused, Taken
from tests.core.fake_tables import pushed
from tests.core.fakes import said
from tests.core.tables_harness import row_ids, with_table

BAD = NotAllowed("table 't' has no row 1000: it has 1000", key="t")


class Wire:
    """Workers push to one part over a network that repeats what it has carried at any time, and updates fail at times.
    Every push names another row.

    Attributes:
        acked, counted: the requests that were acknowledged, and those that were in a round that was applied.
    """

    def __init__(self, seed: int, mode: str, workers: int) -> None:
        self.random = Random(seed)
        self.harness = with_table(workers=workers, mode=mode)
        self.harness.hold = True
        self.clocks = dict.fromkeys(range(workers), 0)  # the newest one that each has used
        self.open: dict[int, dict[int, tuple[int, Any, bytes]]] = {rank: {} for rank in self.clocks}
        self.carried: list[tuple[int, Any, bytes]] = []
        self.rows: dict[int, int] = {}  # row id → request
        self.clock_of: dict[int, tuple[int, int]] = {}  # request → rank, clock
        self.acked: list[int] = []
        self.counted: list[int] = []
        self.refused: list[int] = []

    def push(self, rank: int) -> None:
        """A new push, of a clock that was given back or of the next one."""
        self.clocks[rank] += 1
        request, row = self.harness.request(), len(self.rows)
        self.rows[row], self.clock_of[request] = request, (rank, self.clocks[rank])
        sent = (rank, Push(request, (Part("t", 0, self.clocks[rank]),), 0, 1, pull=False), pushed([row]))
        self.open[rank][request] = sent
        self.carry(*sent)

    def carry(self, rank: int, message: Any, payload: bytes) -> None:
        self.carried.append((rank, message, payload))
        self.take(self.harness.say(rank, message, payload))

    def take(self, effects: Any) -> None:
        for message in said(effects):
            request = getattr(message, "request", 0)
            rank = self.clock_of.get(request, (-1, 0))[0]
            if rank < 0 or request not in self.open[rank]:
                continue
            if isinstance(message, Done):
                del self.open[rank][request]
                self.acked.append(request)
            elif isinstance(message, Refused):
                assert message.taken is Taken.NOTHING
                assert "no row 1000" in message.text
                del self.open[rank][request]
                self.refused.append(request)
                self.clocks[rank] = min(self.clocks[rank], self.clock_of[request][1] - 1)

    def end_job(self, *, fails: bool) -> None:
        job = self.harness.jobs[0]
        assert isinstance(job, Apply)
        if not fails:
            self.counted += [self.rows[row] for _, _, ids in row_ids(job) for row in ids]
        self.harness.error = BAD if fails else None
        self.take(self.harness.finish(job))

    def live(self, steps: int) -> None:
        for _ in range(steps):
            whim, rank = self.random.random(), self.random.choice(sorted(self.clocks))
            if whim < 0.35 and len(self.open[rank]) < 2:
                self.push(rank)
            elif whim < 0.6 and self.open[rank]:
                self.carry(*self.random.choice(sorted(self.open[rank].values(), key=lambda sent: sent[1].request)))
            elif whim < 0.75 and self.carried:
                self.take(self.harness.say(*self.random.choice(self.carried)))
            elif self.harness.jobs:
                self.end_job(fails=self.random.random() < 0.2)

    def settle(self) -> None:
        """All workers make pushes until they are equally far and nothing is open."""
        most = max(self.clocks.values()) + 2
        for _ in range(200):
            for rank, clock in self.clocks.items():
                if clock < most and len(self.open[rank]) < 2:
                    self.push(rank)
                for sent in list(self.open[rank].values()):
                    self.carry(*sent)
            while self.harness.jobs:
                self.end_job(fails=False)
            if all(clock == most for clock in self.clocks.values()) and not any(self.open.values()):
                return
        raise AssertionError(f"pushes that never end: {self.open}")


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("seed", range(6))
def test_what_was_acknowledged_is_in_exactly_one_round_and_what_was_refused_in_none(seed: int, mode: str) -> None:
    wire = Wire(seed, mode, workers=3)
    wire.live(250)
    wire.settle()
    assert sorted(wire.acked) == sorted(wire.counted)
    assert len(set(wire.acked)) == len(wire.acked) > 30
    assert len(wire.refused) > 3
    assert not set(wire.refused) & set(wire.counted)
    for rank, last in wire.clocks.items():
        own = sorted(wire.clock_of[request] for request in wire.acked if wire.clock_of[request][0] == rank)
        assert own == [(rank, clock) for clock in range(1, last + 1)]
