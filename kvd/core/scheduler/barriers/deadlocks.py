"""Whether all workers wait for each other, so that none can ever go on. It is proved, not guessed.

Workers report that they are blocked: all that they have asked is at the servers and waits there for pushes of others,
or here at barriers or points; the threads of their programs wait for that; and nothing of theirs is under way. A report
has a stamp, which changes whenever anything happens in the worker.

1. Every worker has reported that it is blocked, in the present view, and nobody is dead, missing or about to come.
2. Then the scheduler asks all to look again. Call that moment T.
3. All report again, with the number of that check and the stamps from before. So each of them was blocked from before
   T until after it: at T all were blocked at once, and nothing was under way that could free any of them.

Whatever else happens changes a stamp or the view, or makes a worker report that it is not blocked: the proof then
starts from the beginning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvd.core.machine import Send
from kvd.core.membership import name_of
from kvd.core.scheduler.barriers.rendezvous import Gatherings
from kvd.core.scheduler.membership.liveness import Liveness
from kvd.core.scheduler.membership.roster import Roster, Seat
from kvd.protocol.messages import MAX_ABSENT, MAX_STUCK_LINES, Epoch, MemberState, WaitNews, WaitReport

MAX_LINE_CHARS = 300


class _Blocked(NamedTuple):
    """A worker's latest report, if it says that it is blocked."""

    incarnation: int
    epoch: Epoch
    report: WaitReport


@dataclass(frozen=True, slots=True)
class _Proof:
    """The stamps of all workers, by rank: when they were asked to look again, or when they were found stuck."""

    number: int
    stamps: dict[int, int]
    lines: tuple[str, ...] = ()  # not empty: they are stuck


class Deadlocks:
    """Keeps the reports, and finds out whether they prove a deadlock.

    Args:
        first_check: no other start of a scheduler uses the numbers from this one on.
    """

    def __init__(self, roster: Roster, liveness: Liveness, gatherings: Gatherings, first_check: int) -> None:
        self._roster = roster
        self._liveness = liveness
        self._gatherings = gatherings
        self._check = first_check
        self._reports: dict[int, _Blocked] = {}  # by rank
        self._proof: _Proof | None = None

    def take(self, seat: Seat, report: WaitReport, epoch: Epoch, current: Epoch) -> list[Send]:
        """A report of a worker that knows the view `epoch`; `current` is the one that counts.

        Returns:
            What is to be said to whom: to look again, or that they are stuck.
        """
        rank = seat.member.rank
        if not report.blocked or epoch != current:
            self._reports.pop(rank, None)
            self._proof = None
            return []
        self._reports[rank] = _Blocked(seat.member.incarnation, epoch, report)
        seats = self._blocked_seats(current)
        if seats is None:
            self._proof = None
            return []
        stamps = {seat.member.rank: self._reports[seat.member.rank].report.stamp for seat in seats}
        if self._proof is None or self._proof.stamps != stamps:
            self._check += 1
            self._proof = _Proof(self._check, stamps)
            return self._tell(seats)
        if not self._proof.lines and all(
            self._reports[rank].report.check == self._proof.number for rank in self._proof.stamps
        ):
            self._proof = _Proof(self._proof.number, stamps, self._lines(seats))
            return self._tell(seats)
        if self._proof.lines or report.check != self._proof.number:  # what it was told may be lost
            return self._tell([seat])
        return []

    @property
    def lines(self) -> tuple[str, ...]:
        """Who waits for what; empty unless all are stuck."""
        return () if self._proof is None else self._proof.lines

    def _blocked_seats(self, current: Epoch) -> list[Seat] | None:
        """The workers that have neither left nor are lost, if every one is blocked; None if that is not certain."""
        seats = {seat.member.rank: seat for seat in self._roster.seats() if seat.member.role == "worker"}
        if not self._roster.has_all_workers():
            return None
        nobody_waits_for = (MemberState.LEFT, MemberState.LOST)
        stays = [seats[rank] for rank in sorted(seats) if seats[rank].member.state not in nobody_waits_for]
        waiting = self._gatherings.open()
        for seat in stays:
            blocked = self._reports.get(seat.member.rank)
            if (
                blocked is None
                or not seat.is_living
                or self._liveness.known_end(seat)
                or blocked.incarnation != seat.member.incarnation
                or blocked.epoch != current
                or any(seat.member.rank not in waiting.get(name, ()) for name in blocked.report.barriers)
            ):
                return None
        return stays

    def _tell(self, seats: list[Seat]) -> list[Send]:
        proof = self._proof
        assert proof is not None
        sends = []
        for seat in seats:
            if seat.peer is not None:
                stamp = proof.stamps[seat.member.rank]
                news = WaitNews(0, check=0 if proof.lines else proof.number, stamp=stamp, deadlock=proof.lines)
                sends.append(Send(seat.peer, news))
        return sends

    def _lines(self, seats: list[Seat]) -> tuple[str, ...]:
        lines = [self._line(seat) for seat in seats]
        if len(lines) > MAX_STUCK_LINES:
            lines[MAX_STUCK_LINES - 1 :] = [f"{len(lines) - MAX_STUCK_LINES + 1} more workers wait, too"]
        return tuple(lines)

    def _line(self, seat: Seat) -> str:
        report = self._reports[seat.member.rank].report
        what = ", ".join(report.lines)
        if report.barriers:
            entered = self._gatherings.open()
            absent = {rank for name in report.barriers for rank in self._gatherings.absent(name, entered[name])}
            names = ", ".join(name_of("worker", rank) for rank in sorted(absent)[:MAX_ABSENT])
            what += f" (missing at the barrier: {names})"
        host = f", host {seat.host_name}" if seat.host_name else ""
        return f"{seat.name} (node {seat.member.node_id}{host}, pid {seat.pid}): {what}"[:MAX_LINE_CHARS]
