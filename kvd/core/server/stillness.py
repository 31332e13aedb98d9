"""Whether a push may take a lane: nobody but those who push and pull wants to know of it, or has a say in it."""

from __future__ import annotations

from collections.abc import Collection

from kvd.core.server.captures import Captures
from kvd.core.server.disputes import Disputes
from kvd.core.server.groups import FusedGroup
from kvd.core.server.late import LateWorkers
from kvd.core.server.participants import Participants


class Stillness:
    """What may concern a push besides its worker and its group."""

    def __init__(
        self,
        participants: Participants,
        disputes: Disputes,
        captures: Captures,
        late: LateWorkers,
        leaving: Collection[int],
    ) -> None:
        self._participants = participants
        self._disputes = disputes
        self._captures = captures
        self._late = late
        self._leaving = leaving

    def of(self, group: FusedGroup) -> bool:
        """Whether nothing does."""
        return not (
            group.is_gone
            or self._participants.dead
            or self._disputes.open
            or self._captures.is_on
            or self._late.is_on
            or (self._leaving and group.partition in self._leaving)
        )
