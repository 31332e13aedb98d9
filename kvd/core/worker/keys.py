"""What a worker knows of its keys: whether they are live, where their slices are, and the calls that queue there."""

from __future__ import annotations

from collections import deque
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


@dataclass(slots=True, eq=False)
class WorkerKey:
    """One key, as this worker sees it. A key that is READY, DELETING or LOST has its spec, partitions and lineages."""

    name: str
    spec: KeySpec | None = None
    partitions: tuple[int, ...] = ()  # of each slice, for good
    creation: int = 0  # tells it from the keys of its name that were deleted
    lineages: dict[int, int] = field(default_factory=dict)  # of those partitions, when the key was placed
    state: KeyState = KeyState.UNKNOWN
    window: PushWindow = field(default_factory=PushWindow)
    queue: deque[Any] = field(default_factory=deque)  # calls that wait to start; changed by KeyQueue only
    checked_spec: KeySpec | None = None  # the last spec of a program's value that was found to be the same
    is_publishing: bool = False  # its Publish was sent: others may use it already
    is_initialised_here: bool = False  # by this incarnation

    @property
    def is_table(self) -> bool:
        """Whether calls name rows of it; False while its spec is unknown."""
        return self.spec is not None and self.spec.table is not None

    def move_to(self, state: KeyState) -> None:
        """Changes the state, as KEY_TRANSITIONS allows; to stay is always allowed."""
        if state is not self.state and state not in KEY_TRANSITIONS[self.state]:
            raise RuntimeError(f"key {self.name!r} cannot become {state} when it is {self.state}: this is a bug in kvd")
        self.state = state

    def forget(self) -> None:
        """The key was deleted. The calls that queue for it stay."""
        self.move_to(KeyState.UNKNOWN)
        self.spec = self.checked_spec = None
        self.partitions, self.lineages = (), {}
        self.window = PushWindow()
        self.is_publishing = self.is_initialised_here = False

    def place(self, spec: KeySpec, creation: int, view: ViewState) -> None:
        """Takes the spec and the creation, and notes where the slices are."""
        self.spec, self.checked_spec, self.creation = spec, None, creation
        self.partitions = tuple([view.partition_of(self.name, index) for index in range(spec.num_slices)])
        self.lineages = {partition: view.lineage_of(partition) for partition in sorted(set(self.partitions))}

    def check_value(self, spec: KeySpec, *, cast: bool) -> None:
        """Compares a program's value with the key, and remembers that it fits as it is.

        Args:
            cast: it may have another floating dtype.

        Raises:
            ShapeMismatch, DtypeMismatch: the value is not like the key's.
            NotAllowed: one of the two is a table, or they are different tables.
        """
        assert self.spec is not None
        self.spec.check_same(spec, self.name, cast=cast)
        if not cast:
            self.checked_spec = spec

    def lost_partitions(self, view: ViewState) -> list[int]:
        """The partitions that began anew after the key was placed: its slices there are gone."""
        return [partition for partition, held in self.lineages.items() if view.has_begun_anew(partition, held)]


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
        for key in self.by_name.values():
            key.window.validate()
