"""The keys of which a server leads a part: their slices, and which keys are live."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count

from kvd.core.machine import TableVersion
from kvd.core.server.groups import FusedGroup, Slice, fused, parted
from kvd.core.server.rounds import SliceLog
from kvd.optimizer import Optimizer
from kvd.protocol.messages import KeyEntry, KeyId, Made, TableEntry
from kvd.protocol.specs import KeySpec

MAX_SLICES = 1 << 20
PAGE = 100
PAGE_BYTES = 48 << 10


class KeyTable:
    """All slices of one server, by key and index.

    Attributes:
        live: the published keys whose slice 0 is here, and what they are like.
        publishing: those that are live once a backup has heard of it, and how many requests say so.
        creation: keys that are made from now on have at least this creation: it is larger than those of all keys that
            were deleted here.
        numbers: those of the next groups.
    """

    def __init__(self, numbers: Iterator[int] | None = None) -> None:
        """`numbers`: of groups; those of two tables whose groups are updated in one place must differ."""
        self.slices: dict[tuple[str, int], Slice] = {}
        self.groups: dict[int, FusedGroup] = {}
        self.live: dict[str, Made] = {}
        self.publishing = Counter[KeyId]()
        self.creation = 0
        self.bytes_led = 0
        self._parts: set[Slice] = set()  # of tables
        self._indices: dict[str, list[int]] = {}
        self._sorted: list[str] | None = []  # the names of the keys; None if some came or went since the last listing
        self.numbers = count(1) if numbers is None else numbers

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
        creation: int = 0,
        partition: int = 0,
        generation: int = 0,
    ) -> Slice:
        """Adds a slice. It replaces an unpublished one of the same name, and slices of another spec or creation."""
        indices = self._make_room(key, index, spec, creation)
        group = FusedGroup(next(self.numbers), log, spec.dtype, optimizer, generation=generation)
        nbytes = spec.slice_nbytes(index)
        slice_ = Slice(key, index, spec, nbytes, creator, group, request, creation, partition=partition)
        group.take([slice_])
        indices.append(index)
        self.slices[key, index] = slice_
        self.groups[group.number] = group
        self._count(slice_)
        return slice_

    @property
    def table_nbytes(self) -> int:
        """The memory of the parts of tables, which `bytes_led` does not have: it changes with each push."""
        return sum([_version(slice_).nbytes for slice_ in self._parts]) if self._parts else 0

    def pushed_rows_need(self, need: Callable[[KeySpec, int], int]) -> int:
        """What is needed for the bytes that were pushed to tables, and are in no version yet.

        Args:
            need: of so many bytes that were pushed to such a table.
        """
        if not self._parts:
            return 0
        waiting = [(slice_.spec, nbytes) for slice_ in self._parts if (nbytes := slice_.log.unapplied_nbytes)]
        return sum([need(spec, nbytes) for spec, nbytes in waiting])

    def _count(self, slice_: Slice) -> None:
        self.bytes_led += slice_.nbytes
        if slice_.spec.table:
            self._parts.add(slice_)

    def _uncount(self, slice_: Slice) -> None:
        self.bytes_led -= slice_.nbytes
        self._parts.discard(slice_)

    def _make_room(self, key: str, index: int, spec: KeySpec, creation: int) -> list[int]:
        """Forgets what a new slice replaces. Returns the list of the key's indices, which it is to join."""
        if key not in self._indices:
            self._indices[key] = []
            self._sorted = None
        indices = self._indices[key]
        first = self.slices[key, indices[0]] if indices else None
        if first is not None and (first.spec, first.creation) != (spec, creation):  # all have the same
            for other in indices:
                self._forget(key, other)
            indices.clear()
        elif (key, index) in self.slices:
            self._forget(key, index)
            indices.remove(index)
        return indices

    # ── groups come from another table, and go to one ──

    def release(self, group: FusedGroup) -> None:
        """The group leaves this table, as it is. A key is forgotten with the last of its slices."""
        for slice_ in group.slices:
            del self.slices[slice_.key, slice_.index]
            self._uncount(slice_)
            indices = self._indices[slice_.key]
            indices.remove(slice_.index)
            if not indices:
                del self._indices[slice_.key]
                self._sorted = None
        del self.groups[group.number]

    def adopt(self, group: FusedGroup) -> None:
        """The group, which another table has released, is in this one from now on."""
        for slice_ in group.slices:
            indices = self._make_room(slice_.key, slice_.index, slice_.spec, slice_.creation)
            indices.append(slice_.index)
            self.slices[slice_.key, slice_.index] = slice_
            self._count(slice_)
        self.groups[group.number] = group

    def _forget(self, key: str, index: int) -> None:
        slice_ = self.slices[key, index]
        if len(slice_.group.slices) > 1:
            self.part(slice_.group)
        group = slice_.group
        group.is_gone = True
        if group.is_quiescent:
            group.drop_values()
        del self.groups[group.number]
        del self.slices[key, index]
        self._uncount(slice_)

    def drop_values(self) -> None:
        """Drop the bytes of all slices: nobody uses this table any more."""
        for group in self.groups.values():
            group.drop_values()

    def remove(self, key: str) -> list[FusedGroup]:
        """Removes a key, whose groups are quiescent. Returns the groups that it had: some may wait for them."""
        for slice_ in self.of_key(key):
            if len(slice_.group.slices) > 1:
                self.part(slice_.group)
        removed = [slice_.group for slice_ in self.of_key(key)]
        for index in self._indices.pop(key, []):
            self._forget(key, index)
        self.live.pop(key, None)
        self._sorted = None
        return removed

    def is_quiescent(self, key: str) -> bool:
        """Whether no slice of the key is being updated, by itself or with others."""
        return all(slice_.group.is_quiescent for slice_ in self.of_key(key))

    def fuse(self, slices: Sequence[Slice]) -> FusedGroup | None:
        """One group of exactly these slices; None if they cannot be fused."""
        if slices[0].group.slices == tuple(slices):
            return slices[0].group
        olds = [slice_.group.number for slice_ in slices]
        group = fused(next(self.numbers), slices)
        if group is not None:
            for number in olds:
                del self.groups[number]
            self.groups[group.number] = group
        return group

    def part(self, group: FusedGroup) -> None:
        """Gives each slice of a quiescent group a group of its own."""
        del self.groups[group.number]
        for own in parted(group, lambda: next(self.numbers)):
            self.groups[own.number] = own

    def of_key(self, key: str) -> list[Slice]:
        """The slices of a key that are here."""
        return [self.slices[key, index] for index in self._indices.get(key, ())]

    def is_in_use(self, key: str) -> bool:
        """Whether a worker may have pushed to it. Such a key is not made again."""
        return key in self.live or any(
            slice_.log.version or slice_.group.waiting or slice_.group.is_in_use or not slice_.log.is_idle
            for slice_ in self.of_key(key)
        )

    def live_in(self, partition: int) -> list[KeyId]:
        """The keys of a partition that are live, or will be, in order."""
        names = {KeyId(key, made.creation) for key, made in self.live.items()} | set(+self.publishing)
        here = [name for name in names if (first := self.slices.get((name.key, 0))) and first.partition == partition]
        return sorted(here)

    def is_resting(self, key: str) -> bool:
        """Whether slices of the key are being sent to another server, or compared with what that has."""
        return any(slice_.group.is_resting or slice_.group.is_compared for slice_ in self.of_key(key))

    # ── listings ──

    def page(self, after: str) -> tuple[tuple[KeyEntry, ...], bool]:
        """The entries of up to PAGE keys after `after` that fit in a header, and whether there are more."""
        if self._sorted is None:
            self._sorted = sorted(self._indices)
        keys = self._sorted
        first = bisect_right(keys, after) if after else 0
        entries: list[KeyEntry] = []
        room = PAGE_BYTES
        for key in keys[first : first + PAGE]:
            entry = self._entry(key)
            room -= 4 * len(key) + 9 * len(entry.shape) + 92  # at most, as msgpack
            if entries and room < 0:
                break
            entries.append(entry)
        return tuple(entries), first + len(entries) < len(keys)

    def _entry(self, key: str) -> KeyEntry:
        slices = self.of_key(key)
        spec = slices[0].spec
        version = min(slice_.log.version for slice_ in slices)
        nbytes = sum(slice_.nbytes for slice_ in slices)
        table = None
        if spec.table:
            nbytes = sum([_version(slice_).nbytes for slice_ in slices])
            table = TableEntry(spec.table.rows, sum([_version(slice_).rows for slice_ in slices]))
        return KeyEntry(key, spec.dtype, spec.shape, len(slices), nbytes, version, key in self.live, spec.merge, table)

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
        parts = {slice_ for slice_ in self.slices.values() if slice_.spec.table}
        assert parts == self._parts, "the parts of tables are not those that are here"
        for group in self.groups.values():
            group.log.validate()


def _version(slice_: Slice) -> TableVersion:
    """Of a part of a table."""
    version = slice_.log.current
    assert isinstance(version, TableVersion)
    return version
