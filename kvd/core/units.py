"""What is staged, merged and updated as one: a unit of one slice, or of many that are always pushed together.

A thousand small keys, pushed in one call, cost a server as much as one large key if they share a log: their bytes lie
side by side, as in the payload of the push. Slices are fused when a worker pushes a pack of them and all have come
equally far, and parted for good when one of them is pushed without the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvd.core.machine import Buffer, Placed, Rope, Span
from kvd.core.requests import Pending
from kvd.core.slicelog import SliceLog
from kvd.optimizer import Optimizer, with_hyperparameters
from kvd.protocol.specs import KeySpec, padded


class Waiting(NamedTuple):
    """A request that waits for a unit to commit a push (`rank`, `clock`), or to reach a version."""

    pending: Pending
    position: int  # of its first slice in the request
    rank: int
    clock: int
    slice: Slice | None  # that it is about; None: all of the unit


class Change(NamedTuple):
    """Hyperparameters that change with a round."""

    from_round: int
    changes: dict[str, object]


@dataclass(slots=True, eq=False)
class Slice:
    """One slice of a key, and where it lies in its unit."""

    key: str
    index: int
    spec: KeySpec
    nbytes: int
    creator: int  # the incarnation whose Init made it
    unit: Unit
    request: int = 0  # of that Init
    position: int = 0  # among the slices of the unit
    offset: int = 0  # in its bytes
    loaded: tuple[int, int] = (0, 0)  # who stored optimizer state of it last, and the request

    @property
    def log(self) -> SliceLog:
        """The log of its unit."""
        return self.unit.log

    def span(self, buffer: Buffer | Rope) -> Span:
        """Its bytes in a version of the unit."""
        if isinstance(buffer, Rope):
            return buffer.spans[self.position]
        return Span(buffer, self.offset, self.nbytes)


@dataclass(slots=True, eq=False)
class Unit:
    """Slices with one log: who waits for them, and the optimizer that their next round uses."""

    number: int
    log: SliceLog
    dtype: str
    optimizer: Optimizer | None
    slices: tuple[Slice, ...] = ()
    layout: tuple[Placed, ...] = ()
    nbytes: int = 0
    changes: list[Change] = field(default_factory=list)
    waiting: list[Waiting] = field(default_factory=list)
    tasks: list[Callable[[], None]] = field(default_factory=list)  # start jobs on its state, between two updates
    working: bool = False  # such a job is under way
    is_gone: bool = False  # its slices belong to other units now

    @property
    def key(self) -> str:
        """The key to name when something is said about the unit."""
        return self.slices[0].key

    @property
    def is_resting(self) -> bool:
        """Nothing is under way that knows how its bytes are arranged."""
        return self.log.closing is None and not self.tasks and not self.working

    def take(self, slices: Sequence[Slice]) -> None:
        """These are its slices: they lie one after the other, each at a multiple of 8."""
        offset = 0
        for position, slice_ in enumerate(slices):
            offset = padded(offset)
            slice_.unit, slice_.position, slice_.offset = self, position, offset
            offset += slice_.nbytes
        self.slices = tuple(slices)
        self.layout = tuple([Placed(entry.key, entry.index, entry.offset, entry.nbytes) for entry in slices])
        self.nbytes = offset

    def optimizer_for(self, round_number: int) -> Optimizer | None:
        """The optimizer of a round, with the changes that take effect by then."""
        while self.changes and self.changes[0].from_round <= round_number and self.optimizer is not None:
            self.optimizer = with_hyperparameters(self.optimizer, self.changes.pop(0).changes)
        return self.optimizer


def fused(number: int, slices: Sequence[Slice]) -> Unit | None:
    """A unit of these slices, in this order, if each is a unit of its own and all have come equally far."""
    first = slices[0].unit
    for slice_ in slices:
        unit = slice_.unit
        if (
            len(unit.slices) != 1
            or unit.dtype != first.dtype
            or unit.waiting
            or unit.changes
            or not unit.is_resting
            or unit.optimizer != first.optimizer
            or not unit.log.stands_like(first.log)
        ):
            return None
    current = Rope(tuple([slice_.span(slice_.log.current) for slice_ in slices]))
    previous = None
    if first.log.previous is not None:
        previous = Rope(tuple([slice_.span(slice_.log.previous) for slice_ in slices]))
    unit = Unit(number, first.log.like(current, previous), first.dtype, first.optimizer)
    for slice_ in slices:
        unit.log.take_latest(slice_.log.taken)
    for slice_ in slices:
        slice_.unit.is_gone = True
    unit.take(slices)
    return unit


def parted(unit: Unit, number: Callable[[], int]) -> list[Unit]:
    """A unit for each of its slices, with what is staged and who waits. The unit must be resting."""
    log = unit.log
    current, previous = log.current, log.previous
    unit.is_gone = True
    units = []
    for slice_ in unit.slices:
        now = Rope((slice_.span(current),))
        before = None if previous is None else Rope((slice_.span(previous),))
        own = Unit(number(), log.part(now, before, slice_.offset, slice_.nbytes), unit.dtype, unit.optimizer)
        own.changes = list(unit.changes)
        units.append(own)
    slices = unit.slices
    for waiting in unit.waiting:
        _part_waiting(waiting, slices, units)
    for slice_, own in zip(slices, units, strict=True):
        own.take([slice_])
    unit.waiting = []
    return units


def _part_waiting(waiting: Waiting, slices: Sequence[Slice], units: Sequence[Unit]) -> None:
    """Who waited for one slice waits for that; who waited for all of them, for each."""
    if waiting.slice is not None:
        units[waiting.slice.position].waiting.append(waiting)
        return
    waiting.pending.widen(len(slices))
    for position, (slice_, unit) in enumerate(zip(slices, units, strict=True)):
        unit.waiting.append(waiting._replace(position=position, slice=slice_))
