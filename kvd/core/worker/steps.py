"""The steps of a worker, by which a reader knows which versions of different keys belong together.

A step is counted by the key that is pushed most often: the step of a push is the largest number of pushes that the
worker has made to one key by then. A key that is pushed in every step has its clocks as steps; one that is pushed less
often, or was made later, has smaller clocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvd.core.worker.calls import Call
from kvd.core.worker.open_pushes import OpenPushes


class Steps(NamedTuple):
    """What a push says of the steps of its worker: its own, and the newest one whose pushes are all settled."""

    step: int
    settled: int


class StepCounter:
    """Counts the steps of this worker."""

    def __init__(self, pushes: OpenPushes) -> None:
        self._pushes = pushes
        self._newest = 0
        self._first = 0  # in which this incarnation pushed; of earlier ones it knows nothing

    def queued(self, call: Call) -> None:
        """A push waits for its turn. It belongs to the step in which it was made, whatever is started before it."""
        clocks = [key.window.clock + sum(1 for waiting in key.queue if waiting.is_push) for key in call.keys]
        call.step = self._newest = max(self._newest, *clocks)

    def begin(self, call: Call, clocks: Sequence[int]) -> Steps:
        """A push starts under these clocks."""
        step = call.step = max(call.step or self._newest, max(clocks, default=0))
        self._newest = max(self._newest, step)
        if self._first == 0:
            self._first = step
        oldest = self._pushes.oldest
        settled = step - 1 if oldest is None else min(oldest.step, step) - 1
        return Steps(step, settled if settled >= self._first else 0)

    def alone(self, clock: int) -> tuple[int, int]:
        """What a push under this clock says, as `Steps` has it, when it starts while no other is open. It does not
        count yet."""
        step = self._newest if self._newest > clock else clock
        return step, step - 1 if 0 < self._first < step else 0

    def passed(self, step: int) -> None:
        """A push of this step, see `alone`, is settled."""
        self._newest = step
        self._first = self._first or step

    def reached(self, clock: int) -> None:
        """A predecessor has made so many pushes to a key."""
        self._newest = max(self._newest, clock)

    def go_back(self, clock: int) -> None:
        """The worker was rewound: no key has a clock after this one."""
        self._newest = clock
