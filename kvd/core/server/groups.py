"""Fused groups: slices that are staged, merged and updated as one. A slice that goes alone is a group of one.

A thousand small keys, pushed in one call, cost a server as much as one large key if they share a log: their bytes lie
side by side, as in the payload of the push. Slices are fused when a worker pushes them as a batch and their logs are in
the same state. They are parted for good when one of them is pushed without the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvd.core.machine import Buffer, EncodedValue, Extent, ForgetState, Peer, ResetState, ScatterList, Span
from kvd.core.server.pending import Pending
from kvd.core.server.rounds import Record, SliceLog
from kvd.optimizer import Optimizer, with_hyperparameters
from kvd.protocol.messages import SliceId
from kvd.protocol.specs import KeySpec, padded


class Waiting(NamedTuple):
    """A request that waits for a group to commit a push (`rank`, `clock`), or to reach a version."""

    pending: Pending
    position: int  # of its first slice in the request
    rank: int
    clock: int
    slice: Slice | None  # that it is about; None: all of the group


class Verdict(NamedTuple):
    """Admission of a sender's contributions to a group: see `kvd.core.server.verdicts`.

    Attributes:
        regime: the number of the regime in which it was found.
        generation: that of the group's optimizer.
        peer: the connection over which it counts.
        rank: of the worker.
    """

    regime: int
    generation: int
    peer: Peer
    rank: int


class Change(NamedTuple):
    """Hyperparameters that change with a round."""

    from_round: int
    changes: dict[str, object]


@dataclass(slots=True, eq=False)
class Slice:
    """One slice of a key, and where it lies in its group."""

    key: str
    index: int
    spec: KeySpec
    nbytes: int
    creator: int  # the incarnation whose Init made it
    group: FusedGroup
    request: int = 0  # of that Init
    creation: int = 0  # of the key
    position: int = 0  # among the slices of the group
    offset: int = 0  # in its bytes
    loaded: tuple[int, int] = (0, 0)  # who stored optimizer state of it last, and the request
    is_loading: bool = False  # that request is under way
    partition: int = 0
    encoded: dict[int, EncodedValue] = field(default_factory=dict)  # what versions that are kept were decoded from

    @property
    def slice_id(self) -> SliceId:
        return SliceId(self.key, self.index, self.creation)

    @property
    def log(self) -> SliceLog:
        """The log of its group."""
        return self.group.log

    def span(self, buffer: Buffer | ScatterList) -> Span:
        """Its bytes in a version of the group."""
        if isinstance(buffer, ScatterList):
            return buffer.spans[self.position]
        return Span(buffer, self.offset, self.nbytes)


@dataclass(slots=True, eq=False)
class FusedGroup:
    """Slices with one log: who waits for them, and the optimizer that their next round uses."""

    number: int
    log: SliceLog
    dtype: str
    optimizer: Optimizer | None
    slices: tuple[Slice, ...] = ()
    layout: tuple[Extent, ...] = ()
    nbytes: int = 0
    changes: list[Change] = field(default_factory=list)
    waiting: list[Waiting] = field(default_factory=list)
    verdicts: dict[int, Verdict] = field(default_factory=dict)  # on the pushes of senders, by incarnation
    tasks: list[Callable[[], None]] = field(default_factory=list)  # start jobs on its state, between two updates
    working: bool = False  # such a job is under way
    is_resting: bool = False  # it is one that sends the slices to another server
    is_compared: bool = False  # it is one that reads them, to compare them with the backup's
    is_gone: bool = False  # its slices belong to other groups now
    is_of_table: bool = False  # it is a part of a table, which is a group of its own
    generation: int = 0  # how many optimizers had been set when it got this one

    @property
    def partition(self) -> int:
        """The partition of all its slices."""
        return self.slices[0].partition

    @property
    def merge(self) -> str:
        """That of all its keys; "": the cluster's."""
        return self.slices[0].spec.merge

    @property
    def keeps_pulled(self) -> bool:
        """Whether its optimizer has to know what the worker had that pushes."""
        return self.optimizer is not None and self.optimizer.compensates_delay

    @property
    def key(self) -> str:
        """The key to name when something is said about the group."""
        return self.slices[0].key

    @property
    def description(self) -> str:
        """How people call it: "slice 0 of 'w'", or "7 slices from 0 of 'w'"."""
        first = self.slices[0]
        what = f"slice {first.index}" if len(self.slices) == 1 else f"{len(self.slices)} slices from {first.index}"
        return f"{what} of {first.key!r}"

    @property
    def is_quiescent(self) -> bool:
        """Nothing is under way that knows how its bytes are arranged."""
        return self.log.closing is None and not self.tasks and not self.working

    @property
    def is_in_use(self) -> bool:
        """Whether something is under way that a worker has asked for."""
        return not (self.is_quiescent or self.is_resting or self.is_compared)

    def take(self, slices: Sequence[Slice]) -> None:
        """Takes these slices, in order. The bytes of each start at a multiple of 8. What the versions of several were
        decoded from is forgotten: they are sent together, as they are."""
        offset = 0
        for position, slice_ in enumerate(slices):
            offset = padded(offset)
            slice_.group, slice_.position, slice_.offset = self, position, offset
            offset += slice_.nbytes
            if len(slices) > 1:
                slice_.encoded.clear()
        self.slices = tuple(slices)
        self.is_of_table = slices[0].spec.table is not None
        self.layout = tuple([Extent(entry.key, entry.index, entry.offset, entry.nbytes) for entry in slices])
        self.nbytes = offset

    def drop_values(self) -> None:
        """Drop all bytes: its slices are gone, and nothing is at work on them."""
        self.log.drop_values()
        for slice_ in self.slices:
            slice_.encoded.clear()

    def commit(self, buffer: Buffer | ScatterList, encoded: EncodedValue | None = None) -> Record:
        """The closed round is a version: its bytes, and what they were decoded from, if that is so."""
        record = self.log.commit(buffer)
        if len(self.slices) == 1:
            only, version = self.slices[0], self.log.version
            if encoded is not None:
                only.encoded[version] = encoded
            if only.encoded:
                only.encoded = {number: each for number, each in only.encoded.items() if number >= version - 1}
        return record

    @property
    def encoded(self) -> EncodedValue | None:
        """What the current version was decoded from."""
        return self.slices[0].encoded.get(self.log.version) if len(self.slices) == 1 else None

    def renew(self, optimizer: Optimizer | None, generation: int) -> ResetState:
        """Another optimizer was set. Returns the effect by which its state starts over."""
        self.optimizer, self.generation, self.changes = optimizer, generation, []
        self.log.forget_kept()
        return ResetState(tuple([(slice_.key, slice_.index) for slice_ in self.slices]))

    def change_from(self, round_number: int, changes: dict[str, object]) -> None:
        """Hyperparameters change with this round; not before an earlier change: they were found to be allowed in this
        order."""
        last = self.changes[-1] if self.changes else None
        if last is not None and last.from_round >= round_number:
            self.changes[-1] = Change(last.from_round, {**last.changes, **changes})
        else:
            self.changes.append(Change(round_number, changes))

    def optimizer_for(self, round_number: int) -> Optimizer | None:
        """The optimizer of a round, with the changes that take effect by then."""
        while self.changes and self.changes[0].from_round <= round_number and self.optimizer is not None:
            self.optimizer = with_hyperparameters(self.optimizer, self.changes.pop(0).changes)
        return self.optimizer


def forget_state(slices: Iterable[Slice]) -> ForgetState:
    """The effect by which the shell forgets what it keeps of slices that are here no more."""
    return ForgetState(tuple([(slice_.key, slice_.index) for slice_ in slices]))


def fused(number: int, slices: Sequence[Slice]) -> FusedGroup | None:
    """A group of these slices, in this order, if each has its own group and their logs are in the same state."""
    first = slices[0].group
    for slice_ in slices:
        group = slice_.group
        if (
            len(group.slices) != 1
            or (group.dtype, group.merge) != (first.dtype, first.merge)
            or group.waiting
            or group.changes
            or not group.is_quiescent
            or group.optimizer != first.optimizer
            or group.generation != first.generation
            or slice_.partition != slices[0].partition
            or not group.log.is_level_with(first.log)
        ):
            return None
    current = ScatterList(tuple([slice_.span(slice_.log.current) for slice_ in slices]))
    previous = None
    if first.log.previous is not None:
        previous = ScatterList(tuple([slice_.span(slice_.log.previous) for slice_ in slices]))
    log = first.log.copy_for(current, previous)
    group = FusedGroup(number, log, first.dtype, first.optimizer, generation=first.generation)
    for slice_ in slices:
        group.log.take_later_requests(slice_.log)
    for rank, progress in group.log.progress.items():
        progress.kept = _kept_together(slices, rank)
    for slice_ in slices:
        slice_.group.is_gone = True
    group.take(slices)
    return group


def _kept_together(slices: Sequence[Slice], rank: int) -> ScatterList | None:
    """What is kept of each of these slices for a rank; None unless it is there of all."""
    spans = []
    for slice_ in slices:
        kept = slice_.log.progress_of(rank).kept
        if kept is None:
            return None
        spans.append(slice_.span(kept))
    return ScatterList(tuple(spans))


def parted(group: FusedGroup, number: Callable[[], int]) -> list[FusedGroup]:
    """A group for each of its slices, with what is staged and who waits. The group must be quiescent."""
    log = group.log
    current, previous = log.current, log.previous
    group.is_gone = True
    groups = []
    for slice_ in group.slices:
        now = ScatterList((slice_.span(current),))
        before = None if previous is None else ScatterList((slice_.span(previous),))
        part = log.part(now, before, slice_.offset, slice_.nbytes)
        for rank, progress in part.progress.items():
            progress.kept = None if progress.kept is None else ScatterList((slice_.span(progress.kept),))
            progress.pulled = (log.progress[rank].apart or {}).get(slice_.position, progress.pulled)
        own = FusedGroup(number(), part, group.dtype, group.optimizer, generation=group.generation)
        own.changes = list(group.changes)
        groups.append(own)
    slices = group.slices
    for waiting in group.waiting:
        _part_waiting(waiting, slices, groups)
    for slice_, own in zip(slices, groups, strict=True):
        own.take([slice_])
    group.waiting = []
    return groups


def _part_waiting(waiting: Waiting, slices: Sequence[Slice], groups: Sequence[FusedGroup]) -> None:
    """A request for one slice waits for its group; one for all slices waits for each of their groups."""
    if waiting.slice is not None:
        groups[waiting.slice.position].waiting.append(waiting)
        return
    waiting.pending.widen(len(slices))
    for position, (slice_, group) in enumerate(zip(slices, groups, strict=True)):
        group.waiting.append(waiting._replace(position=position, slice=slice_))
