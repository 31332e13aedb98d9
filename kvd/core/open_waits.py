"""Ages of waits, and the age from which a wait counts as a standstill.

The owner looks about once a second and says what is open then, with a mark that changes when the wait makes progress.
Nothing is measured between two looks, so the operations that wait cost nothing. An age is at most one look too small.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

LOOK_S = 0.5  # at least, between two looks
LEAST_STANDSTILL_S = 10.0
TIMES_USUAL = 10
UNKNOWN_STANDSTILL_S = 120.0  # while no usual time is known: the first step may load data and compile
RECENT = 5  # steps of which the median is the usual time

_Name: TypeAlias = str | int


class _Open(NamedTuple):
    mark: object
    since: float


class OpenWaits:
    """Waits by name, with the time at which each was first seen at its present mark.

    A program may pause again and again, for instance because one worker evaluates and the others wait. So the two
    longest waits that ended are kept: a pause that has happened twice is no standstill.
    """

    def __init__(self) -> None:
        self._open: dict[_Name, _Open] = {}
        self._longest = (0.0, 0.0)  # seconds, the longest first

    def look(self, marks: Mapping[Any, object], now: float) -> None:
        """Take over what is open now, by name, with the mark of each."""
        before = self._open
        self._open = {}
        for name, mark in marks.items():
            known = before.get(name)
            self._open[name] = known if known is not None and known.mark == mark else _Open(mark, now)
        ended_s = max((now - wait.since for name, wait in before.items() if self._open.get(name) != wait), default=0.0)
        if ended_s >= LEAST_STANDSTILL_S:
            first, second = self._longest
            self._longest = max(first, ended_s), max(second, min(first, ended_s))

    def since(self, name: _Name, mark: object) -> float | None:
        """When the wait was first seen at this mark; None if it was not, or was not open any more at the last look."""
        wait = self._open.get(name)
        return None if wait is None or wait.mark != mark else wait.since

    def oldest_first(self) -> list[_Name]:
        """The names of the open waits, the oldest first."""
        return sorted(self._open, key=lambda name: self._open[name].since)

    def standstill_s(self, usual_s: float | None) -> float:
        """The age in seconds from which a wait counts as a standstill.

        Args:
            usual_s: seconds that a step usually takes; None if that is not known yet.
        """
        usual = UNKNOWN_STANDSTILL_S if usual_s is None else TIMES_USUAL * usual_s
        return max(LEAST_STANDSTILL_S, usual, 2 * self._longest[1])


class Pace(NamedTuple):
    """How long one step of something takes, by its count at each look. Immutable, so that copies may share it.

    Attributes:
        steps: the count at the last look.
        since: when a look last found a new count; None before the first look.
        recent_s: seconds per step, of the latest looks that found some.
    """

    steps: int = 0
    since: float | None = None
    recent_s: tuple[float, ...] = ()

    def seen(self, steps: int, now: float, last_look: float) -> Pace:
        """The pace after a look that found another count, or is the first one."""
        since = last_look if self.since is None else self.since
        if steps <= self.steps:  # the first look, or an update that failed was taken back
            return Pace(steps, since, self.recent_s)
        return Pace(steps, now, (*self.recent_s[1 - RECENT :], (now - since) / (steps - self.steps)))

    @property
    def usual_s(self) -> float | None:
        """The median of the recent seconds per step; None if there was no step yet."""
        return sorted(self.recent_s)[len(self.recent_s) // 2] if self.recent_s else None
