"""Workers meet at barriers, and leave notes there: what the scheduler answers them, and when a barrier is settled."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from kvd.core.machine import Peer
from kvd.core.scheduler.barriers.barriers import Barriers, Entrant, Settled, Verdict
from kvd.core.scheduler.membership.roster import Roster, Seat
from kvd.protocol.messages import Done, Enter, ErrorCode, Listen, Refused, Said, Say

Meeting: TypeAlias = Enter | Say | Listen


class Met(NamedTuple):
    """What follows from a request.

    Attributes:
        answer: None: the worker waits until the barrier is settled.
        is_new: it must be saved before it is answered.
    """

    answer: Done | Refused | Said | None
    is_new: bool = False


class Meetings:
    """Answers Enter, Say and Listen.

    Args:
        breaking: gives the ranks of workers that break the barriers that they are missing from.
    """

    def __init__(self, roster: Roster, barriers: Barriers, breaking: Callable[[], list[int]]) -> None:
        self._roster = roster
        self._barriers = barriers
        self._breaking = breaking

    def take(self, seat: Seat, peer: Peer, message: Meeting) -> Met:
        """Answers the holder of a seat."""
        request, name, generation = message.request, message.name, message.generation
        rank = seat.member.rank
        answer: Verdict | str | bool | None
        if seat.member.role != "worker":
            return Met(Refused(request, ErrorCode.NOT_ALLOWED, "only workers meet at barriers"))
        if isinstance(message, Listen):
            note = self._barriers.said(name, generation)
            return Met(Said(request, note.is_released, note.text))
        if isinstance(message, Say):
            answer = self._barriers.say(name, generation, rank, message.note)
        else:
            who = Entrant(rank, seat.member.incarnation, peer, request, message.place)
            answer = self._barriers.enter(name, generation, who)
        if isinstance(answer, str):
            return Met(Refused(request, ErrorCode.NOT_ALLOWED, answer))
        if isinstance(answer, Verdict):
            return Met(answer.answer(request, name))
        # A note is saved first: a restarted scheduler must still have it.
        return Met(None) if answer is None else Met(Done(request), is_new=answer)

    def settle(self) -> list[Settled]:
        """The barriers that the latest change releases or breaks."""
        return self._barriers.settle(self._roster.barrier_ranks(), self._breaking(), self._roster.came_in())

    def settle_after(self, message: Meeting) -> list[Settled]:
        """The barriers that this message releases or breaks: at most the one that it is about. Of a thousand workers,
        all but the last are told by counting that nobody has to be told."""
        if not isinstance(message, Enter):
            return []
        required = self._roster.barrier_ranks()
        far = self._barriers.is_far_from_reached(message.name, required, self._roster.came_in())
        return [] if far and not self._breaking() else self.settle()

    def validate(self) -> None:
        """Raises AssertionError if a barrier that should be settled is open."""
        self._barriers.validate(self._roster.barrier_ranks(), self._breaking(), self._roster.came_in())
