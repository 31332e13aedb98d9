"""Which of the steps that all workers share have counted in a slice: the numbers of a growing set, as few ranges."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import pairwise

from kvd.protocol.messages import MAX_COUNTED_RANGES

MAX_RANGES = MAX_COUNTED_RANGES


@dataclass(slots=True)
class CountedSteps:
    """A set of numbers. Steps are given out in order, so the ranges between those under way are few.

    If a worker makes up numbers, the smallest ones that are missing are taken for counted when there are MAX_RANGES.

    Invariants, checked by `validate`: the ranges are in order, are not empty, and do not touch.
    """

    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # the number after the last one of each range

    def __contains__(self, step: int) -> bool:
        position = bisect_right(self.starts, step) - 1
        return position >= 0 and step < self.ends[position]

    def add(self, step: int) -> None:
        """Adds a number that is not in the set."""
        position = bisect_right(self.starts, step)
        joins_left = position > 0 and self.ends[position - 1] == step
        joins_right = position < len(self.starts) and self.starts[position] == step + 1
        if joins_left and joins_right:
            self.ends[position - 1] = self.ends.pop(position)
            del self.starts[position]
        elif joins_left:
            self.ends[position - 1] = step + 1
        elif joins_right:
            self.starts[position] = step
        else:
            self.starts.insert(position, step)
            self.ends.insert(position, step + 1)
            if len(self.starts) > MAX_RANGES:
                del self.starts[1], self.ends[0]

    def remove(self, step: int) -> None:
        """Takes out a number that is in the set: its update failed."""
        position = bisect_right(self.starts, step) - 1
        start, end = self.starts[position], self.ends[position]
        ranges = [(first, last) for first, last in ((start, step), (step + 1, end)) if first < last]
        self.starts[position : position + 1] = [first for first, _ in ranges]
        self.ends[position : position + 1] = [last for _, last in ranges]

    def copy(self) -> CountedSteps:
        return CountedSteps(list(self.starts), list(self.ends))

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        assert len(self.starts) == len(self.ends), f"a range has no end: {self}"
        bounds = [bound for pair in zip(self.starts, self.ends, strict=True) for bound in pair]
        assert all(low < high for low, high in pairwise(bounds)), f"ranges out of order: {self}"
