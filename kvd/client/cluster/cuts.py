"""Reads several keys of one step while training goes on: `kvd.core.cuts` chooses the step."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import count

from kvd.client.calls.deadline import Deadline
from kvd.client.calls.promise import ends_within
from kvd.client.cluster.engine import Engine
from kvd.core import requests
from kvd.core.cuts import Available, Choice, Chooser, available
from kvd.core.requests import Item
from kvd.errors import RequestTimeout, VersionUnavailable

FIRST_LOOK_S = 0.005  # between two looks at the newest step
LONGEST_LOOK_S = 0.1


class Cuts:
    """The reads of an observer of a cluster that trains in rounds. For coroutines on the engine's loop, see
    `Engine.run`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._numbers = count(1)
        self._one_at_a_time = asyncio.Lock()  # the servers forget a read when the next one begins

    # ── which steps there are ──

    async def available(self, items: tuple[Item, ...], deadline: Deadline) -> Available:
        """What can be read of these keys; none: of all."""
        surveys = await self._engine.call(requests.Survey(items), deadline.left_s())
        return available(surveys, one_key=len(items) == 1)

    async def wait_for(self, step: int, deadline: Deadline, timeout_s: float) -> int:
        """Waits until this step is complete on all keys. Returns the newest one that is."""
        pause_s = FIRST_LOOK_S
        while True:
            there = await self.available((), Deadline(self._engine.config.request_timeout_s))
            if there.newest >= step:
                return there.newest
            if deadline.left_s() == 0:
                text = f"the store is at version {there.newest} after {timeout_s:g} s, not at {step} yet"
                raise RequestTimeout(f"{text}: wait longer, or see kvd status for whom training waits")
            await asyncio.sleep(min(pause_s, deadline.left_s()))
            pause_s = min(2 * pause_s, LONGEST_LOOK_S)

    # ── values ──

    async def read_newest(self, items: tuple[Item, ...], deadline: Deadline) -> tuple[int, Sequence[requests.Versions]]:
        """Fills the targets of the items. Returns the step, and the versions of the items."""
        chooser = Chooser()
        async with self._one_at_a_time:
            while True:
                choice = chooser.choose(await self.available(items, deadline))
                versions, has_waited = await self._read(items, choice, deadline)
                if versions is not None and all(version.oldest == version.newest for version in versions):
                    return choice.step, versions
                if versions is not None:
                    continue  # slices of a key that is pushed several times in a step
                if has_waited:
                    chooser.has_waited()
                else:
                    chooser.was_too_late()

    async def read_step(self, items: tuple[Item, ...], step: int, deadline: Deadline) -> Sequence[requests.Versions]:
        """Fills the targets of the items with exactly this step. Returns the versions of the items.

        Raises:
            VersionUnavailable: it is not complete yet, or not kept any more.
        """
        async with self._one_at_a_time:
            there = await self.available(items, deadline)
            if there.oldest <= step <= there.newest:
                is_over = step < there.newest or there.is_over
                versions, _ = await self._read(items, Choice(step, is_over, None), deadline)
                if versions is not None:
                    return versions
                there = await self.available(items, deadline)
        raise _unavailable(step, there)

    async def _read(
        self, items: tuple[Item, ...], choice: Choice, deadline: Deadline
    ) -> tuple[Sequence[requests.Versions] | None, bool]:
        """The versions that were read, None if the step is not there; and whether it was waited for in vain."""
        number = next(self._numbers)
        read = requests.Read(items, number, choice.step, choice.is_over)
        reading = self._engine.submit(read, deadline.left_s())
        has_waited = False
        while choice.patience_s is not None and not has_waited and not await ends_within(reading, choice.patience_s):
            has_waited = await self._engine.call(requests.StopReading(number), deadline.left_s())
        return await reading, has_waited


def _unavailable(step: int, there: Available) -> VersionUnavailable:
    oldest, newest = min(there.oldest, there.newest), there.newest
    what = "is not complete yet" if step > newest else "is not kept any more"
    hint = "wait_for waits for it" if step > newest else "pull without version reads the newest"
    text = f"version {step} {what}: the servers have versions {oldest} to {newest} of these keys; {hint}"
    return VersionUnavailable(text, version=step, oldest=oldest, newest=newest)
