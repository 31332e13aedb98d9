"""The steps of a worker, by which a reader knows which versions of different keys belong together.

A step is counted by the key that is pushed most often: the step of a push is the largest number of pushes that the
worker has made to one key by then. A key that is pushed in every step has its clocks as steps; one that is pushed less
often, or was made later, has smaller clocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvd.core.worker.in_flight import InFlight, Steps
from kvd.core.worker.open_pushes import OpenPushes


class StepCounter:
    """Counts the steps of this worker."""

    def __init__(self, pushes: OpenPushes) -> None:
        self._pushes = pushes
        self._newest = 0
        self._first = 0  # in which this incarnation pushed; of earlier ones it knows nothing

    @property
    def newest(self) -> int:
        """The newest step in which this worker has pushed; 0 before the first."""
        return self._newest

    def queued(self, call: InFlight) -> None:
        """A push waits for its turn. It belongs to the step in which it was made, whatever is started before it."""
        clocks = [key.window.clock + sum(1 for waiting in key.queue if waiting.is_push) for key in call.keys]
        call.step = self._newest = max(self._newest, *clocks)

    def begin(self, call: InFlight, clocks: Sequence[int]) -> Steps:
        """A push starts under these clocks."""
        clock = clocks[0] if len(clocks) == 1 else max(clocks, default=0)
        step = call.step or self._newest
        if clock > step:
            step = clock
        call.step = step
        if step > self._newest:
            self._newest = step
        if self._first == 0:
            self._first = step
        oldest = self._pushes.oldest
        settled = step - 1 if oldest is None else min(oldest.step, step) - 1
        return step, settled if settled >= self._first else 0

    def reached(self, clock: int) -> None:
        """A predecessor has made so many pushes to a key."""
        self._newest = max(self._newest, clock)

    def go_back(self, clock: int) -> None:
        """The worker was rewound: no key has a clock after this one."""
        self._newest = clock
