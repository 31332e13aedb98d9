"""How a leader hands a partition to its backup, which the view names as its successor: it winds down.

From then on it changes nothing of the partition: no round closes that is open, and what it is asked is answered by
NotYet, as on a server that leads it no more. What is under way ends. When the backup holds all of that, the two are the
same, and the scheduler is told. The view that names the successor as the leader ends the waiting: `giving_up` makes a
replica of what is here.

This must not keep workers waiting for long. If no such view has come after WIND_DOWN_S, the leader goes on as before,
and tries again later. That is safe at any moment: what it then commits, its backup holds, and a server that leads in
its place commits nothing that it does not hold itself. But if the backup leads already, the leader would only begin
rounds that nobody holds, and be no copy any more. So, once the scheduler was told, it asks the backup before: one that
leads does not answer with Done, and one that is gone could hold nothing anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvd.core.machine import SCHEDULER, LogEntry, ServerPeer
from kvd.core.membership import name_of
from kvd.core.server.effects import ServerEffects
from kvd.core.server.elsewhere import Elsewhere
from kvd.core.server.groups import FusedGroup
from kvd.core.server.keys import KeyTable
from kvd.core.server.optimizer_records import OptimizerRecords
from kvd.core.server.records import Records
from kvd.core.session import HANDED_OVER_REQUEST, SchedulerSession
from kvd.protocol.messages import NO_RANK, HandedOver, HoldReady, Refused

WIND_DOWN_S = 2.0  # for which a partition is not served, at most
AGAIN_S = 20.0  # after that it is served, before the next try
RETRY_S = 0.5


@dataclass(slots=True, eq=False)
class _Handover:
    """A partition on its way to its backup.

    Attributes:
        is_resting: nothing of it changes; else it is served, until the next try.
        until: when this ends; None: not known before the next `tick`.
        busy: groups that were at work when it began to rest, and may still be.
        asked: in this try, the successor was asked whether it has applied everything, so that it could lead.
        tell_at: when the scheduler is told, again.
    """

    partition: int
    successor: ServerPeer
    rank: int
    is_resting: bool = False
    until: float | None = None
    busy: list[FusedGroup] = field(default_factory=list)
    asked: _Asked | None = None
    tell_at: float = 0.0


@dataclass(slots=True, eq=False)
class _Asked:
    """Attributes:
    is_ready: the successor could lead.
    is_asked_again: whether it still is the backup, before the leader goes on.
    """

    is_ready: bool = False
    is_asked_again: bool = False


class Handovers:
    """The partitions that this server leads, and is to hand to their backups.

    Args:
        optimizers: a new optimizer, or a change, concerns all partitions.
        is_handing_over: whether slices that this server leads are not in the table yet.
        woken: some partitions are served again.
    """

    def __init__(
        self,
        session: SchedulerSession,
        table: KeyTable,
        effects: ServerEffects,
        records: Records,
        optimizers: OptimizerRecords,
        elsewhere: Elsewhere,
        is_handing_over: Callable[[], bool],
        woken: Callable[[], None],
    ) -> None:
        self._view = session.view
        self._table = table
        self._effects = effects
        self._records = records
        self._optimizers = optimizers
        self._elsewhere = elsewhere
        self._is_handing_over = is_handing_over
        self._woken = woken
        self._open: dict[int, _Handover] = {}

    def is_complete(self, partition: int, successor: int) -> bool:
        """Whether the successor, of this incarnation, has all that is here, and nothing changes any more."""
        handover = self._open.get(partition)
        is_open = handover is not None and handover.successor == successor
        return handover is not None and is_open and _is_ready(handover) and self._is_held(handover)

    # ── the view ──

    def view_changed(self, led: list[int]) -> None:
        """Begins what is new, and ends what the view does not ask for any more."""
        wanted = {partition: peer for partition in led if (peer := self._successor(partition)) is not None}
        for partition, handover in list(self._open.items()):
            if wanted.get(partition) != handover.successor:
                del self._open[partition]
                self._elsewhere.leaving.discard(partition)  # whoever called goes on with all groups
        for partition, peer in wanted.items():
            if partition not in self._open:
                rank = self._view.partitions[partition].successor
                self._open[partition] = handover = _Handover(partition, peer, rank)
                text = f"partition {partition} is handed over to {name_of('server', rank)}"
                self._effects.emit(LogEntry("info", text))
                self._rest(handover)

    def _successor(self, partition: int) -> ServerPeer | None:
        """The process that is to lead the partition; None if nobody else is."""
        rank = self._view.partitions[partition].successor
        member = None if rank == NO_RANK else self._view.members.get(("server", rank))
        return None if member is None else ServerPeer(member.incarnation)

    # ── it rests, and is served again ──

    def _rest(self, handover: _Handover) -> None:
        handover.is_resting, handover.until, handover.asked = True, None, None
        handover.busy = self._at_work(handover.partition)
        self._elsewhere.leaving.add(handover.partition)

    def _at_work(self, partition: int) -> list[FusedGroup]:
        groups = self._table.groups.values()
        return [group for group in groups if group.partition == partition and not group.is_quiescent]

    def _go_on(self, handover: _Handover) -> None:
        handover.is_resting, handover.until, handover.asked, handover.busy = False, None, None, []
        self._elsewhere.leaving.discard(handover.partition)
        text = f"partition {handover.partition} cannot be handed over now: it is served, and this is tried again"
        self._effects.emit(LogEntry("warning", text))
        self._woken()

    def _is_held(self, handover: _Handover) -> bool:
        while handover.busy and handover.busy[-1].is_quiescent:
            handover.busy.pop()
        return (
            not handover.busy
            and not self._is_handing_over()
            and not self._optimizers.is_open
            and self._records.are_held(handover.partition, handover.successor)
        )

    def _ask(self, handover: _Handover) -> None:
        """Nothing is under way here: the successor applies what it holds."""
        handover.asked = asked = _Asked()

        def ready(refused: Refused | None) -> None:
            asked.is_ready = refused is None

        self._records.hold(handover.partition, HoldReady(0, handover.partition), ready)

    def _ask_again(self, handover: _Handover) -> None:
        """The scheduler may have let the successor lead: it says whether it is the backup yet, before work goes on."""
        asked = handover.asked
        holders = self._records.holders_of(handover.partition)
        if asked is None or asked.is_asked_again or not holders:
            return
        asked.is_asked_again = True

        def answered(refused: Refused | None) -> None:
            asked.is_asked_again = False
            if refused is None and handover.asked is asked and self._open.get(handover.partition) is handover:
                self._go_on(handover)

        self._records.ask(holders[0], HoldReady(0, handover.partition), answered)

    # ── time ──

    def tick(self, now: float) -> None:
        """Tells the scheduler of what can be handed over, until it says so in a view; not for too long."""
        for handover in list(self._open.values()):
            if handover.until is None:
                handover.until = now + (WIND_DOWN_S if handover.is_resting else AGAIN_S)
            if not handover.is_resting:
                if now >= handover.until:
                    self._rest(handover)
                continue
            if handover.asked is None and self._is_held(handover):
                self._ask(handover)
                handover.tell_at = now
            if now >= handover.until and not _is_ready(handover):
                self._go_on(handover)
            elif now >= handover.until:
                handover.until = now + WIND_DOWN_S
                self._ask_again(handover)
            if _is_ready(handover) and now >= handover.tell_at:
                handover.tell_at = now + RETRY_S
                message = HandedOver(HANDED_OVER_REQUEST, handover.partition, handover.successor)
                self._effects.send(SCHEDULER, message)

    def next_deadline(self) -> float | None:
        due = None
        for handover in self._open.values():
            for at in (handover.until, handover.tell_at if _is_ready(handover) else None):
                if at is not None and (due is None or at < due):
                    due = at
        return due

    def describe(self) -> dict[str, str]:
        """For `kvd status`: partitions, and to whom they go."""
        return {str(handover.partition): name_of("server", handover.rank) for handover in self._open.values()}

    def validate(self) -> None:
        """Raises AssertionError if a partition rests that is not handed over, or work goes on in one that is held."""
        resting = {partition for partition, handover in self._open.items() if handover.is_resting}
        assert resting == self._elsewhere.leaving, f"{resting} are handed over, {self._elsewhere.leaving} rest"
        for partition in resting:
            if self.is_complete(partition, self._open[partition].successor):
                assert not self._at_work(partition), f"partition {partition} changes, and is said to be held"


def _is_ready(handover: _Handover) -> bool:
    return handover.is_resting and handover.asked is not None and handover.asked.is_ready
