"""The keys of which a server leads a part: their slices, which keys are live, and the look-ups that wait for one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from kvd.core.machine import Peer
from kvd.core.server.groups import FusedGroup, Slice, fused, parted
from kvd.core.server.rounds import SliceLog
from kvd.optimizer import Optimizer
from kvd.protocol.messages import KeyEntry
from kvd.protocol.specs import KeySpec

MAX_SLICES = 1 << 20
MAX_WAITING = 1 << 16
PAGE = 100
PAGE_BYTES = 48 << 10


class Live(NamedTuple):
    """A published key, on the server of its slice 0."""

    spec: KeySpec
    publisher: int


class KeyTable:
    """All slices of one server, by key and index."""

    def __init__(self) -> None:
        self.slices: dict[tuple[str, int], Slice] = {}
        self.groups: dict[int, FusedGroup] = {}
        self.live: dict[str, Live] = {}
        self.bytes_led = 0
        self._indices: dict[str, list[int]] = {}
        self._lookups: dict[str, dict[tuple[Peer, int], None]] = {}
        self._lookups_waiting = 0
        self._numbers = count(1)

    # ── slices and their groups ──

    def add(
        self,
        key: str,
        index: int,
        spec: KeySpec,
        log: SliceLog,
        creator: int,
        optimizer: Optimizer | None,
        request: int = 0,
    ) -> None:
        """Adds a slice. It replaces an unpublished one of the same name, and slices of the key with another spec."""
        indices = self._indices.setdefault(key, [])
        if indices and self.slices[key, indices[0]].spec != spec:  # all have the same one
            for other in indices:
                self._forget(key, other)
            indices.clear()
        elif (key, index) in self.slices:
            self._forget(key, index)
            indices.remove(index)
        group = FusedGroup(next(self._numbers), log, spec.dtype, optimizer)
        slice_ = Slice(key, index, spec, spec.slice_nbytes(index), creator, group, request)
        group.take([slice_])
        indices.append(index)
        self.slices[key, index] = slice_
        self.groups[group.number] = group
        self.bytes_led += slice_.nbytes

    def _forget(self, key: str, index: int) -> None:
        slice_ = self.slices[key, index]
        if len(slice_.group.slices) > 1:
            self.part(slice_.group)
        slice_.group.is_gone = True
        del self.groups[slice_.group.number]
        del self.slices[key, index]
        self.bytes_led -= slice_.nbytes

    def fuse(self, slices: Sequence[Slice]) -> FusedGroup | None:
        """One group of exactly these slices; None if they cannot be fused."""
        if slices[0].group.slices == tuple(slices):
            return slices[0].group
        olds = [slice_.group.number for slice_ in slices]
        group = fused(next(self._numbers), slices)
        if group is not None:
            for number in olds:
                del self.groups[number]
            self.groups[group.number] = group
        return group

    def part(self, group: FusedGroup) -> None:
        """Gives each slice of a quiescent group a group of its own."""
        del self.groups[group.number]
        for own in parted(group, lambda: next(self._numbers)):
            self.groups[own.number] = own

    def of_key(self, key: str) -> list[Slice]:
        """The slices of a key that are here."""
        return [self.slices[key, index] for index in self._indices.get(key, ())]

    def is_in_use(self, key: str) -> bool:
        """Whether a worker may have pushed to it. Such a key is not made again."""
        return key in self.live or any(
            slice_.log.version or slice_.group.waiting or not slice_.group.is_quiescent or not slice_.log.is_idle
            for slice_ in self.of_key(key)
        )

    # ── live keys ──

    def await_live(self, key: str, peer: Peer, request: int) -> bool:
        """Notes a Lookup that waits. False if MAX_WAITING wait already."""
        if self._lookups_waiting >= MAX_WAITING:
            return False
        asked = self._lookups.setdefault(key, {})
        if (peer, request) not in asked:
            asked[peer, request] = None
            self._lookups_waiting += 1
        return True

    def publish(self, key: str, live: Live) -> list[tuple[Peer, int]]:
        """Marks the key as live. Returns the look-ups that waited for it, as (peer, request)."""
        self.live[key] = live
        waiting = list(self._lookups.pop(key, {}))
        self._lookups_waiting -= len(waiting)
        return waiting

    def give_up_lookups(self) -> list[tuple[str, Peer, int]]:
        """Forgets the look-ups that wait, and returns them as (key, peer, request): rank 0 will not come."""
        waiting = [(key, peer, request) for key, asked in self._lookups.items() for peer, request in asked]
        self._lookups = {}
        self._lookups_waiting = 0
        return waiting

    def lookups_of(self, peer: Peer) -> list[tuple[str, int]]:
        """The look-ups of this peer that wait, as (key, request)."""
        return [(key, request) for key, asked in self._lookups.items() for asker, request in asked if asker == peer]

    # ── listings ──

    def page(self, after: str) -> tuple[tuple[KeyEntry, ...], bool]:
        """The entries of up to PAGE keys after `after` that fit in a header, and whether there are more."""
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

    # ── invariants ──

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken: each slice is in one group, whose log is sound."""
        for slice_ in self.slices.values():
            group = slice_.group
            assert not group.is_gone, f"slice {slice_.index} of {slice_.key!r} is in a group that is gone"
            assert self.groups.get(group.number) is group, f"group {group.number} is not in the table"
            assert group.slices[slice_.position] is slice_, f"slice {slice_.index} of {slice_.key!r} lies elsewhere"
        assert sum(len(group.slices) for group in self.groups.values()) == len(self.slices), "a slice is in two groups"
        assert sum(slice_.nbytes for slice_ in self.slices.values()) == self.bytes_led, "bytes_led is wrong"
        for group in self.groups.values():
            group.log.validate()
