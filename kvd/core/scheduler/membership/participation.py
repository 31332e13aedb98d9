"""Participation in the rounds: of workers that come back, that are late, or that wait at a point.

Each method changes the state of a member as a message asks, and says what to answer. The rounds follow the view, so the
caller publishes the change, and answers when that is saved.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, TypeAlias

from kvd.core.machine import Received, Send
from kvd.core.membership import TAKING_PART, in_words
from kvd.core.scheduler.barriers.rendezvous import Rendezvous
from kvd.core.scheduler.membership.agreement import Agreement
from kvd.core.scheduler.membership.deaths import Log
from kvd.core.scheduler.membership.roster import AFTER_A_LOSS, MemberEvent, Roster, Seat
from kvd.protocol.messages import (
    Done,
    Epoch,
    ErrorCode,
    Late,
    MemberState,
    NotYet,
    Refused,
    Settings,
    StandBy,
    TakePart,
    Taking,
    Together,
)

LOG_INTERVAL_S = 10.0  # between two lines about one worker


class Stragglers:
    """Late workers: a quorum has pushed for a round, and waited for them long enough.

    A late worker lives. The rounds go on without it until it takes part again, as they go on without one that was lost.
    The view gives the reason, as long as it is back or returning; for one that was lost it gives none then.

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


_WHAT_HAPPENS = {
    Taking.OUT: MemberEvent.STEPPED_OUT,
    Taking.IN: MemberEvent.RETURNED,
    Taking.ARRIVED: MemberEvent.ARRIVED,
}

Answer: TypeAlias = Done | Refused | NotYet | Together


class Outcome(NamedTuple):
    """What became of a message.

    Attributes:
        has_changed: there is something to publish.
        answer: None: the sender waits.
    """

    has_changed: bool
    answer: Answer | None


class Participation:
    """Lets workers into the rounds, and out of them."""

    def __init__(
        self, roster: Roster, agreement: Agreement, rendezvous: Rendezvous, stragglers: Stragglers, log: Log
    ) -> None:
        self._roster = roster
        self._agreement = agreement
        self._rendezvous = rendezvous
        self._stragglers = stragglers
        self._log = log

    # ── what workers and servers say ──

    def take_part(self, seat: Seat, message: TakePart) -> Outcome:
        """A worker that was lost or late, or has just come, takes part, or finds that it cannot yet."""
        if seat.member.role != "worker" or seat.member.state not in (MemberState.ACTIVE, *AFTER_A_LOSS):
            text = f"{seat.name} {in_words(seat.member.state)}: it cannot take part"
            return Outcome(False, Refused(message.request, ErrorCode.NOT_ALLOWED, text))
        is_newest, seat.took_part = message.request >= seat.took_part, max(message.request, seat.took_part)
        if not is_newest:
            return Outcome(False, Done(message.request))
        came_in = seat.came_in  # barriers depend on it as well
        if message.taking is Taking.ARRIVED:
            seat.came_in = message.place
        first = self._roster.comes_in_before(seat) if message.taking is Taking.IN else None
        if first is not None:
            text = f"{first} comes in first, as nobody takes part"
            return Outcome(False, Refused(message.request, ErrorCode.NOT_ALLOWED, text))
        self._rendezvous.points.withdraw(seat.member.rank)
        was_late = seat.is_late
        reason = seat.member.reason if was_late and message.taking is Taking.IN else ""
        has_changed = self._roster.transition(seat, _WHAT_HAPPENS[message.taking], reason)
        if has_changed:
            self._log("debug" if was_late else "info", f"{seat.name} {in_words(seat.member.state)}")
        return Outcome(has_changed or seat.came_in != came_in, Done(message.request))

    def late(self, seat: Seat, message: Late, known: Epoch, newest: Epoch, now: float) -> Outcome:
        """A server that knows the view `known` says that a quorum waits for these workers."""
        if seat.member.role != "server":
            text = f"{seat.name} cannot say who is late: servers do"
            return Outcome(False, Refused(message.request, ErrorCode.NOT_ALLOWED, text))
        late = self._stragglers.judge(message.ranks, known, newest)
        for worker in late:
            self._roster.transition(worker, MemberEvent.LATE, self._stragglers.reason)
            line = self._stragglers.note(worker, now)
            if line:
                self._log("info", line, said_by=seat.name)
        return Outcome(bool(late), Done(message.request))

    def stand_by(self, seat: Seat, event: Received, message: StandBy) -> Outcome:
        """A worker has come to a point: the rounds go on without it until all have. One that was lost, and does not
        take part again yet, is told as the others are; no round waits for it after that either."""
        member = seat.member
        if member.role != "worker" or member.state not in (MemberState.ACTIVE, MemberState.IDLE, *AFTER_A_LOSS):
            text = f"{seat.name} {in_words(member.state)}: it waits for nobody"
            return Outcome(False, Refused(message.request, ErrorCode.NOT_ALLOWED, text))
        answer = self._rendezvous.points.take(member.rank, member.incarnation, event.peer, message)
        waits = answer is None and member.state is not MemberState.BACK
        is_idle_now = waits and self._roster.transition(seat, MemberEvent.IDLED)
        if is_idle_now:
            self._log("info", f"{seat.name} {in_words(seat.member.state)}", point=message.name)
        return Outcome(is_idle_now or self._rendezvous.has_points_to_settle(), answer)

    # ── what follows ──

    def settle_points(self) -> list[Send]:
        """Releases the points to which all have come: all of them take part again from the same view on."""
        answers: list[Send] = []
        for point in self._rendezvous.settle_points():
            if point.missing:
                self._log("warning", f"nobody comes to the point {point.name!r} any more", missing=list(point.missing))
            for who in point.waiting if not point.missing else ():
                seat = self._roster.worker_seat_of(who.incarnation)
                if seat is not None and seat.member.state is MemberState.IDLE:
                    self._roster.transition(seat, MemberEvent.RELEASED)
            answers += point.answers()
        return answers

    def is_back(self, seat: Seat) -> None:
        """A worker that was dead or lost was heard. It may stand at a point still."""
        self.returns_at_once(seat)
        if self._rendezvous.is_at_point(seat) and seat.member.state is MemberState.ACTIVE:
            self._roster.transition(seat, MemberEvent.IDLED)

    def returns_at_once(self, seat: Seat) -> bool:
        """Where no round waits for anyone, a worker that is back takes part in no other way than before."""
        is_apart = seat.member.state is MemberState.BACK
        if is_apart and self._agreement.settings.mode == "async":
            self._roster.transition(seat, MemberEvent.RETURNED)
            self._roster.transition(seat, MemberEvent.ARRIVED)
            return True
        return False
