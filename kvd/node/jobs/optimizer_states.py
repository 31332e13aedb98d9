"""The optimizer states of a server's slices. Slices that are updated together share one state while they agree."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kvd.compute.by_key import first_of_runs
from kvd.compute.optimizers import SliceState
from kvd.core.machine import Extent
from kvd.optimizer import Optimizer

Array: TypeAlias = np.ndarray[Any, Any]
SliceId: TypeAlias = tuple[str, int]
"""Key and index of a slice."""


class StateRange(NamedTuple):
    """The state of a range of a group's elements, from `start` to before `stop`.

    Attributes:
        first: its first slice, if the optimizer has to know; what it does for that one, it does for all of them.
    """

    start: int
    stop: int
    state: SliceState
    first: SliceId | None = None


@dataclass(slots=True, eq=False)
class _GroupStates:
    """The states of one group: one range for all of it, or several whose steps differ."""

    group: int
    ranges: list[StateRange]
    slices: set[SliceId] = field(default_factory=set)
    has_changed: bool = False  # a slice was given another state: perhaps they agree now
    optimizer: Optimizer | None = None  # the latest, and the slices where it begins to calculate in another way
    cuts: tuple[int, ...] = ()


class OptimizerStates:
    """States by group and by slice. A slice takes its state with it when it joins another group."""

    def __init__(self) -> None:
        self._groups: dict[int, _GroupStates] = {}
        self._homes: dict[SliceId, tuple[_GroupStates, int, int]] = {}  # its group, first and last element of a slice

    def reset(self, slices: Sequence[SliceId]) -> None:
        """These slices start with a new state. They stay in their groups."""
        found: dict[int, tuple[_GroupStates, dict[SliceId, None]]] = {}
        for slice_id in slices:
            home = self._homes.get(slice_id)
            if home is not None:
                found.setdefault(id(home[0]), (home[0], {}))[1][slice_id] = None
        for states, own in found.values():
            if len(own) == len(states.slices):
                states.ranges, states.has_changed = _all_new(states.ranges), bool(states.cuts)
            else:
                for slice_id in own:
                    _, start, stop = self._homes[slice_id]
                    self.put(slice_id, SliceState(), stop - start)

    def drop(self, slice_id: SliceId) -> None:
        """Forget the state of a slice, which is created again."""
        self._leave(slice_id)

    def of_group(
        self, group: int, layout: Sequence[Extent], itemsize: int, optimizer: Optimizer | None = None
    ) -> list[StateRange]:
        """The states of all elements of a group, in order.

        Args:
            group: its number.
            layout: the slices of the group and where their bytes lie.
            itemsize: bytes of an element.
            optimizer: what it calculates in the same way for all slices of a range.
        """
        states = self._groups.get(group)
        if states is None:
            states = self._groups[group] = _GroupStates(group, [])
            ranges = []
            for key, index, offset, nbytes in layout:
                start, stop = offset // itemsize, (offset + nbytes) // itemsize
                ranges.append(StateRange(start, stop, self._leave((key, index))))
                self._homes[key, index] = (states, start, stop)
                states.slices.add((key, index))
            states.ranges, states.has_changed = ranges, True
        cuts = states.cuts
        if optimizer is not states.optimizer:
            states.optimizer, cuts = optimizer, first_of_runs(optimizer, [entry.key for entry in layout])
        if states.has_changed or cuts != states.cuts:
            states.ranges = self._cut_at(cuts, states, layout) if cuts else _joined(states.ranges)
            states.has_changed, states.cuts = False, cuts
        return states.ranges

    def _cut_at(self, cuts: Sequence[int], states: _GroupStates, layout: Sequence[Extent]) -> list[StateRange]:
        """Ranges that begin at these slices at least."""
        joined = _joined(states.ranges)
        begins = [each.start for each in joined]
        wanted = set(cuts)
        found: list[StateRange] = []
        before = -1
        for position, (key, index, _, _) in enumerate(layout):
            _, start, stop = self._homes[key, index]
            agrees_with = bisect_right(begins, start)
            if position in wanted or agrees_with != before:
                found.append(StateRange(start, stop, SliceState(), (key, index)))
            else:
                found[-1] = found[-1]._replace(stop=stop)
            before = agrees_with
        whole = replace(states, ranges=joined)
        return [each._replace(state=_cut(whole, each.start, each.stop)) for each in found]

    def keep(self, group: int, ranges: Sequence[StateRange]) -> None:
        """Take the ranges of `of_group` back after an update, which was made on copies of their states."""
        self._groups[group].ranges = list(ranges)

    def renew(self, group: int, layout: Sequence[Extent], itemsize: int) -> None:
        """All slices of the group start with a new state. The arguments are those of `of_group`."""
        ranges = self.of_group(group, layout, itemsize)
        states = self._groups[group]
        states.ranges, states.has_changed = _all_new(ranges), bool(states.cuts)

    def of_slice(self, slice_id: SliceId) -> SliceState:
        """The state of one slice: views of the arrays of its group."""
        home = self._homes.get(slice_id)
        return SliceState() if home is None else _cut(*home)

    def put(self, slice_id: SliceId, state: SliceState, count: int) -> None:
        """Give a slice of `count` elements another state; the others of its group keep theirs."""
        home = self._homes.get(slice_id)
        if home is None:
            states = _GroupStates(0, [StateRange(0, count, state)], {slice_id})  # the first update gives it a group
            self._homes[slice_id] = (states, 0, count)
            return
        states, start, stop = home
        others = [each for each in states.ranges if (each.start, each.stop) != (start, stop)]
        before = [each for each in others if each.stop <= start]
        after = [each for each in others if each.stop > start and each.start >= stop]
        for each in states.ranges:
            if each.start < start < each.stop:
                before.append(_part(each, each.start, start))
            if each.start < stop < each.stop:
                after.insert(0, _part(each, stop, each.stop))
        states.ranges = [*before, StateRange(start, stop, state), *after]
        states.has_changed = True

    def _leave(self, slice_id: SliceId) -> SliceState:
        """Take a slice out of its group, with its state.

        The group dissolves: the other slices get a copy of their parts each, so that none keeps the memory of all.
        """
        home = self._homes.pop(slice_id, None)
        if home is None:
            return SliceState()
        states, start, stop = home
        self._groups.pop(states.group, None)
        states.slices.discard(slice_id)
        for other in states.slices:
            _, first, last = self._homes[other]
            own = StateRange(0, last - first, _cut(states, first, last).copy())
            self._homes[other] = (_GroupStates(0, [own], {other}), 0, last - first)
        state = _cut(states, start, stop)
        return state.copy() if states.slices else state


def _all_new(ranges: Sequence[StateRange]) -> list[StateRange]:
    return [StateRange(ranges[0].start, ranges[-1].stop, SliceState())]


def _cut(states: _GroupStates, start: int, stop: int) -> SliceState:
    for each in states.ranges:
        if (each.start, each.stop) == (start, stop):
            return each.state
    for each in states.ranges:
        if each.start <= start and stop <= each.stop:
            return _part(each, start, stop).state
    return SliceState()


def _part(whole: StateRange, start: int, stop: int) -> StateRange:
    """A part of a range: views of its arrays."""
    if (start, stop) == (whole.start, whole.stop):
        return whole
    state, low, high = whole.state, start - whole.start, stop - whole.start
    master = None if state.master is None else state.master[low:high]
    slots = {name: slot[low:high] for name, slot in state.slots.items()}
    residual = None if state.residual is None else state.residual[low:high]
    return StateRange(start, stop, SliceState(state.step, master, slots, residual))


def _joined(ranges: list[StateRange]) -> list[StateRange]:
    """One range of them all, if they are alike: the same number of steps, and the same arrays."""
    first = ranges[0].state
    kind = _kind(first)
    if len(ranges) == 1 or any(_kind(each.state) != kind for each in ranges):
        return ranges
    total = ranges[-1].stop
    state = SliceState(first.step)
    if first.master is not None:
        state.master = _side_by_side(total, [(each, each.state.master) for each in ranges])
    if first.residual is not None:
        state.residual = _side_by_side(total, [(each, each.state.residual) for each in ranges])
    for name in first.slots:
        state.slots[name] = _side_by_side(total, [(each, each.state.slots[name]) for each in ranges])
    return [StateRange(0, total, state)]


def _kind(state: SliceState) -> tuple[int, bool, bool, dict[str, np.dtype[Any]]]:
    slots = {name: slot.dtype for name, slot in state.slots.items()}
    return state.step, state.master is None, state.residual is None, slots


def _side_by_side(total: int, parts: Sequence[tuple[StateRange, Array | None]]) -> Array:
    dtype = next((array.dtype for _, array in parts if array is not None), np.dtype(np.float32))
    whole = np.zeros(total, dtype)  # zeros also in the padding between two slices
    for each, array in parts:
        if array is not None:
            whole[each.start : each.stop] = array
    return whole
