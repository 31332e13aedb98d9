"""Operators who take snapshots beside a training: whatever happens, all keys of one are as they were after one step."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any, NamedTuple

import numpy as np

from kvd.core.cuts import FARTHEST_AHEAD, available
from kvd.core.requests import Capture, CapturedPart, Control, JoinCluster, Survey
from kvd.errors import KvdError
from kvd.protocol.messages import Captured, CaptureDone, CaptureWhen, FetchCaptured, SliceId, Values
from kvd.protocol.specs import padded
from kvd.testing.process import Coroutine, Sleep, Start
from kvd.testing.simulator import Me, World
from kvd.testing.workloads.readings import have_ended
from kvd.testing.workloads.rounds import Rounds
from kvd.testing.workloads.steps import MANY_KEYS, Keys, insist, item, mostly_together

PAUSE_S = 0.2
PATIENCE_S = 4.0  # for one capture


class Kept(NamedTuple):
    """One snapshot.

    Attributes:
        slices: the bytes of each slice.
    """

    step: int
    keys: Keys
    slices: dict[SliceId, bytes]


@dataclass
class Operators:
    """A program that captures all keys again and again, until all workers have ended. When it comes too late, or a node
    is lost, it has no snapshot; what it has is right. Another one stays away: servers keep one capture at a time.

    Attributes:
        size: how many floats a key has.
        seed: draws how far ahead the step lies that is captured.
    """

    keys: Keys
    size: int
    seed: int
    slice_bytes: int = 4096
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
        items = tuple(item(key, None, np.empty(self.size, np.float32)) for key in self.keys)
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
                self.kept.append(Kept(step, self.keys, slices))

    def _fetch(self, number: int, parts: list[CapturedPart]) -> Generator[Any, Any, dict[SliceId, bytes] | None]:
        found: dict[SliceId, bytes] = {}
        for part in parts:
            control = Control((FetchCaptured(0, number, part.slice_ids),), partitions=(part.partition,))
            ((answer, payload, _),) = yield control
            if not isinstance(answer, Values):
                return None
            offset = 0
            for slice_id in part.slice_ids:
                start, stop = self.place(slice_id)
                found[slice_id] = bytes(memoryview(payload)[offset : offset + stop - start])
                offset += padded(stop - start)
        return found

    def place(self, slice_id: SliceId) -> tuple[int, int]:
        """Where a slice begins and ends in the bytes of its key."""
        start = slice_id.slice_index * self.slice_bytes
        return start, min(start + self.slice_bytes, 4 * self.size)


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
                start, stop = self.operators.place(slice_id)
                if value != self.expected(slice_id.key, step)[start:stop]:
                    world.fail(
                        f"a snapshot of step {step} has other bits of slice {slice_id.slice_index} of {slice_id.key!r}"
                    )

    def expected(self, key: str, step: int) -> bytes:
        """The value of a key after so many rounds."""
        return self.rounds.expected(key, step) if step else np.zeros(self.rounds.size, np.float32).tobytes()


def captured_rounds(workers: int, steps: int, seed: int) -> CapturedRounds:
    """Every key is pushed in every step, mostly in one call."""
    rounds = Rounds(workers, steps, MANY_KEYS[:4], mostly_together(seed), pushpull=seed % 2 == 0)
    return CapturedRounds(rounds, Operators(rounds.keys, rounds.size, seed))
