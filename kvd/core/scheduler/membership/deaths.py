"""What the silence of a node, or the end of its process, means for the others.

A server without its process is dead at once. A worker may be started again until its timeout is over. A worker that
dies is lost if the rounds can go on without it, and else they wait for it. `liveness` knows who is silent, `roster`
whether the rounds can go on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvd.core.membership import in_words
from kvd.core.scheduler.membership.liveness import Liveness
from kvd.core.scheduler.membership.roster import AFTER_A_LOSS, MemberEvent, Roster, Seat
from kvd.protocol.messages import MemberState


class Log(Protocol):
    """Writes a line to the log."""

    def __call__(self, level: str, text: str, **fields: object) -> None: ...


class Deaths:
    """Declares deaths.

    Args:
        changed: is told after each change of a state, before the next is judged.

    Attributes:
        declared: the number of deaths so far, by role.
    """

    def __init__(self, roster: Roster, liveness: Liveness, log: Log, changed: Callable[[], None]) -> None:
        self._roster = roster
        self._liveness = liveness
        self._log = log
        self._changed = changed
        self.declared = {"server": 0, "worker": 0}

    def process_ended(self, seat: Seat | None, reason: str, now: float, *, may_judge: bool = True) -> None:
        """A server without its process is dead at once; a worker may be started again until its timeout.

        If nobody was heard at the place since this start, only the record says who has it: another process may have
        taken it since, and has the whole timeout to be heard.

        Args:
            may_judge: whether a death counts now; if not, `judge` declares it when the server is overdue.
        """
        if seat is None or not seat.is_living:
            return
        was_heard = self._liveness.was_heard(seat)
        if seat.member.role == "server" and was_heard and may_judge:
            self._declare_dead(seat, reason, now)
            return
        left_s = self._liveness.process_ended(seat, reason, now)
        if was_heard:
            text = f"{seat.name}: {reason}; it can be started again within {left_s:.1f} s"
            self._log("warning", text, node_id=seat.member.node_id)

    def judge(self, now: float) -> None:
        """Declares the silent dead, one at a time: each death may leave another server alone with its values."""
        while overdue := self._liveness.overdue(now):
            seat, reason = overdue[0]
            if self._liveness.spare(seat):
                text = f"{seat.name} alone has some values, and is silent: it is waited for"
                self._log("error", text, silent_s=self._liveness.silence_s(seat, now))
            else:
                self._declare_dead(seat, reason, now)
        if self._roster.loses_workers:
            self._lose_the_dead()

    def _declare_dead(self, seat: Seat, reason: str, now: float) -> None:
        pushes = seat.member.role == "worker" and seat.member.state is not MemberState.DONE
        is_lost = pushes and (seat.member.state in AFTER_A_LOSS or self._roster.may_lose(seat))
        event = MemberEvent.DROPPED if is_lost else MemberEvent.DECLARED_DEAD
        self._roster.transition(seat, event, reason, self._liveness.silence_s(seat, now))
        self.declared[seat.member.role] += 1
        self._log("warning", f"{seat.name} {in_words(seat.member.state)}", reason=reason)
        if pushes and self._roster.loses_workers and not is_lost:
            few = "no worker is left" if self._roster.shrinks else "fewer workers than the quorum are left"
            self._log("error", f"{few} to go on without {seat.name}: start it again")
        self._changed()

    def _lose_the_dead(self) -> None:
        """The last worker that died is waited for, as nobody else is there; until somebody is."""
        lost = [seat for seat in self._roster.dead_seats() if self._roster.may_lose(seat)]
        for seat in lost:
            self._roster.transition(seat, MemberEvent.DROPPED, seat.member.reason, seat.member.last_seen_s)
            self._log("warning", f"{seat.name} {in_words(seat.member.state)}")
        if lost:
            self._changed()
