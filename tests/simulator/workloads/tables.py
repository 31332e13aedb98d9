"""Tables: every row that is pulled is what the pushes up to its version have made of it, and no other."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

import numpy as np

from kvd.core.machine import ReadRows, Span, TableVersion
from kvd.core.requests import Depart, Flush, Item, Rewind, Transfer, Versions
from kvd.core.server.groups import Slice
from kvd.errors import KvdError, NodeLost, RemoteError
from kvd.node.jobs.runner import view
from kvd.optimizer import SGD
from kvd.protocol.messages import Departure
from kvd.protocol.specs import ANY_ROW, Initial, KeySpec, TableSpec
from kvd.tables.by_part import ids_in_parts, rows_in_parts
from kvd.tables.parts import parts_of
from kvd.tables.row_values import Rows
from tests.simulator.copies import led
from tests.simulator.process import Coroutine, Process, Sleep, Start
from tests.simulator.simulator import Me, World
from tests.simulator.workloads.steps import (
    Floats,
    Grouping,
    Keys,
    all_together,
    begin_push,
    begin_with,
    insist,
    item,
    mostly_together,
)
from tests.simulator.workloads.table_model import INITIAL, Range, TableModel, TableOf

VALUE = "w"  # a key that is no table, in the lists of the tables
TABLES = (TableOf("t", 90, is_bounded=True), TableOf("u", 400, is_bounded=False))
KEYS: Keys = ("t", VALUE, "u")
DENSE = 7  # floats of the value
ABSENT_ROWS = 5  # that nobody ever pushes
MOST_PULLED = 80
MAX_ATTEMPTS = 60
PAUSE_S = 0.05


class Wanted(NamedTuple):
    """Rows of one table that are pulled: their ids, and their places among those that the item asks for."""

    ids: list[int]
    where: Any
    item: Item


@dataclass
class Pull:
    """Rows of some tables that are pulled after the push of a clock. `call`: if the worker goes on meanwhile."""

    clock: int
    wanted: list[Wanted]
    call: Any = None

    @property
    def transfer(self) -> Transfer:
        return Transfer(tuple([each.item for each in self.wanted]), push=False, pull=True, some_rows=True)


@dataclass
class TableRounds:
    """Workers push random rows, at times none, in lists with another key and by themselves; and pull some.

    In async mode a version is known from its number, which is that of the pushes in it.

    Attributes:
        sync: the pushes of a clock count together.
        replaces: without an optimizer.
        updates_fail: some do, and their steps are made again.
        grouping: which keys of a step go into one push, if no updates fail.
    """

    workers: int
    steps: int
    seed: int
    parts: int
    sync: bool
    replaces: bool
    updates_fail: bool = False
    grouping: Grouping = all_together
    pace_s: float = 0.25
    models: dict[str, TableModel] = field(init=False)

    def __post_init__(self) -> None:
        self.models = {
            table.key: TableModel(table, self.seed, self.workers, self.steps, self.replaces) for table in TABLES
        }

    # ── a worker ──

    def program(self, me: Me) -> Coroutine:
        optimizer = None if self.replaces else SGD(learning_rate=1.0)
        step = yield from begin_with(me, KEYS, self.first, optimizer)
        late: Pull | None = None
        for clock in range(step + 1, self.steps + 1):
            if self.updates_fail:
                yield from self.push_until_it_counts(me, clock)
            else:
                for keys in self.grouping(KEYS, me.rank, clock):
                    yield from begin_push(self.push_of(keys, me.rank, clock), clock)
            if late is not None:
                yield from self.take_late(me, late)
            yield Sleep(self.pace_s)
            pull = late = self.pull_at(me, clock)
            if self.updates_fail or self.random(me, clock).random() < 0.5:
                self.look(me, pull, (yield from insist(pull.transfer)))
                late = None
            else:
                pull.call = yield Start(pull.transfer)
        if late is not None:
            yield from self.take_late(me, late)
        yield Flush()
        yield Depart(Departure.DONE)

    def push_of(self, keys: Keys, rank: int, clock: int) -> Transfer:
        items = tuple([self.to_push(key, rank, clock) for key in keys])
        return Transfer(items, push=True, pull=False, some_rows=True)

    def push_until_it_counts(self, me: Me, clock: int) -> Generator[Any, Any, None]:
        """Makes the step again while a part of a table refuses it. The other parts know its push then."""
        for _ in range(MAX_ATTEMPTS):
            call = yield Start(self.push_of(KEYS, me.rank, clock))
            with suppress(KvdError):
                yield call
            if call.error is None:
                return
            with suppress(RemoteError):  # what the push ended with
                yield from insist(Flush())
            yield Rewind(clock - 1)
            yield Sleep(PAUSE_S)
        raise AssertionError(f"{MAX_ATTEMPTS} attempts at step {clock} failed")

    def spec(self, key: str) -> KeySpec:
        table = self.models[key].table
        rows = table.rows + ABSENT_ROWS if table.is_bounded else ANY_ROW
        initial = Initial("Constant", (float(INITIAL),))
        return KeySpec("float32", (self.workers,), 4096, "", TableSpec(rows, initial, self.parts))

    def first(self, key: str) -> Item:
        """The key as worker 0 makes it."""
        if key == VALUE:
            return item(key, np.zeros(DENSE, np.float32))
        return Item(key, self.spec(key), np.zeros(1, np.uint8))

    def to_push(self, key: str, rank: int, clock: int) -> Item:
        """What a rank pushes. Some rows are named twice, and are added up before they leave."""
        if key == VALUE:
            return item(key, np.full(DENSE, self.sign * clock, np.float32))
        wanted = self.models[key].pushed(rank, clock)
        entries = [(row, part) for row, number in wanted.items() for part in (1, number - 1) if part]
        Random(f"{self.seed} {clock} order").shuffle(entries)
        values = np.zeros((len(entries), self.workers), np.float32)
        values[:, rank] = [self.sign * number for _, number in entries]
        rows = Rows(np.array([row for row, _ in entries], np.int64), values)
        data, ranges = rows_in_parts(rows, self.parts, lambda nbytes: np.empty(max(nbytes, 8), np.uint8))
        return Item(key, self.spec(key), data, ranges=ranges)

    @property
    def sign(self) -> int:
        """Of what is pushed: SGD takes it away."""
        return 1 if self.replaces else -1

    def random(self, me: Me, clock: int) -> Random:
        return Random(f"{self.seed} {me.number} {me.life} {clock}")

    def pull_at(self, me: Me, clock: int) -> Pull:
        """Some rows of some tables: those of the latest push, any, and some that nobody pushes; or of one part."""
        random = self.random(me, -clock)
        wanted = []
        for key in random.choice((["t"], ["u"], ["u", "t"])):
            ids = self.some_ids(random, key, me.rank, clock)
            asked = ids_in_parts(np.array(ids, np.int64), self.parts)
            target = np.full(len(asked.ids) * self.workers * 4, 0xFF, np.uint8)
            item_ = Item(key, self.spec(key), _copied(asked.ids), target, ranges=asked.ranges)
            wanted.append(Wanted(ids, asked.where, item_))
        return Pull(clock, wanted)

    def take_late(self, me: Me, pull: Pull) -> Generator[Any, Any, None]:
        """The rows of a step, while those of the next one are being updated. If a node was lost, it is too late."""
        with suppress(NodeLost):
            self.look(me, pull, (yield pull.call))

    def some_ids(self, random: Random, key: str, rank: int, clock: int) -> list[int]:
        model = self.models[key]
        known = model.table.ids()
        absent = [max(known) + 1 + number for number in range(ABSENT_ROWS)]
        ids = random.choices(known, k=random.randint(0, MOST_PULLED)) + random.sample(absent, 2)
        ids += random.choice(([], list(model.pushed(rank, clock))))
        if random.random() < 0.3:
            part = random.randrange(self.parts)
            ids = [row for row, own in zip(ids, _parts_of(ids, self.parts), strict=True) if own == part]
        return random.sample(ids, len(ids))

    # ── what is there ──

    def look(self, me: Me, pull: Pull, versions: Sequence[Versions | None]) -> None:
        """A worker has pulled these rows after its push of this clock."""
        for (ids, where, item_), seen in zip(pull.wanted, versions, strict=True):
            rows = item_.target.view(np.float32).reshape(-1, self.workers)[where]
            if seen is not None:
                self.look_at_rows(me, item_.key, pull.clock, ids, rows, seen)
            elif ids:
                me.world.fail(f"a pull of {len(ids)} rows of {item_.key!r} has no version")

    def look_at_rows(self, me: Me, key: str, clock: int, ids: Sequence[int], rows: Floats, versions: Versions) -> None:
        if self.sync:
            if versions != (clock, clock):
                me.world.fail(f"a pull of version {clock} of {key!r} brought {versions}")
            self.check_rows(me.world, key, clock, ids, rows)
            return
        for part, found in self.by_part(ids, rows).items():
            self.check_pushes(me.world, f"part {part} of {key!r}", key, found, versions, {me.rank: clock})

    def by_part(self, ids: Sequence[int], rows: Floats) -> dict[int, dict[int, list[float]]]:
        found: dict[int, dict[int, list[float]]] = {}
        for row, part, value in zip(ids, _parts_of(ids, self.parts), rows.tolist(), strict=True):
            found.setdefault(part, {})[row] = value
        return found

    def check_rows(self, world: World, key: str, clock: int, ids: Sequence[int], rows: Floats) -> None:
        """These are the rows after the rounds up to this one."""
        for row, value in zip(ids, rows.tolist(), strict=True):
            expected = self.models[key].row(row, clock)
            if value != expected:
                world.fail(f"row {row} of {key!r} at version {clock} is {value}, the pushes make it {expected}")

    def check_pushes(
        self,
        world: World,
        name: str,
        key: str,
        rows: dict[int, list[float]],
        versions: Versions,
        own: dict[int, int],
    ) -> None:
        """The rows of a part have whole pushes only, in the order of each rank: at least those of `own`, and as many in
        all as the version says."""
        ranges: list[Range] = []
        for rank in range(self.workers):
            found = self.models[key].pushes_in(rank, rows)
            if found is None or found.high < own.get(rank, 0):
                world.fail(f"{name} has other pushes of worker {rank} than its first ones, {own} among them: {rows}")
            ranges.append(found)
        least, most = sum(low for low, _ in ranges), sum(high for _, high in ranges)
        if most < versions.oldest or least > versions.newest:
            world.fail(f"{name} has {least} to {most} pushes, and is at {versions}")

    def check(self, world: World) -> None:
        """Every push of every worker counts once in the end, and only rows that were updated take memory."""
        expected = self.value_after(self.steps)
        if not (world.value(VALUE) == expected).all():
            world.fail(f"key {VALUE!r} ends with {world.value(VALUE).tolist()}, and not {expected}")
        parts = [(process, slice_) for process, slice_ in led(world) if slice_.key in self.models]
        if len(parts) != self.parts * len(self.models):
            world.fail(f"{len(parts)} parts of tables are led")
        for process, slice_ in parts:
            self.check_part(world, process, slice_)

    def value_after(self, clock: int) -> int:
        """The floats of the key that is no table, after so many rounds."""
        return self.workers * (clock if self.replaces else clock * (clock + 1) // 2)

    def updated(self, key: str, part: int, clock: int) -> set[int]:
        """The rows of a part that any round up to this one has named."""
        ids = sorted(self.models[key].updated(clock))
        return {row for row, own in zip(ids, _parts_of(ids, self.parts), strict=True) if own == part}

    def check_part(self, world: World, process: Process, slice_: Slice) -> None:
        model, version = self.models[slice_.key], slice_.log.current
        assert isinstance(version, TableVersion)
        known = model.table.ids()
        ids = [row for row, part in zip(known, _parts_of(known, self.parts), strict=True) if part == slice_.index]
        rows = np.empty((0, self.workers), np.float32)
        for runner in process.runners.values():
            if (slice_.key, slice_.index) in runner.slices:
                packed = np.array(ids, np.int64).tobytes()
                done = runner.run(ReadRows(0, slice_.key, slice_.index, version, (Span(packed, 0, len(packed)),)))
                rows = view(done.result[0], np.dtype(np.float32)).reshape(-1, self.workers)
        self.check_rows(world, slice_.key, self.steps, ids, rows)
        updated = len(self.updated(slice_.key, slice_.index, self.steps))
        if version.rows != updated:
            world.fail(f"part {slice_.index} of {slice_.key!r} keeps {version.rows} rows, {updated} were updated")


def _parts_of(ids: Sequence[int], parts: int) -> list[int]:
    found: list[int] = parts_of(np.array(ids, np.int64), parts).tolist()
    return found


def _copied(ids: Any) -> Any:
    """The ids as bytes of their own: they are overwritten when the call has ended."""
    data = np.zeros(max(ids.nbytes, 8), np.uint8)
    data[: ids.nbytes] = ids.view(np.uint8)
    return data


def table_rounds(
    workers: int, steps: int, seed: int, *, parts: int, sync: bool, updates_fail: bool, has_copies: bool
) -> TableRounds:
    """In sync mode, every second seed trains without an optimizer; but the shell takes the copy of a round without one
    for an update, and would let it fail."""
    replaces = sync and seed % 2 == 1 and not (updates_fail and has_copies)
    return TableRounds(workers, steps, seed, parts, sync, replaces, updates_fail, mostly_together(seed))
