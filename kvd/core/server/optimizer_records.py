"""Optimizers that are set, and their changes, as the backups hold them: they do not commute, so they are held one after
the other. A backup hears of another optimizer after the rounds that were made with the one before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from kvd.core.machine import ResetState
from kvd.core.server.effects import ServerEffects
from kvd.core.server.groups import FusedGroup
from kvd.core.server.pauses import Pauses
from kvd.core.server.records import Records
from kvd.optimizer import Optimizer
from kvd.protocol.messages import HoldChange, HoldOptimizer, LaterSlice

SLICES_OF_A_CHANGE = 50  # in one message, whatever the lengths of their keys

_Made = Callable[[], Sequence[tuple[int, HoldOptimizer | HoldChange]]]


class OptimizerRecords:
    """Gives groups another optimizer, and has that held.

    Attributes:
        is_open: a backup has yet to hold an optimizer or a change: there is no other until then.
    """

    def __init__(self, effects: ServerEffects, records: Records, pauses: Pauses) -> None:
        self.is_open = False
        self._effects = effects
        self._records = records
        self._pauses = pauses
        self._late: list[FusedGroup] = []  # they use the newest optimizer when their update has ended
        self._when_used: Callable[[], None] | None = None  # is called when all groups use it

    def use(self, groups: Iterable[FusedGroup], optimizer: Optimizer | None, generation: int) -> None:
        """The groups are updated with it from their next round on."""
        slices: list[tuple[str, int]] = []
        for group in groups:
            if group.log.closing is not None and self._records.is_held(group.partition):
                self._late.append(group)  # its backups get the record of this round first
                self._pauses.pause(group, partial(self._use_late, group, optimizer, generation))
            else:
                slices += group.renew(optimizer, generation).slices
        self._effects.emit(ResetState(tuple(slices)))

    def _use_late(
        self, group: FusedGroup, optimizer: Optimizer | None, generation: int, resume: Callable[[], None]
    ) -> None:
        self._effects.emit(group.renew(optimizer, generation))
        self._late.remove(group)
        resume()
        self._hold_used()

    def _hold_used(self) -> None:
        if self._when_used is not None and not self._late:
            hold, self._when_used = self._when_used, None
            hold()

    def drop_partition(self, partition: int) -> None:
        """Another server leads it."""
        self._late = [group for group in self._late if group.partition != partition]
        self._hold_used()

    def hold(self, made: _Made, then: Callable[[], None], lost: Callable[[], None]) -> None:
        """Has these records held, which are made when all groups use the newest optimizer. `then` is called when they
        are; `lost` if another server leads a partition by then."""
        self.is_open = True

        def over(told: Callable[[], None]) -> None:
            self.is_open = False
            told()

        self._when_used = lambda: self._records.hold_in(made(), partial(over, then), partial(over, lost))
        self._hold_used()


def change_records(
    partitions: Iterable[int], groups: Sequence[FusedGroup], changes: object
) -> list[tuple[int, HoldChange]]:
    """What the backups are told of the newest change: from which round each slice has it."""
    records = []
    for partition in partitions:
        slices = [
            LaterSlice(*slice_.slice_id, group.changes[-1].from_round if group.changes else group.log.closed + 1)
            for group in groups
            for slice_ in group.slices
            if group.partition == partition
        ]
        records += [
            (partition, HoldChange(0, partition, changes, tuple(slices[first : first + SLICES_OF_A_CHANGE])))
            for first in range(0, len(slices), SLICES_OF_A_CHANGE)
        ]
    return records
