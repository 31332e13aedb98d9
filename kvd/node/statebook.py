"""The optimizer states of a server's slices. Slices that are updated as one have one state, as long as they agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kvd.compute.optimizers import SliceState
from kvd.core.machine import Extent

Array: TypeAlias = np.ndarray[Any, Any]
Place: TypeAlias = tuple[str, int]


class Piece(NamedTuple):
    """The state of a range of a group's elements."""

    start: int
    stop: int
    state: SliceState


@dataclass(slots=True, eq=False)
class _Record:
    """The states of one group: one piece for all of it, or several whose steps differ."""

    group: int
    pieces: list[Piece]
    places: set[Place] = field(default_factory=set)
    has_changed: bool = False  # a slice was given another state: perhaps they agree now


class StateBook:
    """States by group and by slice. What a slice had goes with it when it becomes part of another group."""

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}
        self._homes: dict[Place, tuple[_Record, int, int]] = {}  # where a slice is, and its first and last element

    def clear(self) -> None:
        """Every slice starts with a new state."""
        self._records = {}
        self._homes = {}

    def drop(self, place: Place) -> None:
        """The slice is made anew."""
        self._leave(place)

    def of_unit(self, group: int, layout: Sequence[Extent], itemsize: int) -> list[Piece]:
        """The states of all elements of a group, in their order."""
        record = self._records.get(group)
        if record is None:
            record = self._records[group] = _Record(group, [])
            pieces = []
            for key, index, offset, nbytes in layout:
                start, stop = offset // itemsize, (offset + nbytes) // itemsize
                pieces.append(Piece(start, stop, self._leave((key, index))))
                self._homes[key, index] = (record, start, stop)
                record.places.add((key, index))
            record.pieces = _joined(pieces)
        elif record.has_changed:
            record.pieces = _joined(record.pieces)
        record.has_changed = False
        return record.pieces

    def keep(self, group: int, pieces: Sequence[Piece]) -> None:
        """These are the pieces of `of_unit`, after an update that was made on copies of their states."""
        self._records[group].pieces = list(pieces)

    def renew(self, group: int, layout: Sequence[Extent], itemsize: int) -> None:
        """All slices of the group start with a new state."""
        pieces = self.of_unit(group, layout, itemsize)
        self._records[group].pieces = [Piece(pieces[0].start, pieces[-1].stop, SliceState())]

    def of_slice(self, place: Place) -> SliceState:
        """The state of one slice: views of what its group has."""
        home = self._homes.get(place)
        return SliceState() if home is None else _cut(*home)

    def put(self, place: Place, state: SliceState, count: int) -> None:
        """Gives a slice of `count` elements another state; the others of its group keep theirs."""
        home = self._homes.get(place)
        if home is None:
            record = _Record(0, [Piece(0, count, state)], {place})  # no group yet: the first update finds it here
            self._homes[place] = (record, 0, count)
            return
        record, start, stop = home
        others = [piece for piece in record.pieces if (piece.start, piece.stop) != (start, stop)]
        before = [piece for piece in others if piece.stop <= start]
        after = [piece for piece in others if piece.stop > start and piece.start >= stop]
        for piece in record.pieces:
            if piece.start < start < piece.stop:
                before.append(_range(piece, piece.start, start))
            if piece.start < stop < piece.stop:
                after.insert(0, _range(piece, stop, piece.stop))
        record.pieces = [*before, Piece(start, stop, state), *after]
        record.has_changed = True

    def _leave(self, place: Place) -> SliceState:
        """Takes a slice out of its record, with its state. The others go their own ways too, each with a copy of its
        part: nobody keeps the memory of all."""
        home = self._homes.pop(place, None)
        if home is None:
            return SliceState()
        record, start, stop = home
        self._records.pop(record.group, None)
        record.places.discard(place)
        for other in record.places:
            _, first, last = self._homes[other]
            own = Piece(0, last - first, copied(_cut(record, first, last)))
            self._homes[other] = (_Record(0, [own], {other}), 0, last - first)
        state = _cut(record, start, stop)
        return copied(state) if record.places else state


def copied(state: SliceState) -> SliceState:
    """The same, in arrays of its own."""
    master = None if state.master is None else state.master.copy()
    return SliceState(state.step, master, {name: slot.copy() for name, slot in state.slots.items()})


def _cut(record: _Record, start: int, stop: int) -> SliceState:
    for piece in record.pieces:
        if (piece.start, piece.stop) == (start, stop):
            return piece.state
    for piece in record.pieces:
        if piece.start <= start and stop <= piece.stop:
            return _range(piece, start, stop).state
    return SliceState()


def _range(piece: Piece, start: int, stop: int) -> Piece:
    """A part of a piece: views of its arrays."""
    if (start, stop) == (piece.start, piece.stop):
        return piece
    state, low, high = piece.state, start - piece.start, stop - piece.start
    master = None if state.master is None else state.master[low:high]
    slots = {name: slot[low:high] for name, slot in state.slots.items()}
    return Piece(start, stop, SliceState(state.step, master, slots))


def _joined(pieces: list[Piece]) -> list[Piece]:
    """One piece of them all, if they are alike: as many steps, and the same arrays."""
    first = pieces[0].state
    kind = _kind(first)
    if len(pieces) == 1 or any(_kind(state) != kind for _, _, state in pieces):
        return pieces
    total = pieces[-1].stop
    state = SliceState(first.step)
    if first.master is not None:
        state.master = _side_by_side(total, [(piece, piece.state.master) for piece in pieces])
    for name in first.slots:
        state.slots[name] = _side_by_side(total, [(piece, piece.state.slots[name]) for piece in pieces])
    return [Piece(0, total, state)]


def _kind(state: SliceState) -> tuple[int, bool, dict[str, np.dtype[Any]]]:
    return state.step, state.master is None, {name: slot.dtype for name, slot in state.slots.items()}


def _side_by_side(total: int, parts: Sequence[tuple[Piece, Array | None]]) -> Array:
    dtype = next((array.dtype for _, array in parts if array is not None), np.dtype(np.float32))
    whole = np.zeros(total, dtype)  # also what lies between two slices
    for piece, array in parts:
        if array is not None:
            whole[piece.start : piece.stop] = array
    return whole
