"""What the scheduler knows of waits: how the nodes are, who is missing where others wait, and whether all are stuck."""

from __future__ import annotations

from kvd.core.machine import Effect, LogEntry, Received, Send
from kvd.core.scheduler.barriers.deadlocks import Deadlocks
from kvd.core.scheduler.barriers.rendezvous import Gatherings
from kvd.core.scheduler.membership.liveness import Liveness
from kvd.core.scheduler.membership.roster import MAX_REASON_CHARS, Roster, Seat
from kvd.protocol.messages import (
    MAX_ABSENT,
    MAX_ASKED_ABOUT,
    MAX_ASKED_BARRIERS,
    BarrierWait,
    Epoch,
    NodeFact,
    NodeName,
    WaitNews,
    WaitReport,
)


class WaitReports:
    """Answers WaitReport."""

    def __init__(self, roster: Roster, liveness: Liveness, gatherings: Gatherings, incarnation: int) -> None:
        self._roster = roster
        self._liveness = liveness
        self._gatherings = gatherings
        self._deadlocks = Deadlocks(roster, liveness, gatherings, incarnation)

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
        for name, entered in self._gatherings.open().items():
            absent = self._gatherings.absent(name, entered)
            if seat.member.rank in entered and absent:
                waits.append(BarrierWait(name, tuple(absent[:MAX_ABSENT])))
        return tuple(waits[:MAX_ASKED_BARRIERS])
