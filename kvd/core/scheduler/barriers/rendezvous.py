"""Rendezvous of workers in the scheduler: at barriers, where they may leave notes, and at points."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, TypeAlias

from kvd.core.machine import Peer
from kvd.core.membership import name_of
from kvd.core.open_waits import LOOK_S, OpenWaits
from kvd.core.scheduler.barriers.barriers import Barriers, Entrant, Settled, Verdict
from kvd.core.scheduler.barriers.points import OF_PROGRAMS, Points, SettledPoint
from kvd.core.scheduler.membership.liveness import Liveness
from kvd.core.scheduler.membership.roster import Roster, Seat
from kvd.protocol.messages import EXIT_BARRIER, Done, Enter, ErrorCode, Listen, MemberState, Refused, Said, Say

MAX_SHOWN = 16  # barriers and points in a report

Meeting: TypeAlias = Enter | Say | Listen


class Met(NamedTuple):
    """What follows from a request.

    Attributes:
        answer: None: the worker waits until the barrier is settled.
        is_new: it must be saved before it is answered.
    """

    answer: Done | Refused | Said | None
    is_new: bool = False


class Rendezvous:
    """All barriers and points of a run. The names of points begin in a way of their own.

    Args:
        breaks_on_loss: whether a dead worker that is not awaited any more breaks what it is missing from.
    """

    def __init__(
        self, roster: Roster, liveness: Liveness, barriers: Barriers, points: Points, *, breaks_on_loss: bool
    ) -> None:
        self.barriers = barriers
        self.points = points
        self._roster = roster
        self._liveness = liveness
        self._breaks_on_loss = breaks_on_loss
        self._waits = OpenWaits()
        self._look_at = float("-inf")

    def open(self) -> dict[str, list[int]]:
        """Those at which workers wait, with their ranks."""
        return {**self.barriers.open(), **self.points.open()}

    def look(self, now: float) -> None:
        """Note at which barriers and points workers wait now, for the ages in `describe`."""
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            self._waits.look(self._generations(), now)

    def _generations(self) -> dict[str, int]:
        return {**self.barriers.generations(), **self.points.generations()}

    def describe(self, now: float) -> list[dict[str, object]]:
        """Barriers and points at which workers wait, the oldest first: who is there, who is missing, and for how long.

        At a point, and at the barrier at the end of the programs, waiting is no standstill however long it takes.
        """
        open_, generations = self.open(), self._generations()
        shown = []
        for name in self._waits.oldest_first()[:MAX_SHOWN]:
            since = self._waits.since(name, generations.get(str(name)))
            if since is None or not isinstance(name, str):
                continue
            may_last = name.startswith(OF_PROGRAMS) or name == EXIT_BARRIER
            shown.append(
                {
                    "name": name,
                    "entered": [name_of("worker", rank) for rank in open_[name]],
                    "waits_for": [name_of("worker", rank) for rank in self.absent(name, open_[name])],
                    "age_s": round(now - since, 3),
                    "standstill_s": None if may_last else self._waits.standstill_s(0.0),
                }
            )
        return shown

    def absent(self, name: str, entered: Collection[int]) -> list[int]:
        """The ranks that those wait for who have come to this one."""
        if not name.startswith(OF_PROGRAMS):
            return self.barriers.missing(self._roster.barrier_ranks(), self._roster.came_in()).get(name, [])
        return [rank for rank in self._roster.point_ranks() if rank not in entered]

    def withdraw(self, rank: int) -> None:
        """The worker of this rank was replaced: its predecessor waits nowhere."""
        self.barriers.withdraw(rank)
        self.points.withdraw(rank)

    def _breaking(self) -> list[int]:
        """The ranks of workers that break what they are missing from."""
        return self._liveness.breaking_ranks() if self._breaks_on_loss else []

    # ── barriers ──

    def meet(self, seat: Seat, peer: Peer, message: Meeting) -> Met:
        """Answer what the holder of a seat does at a barrier."""
        request, name, generation = message.request, message.name, message.generation
        rank = seat.member.rank
        answer: Verdict | str | bool | None
        if seat.member.role != "worker":
            return Met(Refused(request, ErrorCode.NOT_ALLOWED, "only workers meet at barriers"))
        if isinstance(message, Listen):
            note = self.barriers.said(name, generation)
            return Met(Said(request, note.is_released, note.text))
        if isinstance(message, Say):
            answer = self.barriers.say(name, generation, rank, message.note)
        else:
            who = Entrant(rank, seat.member.incarnation, peer, request, message.place)
            answer = self.barriers.enter(name, generation, who)
        if isinstance(answer, str):
            return Met(Refused(request, ErrorCode.NOT_ALLOWED, answer))
        if isinstance(answer, Verdict):
            return Met(answer.answer(request, name))
        # A note is saved first: a restarted scheduler must still have it.
        return Met(None) if answer is None else Met(Done(request), is_new=answer)

    def settle_barriers(self) -> list[Settled]:
        """The barriers that the latest change releases or breaks."""
        return self.barriers.settle(self._roster.barrier_ranks(), self._breaking(), self._roster.came_in())

    def settle_after(self, message: Meeting) -> list[Settled]:
        """The barriers that this message releases or breaks: at most the one that it is about. Of a thousand workers,
        all but the last are told by counting that nobody has to be told."""
        if not isinstance(message, Enter):
            return []
        required = self._roster.barrier_ranks()
        far = self.barriers.is_far_from_reached(message.name, required, self._roster.came_in())
        return [] if far and not self._breaking() else self.settle_barriers()

    # ── points ──

    def is_at_point(self, seat: Seat) -> bool:
        """Whether the holder of this seat waits at a point."""
        return self.points.has(seat.member.rank, seat.member.incarnation)

    def has_points_to_settle(self) -> bool:
        """Whether a point is reached, or cannot be."""
        return self.points.would_settle(self._roster.point_ranks(), self._breaking())

    def settle_points(self) -> list[SettledPoint]:
        """The points that the latest change releases or breaks."""
        return self.points.settle(self._roster.point_ranks(), self._breaking())

    # ── invariants ──

    def validate(self) -> None:
        """Raises AssertionError if a barrier or point that should be settled is open, or a worker that waits at a point
        takes part."""
        self.barriers.validate(self._roster.barrier_ranks(), self._breaking(), self._roster.came_in())
        self.points.validate(self._roster.point_ranks(), self._breaking())
        for seat in self._roster.seats():
            takes_part = seat.member.state is MemberState.ACTIVE
            assert not (takes_part and self.is_at_point(seat)), f"{seat.name} takes part, and waits at a point"
