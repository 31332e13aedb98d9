"""Operators who take snapshots beside a training: whatever happens, all keys of one are as they were after one step."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any, NamedTuple

import numpy as np

from kvd.core.cuts import FARTHEST_AHEAD, available
from kvd.core.requests import Capture, CapturedPart, Control, Item, JoinCluster, Survey
from kvd.errors import KvdError
from kvd.protocol.messages import Captured, CaptureDone, CaptureWhen, FetchCaptured, SliceId, Values
from kvd.protocol.specs import KeySpec, padded
from kvd.tables.stored_rows import page_of
from kvd.tables.wire import table_of_spec
from tests.simulator.process import Coroutine, Sleep, Start
from tests.simulator.simulator import Me, World
from tests.simulator.workloads.readings import have_ended
from tests.simulator.workloads.rounds import Rounds
from tests.simulator.workloads.steps import MANY_KEYS, Keys, insist, item, mostly_together
from tests.simulator.workloads.tables import KEYS, TableRounds, table_rounds

PAUSE_S = 0.2
PATIENCE_S = 4.0  # for one capture


class Kept(NamedTuple):
    """One snapshot.

    Attributes:
        slices: the bytes of each slice; those of a part of a table are its rows (`kvd.tables.stored_rows`).
    """

    step: int
    keys: Keys
    slices: dict[SliceId, bytes]


@dataclass
class Operators:
    """A program that captures all keys again and again, until all workers have ended. When it comes too late, or a node
    is lost, it has no snapshot; what it has is right. Another one stays away: servers keep one capture at a time.

    Attributes:
        specs: of the keys, by name.
        seed: draws how far ahead the step lies that is captured.
    """

    specs: Mapping[str, KeySpec]
    seed: int
    kept: list[Kept] = field(default_factory=list)

    def program(self, me: Me) -> Coroutine:
        random, numbers = Random(self.seed * 19 + me.number), count(1)
        yield JoinCluster()
        while not me.machine.view.is_up_to_date:
            yield Sleep(PAUSE_S)
        while not (have_ended(me.world) or me.number):
            number = next(numbers)
            with suppress(KvdError):  # a node was lost, or the keys are not there yet
                yield from self._capture(number, random)
            yield Start(Control((CaptureDone(0, number),), partitions=self._leads(me)))
            yield Sleep(random.uniform(0.0, PAUSE_S))

    def _leads(self, me: Me) -> tuple[int, ...]:
        return tuple(me.machine.view.leads().values())

    def _capture(self, number: int, random: Random) -> Generator[Any, Any, None]:
        items = tuple(Item(key, spec) for key, spec in self.specs.items())
        there = available((yield from insist(Survey(items))), one_key=False)
        step = there.highest + random.randint(0, min(2, FARTHEST_AHEAD))
        call = yield Start(Capture(items, number, step, CaptureWhen.BEFORE_NEXT))
        waited_s = 0.0
        while not call.done and waited_s < PATIENCE_S:
            yield Sleep(PAUSE_S)
            waited_s += PAUSE_S
        if not call.done:
            return
        parts: list[CapturedPart] = yield call
        if all(isinstance(part.answer, Captured) for part in parts):
            slices = yield from self._fetch(number, parts)
            if slices is not None:
                self.kept.append(Kept(step, tuple(self.specs), slices))

    def _fetch(self, number: int, parts: list[CapturedPart]) -> Generator[Any, Any, dict[SliceId, bytes] | None]:
        found: dict[SliceId, bytes] = {}
        for part in parts:
            values = tuple([each for each in part.slice_ids if self.specs[each.key].table is None])
            rows = [(each,) for each in part.slice_ids if self.specs[each.key].table is not None]
            for some in [values, *rows] if values else rows:
                control = Control((FetchCaptured(0, number, some),), partitions=(part.partition,))
                ((answer, payload, nbytes),) = yield control
                if not isinstance(answer, Values):
                    return None
                offset = 0
                for slice_id in some:
                    own = self.specs[slice_id.key].slice_nbytes(slice_id.slice_index) if some is values else nbytes
                    found[slice_id] = bytes(memoryview(payload)[offset : offset + own])
                    offset += padded(own)
        return found


@dataclass
class CapturedRounds:
    """Rounds, whose values are known for each clock, and operators who capture them."""

    rounds: Rounds
    operators: Operators

    def program(self, me: Me) -> Coroutine:
        return self.rounds.program(me)

    def reader(self, me: Me) -> Coroutine:
        return self.operators.program(me)

    def check(self, world: World) -> None:
        self.rounds.check(world)
        for step, keys, slices in self.operators.kept:
            if {slice_id.key for slice_id in slices} != set(keys):
                world.fail(f"a snapshot of step {step} lacks slices: it has {sorted(slices)}")
            for slice_id, value in slices.items():
                start, nbytes = self.operators.specs[slice_id.key].span(slice_id.slice_index)
                if value != self.expected(slice_id.key, step)[start : start + nbytes]:
                    world.fail(
                        f"a snapshot of step {step} has other bits of slice {slice_id.slice_index} of {slice_id.key!r}"
                    )

    def expected(self, key: str, step: int) -> bytes:
        """The value of a key after so many rounds."""
        return self.rounds.expected(key, step) if step else np.zeros(self.rounds.size, np.float32).tobytes()


def captured_rounds(workers: int, steps: int, seed: int) -> CapturedRounds:
    """Every key is pushed in every step, mostly in one call."""
    rounds = Rounds(workers, steps, MANY_KEYS[:4], mostly_together(seed), pushpull=seed % 2 == 0)
    spec = item("", np.zeros(rounds.size, np.float32)).spec
    assert spec is not None
    return CapturedRounds(rounds, Operators(dict.fromkeys(rounds.keys, spec), seed))


@dataclass
class CapturedTables:
    """Rounds of tables and another key, and operators who capture all of them."""

    rounds: TableRounds
    operators: Operators

    def program(self, me: Me) -> Coroutine:
        return self.rounds.program(me)

    def reader(self, me: Me) -> Coroutine:
        return self.operators.program(me)

    def check(self, world: World) -> None:
        self.rounds.check(world)
        for step, keys, slices in self.operators.kept:
            expected = {(key, index) for key in keys for index in range(self.operators.specs[key].num_slices)}
            if {slice_id[:2] for slice_id in slices} != expected:
                world.fail(f"a snapshot of step {step} lacks slices: it has {sorted(slices)}")
            for slice_id, data in slices.items():
                if slice_id.key in self.rounds.models:
                    self._check_rows(world, step, slice_id, np.frombuffer(data, np.uint8))
                elif not (np.frombuffer(data, np.float32) == self.rounds.value_after(step)).all():
                    world.fail(f"a snapshot of step {step} has other bits of {slice_id.key!r}")

    def _check_rows(self, world: World, step: int, slice_id: SliceId, data: np.ndarray[Any, Any]) -> None:
        """The rows of a part are all that were updated by then, and as they were."""
        key, spec = slice_id.key, self.operators.specs[slice_id.key]
        page = page_of(data, table_of_spec(spec), key)
        ids = page.stored.ids.tolist()
        if set(ids) != self.rounds.updated(key, slice_id.slice_index, step) or page.rows_after:
            world.fail(f"a snapshot of step {step} has {len(ids)} rows of part {slice_id.slice_index} of {key!r}")
        self.rounds.check_rows(world, key, step, ids, page.stored.rows)


def captured_tables(workers: int, steps: int, seed: int, *, parts: int) -> CapturedTables:
    """Every second seed trains without an optimizer."""
    rounds = table_rounds(workers, steps, seed, parts=parts, sync=True, updates_fail=False, has_copies=True)
    specs = {key: rounds.first(key).spec for key in KEYS}
    return CapturedTables(rounds, Operators({key: spec for key, spec in specs.items() if spec is not None}, seed))
