"""Workers that are late: a round has had a quorum for the time of grace, and waits for others.

A server that went on without them by itself would be alone with that: its rounds would lack what those of other servers
have. So it tells the scheduler, which decides for all rounds of all servers, in a view.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvd.core.machine import SCHEDULER
from kvd.core.server.effects import ServerEffects
from kvd.core.server.groups import FusedGroup
from kvd.core.server.participants import Participants
from kvd.core.session import LATE_REQUEST, SchedulerSession
from kvd.protocol.messages import Late

RETRY_S = 1.0
PAUSED = 0.25  # of the time of grace: a server that looks so late was paused, or is very busy
MAX_TOLD = 16  # sets of ranks at a time: rounds may wait for different workers


class _Open(NamedTuple):
    """The next round of a group, which waits though a quorum is there."""

    group: FusedGroup
    clock: int
    since: float


class LateWorkers:
    """Notes the rounds that wait though a quorum is there, and says to the scheduler for whom, until the view says so.

    Attributes:
        is_on: whether there is a quorum.
    """

    def __init__(self, session: SchedulerSession, effects: ServerEffects, participants: Participants) -> None:
        self.is_on = False
        self._view = session.view
        self._effects = effects
        self._participants = participants
        self._now = 0.0
        self._open: dict[int, _Open] = {}  # by number of the group, in the order of `since`
        self._awaited_since: dict[int, float] = {}  # rank → when the view came here that has rounds wait for it
        self._look_at: float | None = None
        self._has_waited = False  # after a pause

    def staged(self, group: FusedGroup) -> None:
        """A contribution was staged: the group's next round may wait for others from now on."""
        clock = group.log.closed + 1
        known = self._open.get(group.number)
        if known is not None and known.clock == clock:
            return
        if self._missing(group, clock):
            self._open.pop(group.number, None)
            self._open[group.number] = _Open(group, clock, self._now)
            if self._look_at is None:
                self._look_at = self._now + self._view.settings.quorum_grace_s

    def view_changed(self, groups: Iterable[FusedGroup], now: float) -> None:
        """Rounds may wait for others than before, also some that nobody pushes for any more."""
        self._now = now
        self.is_on = self._view.settings.quorum > 0 and self._view.is_sync
        self._look_at = now if self.is_on else None
        if not self.is_on:
            self._open, self._awaited_since = {}, {}
            return
        earlier = self._awaited_since
        self._awaited_since = {rank: earlier.get(rank, now) for rank in self._participants.awaited}
        for group in groups:
            self.staged(group)

    def tick(self, now: float) -> None:
        """Looks when it is time. After a pause of this server, what it waits for may lie there unread: it reads first,
        and looks a moment later, once."""
        self._now = now
        if self._look_at is None or now < self._look_at:
            return
        moment_s = self._view.settings.quorum_grace_s * PAUSED
        if now - self._look_at > moment_s and not self._has_waited:
            self._has_waited = True
            self._look_at = now + moment_s
        else:
            self._has_waited = False
            self._look()

    def next_deadline(self) -> float | None:
        return self._look_at

    def _look(self) -> None:
        """Tells of those for whom rounds have waited for too long: the workers of each round by themselves, since the
        scheduler need not find all of them late."""
        now, grace_s = self._now, self._view.settings.quorum_grace_s
        late: dict[tuple[int, ...], None] = {}
        self._look_at = None
        for number, (group, clock, since) in list(self._open.items()):
            if now < since + grace_s:
                self._look_again(since + grace_s)
                break
            missing = self._missing(group, clock)
            if not missing:
                del self._open[number]
                self._look_at_parts(group)
                continue
            due = {rank: max(since, self._awaited_since.get(rank, since)) + grace_s for rank in missing}
            overdue = tuple([rank for rank in missing if due[rank] <= now])
            if overdue and len(late) < MAX_TOLD:
                late[overdue] = None
            self._look_again(now + RETRY_S if overdue else min(due.values()))
        for ranks in late:
            self._effects.send(SCHEDULER, Late(LATE_REQUEST, ranks))

    def _missing(self, group: FusedGroup, clock: int) -> list[int]:
        """For whom this round waits, if it is open and has a quorum."""
        log, awaited = group.log, self._participants.awaited
        if group.is_gone or log.closed >= clock or not log.has_quorum(clock, self._view.settings.quorum, awaited):
            return []
        return log.missing(clock, awaited)

    def _look_at_parts(self, group: FusedGroup) -> None:
        """Its slices may belong to other groups now, which have what was staged for it."""
        for slice_ in group.slices if group.is_gone else ():
            if not slice_.group.is_gone:
                self.staged(slice_.group)

    def _look_again(self, at: float) -> None:
        self._look_at = at if self._look_at is None else min(self._look_at, at)
