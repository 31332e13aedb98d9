"""Which partitions this server leads, as the newest view says: it takes some over from the replicas, and gives some up.

With one replica the server of rank n leads partition n, and nothing here has anything to do.
"""

from __future__ import annotations

from collections.abc import Callable

from kvd.core.machine import LogEntry
from kvd.core.open_waits import Pace
from kvd.core.server.control import ServerControl
from kvd.core.server.effects import ServerEffects
from kvd.core.server.elsewhere import Elsewhere
from kvd.core.server.giving_up import GivingUp
from kvd.core.server.groups import FusedGroup
from kvd.core.server.handover import Handovers
from kvd.core.server.keys import KeyTable
from kvd.core.server.replicas import Replicas
from kvd.core.server.shared_steps import SharedSteps
from kvd.core.session import SchedulerSession

Advance = Callable[[FusedGroup], None]


class Leadership:
    """Takes over what this server is to lead, and drops what another one leads now.

    Args:
        out_of_sync: this server does not hold a partition of which the view says that it does.

    Attributes:
        promoted: the partitions that it has held until the newest view, and leads by that.
    """

    def __init__(
        self,
        session: SchedulerSession,
        table: KeyTable,
        effects: ServerEffects,
        replicas: Replicas,
        control: ServerControl,
        shared: SharedSteps,
        elsewhere: Elsewhere,
        handovers: Handovers,
        giving_up: GivingUp,
        out_of_sync: Callable[[int], None],
        advance: Advance,
    ) -> None:
        self._session = session
        self._view = session.view
        self._table = table
        self._effects = effects
        self._replicas = replicas
        self._control = control
        self._shared = shared
        self._elsewhere = elsewhere
        self._handovers = handovers
        self._giving_up = giving_up
        self._out_of_sync = out_of_sync
        self._advance = advance
        self.promoted: set[int] = set()
        self._led: set[int] = set()
        self._adopted: list[FusedGroup] = []  # not advanced yet: a round that closes goes to the backups

    @property
    def led(self) -> list[int]:
        """The partitions that this server leads."""
        return sorted(self._led)

    # ── the view ──

    def view_changed(self) -> None:
        before, now = self._led, set()
        for number, entry in enumerate(self._view.partitions):
            leader = self._view.members.get(("server", entry.leader))
            if leader is None:  # a scheduler that was restarted waits for it
                now |= before & {number}
            elif leader.incarnation == self._session.incarnation:
                now.add(number)
        self._led = now
        self.promoted = set()
        if before - now:
            self._elsewhere.gave_up()
        for partition in sorted(before - now):
            self._give_up(partition)
        for partition in sorted(now - before):
            self._take_over(partition)

    def _take_over(self, partition: int) -> None:
        held = self._replicas.take(partition, self._adopt)
        if held is None:
            return  # it began here
        self.promoted.add(partition)
        self._table.creation = max(self._table.creation, held.table.creation)
        for key, made in held.table.live.items():
            self._table.live.setdefault(key, made)
        self._shared.take_over(held.loops.values())
        self._control.learn(held.optimizer, held.as_set, held.generation)
        keys = len(held.table.live)
        text = f"{self._session.name} leads partition {partition} now, with {keys} key{'' if keys == 1 else 's'}"
        self._effects.emit(LogEntry("warning", text))

    def _adopt(self, group: FusedGroup) -> None:
        """A replica becomes what it was a replica of. Workers send again what was staged, and not committed."""
        self._table.adopt(group)
        group.log.pace = Pace(group.log.closed)  # the rounds so far were made elsewhere
        if self._control.generation > group.generation:  # an optimizer was set here that did not get there
            self._effects.emit(group.renew(self._control.optimizer, self._control.generation))
        self._adopted.append(group)

    def advance_adopted(self) -> None:
        """Goes on with what was taken over. Who the backups are must be known by now."""
        adopted, self._adopted = self._adopted, []
        for group in adopted:
            self._advance(group)

    def _give_up(self, partition: int) -> None:
        """Another server leads the partition: perhaps with what was handed over to it."""
        leader, backup, *_ = self._view.partitions[partition]
        successor = self._view.members["server", leader].incarnation
        is_backup = backup == self._session.rank
        if is_backup and self._handovers.is_complete(partition, successor):
            self._giving_up.hold(partition, successor)
            return
        self._giving_up.forget(partition)
        if is_backup:
            self._out_of_sync(partition)

    def validate(self) -> None:
        """Raises AssertionError if this server has slices of partitions that it does not lead."""
        if self._view.partitions:
            for group in self._table.groups.values():
                assert group.partition in self._led, f"{group.description} is led elsewhere"
