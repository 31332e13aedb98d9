"""Which workers are late: a quorum has pushed for a round, and waited for them long enough.

A late worker lives. The rounds go on without it until it takes part again, as they go on without one that was lost. The
view says why, as long as it is back or returning; of one that was lost it gives no reason then.
"""

from __future__ import annotations

from collections.abc import Collection

from kvd.core.membership import TAKING_PART
from kvd.core.scheduler.membership.roster import Roster, Seat
from kvd.protocol.messages import Epoch, Settings

LOG_INTERVAL_S = 10.0  # between two lines about one worker


class Lateness:
    """Judges what servers say of late workers.

    Args:
        settings: of the cluster: the quorum, and the time of grace.
    """

    def __init__(self, roster: Roster, settings: Settings) -> None:
        self._roster = roster
        self._quorum = settings.quorum
        self._grace_s = settings.quorum_grace_s
        self._logged_at: dict[int, float] = {}
        self._unlogged: dict[int, int] = {}  # how often a rank was late since then

    @property
    def reason(self) -> str:
        """What the view says of a late worker."""
        return f"late: {self._quorum} or more others have waited for it for {self._grace_s:g} s"

    def judge(self, ranks: Collection[int], known: Epoch, newest: Epoch) -> list[Seat]:
        """The seats of those ranks that are late, if a quorum takes part without them.

        A server must know the `newest` view. One that does not may speak of the time before a worker came, or came
        back, and would throw it out for nothing that it has done since; it asks again when it knows more.

        Args:
            known: the view that the server knows.
        """
        if known != newest:
            return []
        late = [
            seat
            for seat in self._roster.seats()
            if seat.member.role == "worker" and seat.member.rank in ranks and seat.member.state in TAKING_PART
        ]
        return late if self._roster.has_quorum_without([seat.member.rank for seat in late]) else []

    def note(self, seat: Seat, now: float) -> str:
        """The worker is late. Returns what to log; "" if there was a line about it not long ago."""
        rank = seat.member.rank
        logged_at = self._logged_at.get(rank)
        if logged_at is not None and now < logged_at + LOG_INTERVAL_S:
            self._unlogged[rank] = self._unlogged.get(rank, 0) + 1
            return ""
        self._logged_at[rank] = now
        unlogged = self._unlogged.pop(rank, 0)
        more = f", and was {unlogged} times more since the last line about it" if unlogged else ""
        return f"{seat.name} is late: the rounds go on without it until its next step{more}"
