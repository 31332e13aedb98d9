"""What a worker knows of its keys: whether they are live, where their slices are, and the calls that queue there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Any

from kvd.core.membership import ViewState
from kvd.core.worker.push_window import PushWindow
from kvd.protocol.specs import KeySpec


class KeyState(StrEnum):
    """How far a worker has come with a key."""

    UNKNOWN = auto()  # not asked for, or the last look-up failed
    ASKING = auto()  # the look-up, or the question for a predecessor's clock, is on its way
    READY = auto()  # its spec, its place and its clock are known
    DELETING = auto()  # this worker has deleted it, and waits for the others
    LOST = auto()  # a partition of it began anew, and its slices there are gone


KEY_TRANSITIONS: dict[KeyState, frozenset[KeyState]] = {
    KeyState.UNKNOWN: frozenset({KeyState.ASKING, KeyState.READY}),  # READY: this worker initialised or found it
    KeyState.ASKING: frozenset({KeyState.UNKNOWN, KeyState.READY}),
    KeyState.READY: frozenset({KeyState.LOST, KeyState.DELETING, KeyState.UNKNOWN}),  # UNKNOWN: others deleted it
    KeyState.DELETING: frozenset({KeyState.UNKNOWN, KeyState.READY}),
    KeyState.LOST: frozenset({KeyState.READY}),  # it was initialised again
}


class KeyGroup:
    """Keys that the calls of a list move together: what is in flight, and their clock, are in one window for all.

    Whoever wants to change anything about one of the keys takes its `window`, or changes its state: that parts the
    group, and each key gets a copy in its own window. So what was found out about them all holds until then.

    Attributes:
        keys: each once. All are READY, without calls that queue, under the same clock, and in no other group.
        windows: those that calls of the group use: one for all keys; one per key once the group is parted.
        window: the one for all.
        is_parted: whether it is over.
    """

    __slots__ = ("is_parted", "keys", "window", "windows")

    def __init__(self, keys: tuple[WorkerKey, ...]) -> None:
        clock = keys[0].window.clock
        self.window = PushWindow(clock, clock)
        self.windows = [self.window]
        self.keys = keys
        self.is_parted = False
        for key in keys:
            key.group = self

    def part(self) -> None:
        if self.is_parted:
            return
        self.is_parted = True
        self.windows[:] = [key.own_window for key in self.keys]
        for key in self.keys:
            key.own_window.take_over(self.window)
            key.group = None

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        self.window.validate()
        for key in self.keys:
            assert key.group is self, f"{key.name!r} left its group alone"
            assert key.state is KeyState.READY, f"{key.name!r} is {key.state} in its group"
            assert not key.queue, f"calls queue for {key.name!r} in its group"
            window = key.own_window
            assert window.clock <= self.window.clock, f"the group is behind {key.name!r}: {self.window}, {window}"
            assert not window.is_in_use, f"{key.name!r} moves by itself in its group: {window}"


@dataclass(slots=True, eq=False)
class WorkerKey:
    """One key, as this worker sees it. A key that is READY, DELETING or LOST has its spec, partitions and lineages.

    Attributes:
        own_window: of a key in a group its clock and what is in flight are not right. To look at, not to change: see
            `window`.
    """

    name: str
    spec: KeySpec | None = None
    partitions: tuple[int, ...] = ()  # of each slice, for good
    creation: int = 0  # tells it from the keys of its name that were deleted
    lineages: dict[int, int] = field(default_factory=dict)  # of those partitions, when the key was placed
    state: KeyState = KeyState.UNKNOWN
    own_window: PushWindow = field(default_factory=PushWindow)
    group: KeyGroup | None = None
    queue: deque[Any] = field(default_factory=deque)  # calls that wait to start; changed by KeyQueue only
    checked_spec: KeySpec | None = None  # the last spec of a program's value that was found to be the same
    is_publishing: bool = False  # its Publish was sent: others may use it already
    is_initialised_here: bool = False  # by this incarnation
    inits: int = 0  # under way: calls on the key queue behind them

    @property
    def window(self) -> PushWindow:
        """Its window, which may be changed. A key in a group leaves it, and so do the others."""
        if self.group is not None:
            self.group.part()
        return self.own_window

    @property
    def clock(self) -> int:
        """That of its window; the key stays in its group. Any thread may ask."""
        group = self.group
        return self.own_window.clock if group is None else group.window.clock

    @property
    def has_pushed(self) -> bool:
        """See `PushWindow.has_pushed`. Any thread may ask."""
        return self.clock != self.own_window.base_clock

    def leave_group(self) -> None:
        if self.group is not None:
            self.group.part()

    @property
    def is_table(self) -> bool:
        """Whether calls name rows of it; False while its spec is unknown."""
        return self.spec is not None and self.spec.table is not None

    def move_to(self, state: KeyState) -> None:
        """Changes the state, as KEY_TRANSITIONS allows; to stay is always allowed."""
        if state is not self.state and state not in KEY_TRANSITIONS[self.state]:
            raise RuntimeError(f"key {self.name!r} cannot become {state} when it is {self.state}: this is a bug in kvd")
        if state is not self.state:
            self.leave_group()
        self.state = state

    def forget(self) -> None:
        """The key was deleted. The calls that queue for it stay."""
        self.leave_group()
        self.move_to(KeyState.UNKNOWN)
        self.spec = self.checked_spec = None
        self.partitions, self.lineages = (), {}
        self.own_window = PushWindow()
        self.is_publishing = self.is_initialised_here = False

    def place(self, spec: KeySpec, creation: int, view: ViewState) -> None:
        """Takes the spec and the creation, and notes where the slices are."""
        self.leave_group()
        self.spec, self.checked_spec, self.creation = spec, None, creation
        self.partitions = tuple([view.partition_of(self.name, index) for index in range(spec.num_slices)])
        self.lineages = {partition: view.lineage_of(partition) for partition in sorted(set(self.partitions))}

    def check_value(self, spec: KeySpec, *, cast: bool, what: str = "value") -> None:
        """Compares a program's value with the key, and remembers that it fits as it is.

        Args:
            cast: it may have another floating dtype.
            what: see `KeySpec.check_same`.

        Raises:
            ShapeMismatch, DtypeMismatch: the value is not like the key's.
            NotAllowed: one of the two is a table, or they are different tables.
        """
        assert self.spec is not None
        self.spec.check_same(spec, self.name, cast=cast, what=what)
        if not cast:
            self.checked_spec = spec

    def lost_partitions(self, view: ViewState) -> list[int]:
        """The partitions that began anew after the key was placed: its slices there are gone."""
        return [partition for partition, held in self.lineages.items() if view.has_begun_anew(partition, held)]


def windows_at_rest(keys: Sequence[WorkerKey | None], specs: Iterable[KeySpec | None]) -> tuple[PushWindow, ...] | None:
    """The windows of the keys, if each takes a call at once, all of them under the same clock, and no value need be
    checked. Keys that are looked at leave their groups.

    Args:
        specs: of the values, one per key; None: they are like the key's, whatever that is.
    """
    if len(keys) > 1 and len(set(keys)) < len(keys):
        return None
    windows: list[PushWindow] = []
    clock = -1
    for key, spec in zip(keys, specs, strict=True):
        if key is None or key.state is not KeyState.READY or key.queue:
            return None
        if spec is not key.checked_spec and (spec is not None or key.is_table):
            return None
        window = key.window
        if window.is_in_use or window.partial_failure is not None or clock not in (-1, window.clock):
            return None
        clock = window.clock
        windows.append(window)
    return tuple(windows) or None


class KeyTable:
    """All keys that the program has named."""

    def __init__(self) -> None:
        self.by_name: dict[str, WorkerKey] = {}

    def get_or_add(self, name: str) -> WorkerKey:
        key = self.by_name.get(name)
        if key is None:
            key = self.by_name[name] = WorkerKey(name)
        return key

    def mark_lost(self, view: ViewState) -> None:
        """Marks the keys of which slices are gone."""
        for key in self.by_name.values():
            if key.state is KeyState.READY and key.lost_partitions(view):
                key.move_to(KeyState.LOST)

    def validate(self) -> None:
        """Raises AssertionError if an invariant of a key is broken."""
        groups = set()
        for key in self.by_name.values():
            key.own_window.validate()
            if key.group is not None:
                groups.add(key.group)
        for group in groups:
            group.validate()
