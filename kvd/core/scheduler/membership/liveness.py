"""Liveness: when each member was last heard, and who has been silent for too long."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from kvd.core.scheduler.membership.roster import Roster, Seat
from kvd.core.scheduler.placement.partitions import Partitions
from kvd.protocol.messages import MAX_QUIET, Quiet

SECONDS_PER_MEMBER = 2e-3  # of time between two heartbeats: what one costs here is a small part of that
HEARTBEATS_PER_TIMEOUT = 4  # at least, however many members there are
SILENT_S = 10.0  # a program that holds Python's lock in a long call sends no heartbeats either
HEARTBEATS_MISSED = 3
LATE = 0.1  # of a heartbeat interval: a Tick that comes so late, after a long silence, found the scheduler paused


class Liveness:
    """Judges the living members of a roster by their silence, and says how long the dead are awaited.

    Changes nothing in the roster.

    Args:
        partitions: of the run. A silent server that holds the only copy of values is not declared dead: that would help
            nobody, and it may come back with all of them.
    """

    def __init__(
        self,
        roster: Roster,
        partitions: Partitions,
        heartbeat_interval_s: float,
        server_timeout_s: float,
        worker_timeout_s: float,
        now: float,
    ) -> None:
        self._roster = roster
        self._interval_s = heartbeat_interval_s
        self._timeouts_s = {"server": server_timeout_s, "worker": worker_timeout_s}
        self._heard_at = {seat.place: now for seat in roster.seats()}
        self._by_silence = {
            role: OrderedDict[tuple[str, int], None]() for role in self._timeouts_s
        }  # the longest first
        for seat in roster.seats():
            self._by_silence[seat.member.role][seat.place] = None  # who is found not to live is taken out
        self._unheard = set(self._heard_at)  # places of a record: nobody was heard there since this start
        self._ended: dict[tuple[str, int], str] = {}  # how a process ended whose member is not declared dead yet
        self._partitions = partitions
        self._spared: set[tuple[str, int]] = set()  # servers that are alone, and were silent for a whole timeout
        self._last_step = now
        return_by = now + worker_timeout_s
        self._awaited = {("worker", rank): return_by for rank in roster.dead_ranks()}  # may be on their way back

    # ── what is known ──

    def joined(self, seat: Seat, now: float) -> None:
        """A new incarnation took this seat: nothing that was known of the one before counts.

        A worker that comes after others have died may be the first of a program that is started again: those get their
        timeout to come as well.
        """
        self._note(seat, now)
        self._ended.pop(seat.place, None)
        self._awaited.pop(seat.place, None)
        if seat.member.role == "worker":
            until = now + self._timeouts_s["worker"]
            self._awaited.update({("worker", rank): until for rank in self._roster.dead_ranks()})

    def heard(self, seat: Seat, now: float) -> None:
        self._note(seat, now)

    def _note(self, seat: Seat, now: float) -> None:
        place = seat.place
        self._heard_at[place] = now
        order = self._by_silence[place[0]]
        order[place] = None
        order.move_to_end(place)
        self._spared.discard(place)
        self._unheard.discard(place)

    def was_heard(self, seat: Seat) -> bool:
        """Whether the holder of this place was heard since this scheduler started."""
        return seat.place not in self._unheard

    def process_ended(self, seat: Seat, reason: str, now: float) -> float:
        """The seat's process has ended. Returns the seconds that are left to start it again, from 0."""
        self._ended[seat.place] = reason
        return max(0.0, self._deadline(seat) - now)

    def forgive_after_pause(self, now: float) -> bool:
        """Called at each step. True: this scheduler was paused, so that everyone has a full timeout from now on.

        Nodes that seem silent may have sent heartbeats that are still unread.
        """
        deadline = self.next_deadline() if now - self._last_step > 2 * self._interval_s else None
        self._last_step = now
        if deadline is None or now - deadline <= self._interval_s * LATE:
            return False
        self._heard_at = dict.fromkeys(self._heard_at, now)
        self._awaited = dict.fromkeys(self._awaited, now + self._timeouts_s["worker"])
        return True

    # ── what follows ──

    def silence_s(self, seat: Seat, now: float) -> float:
        """Seconds since the seat's holder was last heard, to the millisecond."""
        return round(now - self._heard_at[seat.place], 3)

    def is_silent(self, seat: Seat, now: float) -> bool:
        """Whether the seat's holder has missed so many heartbeats that its process is stopped, or cut off."""
        limit_s = max(SILENT_S, HEARTBEATS_MISSED * self.interval_s(seat.member.role))
        return now - self._heard_at[seat.place] >= limit_s

    def known_end(self, seat: Seat) -> str:
        """How the seat's process ended; "" if nothing is known of its end."""
        return self._ended.get(seat.place, "")

    def spare(self, seat: Seat) -> bool:
        """Whether this overdue member is waited for from now on, until it is heard or is known to have ended."""
        if self.known_end(seat) or not self._partitions.is_alone(seat.member.incarnation):
            return False
        self._spared.add(seat.place)
        return True

    def overdue(self, now: float) -> list[tuple[Seat, str]]:
        """The living members that must be declared dead, each with the reason."""
        found = set()
        for role in self._by_silence:
            for seat in self._silent(role):
                if now < self._deadline(seat):
                    break
                found.add(seat.place)
        if not found:
            return []
        return [
            (seat, self.known_end(seat) or f"no heartbeat for {self._timeouts_s[seat.member.role]:g} s")
            for seat in self._roster.living()
            if seat.place in found
        ]

    def breaking_ranks(self) -> list[int]:
        """The dead workers whom nobody awaits any more: a barrier that they are missing from is not reached."""
        return [rank for rank in self._roster.dead_ranks() if ("worker", rank) not in self._awaited]

    def stops_awaiting(self, now: float) -> bool:
        """Called at each step. True: the time of a dead worker to come back is over."""
        over = [place for place, until in self._awaited.items() if now >= until]
        for place in over:
            del self._awaited[place]
        return bool(over)

    def next_deadline(self) -> float | None:
        """When the next member is overdue if it stays silent, or a dead one is not awaited any more; None: never."""
        judged = [self._deadline(seat) for role in self._by_silence for seat in islice(self._silent(role), 1)]
        return min((*judged, *self._awaited.values()), default=None)

    def interval_s(self, role: str) -> float:
        """How often nodes of this role are to say that they are alive: the less often the more there are. Several of
        them may be lost before one counts as dead."""
        wanted_s = max(self._interval_s, SECONDS_PER_MEMBER * len(self._roster.seats()))
        return max(self._interval_s, min(wanted_s, self._timeouts_s[role] / HEARTBEATS_PER_TIMEOUT))

    def quiet(self, now: float) -> tuple[Quiet, ...]:
        """The living members that have missed heartbeats, and for how long: those that were silent the longest."""
        found: list[Quiet] = []
        limits_s = {role: 2 * self.interval_s(role) for role in self._timeouts_s}
        for role, limit_s in limits_s.items():
            for seat in self._silent(role, and_spared=True):
                if now - self._heard_at[seat.place] <= limit_s or len(found) == MAX_QUIET:
                    break
                found.append(Quiet(role, seat.member.rank, self.silence_s(seat, now)))
        return tuple(found)

    def _silent(self, role: str, *, and_spared: bool = False) -> Iterator[Seat]:
        """The living of this role, who was heard the longest ago first."""
        order = self._by_silence[role]
        gone: list[tuple[str, int]] = []
        try:
            for place in order:
                seat = self._roster.living_holder(*place)
                if seat is None:
                    gone.append(place)
                elif and_spared or place not in self._spared:
                    yield seat
        finally:  # also of those who do not look at all
            for place in gone:
                del order[place]

    def _deadline(self, seat: Seat) -> float:
        return self._heard_at[seat.place] + self._timeouts_s[seat.member.role]
