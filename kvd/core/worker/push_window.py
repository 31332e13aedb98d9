"""How far the pushes of one key run ahead of their rounds, and under which clock each push goes.

A call pushes or pulls many keys at once, so the functions below take the windows of all its keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvd.core.places import Inheritance
from kvd.errors import KvdError


@dataclass(slots=True, eq=False)
class PushWindow:
    """The clock of this worker for one key, and what is in flight under it. All changes are made in this file.

    Invariants:
        base_clock <= clock and resume_clock <= clock.
        0 <= failing_pushes <= open_pushes.
        partial_failure is set only when a push was taken by some servers and refused by others.

    The numbers among them are checked by `validate`.
    """

    clock: int = 0  # the number of pushes that were made: the next one goes under clock + 1
    base_clock: int = 0  # the clock when the key was found, or that `rewind` went back to
    resume_clock: int = 0  # rounds up to here were closed without this worker: no clock goes back behind it
    open_pushes: int = 0  # started and not settled
    failing_pushes: int = 0  # open pushes of which a message was refused; the others may have been taken
    pulling: list[int] = field(default_factory=list)  # the versions that open pulls wait for (sync mode)
    reading: int = 0  # open pulls that wait for no version in particular
    inherited: Inheritance | None = None  # from a predecessor that died
    partial_failure: KvdError | None = None  # what a push was refused with that others took: only rewind goes on

    def holds_back(self, limit: int) -> bool:
        """Whether the next push has to wait.

        It waits when `limit` pushes are open, when the clock of an open push may still be given back, and when its
        round would replace a version that is being pulled.
        """
        return (
            self.open_pushes >= limit
            or self.failing_pushes > 0
            or (bool(self.pulling) and min(self.pulling) < self.clock)
        )

    @property
    def has_pushed(self) -> bool:
        """Whether a push was made since the key was found, or since the last rewind."""
        return self.clock != self.base_clock

    @property
    def is_in_use(self) -> bool:
        """Whether a push or pull is under way."""
        return self.open_pushes > 0 or self.reading > 0 or bool(self.pulling)

    def start_at(self, clock: int) -> None:
        """Goes on from the clock of a predecessor."""
        self.clock = self.base_clock = clock

    def inherit(self, left: Inheritance, clock: int) -> None:
        """Goes on from `clock`, after what a predecessor has left."""
        self.inherited = left
        self.start_at(clock)

    def catch_up(self) -> None:
        """Goes on after all that counted of the predecessor, unless this worker has pushed since."""
        if self.inherited is not None and not self.has_pushed:
            self.start_at(max(self.clock, self.inherited.counted))

    def resume(self) -> None:
        """This worker counts again from its present clock on; the rounds before were closed without it."""
        self.resume_clock = self.clock

    def rewind(self, clock: int) -> None:
        """Goes back to `clock`, never forward. No push may be open."""
        self.clock = min(self.clock, max(clock, self.resume_clock))
        self.base_clock = min(self.base_clock, self.clock)
        self.partial_failure = None

    def take_over(self, other: PushWindow) -> None:
        """What is in flight in another window, and its clock, count here from now on."""
        self.clock = other.clock
        self.open_pushes = other.open_pushes
        self.failing_pushes = other.failing_pushes
        self.pulling = other.pulling[:]
        self.reading = other.reading
        self.partial_failure = other.partial_failure

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        assert self.base_clock <= self.clock, f"the clock lies before its start: {self}"
        assert 0 <= self.failing_pushes <= self.open_pushes, f"more pushes fail than are open: {self}"
        assert self.reading >= 0, f"more pulls ended than were begun: {self}"
        assert all(clock <= self.clock for clock in self.pulling), f"a later version is pulled: {self}"


def begin_pushes(windows: Sequence[PushWindow], *, pulls: bool = False) -> list[int]:
    """Opens a push of each key. Returns their clocks.

    Args:
        pulls: the versions that the pushes lead to are pulled: as `begin_pulls` behind it.
    """
    clocks = []
    for window in windows:
        window.clock = clock = window.clock + 1
        window.open_pushes += 1
        if pulls:
            window.pulling.append(clock)
        clocks.append(clock)
    return clocks


def begin_pulls(windows: Sequence[PushWindow]) -> None:
    """Holds back the rounds that would replace the versions of the present clocks, which are being pulled."""
    for window in windows:
        window.pulling.append(window.clock)


def end_pulls(windows: Sequence[PushWindow], clocks: Sequence[int]) -> None:
    """Undoes `begin_pulls`: the values are here, or are not wanted any more.

    Args:
        clocks: at which it was called, one per window, or one for all of them.
    """
    if len(clocks) == 1:
        (clock,) = clocks
        for window in windows:
            window.pulling.remove(clock)
        return
    for position, clock in enumerate(clocks):
        windows[position].pulling.remove(clock)


def begin_reads(windows: Sequence[PushWindow]) -> None:
    """Counts an open pull of each key that takes whatever version is there."""
    for window in windows:
        window.reading += 1


def end_reads(windows: Sequence[PushWindow]) -> None:
    """Undoes `begin_reads`: the values are here, or are not wanted any more."""
    for window in windows:
        window.reading -= 1


def mark_failing(windows: Sequence[PushWindow]) -> None:
    """The first message of an open push was refused. Until the others are answered, no push follows."""
    for window in windows:
        window.failing_pushes += 1


def settle_pushes(
    windows: Sequence[PushWindow], failure: KvdError | None, is_untaken: bool, pulled: Sequence[int] = ()
) -> None:
    """Closes an open push of each key: all its messages are answered.

    Args:
        pulled: the clocks of versions that it has pulled, as in `end_pulls`.
        failure: what a message was refused with; None if all were taken.
        is_untaken: no server took any of it. Its clock is given back, unless a later push has taken the next one.
    """
    if len(pulled) > 1:
        end_pulls(windows, pulled)
        pulled = ()
    for window in windows:
        window.open_pushes -= 1
        if pulled:
            window.pulling.remove(pulled[0])
        if failure is not None:
            window.failing_pushes -= 1
            if is_untaken and window.open_pushes == 0:
                window.clock -= 1
            else:
                window.partial_failure = failure
