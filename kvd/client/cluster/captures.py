"""Has the servers keep all keys as they were at one moment, while training goes on: which moment, and until when.

In rounds that is a step, the same for all keys. It lies ahead of the step that training has reached, farther each time
that some slice has passed it before it was asked. If nobody gets on, it is the step that there is; and if that is not
complete either, as in the values that a failed run has left, each slice is kept as it is. In asynchronous training the
workers share no steps: each key has one version.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from kvd.client.calls.deadline import Deadline
from kvd.client.calls.promise import Promise, ends_within
from kvd.client.cluster.engine import Engine
from kvd.core import requests
from kvd.core.cuts import FARTHEST_AHEAD, Available, available
from kvd.core.requests import CapturedPart, Item
from kvd.errors import RequestTimeout
from kvd.protocol.messages import Captured, CaptureDone, CapturedSlice, CaptureWhen, SliceId

LOOK_S = 0.1  # between two looks whether training gets on
PATIENCE_S = 1.0  # that training may take for a step


class Whole(NamedTuple):
    """All keys at one moment, as the servers keep them.

    Attributes:
        number: of the capture.
        is_one_step: whether all keys are of the same step of the training.
    """

    number: int
    parts: list[CapturedPart]
    is_one_step: bool

    def slices(self) -> list[tuple[CapturedPart, SliceId, CapturedSlice]]:
        """Each slice, and the answer that it was in."""
        return [
            (part, slice_id, found)
            for part in self.parts
            if isinstance(part.answer, Captured)
            for slice_id, found in zip(part.slice_ids, part.answer.kept, strict=True)
        ]


class Captures:
    """The captures of an operator, one at a time. For coroutines on the engine's loop, see `Engine.run`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._numbers = count(1)

    async def take(self, items: tuple[Item, ...], deadline: Deadline) -> Whole:
        """Has these keys kept, until `end`.

        Raises:
            RequestTimeout: no moment was found before the deadline.
            KeyNotFound: a key was deleted meanwhile.
        """
        if self._engine.machine.view.is_sync:
            return await self._of_a_step(items, deadline)
        return await self._of_versions(items, deadline)

    async def end(self, number: int, deadline: Deadline) -> None:
        """Nothing of the capture is needed any more."""
        leads = tuple(self._engine.machine.view.leads().values())
        await self._engine.call(requests.Control((CaptureDone(0, number),), partitions=leads), deadline.left_s())

    # ── in rounds ──

    async def _of_a_step(self, items: tuple[Item, ...], deadline: Deadline) -> Whole:
        ahead, still = 1, 0
        while True:
            there = await self._available(items, deadline)
            step, when = _moment(there, ahead, still)
            number = next(self._numbers)
            parts, was_late = await self._try(items, number, step, when, deadline)
            if parts is not None:
                whole = Whole(number, parts, is_one_step=True)
                if when is CaptureWhen.AS_IT_IS:
                    return whole._replace(is_one_step=len({found.step for *_, found in whole.slices()}) == 1)
                return whole
            if deadline.left_s() == 0:
                raise RequestTimeout("training went on too fast, or too slowly, for a snapshot of it: try again")
            ahead, still = (min(2 * ahead, FARTHEST_AHEAD), 0) if was_late else (1, still + 1)

    async def _available(self, items: tuple[Item, ...], deadline: Deadline) -> Available:
        surveys = await self._engine.call(requests.Survey(items), deadline.left_s())
        return available(surveys, one_key=len(items) == 1)

    async def _try(
        self, items: tuple[Item, ...], number: int, step: int, when: CaptureWhen, deadline: Deadline
    ) -> tuple[list[CapturedPart] | None, bool]:
        """What is kept at this moment, None if a slice is not; and whether that was because it came too late."""
        asked = self._engine.submit(requests.Capture(items, number, step, when), deadline.left_s())
        newest, since, is_stopped = -1, time.monotonic(), False
        while not await ends_within(asked, LOOK_S):
            there = await self._available(items, deadline)
            if there.highest > newest:
                newest, since = there.highest, time.monotonic()
            if len(items) > 1 and there.is_over and there.newest >= step and when is CaptureWhen.BEFORE_NEXT:
                when = CaptureWhen.OVER  # keys that are not pushed any more wait for no round
                late, asked = asked, self._engine.submit(requests.Capture(items, number, step, when), deadline.left_s())
                await late
            elif time.monotonic() - since > PATIENCE_S and not is_stopped:
                is_stopped = True
                await self.end(number, deadline)
        parts: list[CapturedPart] = await asked
        if all(isinstance(part.answer, Captured) for part in parts):
            return parts, False
        if not is_stopped:
            await self.end(number, deadline)
        return None, not is_stopped

    # ── asynchronous ──

    async def _of_versions(self, items: tuple[Item, ...], deadline: Deadline) -> Whole:
        """Keys whose slices are of different versions are waited for: until each slice has made as many updates."""
        number, ahead, since = next(self._numbers), 0, time.monotonic()
        asked = requests.Capture(items, number, 0, CaptureWhen.AS_IT_IS)
        whole = Whole(number, await self._engine.call(asked, deadline.left_s()), is_one_step=False)
        while True:
            mixed = _mixed(whole)
            if not mixed or time.monotonic() - since > PATIENCE_S:
                return whole
            waiting = []
            for version in sorted(set(mixed.values())):
                some = tuple([item for item in items if mixed.get(item.key) == version])
                capture = requests.Capture(some, number, version + ahead, CaptureWhen.COMPLETE)
                waiting.append(self._engine.submit(capture, deadline.left_s()))
            await asyncio.gather(*[ends_within(promise, PATIENCE_S) for promise in waiting])
            again = requests.Capture(
                tuple([item for item in items if item.key in mixed]), number, 0, CaptureWhen.AS_IT_IS
            )
            parts = await self._given(waiting, again, deadline)
            ahead = min(2 * ahead or 1, FARTHEST_AHEAD)
            whole = whole._replace(parts=_replaced(whole, parts, set(mixed)))

    async def _given(
        self, waiting: Sequence[Promise], again: requests.Capture, deadline: Deadline
    ) -> list[CapturedPart]:
        """What was kept at the versions that were asked for; or, if one is missing, all as it is."""
        if all(promise.done() for promise in waiting):
            found: list[CapturedPart] = [part for promise in waiting for part in promise.result()]
            if all(isinstance(part.answer, Captured) for part in found):
                return found
        parts: list[CapturedPart] = await self._engine.call(
            again, deadline.left_s()
        )  # the servers give up those that wait
        for promise in waiting:
            await promise
        return parts


def _moment(there: Available, ahead: int, still: int) -> tuple[int, CaptureWhen]:
    """Which step is tried next.

    Args:
        ahead: how far it lies ahead of those that have passed.
        still: how often nothing has happened in the time that a step may take.
    """
    if there.is_over and there.newest == there.highest:
        return there.highest, CaptureWhen.OVER  # all workers have left
    if still == 0:
        return there.highest + ahead, CaptureWhen.BEFORE_NEXT
    return there.highest, CaptureWhen.COMPLETE if still == 1 else CaptureWhen.AS_IT_IS


def _mixed(whole: Whole) -> dict[str, int]:
    """The keys whose slices have different versions, and the largest of each."""
    versions: dict[str, set[int]] = {}
    for _, slice_id, found in whole.slices():
        versions.setdefault(slice_id.key, set()).add(found.version)
    return {key: max(found) for key, found in versions.items() if len(found) > 1}


def _replaced(whole: Whole, parts: Sequence[CapturedPart], keys: set[str]) -> list[CapturedPart]:
    """The parts, with new ones for some keys."""
    kept = []
    for part in whole.parts:
        if isinstance(part.answer, Captured):
            places = [place for place, slice_id in enumerate(part.slice_ids) if slice_id.key not in keys]
            answer = Captured(
                0,
                part.answer.slots,
                part.answer.optimizers,
                tuple([part.answer.kept[place] for place in places]),
                part.answer.reached,
            )
            if places:
                ids = tuple([part.slice_ids[place] for place in places])
                kept.append(part._replace(slice_ids=ids, answer=answer))
    return [*kept, *parts]
