"""How a server becomes the backup of a partition while its leader goes on: it is sent the slices, some at a time.

The slices that are sent rest meanwhile: no round of theirs closes before the other server has them. Their later rounds
are held by it as well, so it never falls behind. When it has all of them, and knows which keys are live, the scheduler
is told, which makes it the backup.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvd.core.machine import SCHEDULER, Export, JobDone, LogEntry
from kvd.core.membership import name_of
from kvd.core.server.control import ServerControl
from kvd.core.server.copied_rows import CopiedRows
from kvd.core.server.effects import ServerEffects
from kvd.core.server.groups import FusedGroup, Slice
from kvd.core.server.images import MOST_BYTES, OptimizerState, install_of, packs
from kvd.core.server.keys import KeyTable
from kvd.core.server.pauses import Pauses
from kvd.core.server.records import LED_ELSEWHERE, Holder, Records
from kvd.core.server.shared_steps import SharedSteps
from kvd.core.server.sync_failures import SyncFailures
from kvd.core.session import SYNCED_REQUEST, SchedulerSession
from kvd.protocol.messages import HoldLoop, HoldOptimizer, HoldPublished, Refused, Synced

MOST_GROUPS = 64  # that rest at once
MOST_KEYS = 64  # in one message
RETRY_S = 1.0


@dataclass(slots=True, eq=False)
class _Sync:
    """One server on its way to become the backup of a partition."""

    holder: Holder
    left: deque[tuple[str, int]]  # the slices that it may lack: those that were here when it began
    # The groups that are to be sent now: the end of the pause of each, if it has begun.
    resting: dict[FusedGroup, Callable[[], None] | None] = field(default_factory=dict)
    missing: int = 0  # of them, those that do not rest yet
    states: dict[Slice, OptimizerState] = field(default_factory=dict)
    is_failed: bool = False
    tell_at: float | None = None  # when the scheduler is told, again, that all is there


class Syncing:
    """Copies partitions to the servers that the view wants to be their backups.

    Args:
        is_handing_over: whether slices that this server leads are not in the table yet.
    """

    def __init__(
        self,
        session: SchedulerSession,
        table: KeyTable,
        effects: ServerEffects,
        records: Records,
        shared: SharedSteps,
        control: ServerControl,
        is_handing_over: Callable[[], bool],
        pauses: Pauses,
    ) -> None:
        self._session = session
        self._table = table
        self._effects = effects
        self._records = records
        self._shared = shared
        self._control = control
        self._is_handing_over = is_handing_over
        self._pauses = pauses
        self._rows = CopiedRows(effects, records, self.fail)
        self._syncs: dict[Holder, _Sync] = {}
        self._failures = SyncFailures()
        self._put_off: list[Holder] = []  # those that have failed before: for a while
        self._is_late = False  # a view is not acted upon yet
        self._now = 0.0

    def job_ended(self) -> None:
        """An update has ended: perhaps all is here now."""
        if self._is_late:
            self.view_changed()

    def view_changed(self) -> None:
        """Begins with servers that are new, and forgets those that are backups now, or nothing."""
        view = self._session.view
        self._is_late = self._is_handing_over()
        if self._is_late:
            return  # not all is here yet that is to be sent
        wanted = [self._records.syncing_of(partition) for partition in range(len(view.partitions))]
        syncing = [holder for holder in wanted if holder is not None]
        for holder in [holder for holder in self._syncs if holder not in syncing]:
            self._end(self._syncs.pop(holder))
        self._put_off = []
        for holder in syncing:
            if holder.is_over or self._again_at(holder) > self._now:
                self._put_off.append(holder)
            elif holder not in self._syncs:
                here = [name for name, slice_ in self._table.slices.items() if slice_.partition == holder.partition]
                self._syncs[holder] = sync = _Sync(holder, deque(here))
                text = f"{name_of('server', holder.rank)} is sent partition {holder.partition}, to hold it as well"
                self._effects.emit(LogEntry("info", text))
                self._go_on(sync)

    def _again_at(self, holder: Holder) -> float:
        return self._failures.again_at(holder.partition, holder.peer)

    def _try_again(self) -> None:
        """A while has passed since some have failed."""
        for holder in self._put_off:
            if holder.is_over and self._again_at(holder) <= self._now:
                self._records.begin_anew(holder)
        self.view_changed()

    def was_no_copy(self, partition: int, incarnation: int) -> None:
        """A backup has turned out not to be one: if it is to be that again, not at once."""
        for holder in self._records.holders_of(partition):
            if holder.peer == incarnation:
                self._failures.add(partition, holder.peer, holder.rank, "it was no true copy", self._now)

    def _end(self, sync: _Sync) -> None:
        sync.is_failed = True
        for group in list(sync.resting):
            self._wake(sync, group)

    # ── some groups rest ──

    def _go_on(self, sync: _Sync) -> None:
        """Sends the next slices, or, when there are none left, what else there is to know. New ones it gets as they are
        made."""
        nbytes = 0
        while sync.left and len(sync.resting) < MOST_GROUPS and nbytes < MOST_BYTES:
            slice_ = self._table.slices.get(sync.left.popleft())
            if slice_ is None or slice_.slice_id in sync.holder.copied or slice_.group in sync.resting:
                continue
            sync.resting[slice_.group] = None
            nbytes += slice_.group.nbytes
        sync.missing = len(sync.resting)
        sync.states = {}
        for group in list(sync.resting):
            self._pauses.pause(group, partial(self._rests, sync, group))
        if not sync.resting:
            self._finish(sync)

    def _rests(self, sync: _Sync, group: FusedGroup, resume: Callable[[], None]) -> None:
        if sync.is_failed:
            resume()
            return
        group.is_resting, sync.resting[group] = True, resume
        slices = list(group.slices)

        def export_next() -> None:
            if slices:
                slice_ = slices.pop(0)
                if group.is_of_table:
                    export_next()  # what the optimizer keeps goes with the rows
                    return
                self._effects.start_job(lambda job: Export(job, slice_.key, slice_.index), partial(exported, slice_))
            else:
                sync.missing -= 1
                if not sync.missing and not sync.is_failed:
                    self._send(sync)

        def exported(slice_: Slice, done: JobDone) -> None:
            if done.error is not None:
                self.fail(sync.holder, f"the optimizer's state of {slice_.key!r} cannot be read: {done.error}")
            else:
                sync.states[slice_] = OptimizerState(*done.result)
                export_next()

        export_next()

    def _wake(self, sync: _Sync, group: FusedGroup) -> None:
        resume = sync.resting.pop(group, None)
        if resume is not None:
            group.is_resting = False
            resume()

    def fail(self, holder: Holder, why: str) -> None:
        """The server cannot become the backup. It is tried again later, if the view still names it then."""
        if holder.is_over:
            return
        again_s = self._failures.add(holder.partition, holder.peer, holder.rank, why, self._now)
        text = f"{name_of('server', holder.rank)} cannot become the backup of partition {holder.partition}: {why}"
        self._effects.emit(LogEntry("error", f"{text}; it is tried again in {again_s:g} s"))
        sync = self._syncs.get(holder)
        if sync is not None:
            self._end(sync)
        self._records.drop(holder)
        if holder not in self._put_off:
            self._put_off.append(holder)

    # ── they are sent ──

    def _send(self, sync: _Sync) -> None:
        slices = [slice_ for group in sync.resting for slice_ in group.slices]
        slices.sort(key=lambda slice_: (slice_.key, slice_.index))
        self._rows.send(sync.holder, slices, partial(self._send_slices, sync, slices))

    def _send_slices(self, sync: _Sync, slices: Sequence[Slice]) -> None:
        if sync.is_failed:
            return
        messages = packs(slices)
        remaining = len(messages)

        def held(refused: Refused | None) -> None:
            nonlocal remaining
            remaining -= 1
            if refused is LED_ELSEWHERE:
                return  # `view_changed` wakes the groups
            if not remaining and not sync.is_failed:
                for group in list(sync.resting):
                    self._wake(sync, group)
                self._go_on(sync)

        for pack in messages:
            sync.holder.copied.update([slice_.slice_id for slice_ in pack])
            message, payload = install_of(sync.holder.partition, pack, sync.states)
            self._records.copy(sync.holder, message, held, payload)

    # ── all are there ──

    def _finish(self, sync: _Sync) -> None:
        partition = sync.holder.partition
        live = self._table.live_in(partition)
        last: list[HoldPublished | HoldLoop | HoldOptimizer] = [
            HoldPublished(0, partition, tuple(live[first : first + MOST_KEYS]))
            for first in range(0, len(live), MOST_KEYS)
        ]
        last += self._shared.records(partition)
        last.append(self._control.record(partition))
        remaining = len(last)

        def held(refused: Refused | None) -> None:
            nonlocal remaining
            remaining -= 1
            if refused is not None and not sync.is_failed:
                self.fail(sync.holder, refused.text)
            elif not remaining and not sync.is_failed and not sync.holder.is_over:
                sync.tell_at = self._now

        for message in last:
            self._records.copy(sync.holder, message, held)

    # ── time ──

    def tick(self, now: float) -> None:
        """Tells the scheduler of those that have everything, until it says so in a view."""
        self._now = now
        if self._put_off and not self._is_late and min(map(self._again_at, self._put_off)) <= now:
            self._try_again()
        for sync in self._syncs.values():
            if sync.tell_at is not None and now >= sync.tell_at:
                sync.tell_at = now + RETRY_S
                holder = sync.holder
                self._effects.send(SCHEDULER, Synced(SYNCED_REQUEST, holder.partition, holder.peer))

    def next_deadline(self) -> float | None:
        if not (self._syncs or self._put_off):
            return None
        due = [sync.tell_at for sync in self._syncs.values() if sync.tell_at is not None]
        if not self._is_late:
            due += map(self._again_at, self._put_off)
        return min(due, default=None)

    def describe(self) -> list[dict[str, object]]:
        """For `kvd status`: who is to become a backup, and has failed."""
        return [self._failures.describe(each.partition, each.peer, self._now) for each in self._put_off]
