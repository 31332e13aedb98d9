"""How long a worker stays out that is late in each step in which it comes back.

Each time the others wait for it for the time of grace, and what it gives is in no round. It stays out twice as long
each time, so the others hardly wait for a worker that is slow for good; one that was late once comes back at once.
"""

from __future__ import annotations

from kvd.core.membership import TAKING_PART, ViewState
from kvd.core.places import PlaceKind, kind_of, step_of

MOST_GRACES = 16
"""It stays out for so many times of grace at most."""


class ReturnPause:
    """Remembers in which step the worker came back, and how often it was late in that one."""

    def __init__(self, view: ViewState) -> None:
        self._view = view
        self._came_into = -1  # step
        self._in_vain = 0  # how often in a row

    def next_s(self, place: int) -> float:
        """The seconds for which a worker that is about to come back stays out. Its program is at this place."""
        is_same_step = kind_of(place) is PlaceKind.STEP and step_of(place) == self._came_into
        self._in_vain = self._in_vain + 1 if is_same_step else 0
        graces = min(MOST_GRACES, 1 << (self._in_vain - 1)) if self._in_vain else 0
        return self._view.settings.quorum_grace_s * graces

    def came_into(self, step: int) -> None:
        """The worker takes part again from this step on."""
        self._came_into = step

    @property
    def is_needed(self) -> bool:
        """Whether the others are too few to go on: then it does not stay out any longer."""
        workers = [member for member in self._view.members.values() if member.role == "worker"]
        return sum(member.state in TAKING_PART for member in workers) < self._view.settings.quorum
