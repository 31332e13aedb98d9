"""What a table has to hold, as dicts of whole numbers: every push of every worker is known from its seed.

A row has an element for each rank, to which only the pushes of that rank add. So a row says which pushes are in it, and
a version that has one push too many or too few, or some of its rows twice, cannot be taken for another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

INITIAL = 3  # each element before the first update
COUNTS = (0, 0, 1, 5, 60)  # rows of a push
SPREAD = 0x9E3779B97F4A7C15 >> 1  # rows of a table without a bound have ids all over


class TableOf(NamedTuple):
    """A table of the workload."""

    key: str
    rows: int
    is_bounded: bool

    def ids(self) -> list[int]:
        """The ids of rows that are pushed at times."""
        return [row if self.is_bounded else row * SPREAD % (1 << 63) for row in range(self.rows)]


class Range(NamedTuple):
    """How many pushes of a rank may be in a row: from the lowest to the highest."""

    low: int
    high: int


@dataclass
class TableModel:
    """The rows of one table at every version.

    Attributes:
        steps: how often each rank pushes.
        replaces: pushed rows replace what is there; else they are added to it.
    """

    table: TableOf
    seed: int
    workers: int
    steps: int
    replaces: bool
    _pushed: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)  # by rank and clock
    _sums: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)  # the same, of all clocks up to it

    def pushed(self, rank: int, clock: int) -> Mapping[int, int]:
        """What a rank adds to the rows of these ids, in its own element; it may be nothing."""
        found = self._pushed.get((rank, clock))
        if found is None:
            random = Random(f"{self.seed} {self.table.key} {rank} {clock}")
            ids = random.sample(self.table.ids(), min(random.choice(COUNTS), self.table.rows))
            found = self._pushed[rank, clock] = {row: random.randint(1, 9) for row in ids}
        return found

    def summed(self, rank: int, clock: int) -> Mapping[int, int]:
        """What the pushes of a rank up to this clock have added."""
        if clock <= 0:
            return {}
        found = self._sums.get((rank, clock))
        if found is None:
            found = dict(self.summed(rank, clock - 1))
            for row, number in self.pushed(rank, clock).items():
                found[row] = found.get(row, 0) + number
            self._sums[rank, clock] = found
        return found

    # ── rounds ──

    def row(self, row: int, clock: int) -> list[int]:
        """The row after the rounds up to this one, each with a push of every rank."""
        ranks = range(self.workers)
        if not self.replaces:
            return [INITIAL + self.summed(rank, clock).get(row, 0) for rank in ranks]
        for last in range(clock, 0, -1):
            if any(row in self.pushed(rank, last) for rank in ranks):
                return [self.pushed(rank, last).get(row, 0) for rank in ranks]
        return [INITIAL] * self.workers

    def updated(self, clock: int) -> set[int]:
        """The rows that any push up to this clock has named."""
        return {row for rank in range(self.workers) for row in self.summed(rank, clock)}

    # ── pushes that count one by one ──

    def pushes_in(self, rank: int, rows: Mapping[int, Sequence[float]]) -> Range | None:
        """How many pushes of a rank may be in these rows; None if no number can be."""
        clocks = [
            clock
            for clock in range(self.steps + 1)
            if all(value[rank] == INITIAL + self.summed(rank, clock).get(row, 0) for row, value in rows.items())
        ]
        return Range(clocks[0], clocks[-1]) if clocks else None
