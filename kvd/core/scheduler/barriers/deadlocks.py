"""Reports of waits, and the proof of a deadlock: that all workers wait for each other, and none can ever go on.

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

from kvd.core.machine import Effect, LogEntry, Received, Send
from kvd.core.membership import name_of
from kvd.core.scheduler.barriers.rendezvous import Rendezvous
from kvd.core.scheduler.membership.liveness import Liveness
from kvd.core.scheduler.membership.roster import MAX_REASON_CHARS, Roster, Seat
from kvd.protocol.messages import (
    MAX_ABSENT,
    MAX_ASKED_ABOUT,
    MAX_ASKED_BARRIERS,
    MAX_STUCK_LINES,
    BarrierWait,
    Epoch,
    MemberState,
    NodeFact,
    NodeName,
    WaitNews,
    WaitReport,
)

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

    def __init__(self, roster: Roster, liveness: Liveness, rendezvous: Rendezvous, first_check: int) -> None:
        self._roster = roster
        self._liveness = liveness
        self._rendezvous = rendezvous
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
        waiting = self._rendezvous.open()
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
            entered = self._rendezvous.open()
            absent = {rank for name in report.barriers for rank in self._rendezvous.absent(name, entered[name])}
            names = ", ".join(name_of("worker", rank) for rank in sorted(absent)[:MAX_ABSENT])
            what += f" (missing at the barrier: {names})"
        host = f", host {seat.host_name}" if seat.host_name else ""
        return f"{seat.name} (node {seat.member.node_id}{host}, pid {seat.pid}): {what}"[:MAX_LINE_CHARS]


class WaitReports:
    """Answers WaitReport: how the nodes are, who is missing where others wait, and whether all are stuck."""

    def __init__(self, roster: Roster, liveness: Liveness, rendezvous: Rendezvous, incarnation: int) -> None:
        self._roster = roster
        self._liveness = liveness
        self._rendezvous = rendezvous
        self._deadlocks = Deadlocks(roster, liveness, rendezvous, incarnation)

    def take(self, seat: Seat, event: Received, report: WaitReport, current: Epoch, now: float) -> list[Effect]:
        """Answers a worker. `current` is the view that counts: no other is about to be announced."""
        barriers = self._absent_at(seat)
        absent = [NodeName("worker", rank) for wait in barriers for rank in wait.absent]
        names = list(dict.fromkeys([*report.nodes, *absent]))[:MAX_ASKED_ABOUT]
        facts = [fact for name in names if (fact := self._fact(*name, now)) is not None]
        news = WaitNews(report.request, tuple(facts), barriers)
        effects: list[Effect] = [Send(event.peer, news)]
        were_stuck = self._deadlocks.lines
        effects += self._deadlocks.take(seat, report, event.epoch, current)
        lines = self._deadlocks.lines
        if lines and lines != were_stuck:
            effects.append(LogEntry("warning", "all workers wait for each other, and none can go on", {"waits": lines}))
        return effects

    def _fact(self, role: str, rank: int, now: float) -> NodeFact | None:
        seat = next((seat for seat in self._roster.seats() if seat.place == (role, rank)), None)
        if seat is None:
            return None
        ended = self._liveness.known_end(seat)[:MAX_REASON_CHARS]
        return NodeFact(role, rank, seat.host_name, seat.pid, max(0.0, self._liveness.silence_s(seat, now)), ended)

    def _absent_at(self, seat: Seat) -> tuple[BarrierWait, ...]:
        """The barriers that the worker has entered, the point at which it waits, and who is missing there."""
        waits = []
        for name, entered in self._rendezvous.open().items():
            absent = self._rendezvous.absent(name, entered)
            if seat.member.rank in entered and absent:
                waits.append(BarrierWait(name, tuple(absent[:MAX_ABSENT])))
        return tuple(waits[:MAX_ASKED_BARRIERS])
