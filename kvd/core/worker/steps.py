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
        self._said: Steps | None = None
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
        """A push starts under these clocks, or has started in the lane: see `repeat`."""
        said, self._said = self._said, None
        if said is not None:
            call.step = said.step
            return said
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
        """A push of this step, see `alone`, counts."""
        self._newest = step
        self._first = self._first or step

    def begin_in_lane(self, clock: int, oldest: int) -> Steps:
        """A push under this clock starts in the lane, later than all that are open.

        Args:
            oldest: the step of the first push in the lane; 0: there is none.
        """
        step = self._newest = max(self._newest, clock)
        self._first = self._first or step
        first = self._pushes.oldest
        if first is not None:
            oldest = first.step
        settled = (min(oldest, step) if oldest else step) - 1
        return Steps(step, settled if settled >= self._first else 0)

    def repeat(self, said: Steps) -> None:
        """The push that starts next has started in the lane, and its messages have said this."""
        self._said = said

    def reached(self, clock: int) -> None:
        """A predecessor has made so many pushes to a key."""
        self._newest = max(self._newest, clock)

    def go_back(self, clock: int) -> None:
        """The worker was rewound: no key has a clock after this one."""
        self._newest = clock
