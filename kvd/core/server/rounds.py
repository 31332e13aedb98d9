"""The rounds of one slice, or of several that are fused.

Contributions are staged, counted when their round closes, and committed when every in-sync replica holds the record
(`kvd.core.server.progress` has these numbers per worker). A slice's state is the fold of its records; its version is
the number of committed records since its init. Rounds close in order and one at a time, so at most one update of a
slice runs.

In sync mode a round holds the contributions with the same clock, in rank order. In async mode every push is a round of
its own, in order of arrival; with a bounded staleness it waits until its worker is no further ahead of the slowest.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from operator import attrgetter
from typing import NamedTuple

from kvd.core.machine import Buffer, Contribution, ScatterList
from kvd.core.open_waits import Pace
from kvd.core.places import START, PlaceKind, kind_of, place_of, step_of
from kvd.core.server.counted_steps import CountedSteps
from kvd.core.server.progress import NEVER_PULLED, NO_PROGRESS, PushRequest, Refusal, WorkerProgress
from kvd.core.server.staging import Staging, nbytes_of
from kvd.protocol.messages import ADD, NO_PLACE, MergedCoding

_ADDS = frozenset({ADD})
_how_of = attrgetter("how")


class PushStatus(Enum):
    """What the clock of a push means for a slice."""

    NEXT = "next"  # the clock that the slice takes next
    KNOWN = "known"  # staged or counted before: the push is answered as it was the first time
    MISSED = "missed"  # its round closed without this worker
    OUT_OF_TURN = "out of turn"  # none of these

    __hash__ = object.__hash__  # by identity: Enum's own is a Python function, which each push would call


class Record(NamedTuple):
    """One change of a slice: what a replica needs besides the bytes.

    Attributes:
        repeated: a contribution that changes nothing: another worker has made this shared step.
    """

    number: int
    contributions: tuple[Contribution, ...]
    repeated: tuple[Contribution, ...] = ()

    @property
    def assign(self) -> bool:
        return not _ADDS.issuperset(map(_how_of, self.contributions))

    @property
    def coding(self) -> MergedCoding | None:
        """How all contributions ask for their merged value to be encoded; None if they do not, or differ."""
        first = self.contributions[0].coding if self.contributions else None
        if first is None or any(contribution.coding != first for contribution in self.contributions[1:]):
            return None
        return first


class NoVersion(Enum):
    """Why a slice has no version to read of a step."""

    LATER = "later"  # more pushes of the step may come
    GONE = "gone"  # there are later versions, and it is not kept any more


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
    step: int = 0  # of the current version: see `kvd.core.server.readings`
    previous_step: int = 0
    progress: dict[int, WorkerProgress] = field(default_factory=dict)  # by rank
    newest: tuple[int, int] = (START, 0)  # the newest place of a push that counts, and its clock; sync only
    shared: CountedSteps = field(default_factory=CountedSteps)  # async: the shared steps that count here
    pace: Pace = field(default=Pace(), compare=False)
    _staging: Staging = field(default_factory=Staging)
    _waits_at: int = field(default=0, compare=False)  # where in the required ranks the next round looks for one first

    # ── where a worker stands ──

    def progress_of(self, rank: int) -> WorkerProgress:
        """To read only: a rank that has never pushed shares NO_PROGRESS."""
        return self.progress.get(rank, NO_PROGRESS)

    def _progress_to_change(self, rank: int) -> WorkerProgress:
        progress = self.progress.get(rank)
        if progress is None:
            progress = self.progress[rank] = WorkerProgress()
        return progress

    def staged_clock(self, rank: int) -> int:
        clock = self.progress.get(rank, NO_PROGRESS).staged
        return max(clock, self.closed) if self.sync else clock

    def counted_clock(self, rank: int) -> int:
        return self.closed if self.sync else self.progress_of(rank).counted

    def committed_clock(self, rank: int) -> int:
        return self.version if self.sync else self.progress_of(rank).committed

    def own_clock(self, rank: int) -> int:
        """The newest clock of the worker's own pushes that count: rounds that closed without it are not its own."""
        return min(self.progress_of(rank).staged, self.counted_clock(rank))

    def resume_clock(self, rank: int) -> int:
        """Where the worker stands when nothing of it is staged: its successor goes on from there."""
        return max(self.own_clock(rank), self.progress_of(rank).skipped)

    def was_sent(self, rank: int, version: int, kept: Buffer | ScatterList | None = None) -> None:
        """Async: the worker has this version from now on. Its bytes are kept, if they are given."""
        progress = self._progress_to_change(rank)
        progress.pulled, progress.apart, progress.kept = version, None, kept

    def was_sent_one_of(self, count: int, position: int, rank: int, version: int) -> None:
        """Async: the worker has this version of one of so many slices. That of the group stays the oldest that it has
        of any: it changes when it has been sent all of them."""
        progress = self._progress_to_change(rank)
        if progress.apart is None:
            progress.apart = {}
        progress.apart[position] = version
        if len(progress.apart) == count:
            self.was_sent(rank, min(progress.apart.values()), progress.kept)

    def forget_kept(self) -> None:
        """Nobody needs to know any more what the workers have."""
        for progress in self.progress.values():
            progress.kept = None

    def drop_values(self) -> None:
        """Drop all bytes: the slice is gone. The log itself stays until the interpreter collects cycles of objects."""
        self.current = self.previous = self.closing = None
        self._staging.clear()
        self.forget_kept()

    # ── staging ──

    def status_of(self, rank: int, clock: int) -> PushStatus:
        """What the clock of a push by this rank means here."""
        progress = self.progress.get(rank, NO_PROGRESS)
        staged = max(progress.staged, self.closed) if self.sync else progress.staged
        if clock < 1:  # the first push has clock 1
            return PushStatus.OUT_OF_TURN
        if clock <= staged:
            is_own = progress.skipped < clock <= progress.staged
            return PushStatus.KNOWN if is_own or not self.sync else PushStatus.MISSED
        if clock == staged + 1 and clock <= self.counted_clock(rank) + self.rounds_ahead:
            return PushStatus.NEXT
        return PushStatus.OUT_OF_TURN

    def mixes(self, clock: int, how: int) -> bool:
        """Whether a push of this kind would meet the other kind (contributions and assignments) in its round."""
        others = self._staging.rounds.get(clock) if self.sync else None
        if others:
            for other in others.values():  # one tells for all: this is asked before each is staged
                return (other.how == ADD) != (how == ADD)
        return False

    def refuse(self, rank: int, refusal: Refusal) -> None:
        """The push is refused for good: see `WorkerProgress.last_refusal`."""
        self._progress_to_change(rank).refuse(refusal)

    def stage(self, contribution: Contribution, push: PushRequest) -> None:
        """Takes the contribution, whose status is NEXT, of this push message."""
        rank, clock, place = contribution.rank, contribution.clock, contribution.place
        progress = self.progress.get(rank)
        if progress is None:
            progress = self.progress[rank] = WorkerProgress()
        progress.staged = clock
        if place != progress.place or not progress.trained:
            progress.come_to(place, clock, is_contribution=contribution.how == ADD)
        progress.last_request = push
        staging = self._staging
        if not self.sync:
            staging.arrived.append(contribution)
        elif clock in staging.rounds:
            staging.rounds[clock][rank] = contribution
        else:
            staging.rounds[clock] = {rank: contribution}
        if contribution.span is not None:
            staging.nbytes += contribution.span.nbytes

    def is_next(self, rank: int, clock: int, sender: int, request: int) -> bool:
        """Sync: whether a contribution plainly is its worker's next push. False: `status_of`, `mixes` and the table of
        admission tell."""
        progress, closed = self.progress.get(rank), self.closed
        if progress is None or clock > closed + self.rounds_ahead:
            return False
        if clock != (progress.staged if progress.staged > closed else closed) + 1:
            return False
        last, told = progress.last_request, progress.last_refusal
        if last is None or last.sender != sender or last.number >= request:
            return False
        if told is not None and told.push.number >= request:
            return False
        others = self._staging.rounds.get(clock)
        return not others or next(iter(others.values())).how == ADD

    def drop_unclosed(self, rank: int) -> None:
        """A new incarnation has the rank, or the rounds go on without it: what it staged for open rounds is
        forgotten."""
        self._staging.drop(rank)
        progress = self._progress_to_change(rank)
        progress.fall_back(self.resume_clock(rank))
        progress.last_refusal = None
        progress.pulled, progress.apart, progress.kept = NEVER_PULLED, None, None

    def drop_staged(self) -> None:
        """Another server leads, and has all that has counted: what is staged is sent there again, as it was."""
        self._staging.clear()
        for rank, progress in self.progress.items():
            progress.fall_back(self.resume_clock(rank))
            progress.last_request = progress.last_refusal = None
            progress.pulled, progress.apart, progress.kept = NEVER_PULLED, None, None

    def activate(self, rank: int, clock: int, place: int = NO_PLACE) -> None:
        """The worker takes part again, from the round after `clock` on. Its program goes on at this place, unless it
        has come further already."""
        progress = self._progress_to_change(rank)
        if not self.sync:  # what is staged has yet to count: a late copy of the request must not say that it has
            progress.counted = max(progress.counted, clock)
            progress.committed = max(progress.committed, clock)
        clock = max(progress.staged, clock)
        if self.sync and clock > progress.staged:
            progress.skipped = clock
        progress.skip_to(clock)
        if place > progress.place:
            progress.move_to(place)

    def move_to(self, rank: int, place: int) -> None:
        """The program of the rank has come to this place."""
        if rank in self.progress:
            self.progress[rank].move_to(place)

    def newest_place(self) -> int:
        """The newest place at which any rank has pushed. The rounds of a loop that closed without a push count as
        steps: all who took part had come in after them."""
        staged = [entry.place for entry in self.progress.values() if entry.staged > entry.begun]
        place, clock = self.newest
        if self.sync and kind_of(place) is PlaceKind.STEP:
            place = place_of(PlaceKind.STEP, step_of(place) + self.closed - clock)
        return max([place, *staged])

    def clock_of_step(self, first: int, step: int) -> int:
        """The clock under which all ranks push in this step of the loop that begins with step `first`, if the loop
        pushes this slice; otherwise that of the newest closed round. Both are steps among those of all loops. Each step
        of a loop pushes each of its keys once, so one step whose clock is known gives all others."""
        staged = [(entry.place, entry.trained) for entry in self.progress.values() if entry.trained]
        known = [
            (step_of(place), clock)
            for place, clock in (self.newest, *staged)
            if kind_of(place) is PlaceKind.STEP and step_of(place) >= first
        ]
        if not known:
            return self.closed
        newest, clock = max(known)
        return max(0, clock + step - newest)

    def begun_at(self, rank: int, place: int) -> int:
        """The clock at which a rank, of which nothing is staged, came to this place of its program."""
        return self.progress_of(rank).begun_at(place, max(self.counted_clock(rank), self.resume_clock(rank)))

    def has_trained(self, rank: int) -> bool:
        """Whether a contribution that the rank pushed at its newest place has counted."""
        return 0 < self.progress_of(rank).trained <= self.own_clock(rank)

    # ── rounds ──

    def missing(self, clock: int, required: Iterable[int]) -> list[int]:
        """Sync: the ranks that the round of `clock` still waits for."""
        contributions, progress, missing = self._staging.rounds.get(clock, ()), self.progress, []
        for rank in required:
            if rank not in contributions and progress.get(rank, NO_PROGRESS).staged < clock:
                missing.append(rank)  # noqa: PERF401  a comprehension is one more call in each push
        return missing

    def has_quorum(self, clock: int, quorum: int, required: Iterable[int]) -> bool:
        """Sync: whether so many have contributed to the round of `clock`, or came in after it and wait for it as well.
        A round of assignments waits for all: without rank 0 it would have no value."""
        given = self._staging.rounds.get(clock)
        if not given or any(contribution.how != ADD for contribution in given.values()):
            return False
        past = {rank for rank in required if self.progress.get(rank, NO_PROGRESS).staged >= clock}
        return len(past | given.keys()) >= quorum

    def slowest(self, required: Collection[int]) -> int:
        """Async: the smallest staged clock of the active workers. A push that is staged need not be counted for that:
        with a staleness of 0 the pushes of one clock would wait for each other."""
        return min((self.staged_clock(rank) for rank in required), default=0)

    def _is_complete(self, clock: int, contributions: Container[int], required: Sequence[int]) -> bool:
        """Sync: whether the round waits for nobody. A round is asked at each of its pushes: it goes on looking where it
        found a rank that was missing, and so looks at each rank once, however many there are."""
        progress = self.progress
        count = len(required)
        begin = self._waits_at if self._waits_at < count else 0
        for place in range(begin, begin + count):
            rank = required[place if place < count else place - count]
            if rank not in contributions and progress.get(rank, NO_PROGRESS).staged < clock:
                self._waits_at = place if place < count else place - count
                return False
        return True

    def close_next(self, required: Sequence[int]) -> Record | None:
        """Closes the next round if it is complete and no other is being applied.

        A round is empty if all required workers resumed after it, and those that had to push for it have left.
        """
        if self.closing is not None:
            return None
        if not self.sync:
            return self._close_arrived(required)
        clock = self.closed + 1
        contributions = self._staging.rounds.get(clock)
        if not contributions:
            return self.close_empty() if required and self._is_complete(clock, (), required) else None
        if not self._is_complete(clock, contributions, required):
            return None
        del self._staging.rounds[clock]
        self.closed = clock
        taken = tuple(map(contributions.__getitem__, sorted(contributions)))
        record = self.closing = Record(clock, taken)
        for given in taken:
            if (given.place, given.clock) > self.newest:
                self.newest = given.place, given.clock
        return record

    def close_empty(self) -> Record:
        """Closes a round without a contribution, as the leader has done: nobody owed it one."""
        self.closed += 1
        self.closing = Record(self.closed, ())
        return self.closing

    def _close_arrived(self, required: Collection[int]) -> Record | None:
        """Async: closes a round of the next contribution. If that repeats a shared step, it changes nothing."""
        bound = None if self.staleness < 0 else self.slowest(required) + self.staleness
        for position, contribution in enumerate(self._staging.arrived):
            if bound is None or contribution.clock <= bound or contribution.rank not in required:
                del self._staging.arrived[position]
                self._progress_to_change(contribution.rank).counted = contribution.clock
                self.closed += 1
                given = (contribution,)
                is_repeated = self._is_counted_step(contribution)
                self.closing = Record(self.closed, (), given) if is_repeated else Record(self.closed, given)
                return self.closing
        return None

    def _is_counted_step(self, contribution: Contribution) -> bool:
        """Whether this is a shared step that another worker has made already. If not, it is counted now."""
        if kind_of(contribution.place) is not PlaceKind.SHARED:
            return False
        step = step_of(contribution.place)
        if step in self.shared:
            return True
        self.shared.add(step)
        return False

    def is_closing_of(self, rank: int) -> bool:
        """A push of this rank is in the round that is being applied."""
        closing = self.closing
        return closing is not None and any(given.rank == rank for given in (*closing.contributions, *closing.repeated))

    def commit(self, buffer: Buffer) -> Record:
        """The closed round is applied, and every replica holds its record: `buffer` is the new version."""
        record = self.closing
        assert record is not None
        self.closing = None
        self._staging.release((*record.contributions, *record.repeated))
        self.previous, self.current = self.current, buffer
        self.version += 1
        self.previous_step = self.step
        self.step = max(self.step, self.version)
        for given in record.contributions:
            if given.step > self.step:
                self.step = given.step
        if not self.sync:
            for contribution in (*record.contributions, *record.repeated):
                self._progress_to_change(contribution.rank).committed = contribution.clock
        return record

    def give_up(self) -> Record:
        """The closed round could not be applied: it counts for nobody, and its pushes may be made again."""
        record = self.closing
        assert record is not None
        self.closing = None
        self._staging.release((*record.contributions, *record.repeated))
        self.closed -= 1
        for contribution in record.contributions:
            before = contribution.clock - 1
            progress = self._progress_to_change(contribution.rank)
            progress.fall_back(before)
            progress.last_request = None  # what is dropped here without a refusal is sent again as it was
            if not self.sync:
                progress.counted = before
            if kind_of(contribution.place) is PlaceKind.SHARED:
                self.shared.remove(step_of(contribution.place))
            self._staging.drop(contribution.rank)
        return record

    # ── several slices, one log ──

    @property
    def is_idle(self) -> bool:
        """Nothing is staged, and nothing is being applied."""
        return self.closing is None and next(self._staging.open(), None) is None

    def is_level_with(self, other: SliceLog) -> bool:
        """Whether both are idle and equally far, so that they can go on as one."""
        ranks = self.progress.keys() | other.progress.keys()
        return (
            self.is_idle
            and other.is_idle
            and (self.version, self.closed, self.previous is None, self.step, self.previous_step)
            == (other.version, other.closed, other.previous is None, other.step, other.previous_step)
            and self.shared == other.shared
            and all(self.progress_of(rank) == other.progress_of(rank) for rank in ranks)
        )

    def copy_for(self, current: Buffer | ScatterList, previous: Buffer | ScatterList | None) -> SliceLog:
        """An idle log that has come as far as this one, of other bytes."""
        return replace(
            self,
            current=current,
            previous=previous,
            progress={rank: replace(progress, apart=None) for rank, progress in self.progress.items()},
            shared=self.shared.copy(),
            _staging=Staging(),
        )

    def take_later_requests(self, other: SliceLog) -> None:
        """Of each rank, remembers the later of the pushes that both logs took last."""
        for rank, progress in other.progress.items():
            self._progress_to_change(rank).take_later_request(progress)

    def part(self, current: ScatterList, previous: ScatterList | None, offset: int, nbytes: int) -> SliceLog:
        """The log of a range of the bytes, with what is staged for it. Not while a round is being applied."""
        assert self.closing is None
        log = self.copy_for(current, previous)
        log._staging = self._staging.part(offset, nbytes)
        return log

    # ── versions ──

    def at_version(self, version: int) -> Buffer | ScatterList | None:
        """The bytes of a committed version, if they are still kept."""
        if version == self.version:
            return self.current
        if version == self.version - 1 and self.previous is not None:
            return self.previous
        return None

    def version_at(self, step: int, over: int) -> int | NoVersion:
        """Return the newest version of a step up to `step`, if it is known for good.

        Args:
            step: of the program; in asynchronous training the number of a version, and the answer is that version.
            over: a step, newest of those whose pushes are all committed.
        """
        if not self.sync:
            if self.version <= step:
                return self.version if self.version == step else NoVersion.LATER
            return step if self.at_version(step) is not None else NoVersion.GONE
        if self.step > step:  # a version of a later step exists, so no more versions of this one will come
            return self.version - 1 if self.previous is not None and self.previous_step <= step else NoVersion.GONE
        # The next version has a larger number, and no version has a step below its number.
        return self.version if self.version == step or step <= over else NoVersion.LATER

    @property
    def staged_nbytes(self) -> int:
        """Bytes held for rounds that are open."""
        return nbytes_of(self._staging.open())

    @property
    def unapplied_nbytes(self) -> int:
        """The same, and those of the round that is being applied."""
        return self._staging.nbytes

    # ── invariants ──

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken: those of `WorkerProgress`, and

        closed = version, plus 1 while a round is being applied
        no version has a step below its number
        a staged contribution has a clock that is staged, not skipped, and not in a closed round
        no worker has more than `rounds_ahead` contributions staged
        the bytes that wait are counted
        """
        assert self.closed == self.version + (self.closing is not None), f"rounds {self.closed} of {self.version}"
        assert max(self.version, self.previous_step) <= self.step, f"version {self.version} is of step {self.step}"
        self.shared.validate()
        for progress in self.progress.values():
            progress.validate(sync=self.sync)
        counts: dict[int, int] = {}
        for entry in self._staging.open():
            progress = self.progress_of(entry.rank)
            assert progress.skipped < entry.clock <= progress.staged, f"{entry} is staged, but {progress}"
            assert entry.clock > self.counted_clock(entry.rank), f"{entry} is staged, its round is closed"
            counts[entry.rank] = counts.get(entry.rank, 0) + 1
        assert max(counts.values(), default=0) <= self.rounds_ahead, f"too far ahead: {counts}"
        closing = () if self.closing is None else (*self.closing.contributions, *self.closing.repeated)
        unapplied = self.staged_nbytes + nbytes_of(closing)
        assert self.unapplied_nbytes == unapplied, f"{unapplied} bytes wait, {self.unapplied_nbytes} are counted"
        assert WorkerProgress() == NO_PROGRESS, "somebody wrote to the progress that all new ranks share"
