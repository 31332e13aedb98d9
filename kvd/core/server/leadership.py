"""Which partitions this server leads, as the newest view says: it takes some over from the replicas, and gives some up.

With one replica the server of rank n leads partition n, and nothing here has anything to do.
"""

from __future__ import annotations

from collections.abc import Callable

from kvd.core.machine import LogEntry
from kvd.core.server.captures import Captures
from kvd.core.server.control import ServerControl
from kvd.core.server.deletions import Deletions
from kvd.core.server.effects import ServerEffects
from kvd.core.server.elsewhere import Elsewhere
from kvd.core.server.groups import FusedGroup, forget_state
from kvd.core.server.key_requests import KeyRequests
from kvd.core.server.keys import KeyTable
from kvd.core.server.readings import Readings
from kvd.core.server.replicas import Replicas
from kvd.core.server.shared_steps import SharedSteps
from kvd.core.server.waiting import Waiters
from kvd.core.session import SchedulerSession

Advance = Callable[[FusedGroup], None]


class Leadership:
    """Takes over what this server is to lead, and drops what another one leads now."""

    def __init__(
        self,
        session: SchedulerSession,
        table: KeyTable,
        effects: ServerEffects,
        replicas: Replicas,
        control: ServerControl,
        keys: KeyRequests,
        deletions: Deletions,
        shared: SharedSteps,
        waiters: Waiters,
        readings: Readings,
        captures: Captures,
        elsewhere: Elsewhere,
        advance: Advance,
    ) -> None:
        self._session = session
        self._view = session.view
        self._table = table
        self._effects = effects
        self._replicas = replicas
        self._control = control
        self._droppers = (
            keys.drop_partition,
            deletions.drop_partition,
            shared.drop_partition,
            control.held.drop_partition,
        )
        self._shared = shared
        self._waiters = waiters
        self._readings = readings
        self._captures = captures
        self._elsewhere = elsewhere
        self._advance = advance
        self._led: set[int] = set()
        self._ending: list[FusedGroup] = []  # groups that were given up while a job was at work on them

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
        self._table.creation = max(self._table.creation, held.table.creation)
        for key, made in held.table.live.items():
            self._table.live.setdefault(key, made)
        self._shared.take_over(held.loops.values())
        self._control.learn(held.optimizer, held.as_set, held.generation)
        text = f"{self._session.name} leads partition {partition} now, with {len(held.table.live)} keys"
        self._effects.emit(LogEntry("warning", text))

    def _adopt(self, group: FusedGroup) -> None:
        """A replica becomes what it was a replica of. Workers send again what was staged, and not committed."""
        self._table.adopt(group)
        if self._control.generation > group.generation:  # an optimizer was set here that did not get there
            self._effects.emit(group.renew(self._control.optimizer, self._control.generation))
        self._advance(group)

    def _give_up(self, partition: int) -> None:
        """Another server leads the partition. Those who wait ask there: they are told by the same view."""
        for drop in self._droppers:
            drop(partition)
        for group in [group for group in self._table.groups.values() if group.partition == partition]:
            self._waiters.drop_group(group)
            self._readings.drop_slices(group.slices)
            self._captures.drop_slices(group.slices)
            for slice_ in group.slices:
                if slice_.index == 0:
                    self._table.live.pop(slice_.key, None)
            self._table.release(group)
            group.is_gone = True
            group.tasks = []
            if group.is_quiescent:
                self._effects.emit(forget_state(group.slices))
            else:
                self._ending.append(group)
        self._readings.led_less()
        text = f"{self._session.name} does not lead partition {partition} any more"
        self._effects.emit(LogEntry("warning", text))

    def end_groups(self) -> None:
        """A job, or a record, has come to its end: the bytes of a group that was given up may be needed no more."""
        for group in [group for group in self._ending if group.is_quiescent]:
            self._ending.remove(group)
            self._effects.emit(forget_state(group.slices))

    def is_ending(self, partition: int) -> bool:
        """Whether a job is at work on slices of this partition, which this server does not lead any more."""
        return any(group.partition == partition for group in self._ending)

    def validate(self) -> None:
        """Raises AssertionError if this server has slices of partitions that it does not lead."""
        if self._view.partitions:
            for group in self._table.groups.values():
                assert group.partition in self._led, f"{group.description} is led elsewhere"
        assert not any(group.is_quiescent for group in self._ending), "a group that was given up is not forgotten"
