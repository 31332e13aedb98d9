"""The keys of which a server leads a part: their slices, which of them are live, and who waits for one to become so."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvd.core.machine import Peer
from kvd.core.requests import Pending
from kvd.core.slicelog import SliceLog
from kvd.optimizer import Optimizer, with_hyperparameters
from kvd.protocol.messages import KeyEntry
from kvd.protocol.specs import KeySpec

MAX_SLICES = 1 << 20
MAX_WAITING = 1 << 16
PAGE = 100
PAGE_BYTES = 48 << 10


class Waiting(NamedTuple):
    """A request that waits for a slice to commit a push (`rank`, `clock`), or to reach a version."""

    pending: Pending
    position: int  # of the slice in the request
    rank: int
    clock: int


class Change(NamedTuple):
    """Hyperparameters that change with a round."""

    from_round: int
    changes: dict[str, object]


@dataclass(slots=True)
class Slice:
    """One slice: its log, who waits for it, and the optimizer that its next round uses."""

    key: str
    index: int
    spec: KeySpec
    nbytes: int
    log: SliceLog
    creator: int  # the incarnation whose Init made it
    optimizer: Optimizer | None = None
    changes: list[Change] = field(default_factory=list)
    waiting: list[Waiting] = field(default_factory=list)
    tasks: list[Callable[[], None]] = field(default_factory=list)  # start jobs on its state, between two updates
    working: bool = False  # such a job is under way

    def optimizer_for(self, round_number: int) -> Optimizer | None:
        """The optimizer of a round, with the changes that take effect by then."""
        while self.changes and self.changes[0].from_round <= round_number and self.optimizer is not None:
            self.optimizer = with_hyperparameters(self.optimizer, self.changes.pop(0).changes)
        return self.optimizer


class Live(NamedTuple):
    """A published key, on the server of its slice 0."""

    spec: KeySpec
    publisher: int


class KeyTable:
    """All slices of one server, by key and index."""

    def __init__(self) -> None:
        self.slices: dict[tuple[str, int], Slice] = {}
        self.live: dict[str, Live] = {}
        self.bytes_led = 0
        self._indices: dict[str, list[int]] = {}
        self._lookups: dict[str, dict[tuple[Peer, int], None]] = {}
        self._lookups_waiting = 0

    def add(self, slice_: Slice) -> None:
        """Puts a slice in, in place of an unpublished one of the same name, and of what was cut in another way."""
        place = (slice_.key, slice_.index)
        indices = self._indices.setdefault(slice_.key, [])
        if indices and self.slices[slice_.key, indices[0]].spec != slice_.spec:  # all have the same one
            self.bytes_led -= sum(self.slices.pop((slice_.key, index)).nbytes for index in indices)
            indices.clear()
        old = self.slices.get(place)
        if old is not None:
            self.bytes_led -= old.nbytes
        else:
            indices.append(slice_.index)
        self.slices[place] = slice_
        self.bytes_led += slice_.nbytes

    def of_key(self, key: str) -> list[Slice]:
        """The slices of a key that are here."""
        return [self.slices[key, index] for index in self._indices.get(key, ())]

    def await_live(self, key: str, peer: Peer, request: int) -> bool:
        """Notes a Lookup that waits; False if too many do."""
        if self._lookups_waiting >= MAX_WAITING:
            return False
        asked = self._lookups.setdefault(key, {})
        if (peer, request) not in asked:
            asked[peer, request] = None
            self._lookups_waiting += 1
        return True

    def publish(self, key: str, live: Live) -> list[tuple[Peer, int]]:
        """The key is live; who waited for it."""
        self.live[key] = live
        waiting = list(self._lookups.pop(key, {}))
        self._lookups_waiting -= len(waiting)
        return waiting

    def give_up_lookups(self) -> list[tuple[str, Peer, int]]:
        """Forgets everyone who waits for a key, because rank 0 will not come: (key, peer, request)."""
        waiting = [(key, peer, request) for key, asked in self._lookups.items() for peer, request in asked]
        self._lookups = {}
        self._lookups_waiting = 0
        return waiting

    def page(self, after: str) -> tuple[tuple[KeyEntry, ...], bool]:
        """The entries of up to PAGE keys after `after`, as many as a header holds, and whether there are more."""
        keys = sorted(self._indices)
        first = bisect_right(keys, after) if after else 0
        entries: list[KeyEntry] = []
        room = PAGE_BYTES
        for key in keys[first : first + PAGE]:
            entry = self._entry(key)
            room -= 4 * len(key) + 9 * len(entry.shape) + 64  # at most, as msgpack
            if entries and room < 0:
                break
            entries.append(entry)
        return tuple(entries), first + len(entries) < len(keys)

    def _entry(self, key: str) -> KeyEntry:
        slices = self.of_key(key)
        spec = slices[0].spec
        version = min(slice_.log.version for slice_ in slices)
        nbytes = sum(slice_.nbytes for slice_ in slices)
        return KeyEntry(key, spec.dtype, spec.shape, len(slices), nbytes, version, key in self.live)
