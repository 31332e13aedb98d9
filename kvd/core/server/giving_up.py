"""A partition that this server led is led by another one: it is forgotten, or, when handed over, becomes a replica."""

from __future__ import annotations

from kvd.core.machine import LogEntry
from kvd.core.server.captures import Captures
from kvd.core.server.control import ServerControl
from kvd.core.server.deletions import Deletions
from kvd.core.server.effects import ServerEffects
from kvd.core.server.groups import FusedGroup, forget_state
from kvd.core.server.held import HeldPartition
from kvd.core.server.key_requests import KeyRequests
from kvd.core.server.keys import KeyTable
from kvd.core.server.readings import Readings
from kvd.core.server.replicas import Replicas
from kvd.core.server.shared_steps import SharedSteps
from kvd.core.server.waiting import Waiters
from kvd.core.session import SchedulerSession


class GivingUp:
    """Takes partitions out of the table of what is led. Those who wait for them ask the new leader: they are told of it
    by the same view."""

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
    ) -> None:
        self._session = session
        self._table = table
        self._effects = effects
        self._replicas = replicas
        self._control = control
        self._shared = shared
        self._droppers = (
            keys.drop_partition,
            deletions.drop_partition,
            shared.drop_partition,
            control.held.drop_partition,
        )
        self._waiters = waiters
        self._readings = readings
        self._captures = captures
        self._ending: list[FusedGroup] = []  # groups that were given up while a job was at work on them

    def forget(self, partition: int) -> None:
        """What is here of it counts for nobody."""
        for group in self._taken_out(partition):
            group.is_gone = True
            group.tasks = []
            if group.is_quiescent:
                self._forget(group)
            else:
                self._ending.append(group)
        self._log("warning", f"does not lead partition {partition} any more")

    def hold(self, partition: int, leader: int) -> None:
        """The new leader has all of it: what is here becomes the replica that the leader's records go on with."""
        held = HeldPartition(leader, KeyTable(self._table.numbers), since=self._session.view.epoch)
        held.table.creation = self._table.creation
        held.table.live = {
            slice_.key: self._table.live[slice_.key]
            for slice_ in self._table.slices.values()
            if slice_.partition == partition and slice_.index == 0 and slice_.key in self._table.live
        }
        held.loops = {record.first: record for record in self._shared.records(partition)}
        held.optimizer, held.as_set, held.generation = self._control.newest()
        for group in self._taken_out(partition):
            group.log.drop_staged()
            held.table.adopt(group)
        self._replicas.put(partition, held)
        self._log("info", f"has handed partition {partition} over, and is its backup")

    def _taken_out(self, partition: int) -> list[FusedGroup]:
        """The groups of the partition, which are not led any more, and nobody waits for them."""
        for drop in self._droppers:
            drop(partition)
        groups = [group for group in self._table.groups.values() if group.partition == partition]
        for group in groups:
            self._waiters.drop_group(group)
            self._readings.drop_slices(group.slices)
            self._captures.drop_slices(group.slices)
            for slice_ in group.slices:
                if slice_.index == 0:
                    self._table.live.pop(slice_.key, None)
            self._table.release(group)
        self._readings.led_less()
        return groups

    def _log(self, level: str, text: str) -> None:
        self._effects.emit(LogEntry(level, f"{self._session.name} {text}"))

    def end_groups(self) -> None:
        """A job, or a record, has come to its end: the bytes of a group that was given up may be needed no more."""
        for group in [group for group in self._ending if group.is_quiescent]:
            self._ending.remove(group)
            self._forget(group)

    def _forget(self, group: FusedGroup) -> None:
        group.drop_values()
        self._effects.emit(forget_state(group.slices))

    def is_ending(self, partition: int) -> bool:
        """Whether a job is at work on slices of this partition, which this server does not lead any more."""
        return any(group.partition == partition for group in self._ending)

    def validate(self) -> None:
        """Raises AssertionError if a group should be forgotten by now."""
        assert not any(group.is_quiescent for group in self._ending), "a group that was given up is not forgotten"
