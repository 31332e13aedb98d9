"""Servers that turn out not to hold what they should: the scheduler is told, which takes them out of the table."""

from __future__ import annotations

from kvd.core.machine import SCHEDULER
from kvd.core.server.effects import ServerEffects
from kvd.core.session import OUT_OF_SYNC_REQUEST, SchedulerSession
from kvd.protocol.messages import OutOfSync

RETRY_S = 1.0


class OutOfStep:
    """Says to the scheduler which servers do not hold what they should, until the view says so."""

    def __init__(self, session: SchedulerSession, effects: ServerEffects) -> None:
        self._view = session.view
        self._effects = effects
        self._told: dict[tuple[int, int], float] = {}  # when it is told next
        self._now = 0.0

    def add(self, partition: int, incarnation: int) -> bool:
        """This server does not hold this partition any more. False: that is being said already."""
        if (partition, incarnation) in self._told:
            return False
        self._told[partition, incarnation] = self._now
        return True

    def view_changed(self) -> None:
        for partition, incarnation in list(self._told):
            member = self._view.by_incarnation(incarnation)
            entry = self._view.partitions[partition] if partition < len(self._view.partitions) else None
            if member is None or entry is None or member.rank not in (entry.backup, entry.syncing):
                del self._told[partition, incarnation]

    def tick(self, now: float) -> None:
        self._now = now
        for (partition, incarnation), at in self._told.items():
            if now >= at:
                self._told[partition, incarnation] = now + RETRY_S
                self._effects.send(SCHEDULER, OutOfSync(OUT_OF_SYNC_REQUEST, partition, incarnation))

    def next_deadline(self) -> float | None:
        return min(self._told.values(), default=None)
