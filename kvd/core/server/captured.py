"""One capture: what it keeps of a slice, at which moment, for whom, and how its operator is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvd.core.machine import Export, KeepRows, KeptRows, Peer, ReadStored, Span, TableVersion
from kvd.core.places import PlaceKind, kind_of, place_of, step_of
from kvd.core.server.groups import FusedGroup, Slice
from kvd.core.server.images import OptimizerState
from kvd.core.server.rounds import NoVersion, Record, SliceLog
from kvd.core.server.slice_states import PAGE_NBYTES
from kvd.errors import NotAllowed
from kvd.optimizer import Optimizer, to_wire
from kvd.protocol.messages import Capture, Captured, CapturedSlice, CaptureWhen, FetchCaptured, Reached, SliceId


class KeptSlice(NamedTuple):
    """A slice as it was.

    Attributes:
        spans: its bytes, and the arrays of its optimizer's state; of a part of a table none.
        rows: those of a part of a table.
        asked: the step of the request.
        optimizer: with which it would have been updated next.
        reached: how far the ranks had come whose pushes are in it.
    """

    asked: int
    spans: tuple[Span, ...]
    version: int
    step: int
    updates: int
    slots: tuple[tuple[str, str], ...]
    optimizer: Optimizer | None
    reached: tuple[Reached, ...]
    rows: KeptRows | None = None

    @property
    def nbytes(self) -> int:
        """The memory that it takes, as far as it is not the present version."""
        return sum([span.nbytes for span in self.spans]) + (0 if self.rows is None else self.rows.nbytes)


def kept_slice(
    asked: int, slice_: Slice, state: OptimizerState, optimizer: Optimizer | None, rows: KeptRows | None
) -> KeptSlice:
    """The slice as it is; no round of it is being applied.

    Args:
        rows: of a part of a table.
    """
    log = slice_.log
    spans = (slice_.span(log.current), *state.spans) if rows is None else ()
    slots = tuple(state.slots)
    return KeptSlice(asked, spans, log.version, log.step, state.step, slots, optimizer, _reached(log), rows)


def rows_nbytes(slice_: Slice) -> int:
    """The memory of a copy of a part of a table; of other slices 0."""
    version = slice_.log.current
    return version.nbytes if isinstance(version, TableVersion) else 0


def no_room(slices: Iterable[Slice], error_of: Callable[[str, int], str]) -> tuple[Slice, NotAllowed] | None:
    """The first of these slices for a copy of which there is no memory, and the error; None: there is enough."""
    needed = 0
    for slice_ in slices:
        needed += rows_nbytes(slice_)
        if needed and (text := error_of(slice_.key, needed)):
            return slice_, NotAllowed(text, key=slice_.key)
    return None


def copy_of(slice_: Slice, job: int) -> Export | KeepRows:
    """The job that copies what the next update of a slice changes in place."""
    if slice_.spec.table is not None:
        return KeepRows(job, slice_.key, slice_.index)
    return Export(job, slice_.key, slice_.index)


def page_of(kept: KeptSlice, message: FetchCaptured, job: int) -> ReadStored:
    """The job that reads some rows of a part of a table, as they are kept."""
    key, index, _ = message.slice_ids[0]
    return ReadStored(job, key, index, message.first, PAGE_NBYTES, kept.rows)


@dataclass(slots=True, eq=False)
class CaptureRequest:
    """A Capture that is not answered yet."""

    peer: Peer
    message: Capture
    slices: tuple[Slice, ...]
    remaining: int = 0  # that it waits for


@dataclass(slots=True, eq=False)
class OpenCapture:
    """The capture of one operator.

    Attributes:
        kept: what it has, by slice.
        waiting: its requests that are not answered, by number.
        wanted: the slices that they wait for.
        answered: what it was answered, by the number of the request.
        copying_nbytes: of rows of tables that are being copied.
    """

    sender: int
    number: int
    expires_at: float
    look_at: float
    kept: dict[SliceId, KeptSlice] = field(default_factory=dict)
    waiting: dict[int, CaptureRequest] = field(default_factory=dict)
    wanted: dict[Slice, CaptureRequest] = field(default_factory=dict)
    answered: dict[int, Captured] = field(default_factory=dict)
    copying_nbytes: int = 0

    @property
    def copied_nbytes(self) -> int:
        """The memory of rows of tables, which are copies."""
        return self.copying_nbytes + sum([kept.rows.nbytes for kept in self.kept.values() if kept.rows is not None])

    def has(self, slice_id: SliceId, message: Capture) -> bool:
        """Whether what is kept of the slice is what the message asks for."""
        kept = self.kept.get(slice_id)
        return kept is not None and message.when is not CaptureWhen.AS_IT_IS and kept.asked == message.step

    def validate(self, over: int) -> None:
        """Raises AssertionError unless each wanted slice is before its moment, or about to be captured, and has one
        request that counts it."""
        for request in self.waiting.values():
            missing = [slice_ for slice_ in request.slices if self.wanted.get(slice_) is request]
            assert len(missing) == request.remaining > 0, "a capture counts its missing slices wrongly"
            for slice_ in missing:
                assert slice_.slice_id not in self.kept, f"a slice of {slice_.key!r} is kept, and waited for"
                found = version_for(request.message, slice_.log, over)
                gone = slice_.group.is_gone
                assert gone or found is not NoVersion.GONE, f"{slice_.key!r} is past its moment"
        assert sum(request.remaining for request in self.waiting.values()) == len(self.wanted), "one has ended"
        assert self.copying_nbytes >= 0, "copies are counted wrongly"

    def due(self, group: FusedGroup, moment_after: int) -> dict[Slice, CaptureRequest]:
        """The wanted slices of a group whose moment ends with the round that has closed, and who wants them."""
        return {
            slice_: request
            for slice_ in group.slices
            if (request := self.wanted.get(slice_)) is not None and moment_after > request.message.step
        }


def next_moment(log: SliceLog, record: Record) -> int:
    """Return what a Capture can name of the version that this closed round becomes: its step, or in asynchronous
    training its number."""
    if not log.sync:
        return log.version + 1
    return max(log.step, log.version + 1, *[given.step for given in record.contributions])


def version_for(message: Capture, log: SliceLog, over: int) -> int | NoVersion:
    """Return the present version, if it is the one that a Capture asks for, for good. An earlier one is gone, as the
    optimizer's states of it are.

    Args:
        over: the newest step whose pushes are known to be committed.
    """
    if message.when is CaptureWhen.AS_IT_IS:
        return log.version
    found = log.version_at(message.step, message.step if message.when is CaptureWhen.OVER else over)
    if found is not NoVersion.LATER and found != log.version:
        return NoVersion.GONE
    # Before the next step is when a round of that step has closed: see `OpenCapture.due`.
    return NoVersion.LATER if message.when is CaptureWhen.BEFORE_NEXT else found


def _reached(log: SliceLog) -> tuple[Reached, ...]:
    """How far the ranks had come whose pushes are in the version: how many steps they had made, as a place outside of
    the loops; in a loop of shared steps, that place."""
    found = []
    for rank, progress in sorted(log.progress.items()):
        clock = log.version if log.sync else progress.committed
        kind, step = kind_of(progress.place), step_of(progress.place)
        if not progress.skipped < clock <= progress.staged:
            continue  # it has left the rounds, or has pushed nothing
        if kind is PlaceKind.SHARED:
            found.append(Reached(rank, progress.place))
        elif kind is PlaceKind.STEP:  # which pushes each key once
            made = max(0, step + min(clock - progress.begun, 1))
            found.append(Reached(rank, place_of(PlaceKind.OUTSIDE, made)))
        elif clock >= progress.begun:
            found.append(Reached(rank, progress.place))
    return tuple(found)


def captured(request: int, kept: Sequence[KeptSlice]) -> Captured:
    """The answer to a Capture of these slices."""
    slots: dict[tuple[tuple[str, str], ...], int] = {}
    optimizers: list[Optimizer | None] = []
    slices = []
    reached: dict[int, int] = {}
    for own in kept:
        if own.optimizer not in optimizers:
            optimizers.append(own.optimizer)
        described = slots.setdefault(own.slots, len(slots))
        slices.append(CapturedSlice(own.version, own.step, own.updates, described, optimizers.index(own.optimizer)))
        for rank, place in own.reached:
            reached[rank] = max(reached.get(rank, 0), place)
    wire = tuple([None if optimizer is None else to_wire(optimizer) for optimizer in optimizers])
    ranks = tuple([Reached(rank, place) for rank, place in sorted(reached.items())])
    return Captured(request, tuple(slots), wire, tuple(slices), ranks)
