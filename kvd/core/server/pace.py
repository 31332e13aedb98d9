"""How often a worker may make its server visit every slice: all workers of all jobs wait meanwhile."""

from __future__ import annotations

from typing import Final

PAUSE_PER_SLICE_S: Final = 20e-6  # ten times what a new optimizer takes for one
QUICK_SLICES: Final = 512  # a visit to so few is not worth a pause


class Pace:
    """Pauses between visits, each ten times as long as the visit: at most an eleventh of the time goes into them."""

    def __init__(self) -> None:
        self._pause_until = 0.0

    def is_paused(self, now: float) -> bool:
        """Whether it is too soon for another visit."""
        return now < self._pause_until

    def visited(self, slices: int, now: float) -> None:
        """So many slices were visited."""
        if slices > QUICK_SLICES:
            self._pause_until = now + slices * PAUSE_PER_SLICE_S
