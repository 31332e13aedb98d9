"""In which form a ledger's keys hold its floats: as values, or as tables that have a row for each of them; and how what
is pushed travels: as it is, or compressed.

A compressor that says 1 and 0 exactly loses nothing of a ledger. A table has the rows of one slice of such a value in
one of its parts. So what holds of a place of a value holds of the row of that place, and the same ledger checks both.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from kvd.compression import TwoBit
from kvd.core.machine import ReadRows, Span, TableVersion
from kvd.core.requests import Item, Transfer
from kvd.core.server.groups import Slice
from kvd.node.jobs.runner import view
from kvd.protocol.messages import MergedForm
from kvd.protocol.specs import ROW_ID_BYTES, Initial, KeySpec, TableSpec
from kvd.tables.by_part import ids_in_parts, rows_in_parts
from kvd.tables.parts import parts_of
from kvd.tables.row_values import Rows
from tests.simulator.copies import led, pairs, reaches_all
from tests.simulator.process import Process
from tests.simulator.simulator import Me, World
from tests.simulator.workloads.coding import encoded
from tests.simulator.workloads.steps import Floats, Keys, insist, item

SLICE_FLOATS = 1024  # of a key with the smallest slices
PARTS = 2
MOST_ROWS = 1 << 20  # and as many more as the key has floats, which tells its tables apart
ZEROS = Initial("Zeros")


@cache
def row_ids(size: int) -> tuple[int, ...]:
    """The row of each float: those of slice i are in part i."""
    candidates = np.arange(8 * max(size, SLICE_FLOATS), dtype=np.int64)
    parts = parts_of(candidates, PARTS)
    of_part = [candidates[parts == part].tolist() for part in range(PARTS)]
    return tuple([of_part[place // SLICE_FLOATS][place % SLICE_FLOATS] for place in range(size)])


@dataclass(frozen=True)
class Forms:
    """Which keys are tables, and which values are compressed when they are pushed."""

    tables: frozenset[str] = frozenset()
    coded: frozenset[str] = frozenset()

    def first(self, key: str, size: int) -> Item:
        """The key as it is made: zeros."""
        if key not in self.tables:
            return item(key, np.zeros(size, np.float32))
        return Item(key, _spec(size), np.zeros(1, np.uint8))

    def is_made_so(self, key: str, size: int, spec: KeySpec) -> bool:
        """Whether this is the key with so many floats."""
        made = self.first(key, size).spec
        assert made is not None
        return (spec.shape, spec.table) == (made.shape, made.table)

    def pushed(self, key: str, gradient: Floats) -> Item:
        """A gradient; of a table, the rows of what is not 0 in it."""
        if key in self.coded:
            return encoded(key, gradient, TwoBit(float(np.abs(gradient).max())), MergedForm.FED_BACK)
        if key not in self.tables:
            return item(key, gradient)
        places = np.flatnonzero(gradient)
        ids = np.array(row_ids(gradient.size), np.int64)[places]
        rows = Rows(ids, gradient[places].reshape(-1, 1))
        data, ranges = rows_in_parts(rows, PARTS, lambda nbytes: np.zeros(max(nbytes, 8), np.uint8))
        return Item(key, _spec(gradient.size), data, ranges=ranges)

    def push(self, keys: Sequence[str], gradients: Sequence[Floats], place: int = 0) -> Transfer:
        """These keys in one push, which is made at this place of the program."""
        items = tuple([self.pushed(key, gradient) for key, gradient in zip(keys, gradients, strict=True)])
        some_rows, some_encoded = (not names.isdisjoint(keys) for names in (self.tables, self.coded))
        return Transfer(items, True, False, place=place, some_rows=some_rows, some_encoded=some_encoded)

    def pull(
        self, keys: Sequence[str], size: int, *, any_version: bool = False
    ) -> Generator[Any, Any, tuple[dict[str, Floats], Any]]:
        """The values of these keys, all floats of each, and their versions."""
        asked = {key: ids_in_parts(np.array(row_ids(size), np.int64), PARTS) for key in keys if key in self.tables}
        targets = {key: np.full(size, np.nan, np.float32) for key in keys}
        items = tuple(
            [
                Item(key, _spec(size), _copied(asked[key].ids), target.view(np.uint8), ranges=asked[key].ranges)
                if key in asked
                else item(key, None, target)
                for key, target in targets.items()
            ]
        )
        pull = Transfer(items, push=False, pull=True, any_version=any_version, some_rows=bool(asked))
        versions = yield from insist(pull)
        for key, own in asked.items():
            targets[key] = targets[key][own.where]
        return targets, versions

    def weights_before(self, me: Me, keys: Keys, size: int, clock: int) -> Generator[Any, Any, dict[str, Floats]]:
        """What the keys hold before step `clock`, and nothing later."""
        weights, versions = yield from self.pull(keys, size)
        if versions != [(clock - 1, clock - 1)] * len(keys):
            me.world.fail(f"worker {me.rank} asked for version {clock - 1} of {keys}, got {versions}")
        return weights

    def value(self, world: World, key: str, size: int) -> Floats:
        """The committed floats of a key, at the servers that lead it."""
        if key not in self.tables:
            found: Floats = world.value(key)
            return found
        floats = np.zeros(size, np.float32)
        for process, slice_ in led(world):
            if slice_.key == key:
                places = np.arange(slice_.index * SLICE_FLOATS, min(size, (slice_.index + 1) * SLICE_FLOATS))
                floats[places] = _rows(process, slice_, [row_ids(size)[place] for place in places])
        return floats

    def reaches_all(self, world: World, key: str, size: int, place: int, holds: Callable[[float], bool]) -> bool:
        """Whether that holds of this float, with all who must have what was acknowledged."""
        if key not in self.tables:
            return reaches_all(world, key, place, holds)
        ids = [row_ids(size)[place]]
        index = place // SLICE_FLOATS
        if world.cluster.replicas < 2:
            there = [(process, slice_) for process, slice_ in led(world) if (slice_.key, slice_.index) == (key, index)]
            return bool(there) and all(holds(float(_rows(*each, ids)[0])) for each in there)
        for pair in pairs(world):
            for copy in filter(None, (pair.leader, pair.backup)):
                for slice_ in copy.table.of_key(key):
                    is_of_it = slice_.index == index and slice_.partition == pair.partition
                    if not is_of_it or slice_.log.closing is not None:
                        continue
                    if not holds(float(_rows(copy.process, slice_, ids)[0])):
                        return False
        return True


VALUES = Forms()


def _spec(size: int) -> KeySpec:
    return KeySpec("float32", (1,), 4 * SLICE_FLOATS, "", TableSpec(MOST_ROWS + size, ZEROS, PARTS))


def _rows(process: Process, slice_: Slice, ids: Sequence[int]) -> Floats:
    """The first element of these rows, as they are in the present version of a part."""
    version = slice_.log.current
    assert isinstance(version, TableVersion)
    packed = np.array(ids, np.int64).tobytes()
    job = ReadRows(0, slice_.key, slice_.index, version, (Span(packed, 0, len(packed)),))
    runners = [each for each in process.runners.values() if (slice_.key, slice_.index) in each.slices]
    done = runners[-1].run(job)
    if done.error is not None:
        raise AssertionError(f"rows of part {slice_.index} of {slice_.key!r} cannot be read: {done.error}")
    found: Floats = view(done.result[0], np.dtype(np.float32))
    return found


def _copied(ids: Any) -> Any:
    """The ids as bytes of their own: they are overwritten when the call has ended."""
    data = np.zeros(max(len(ids) * ROW_ID_BYTES, 8), np.uint8)
    data[: ids.nbytes] = ids.view(np.uint8)
    return data
