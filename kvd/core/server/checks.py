"""Whether the backups hold what this server has: it tells them, for some slices after the other, their checksums.

The backup compares at the same version (`held_checks`). One that differs is not a copy: the scheduler is told, and the
partition is sent again. Which of the two is wrong, nobody can know: what is led counts.

It costs little: a few slices at a time rest for as long as reading them takes, and then there is a pause that grows
with their bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple

from kvd.core.machine import Checksums, JobDone, LogEntry, ServerPeer, TableVersion, Whole
from kvd.core.membership import name_of
from kvd.core.server.effects import ServerEffects
from kvd.core.server.groups import FusedGroup, Slice
from kvd.core.server.keys import KeyTable
from kvd.core.server.pauses import Pauses
from kvd.core.server.records import LED_ELSEWHERE, Holder, Records
from kvd.core.session import SchedulerSession
from kvd.protocol.messages import CheckedSlice, Compare, Refused

PAUSE_S = 2.0  # at least
BYTES_PER_S = 8 << 20  # in the long run; memory is read some hundred times as fast
MOST_BYTES = 8 << 20  # of the values at a time
MOST_GROUPS = 8  # at a time
MOST_SLICES = 64  # in one message


class Difference(NamedTuple):
    """What a backup was found to have."""

    partition: int
    backup: str
    text: str


class Checks:
    """Compares what is led here with what the backups hold, over and over.

    Args:
        leaving: partitions that are being handed over: nothing begins in them.
        out_of_sync: a server (its incarnation comes second) does not hold what it should of a partition.

    Attributes:
        compared: how many slices backups were asked about.
        differences: how many of those were not the same.
        last: the newest of these.
    """

    def __init__(
        self,
        session: SchedulerSession,
        table: KeyTable,
        effects: ServerEffects,
        records: Records,
        leaving: Collection[int],
        out_of_sync: Callable[[int, int], None],
        pauses: Pauses,
    ) -> None:
        self._session = session
        self._table = table
        self._effects = effects
        self._records = records
        self._leaving = leaving
        self._out_of_sync = out_of_sync
        self._pauses = pauses
        self._left: deque[tuple[str, int]] = deque()  # the slices whose turn has not come in this rotation
        self._due_at: float | None = None
        self.compared = 0
        self.differences = 0
        self.last: Difference | None = None

    # ── time ──

    def tick(self, now: float) -> None:
        """Begins with the next slices, if it is time."""
        if not self._records.holders:
            self._due_at = None
        elif self._due_at is None:
            self._due_at = now + PAUSE_S
        elif now >= self._due_at:
            self._due_at = now + PAUSE_S
            self._begin()

    def next_deadline(self) -> float | None:
        return self._due_at

    def _begin(self) -> None:
        if not self._left:
            self._left.extend(self._table.slices)
        nbytes = groups = 0
        while self._left and groups < MOST_GROUPS and nbytes < MOST_BYTES:
            slices = self._next()
            if slices:
                group = slices[0].group
                self._pauses.pause(group, partial(self._read, group, slices))
                nbytes += sum(map(_nbytes_read, slices))
            groups += 1

    def _next(self) -> list[Slice]:
        """The next slices of one group, if a backup has them and nothing is about to be done with them."""
        slices: list[Slice] = []
        nbytes = 0
        while self._left and len(slices) < MOST_SLICES and nbytes < MOST_BYTES:
            slice_ = self._table.slices.get(self._left[0])
            if slice_ is not None and slices and slice_.group is not slices[0].group:
                break
            self._left.popleft()
            if slice_ is None or not _nbytes_read(slice_):
                continue
            if slice_.group.tasks or slice_.partition in self._leaving or self._backup(slice_.partition) is None:
                break  # in the next rotation
            slices.append(slice_)
            nbytes += _nbytes_read(slice_)
        return slices

    def _backup(self, partition: int) -> Holder | None:
        holders = self._records.holders_of(partition)
        return next((holder for holder in holders if not (holder.is_syncing or holder.is_over)), None)

    # ── between two rounds of a group ──

    def _read(self, group: FusedGroup, slices: list[Slice], resume: Callable[[], None]) -> None:
        if group.is_gone:
            resume()
            return
        group.is_compared = True
        version, generation = group.log.version, group.generation
        wholes = tuple([Whole(slice_.key, slice_.index, slice_.span(group.log.current)) for slice_ in slices])

        def done(job: JobDone) -> None:
            group.is_compared = False
            if job.error is not None:
                self._log("error", f"{group.description} cannot be compared with its copy: {job.error}")
            elif not group.is_gone and group.generation == generation:
                checksums, nbytes = job.result
                self._tell(slices, version, generation, checksums)
                if self._due_at is not None:
                    self._due_at += nbytes / BYTES_PER_S
            resume()

        self._effects.start_job(lambda job: Checksums(job, wholes), done)

    def _tell(self, slices: list[Slice], version: int, generation: int, checksums: tuple[int, ...]) -> None:
        partition = slices[0].partition
        backup = self._backup(partition)
        if backup is None:
            return
        checked = tuple(
            [
                CheckedSlice(slice_.key, slice_.index, slice_.creation, *slice_.loaded, checksum)
                for slice_, checksum in zip(slices, checksums, strict=True)
            ]
        )
        self.compared += len(slices)
        message = Compare(0, partition, version, generation, checked)
        self._records.ask(backup, message, partial(self._answered, partition, backup.peer, backup.rank))

    def _answered(self, partition: int, backup: ServerPeer, rank: int, refused: Refused | None) -> None:
        if refused is None or refused is LED_ELSEWHERE:
            return
        name = name_of("server", rank)
        self.differences += max(1, len(refused.places))
        self.last = Difference(partition, name, refused.text)
        text = (
            f"{name} has no true copy of partition {partition}, which {self._session.name} leads: {refused.text}. It "
            "is sent all of it again. Check the memory of both hosts, and that both run the same kvd and NumPy"
        )
        self._log("error", text)
        self._out_of_sync(partition, backup)

    # ── for people ──

    def _log(self, level: str, text: str) -> None:
        self._effects.emit(LogEntry(level, text))

    def describe(self) -> dict[str, object]:
        """For `kvd status`."""
        found: dict[str, object] = {"slices_compared": self.compared, "slices_that_differed": self.differences}
        if self.last is not None:
            found["last_difference"] = self.last._asdict()
        return found


def _nbytes_read(slice_: Slice) -> int:
    """About what is read of a slice; of a part of a table it is some of its rows."""
    version = slice_.log.current
    return min(version.nbytes, MOST_BYTES) if isinstance(version, TableVersion) else slice_.nbytes
