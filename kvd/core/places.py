"""Where a worker's program is: outside of its loops, in a step of one, or in a step that all workers share.

Every push says at which place it was made. The steps of all loops of a program are counted through: a loop of 100 steps
has the numbers 0 to 99, and the next loop begins with 100, even if the first was left early. So a program that runs
again comes to the same places, and one number tells a successor where its predecessor stopped. A worker begins no push
of a place before its pushes of earlier places are settled: when a push of a place has reached a server, whatever came
before that place has counted.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

_KINDS = 4
MAX_STEPS = 1 << 58  # of all loops of a program


class PlaceKind(IntEnum):
    """What a program does at a place."""

    OUTSIDE = 0  # before the step with this number: pushes are not counted by step
    STEP = 1  # every key of the loop is pushed once
    SHARED = 2  # the same, and only one worker makes this step


START = 0  # the place of a program before its first loop, and of every program without loops


def place_of(kind: PlaceKind, step: int) -> int:
    """The place of a step, by its number among the steps of all loops; OUTSIDE: before that step."""
    return _KINDS * step + kind


def kind_of(place: int) -> PlaceKind:
    return PlaceKind(place % _KINDS)


def step_of(place: int) -> int:
    return place // _KINDS


class Inheritance(NamedTuple):
    """What the predecessor of this worker has left in one key.

    Attributes:
        place: where its program was when it made its latest push of the key.
        counted: how many of its pushes count in every slice.
        begun: how many of them it had made before it came to the place where it stopped.
    """

    place: int
    counted: int
    begun: int


class Stopped(NamedTuple):
    """Where the program of the worker stopped that had this rank before, and died.

    Attributes:
        place: where its program stopped.
        trained: whether a contribution that it pushed there has counted.
        left: what it has left in a key; None if it has left nothing, or the key is not known yet.
        is_new: there was none: this worker came when the job was under way, and the place is where the others were.
    """

    place: int = START
    trained: bool = False
    left: Callable[[str], Inheritance | None] = lambda name: None
    is_new: bool = False


class Boundary(NamedTuple):
    """A point between two steps.

    Attributes:
        steps: how many steps of its loops the program has made by then.
        is_past: the store was restored from a later point, so its values are not those of this one.
    """

    steps: int
    is_past: bool


class Point(NamedTuple):
    """Where a program comes together with the others, between two loops.

    Attributes:
        steps: how many steps its loops have made.
        place: what its servers have yet to be told: that all before it is done. None: they know, or the program has
            pushed since its last loop, and what it pushed belongs to this place.
    """

    steps: int
    place: int | None


class Restored(NamedTuple):
    """The snapshot that the store was restored from, if it was.

    Attributes:
        steps: how many steps of all loops were made before it.
        begins_past: what the program does before its first loop was done before it, too.
    """

    steps: int = 0
    begins_past: bool = False
