"""Which step a reader of several keys asks for; `kvd.core.server.readings` says what a step is.

A reader asks the servers which steps they have, chooses one that all of them can give, and asks for exactly that. If
training has moved on before the question arrives, the reader chooses one that is still to come, farther ahead each
time: the servers then answer when they reach it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvd.protocol.messages import Surveyed

FIRST_PATIENCE_S = 0.05
LONGEST_PATIENCE_S = 1.0
FARTHEST_AHEAD = 1 << 12


class Available(NamedTuple):
    """What all servers together can give.

    Attributes:
        oldest: they have every complete step from this one on.
        newest: the newest step that is complete.
        is_over: nothing more of that step will be pushed.
        highest: the newest step of which any of them has a part.
    """

    oldest: int
    newest: int
    is_over: bool
    highest: int

    @property
    def has_moved_on(self) -> bool:
        """While the servers were asked, the newest step that was complete everywhere was given up by some."""
        return self.newest < self.oldest


def available(surveys: Sequence[Surveyed], *, one_key: bool) -> Available:
    """What the answers of all servers amount to.

    Args:
        one_key: they are about one key only, any of whose versions is complete.
    """
    lowest = min([survey.lowest for survey in surveys], default=0)
    highest = max([survey.highest for survey in surveys], default=0)
    kept = max([survey.kept for survey in surveys], default=0)
    over = max([survey.over for survey in surveys], default=0)
    newest, is_over = over, True
    if one_key:
        newest = lowest
    elif all(survey.level for survey in surveys) and lowest > over:
        newest, is_over = lowest, False  # its number is the version of each slice, after which comes a later step
    return Available(kept, newest, is_over, max(highest, over))


class Choice(NamedTuple):
    """What a reader asks for next.

    Attributes:
        patience_s: how long it waits for a step that is still to come, or for more of its values, before it looks
            again; None: the step is there.
    """

    step: int
    is_over: bool
    patience_s: float | None


class Chooser:
    """Chooses the steps that one read asks for, until one is read."""

    def __init__(self) -> None:
        self._ahead = 0
        self._patience_s = FIRST_PATIENCE_S

    def choose(self, there: Available) -> Choice:
        """The newest step, or one that is to come."""
        if self._ahead == 0 and not there.has_moved_on:
            return Choice(there.newest, there.is_over, None)
        self._ahead = max(self._ahead, 1)
        return Choice(there.highest + self._ahead, False, self._patience_s)

    def was_too_late(self) -> None:
        """Some server did not have the step any more."""
        self._ahead = min(2 * self._ahead or 1, FARTHEST_AHEAD)

    def has_waited(self) -> None:
        """The step has not come: training has become slower."""
        self._ahead = 0
        self._patience_s = min(2 * self._patience_s, LONGEST_PATIENCE_S)
