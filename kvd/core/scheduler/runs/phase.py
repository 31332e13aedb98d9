"""The phases of a run: it forms, runs, closes, and has ended or failed.

The phase changes only in `RunLife`, along TRANSITIONS. A run whose values are given up has no machine any more, and no
`RunLife`: its phase is GONE.
"""

from __future__ import annotations

from enum import Enum

from kvd.core.scheduler.membership.roster import LIVING, Roster
from kvd.protocol.messages import MemberState, RunPhase

IN_WORDS = {
    RunPhase.FORMING: "the run waits for its workers",
    RunPhase.RUNNING: "all workers have joined",
    RunPhase.CLOSING: "all workers have come to the end",
    RunPhase.ENDED: "the run has ended",
    RunPhase.FAILED: "the run has failed: no worker is left",
}


class RunEvent(Enum):
    """What can happen to a run."""

    COMPLETE = "every rank has been taken"
    EXIT_PASSED = "the exit barrier was passed"
    DESERTED = "all workers have left"
    LOST = "no worker is left, and one died"
    ENTERED = "a worker is there"
    ABANDONED = "no worker has come, or all gave up before they did anything"


# An event that is not in the row of a phase changes nothing there.
TRANSITIONS: dict[RunPhase, dict[RunEvent, RunPhase]] = {
    RunPhase.FORMING: {
        RunEvent.COMPLETE: RunPhase.RUNNING,
        RunEvent.DESERTED: RunPhase.FAILED,  # it never began: its program may try again
        RunEvent.LOST: RunPhase.FAILED,
        RunEvent.ABANDONED: RunPhase.FAILED,
    },
    RunPhase.RUNNING: {
        RunEvent.EXIT_PASSED: RunPhase.CLOSING,
        RunEvent.DESERTED: RunPhase.ENDED,
        RunEvent.LOST: RunPhase.FAILED,
        RunEvent.ABANDONED: RunPhase.FAILED,
    },
    RunPhase.CLOSING: {
        RunEvent.DESERTED: RunPhase.ENDED,
        RunEvent.ABANDONED: RunPhase.ENDED,
        RunEvent.LOST: RunPhase.ENDED,  # all of its work was done: a leave that is lost counts as good
    },
    RunPhase.ENDED: {
        RunEvent.ENTERED: RunPhase.CLOSING,  # an operator, or a worker that was paused while it left
    },
    RunPhase.FAILED: {
        RunEvent.ENTERED: RunPhase.FORMING,  # its program was started again, or wakes up
    },
}


class RunLife:
    """The phase of one run, as the states of its workers show it.

    Args:
        return_by: when the first worker must be there, if the run is not over; None: no worker is expected.
    """

    def __init__(self, phase: RunPhase = RunPhase.FORMING, return_by: float | None = None) -> None:
        self.phase = phase
        self._return_by = return_by

    def observe(self, roster: Roster, *, exit_passed: bool = False) -> bool:
        """Takes over what happened to the workers; True if the phase is now another."""
        before = self.phase
        while self._follow(roster, exit_passed=exit_passed):
            pass
        return self.phase is not before

    def give_back(self, roster: Roster) -> None:
        """A worker gave up joining, and its place is free again."""
        if not roster.worker_states():
            self._change(RunEvent.ABANDONED)

    def next_deadline(self, roster: Roster) -> float | None:
        """When the run is abandoned if no worker comes."""
        return None if self._return_by is None or self.phase.is_over or roster.has_workers else self._return_by

    def expire(self, roster: Roster, now: float) -> bool:
        """No worker came, or came back to a scheduler without its record, in time; True if that ends the run."""
        deadline = self.next_deadline(roster)
        return deadline is not None and now >= deadline and self._change(RunEvent.ABANDONED)

    def _follow(self, roster: Roster, *, exit_passed: bool) -> bool:
        states = roster.worker_states()
        if exit_passed and self._change(RunEvent.EXIT_PASSED):
            return True
        if any(state in LIVING for state in states):
            return self._change(RunEvent.ENTERED) or (roster.is_complete() and self._change(RunEvent.COMPLETE))
        if MemberState.DEAD in states or MemberState.LOST in states:
            return self._change(RunEvent.LOST)
        return bool(states) and self._change(RunEvent.DESERTED)

    def _change(self, event: RunEvent) -> bool:
        after = TRANSITIONS[self.phase].get(event)
        if after is None:
            return False
        self.phase = after
        return True
