"""The life of one slice, or of several that go together.

Contributions are staged, counted when their round closes, and acknowledged at the commit: three numbers per worker.
*Staged*: the server has the bytes; *counted*: they are in a closed round; *committed*: every in-sync replica holds the
record. A slice's state is the fold of its records; its version is the number of committed records since the init.
Rounds close in order and one at a time, so that at most one update of a slice runs.

In sync mode a round holds the contributions with the same clock, in rank order. In async mode every push is a round of
its own, in the order of arrival; with a bounded staleness a push waits until its worker is at most so many clocks ahead
of the slowest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from kvd.core.machine import Buffer, Contribution, ScatterList
from kvd.protocol.messages import ADD, ErrorCode


class PushStatus(Enum):
    """What the clock of a push means for a slice."""

    NEXT = "next"  # its turn: stage it
    KNOWN = "known"  # staged or counted before: answer it as the first time
    MISSED = "missed"  # its round was closed without this worker
    WRONG = "wrong"  # neither


class Record(NamedTuple):
    """One change of a slice: what a replica needs besides the bytes."""

    number: int
    contributions: tuple[Contribution, ...]

    @property
    def assign(self) -> bool:
        return any(contribution.how != ADD for contribution in self.contributions)


class Refusal(NamedTuple):
    """A worker was told for good that a push did not take place."""

    sender: int  # its incarnation
    request: int  # this push and its earlier ones
    error: ErrorCode
    text: str


@dataclass(slots=True)
class SliceLog:
    """Staging, rounds and versions of one slice. `mode` and the bounds are those of the cluster."""

    sync: bool
    rounds_ahead: int
    staleness: int  # -1: unbounded; async only
    current: Buffer | ScatterList = None
    previous: Buffer | ScatterList | None = None
    version: int = 0  # committed records
    closed: int = 0  # closed records, the one being applied included
    closing: Record | None = None
    staged: dict[int, int] = field(default_factory=dict)  # rank → clock
    counted: dict[int, int] = field(default_factory=dict)  # rank → clock (async; in sync it is `closed` for all)
    committed: dict[int, int] = field(default_factory=dict)  # rank → clock (async; in sync it is `version` for all)
    skipped: dict[int, int] = field(default_factory=dict)  # sync: rank → clock, up to which rounds did without it
    refusals: dict[int, Refusal] = field(default_factory=dict)  # rank → the last one
    taken: dict[int, tuple[int, int]] = field(default_factory=dict)  # rank → sender and request of its last push
    _rounds: dict[int, dict[int, Contribution]] = field(default_factory=dict)  # sync: clock → rank → contribution
    _arrived: list[Contribution] = field(default_factory=list)  # async, in the order of arrival

    # ── clocks of a worker ──

    def staged_clock(self, rank: int) -> int:
        clock = self.staged.get(rank, 0)
        return max(clock, self.closed) if self.sync else clock

    def counted_clock(self, rank: int) -> int:
        return self.closed if self.sync else self.counted.get(rank, 0)

    def committed_clock(self, rank: int) -> int:
        return self.version if self.sync else self.committed.get(rank, 0)

    def own_clock(self, rank: int) -> int:
        """The clock up to which the worker's own pushes count: rounds that were closed without it are not its own."""
        return min(self.staged.get(rank, 0), self.counted_clock(rank))

    def resume_clock(self, rank: int) -> int:
        """Where the worker stands when nothing of it is staged: a successor goes on from there."""
        return max(self.own_clock(rank), self.skipped.get(rank, 0))

    # ── staging ──

    def turn(self, rank: int, clock: int) -> PushStatus:
        """Whether a push with this clock is the next one of its worker, is known, came too late, or is out of turn."""
        staged = self.staged_clock(rank)
        if clock < 1:  # the first push has clock 1
            return PushStatus.WRONG
        if clock <= staged:
            has_part = self.skipped.get(rank, 0) < clock <= self.staged.get(rank, 0)
            return PushStatus.KNOWN if has_part or not self.sync else PushStatus.MISSED
        if clock == staged + 1 and clock <= self.counted_clock(rank) + self.rounds_ahead:
            return PushStatus.NEXT
        return PushStatus.WRONG

    def mixes(self, clock: int, how: int) -> bool:
        """Whether a push of this kind would meet the other kind (values and assignments) in its round."""
        others = self._rounds.get(clock, {}).values() if self.sync else ()
        return any((other.how == ADD) != (how == ADD) for other in others)

    def refuse(self, rank: int, refusal: Refusal) -> None:
        """The worker may use the clock of the push for its next one: this one must not take it when it comes again."""
        before = self.refusals.get(rank)
        if before is None or before.sender != refusal.sender or before.request < refusal.request:
            self.refusals[rank] = refusal

    def refusal(self, rank: int, sender: int, request: int) -> Refusal | None:
        """What was said of a push that is not staged. The requests of a sender on a slice grow with their clocks."""
        last = self.refusals.get(rank)
        return last if last is not None and last.sender == sender and request <= last.request else None

    def is_outdated(self, rank: int, sender: int, request: int) -> bool:
        """A later push of this sender was taken: this one comes once more, after it was given up."""
        taken = self.taken.get(rank)
        return taken is not None and taken[0] == sender and request < taken[1]

    def take_latest(self, taken: Mapping[int, tuple[int, int]]) -> None:
        """Of each rank the latest push of both."""
        for rank, (sender, request) in taken.items():
            mine = self.taken.get(rank, (sender, 0))
            if mine[0] == sender and mine[1] < request:
                self.taken[rank] = (sender, request)

    def stage(self, contribution: Contribution) -> None:
        """Takes the contribution whose turn it is."""
        rank, clock = contribution.rank, contribution.clock
        self.staged[rank] = clock
        if self.sync:
            self._rounds.setdefault(clock, {})[rank] = contribution
        else:
            self._arrived.append(contribution)

    def drop_unclosed(self, rank: int) -> None:
        """A new incarnation has the rank: what its predecessor staged for rounds that are open is forgotten."""
        for contributions in self._rounds.values():
            contributions.pop(rank, None)
        self._arrived = [contribution for contribution in self._arrived if contribution.rank != rank]
        self.staged[rank] = self.resume_clock(rank)
        self.refusals.pop(rank, None)

    def activate(self, rank: int, clock: int) -> None:
        """The worker takes part again, from the round after `clock` on."""
        clock = max(self.staged_clock(rank), clock)
        if self.sync and clock > self.staged.get(rank, 0):
            self.skipped[rank] = clock
        self.staged[rank] = clock
        if not self.sync:
            self.counted[rank] = max(self.counted.get(rank, 0), clock)
            self.committed[rank] = max(self.committed.get(rank, 0), clock)

    # ── rounds ──

    def missing(self, clock: int, required: Iterable[int]) -> list[int]:
        """Sync: the ranks that the round of `clock` still waits for."""
        contributions = self._rounds.get(clock, {})
        return [rank for rank in required if rank not in contributions and self.staged.get(rank, 0) < clock]

    def slowest(self, required: Collection[int]) -> int:
        """Async: the smallest staged clock of the active workers. A push that is staged need not be counted for that:
        with a staleness of 0 the pushes of one clock would wait for each other."""
        return min((self.staged_clock(rank) for rank in required), default=0)

    def close_next(self, required: Collection[int]) -> Record | None:
        """Closes the next round if it is complete and no other is being applied."""
        if self.closing is not None:
            return None
        taken = self._take_round(required) if self.sync else self._take_arrived(required)
        if taken is None:
            return None
        self.closed += 1
        self.closing = Record(self.closed, taken)
        return self.closing

    def _take_round(self, required: Collection[int]) -> tuple[Contribution, ...] | None:
        """A round is empty if all who are required came back after it, and whoever had to push for it has left."""
        clock = self.closed + 1
        contributions = self._rounds.get(clock)
        if not contributions:
            is_over = bool(required) and all(self.staged.get(rank, 0) >= clock for rank in required)
            return () if is_over else None
        if self.missing(clock, required):
            return None
        del self._rounds[clock]
        return tuple(contributions[rank] for rank in sorted(contributions))

    def _take_arrived(self, required: Collection[int]) -> tuple[Contribution, ...] | None:
        bound = None if self.staleness < 0 else self.slowest(required) + self.staleness
        for position, contribution in enumerate(self._arrived):
            if bound is None or contribution.clock <= bound or contribution.rank not in required:
                del self._arrived[position]
                self.counted[contribution.rank] = contribution.clock
                return (contribution,)
        return None

    def is_closing_of(self, rank: int) -> bool:
        """A push of this rank is in the round that is being applied."""
        return self.closing is not None and any(given.rank == rank for given in self.closing.contributions)

    def commit(self, buffer: Buffer) -> Record:
        """The closed round is applied, and every replica holds its record: `buffer` is the new version."""
        record = self.closing
        assert record is not None
        self.closing = None
        self.previous, self.current = self.current, buffer
        self.version += 1
        if not self.sync:
            for contribution in record.contributions:
                self.committed[contribution.rank] = contribution.clock
        return record

    def give_up(self) -> Record:
        """The closed round could not be applied: it counts for nobody, and its pushes may be made again."""
        record = self.closing
        assert record is not None
        self.closing = None
        self.closed -= 1
        for contribution in record.contributions:
            before = contribution.clock - 1
            self.staged[contribution.rank] = before
            for contributions in self._rounds.values():
                contributions.pop(contribution.rank, None)
            self._arrived = [other for other in self._arrived if other.rank != contribution.rank]
            self.taken.pop(contribution.rank, None)  # what was dropped and not refused is sent again as it was
            if not self.sync:
                self.counted[contribution.rank] = before
        return record

    # ── several slices, one log ──

    @property
    def is_idle(self) -> bool:
        """Nothing is staged, and nothing is being applied."""
        return self.closing is None and not self._arrived and not any(self._rounds.values())

    def stands_like(self, other: SliceLog) -> bool:
        """Whether both are idle and have come equally far, so that they can go on as one."""
        return (
            self.is_idle
            and other.is_idle
            and (self.version, self.closed, self.previous is None)
            == (other.version, other.closed, other.previous is None)
            and (self.staged, self.counted, self.committed, self.skipped, self.refusals)
            == (other.staged, other.counted, other.committed, other.skipped, other.refusals)
        )

    def like(self, current: Buffer | ScatterList, previous: Buffer | ScatterList | None) -> SliceLog:
        """An idle log that has come as far as this one, of other bytes."""
        return replace(
            self,
            current=current,
            previous=previous,
            staged=dict(self.staged),
            counted=dict(self.counted),
            committed=dict(self.committed),
            skipped=dict(self.skipped),
            refusals=dict(self.refusals),
            taken=dict(self.taken),
            _rounds={},
            _arrived=[],
        )

    def part(self, current: ScatterList, previous: ScatterList | None, offset: int, nbytes: int) -> SliceLog:
        """The log of a range of the bytes, with what is staged for it. Not while a round is being applied."""
        assert self.closing is None
        log = self.like(current, previous)
        log._arrived = [contribution.part(offset, nbytes) for contribution in self._arrived]
        log._rounds = {
            clock: {rank: contribution.part(offset, nbytes) for rank, contribution in contributions.items()}
            for clock, contributions in self._rounds.items()
        }
        return log

    # ── versions ──

    def at_version(self, version: int) -> Buffer | ScatterList | None:
        """The bytes of a committed version, if they are still kept."""
        if version == self.version:
            return self.current
        if version == self.version - 1 and self.previous is not None:
            return self.previous
        return None

    def staged_bytes(self, nbytes: int) -> int:
        """Bytes held for rounds that are open."""
        return nbytes * (len(self._arrived) + sum(len(contributions) for contributions in self._rounds.values()))
