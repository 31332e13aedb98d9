"""Rounds whose merged values are encoded: each pulled value is what a model makes of all rounds up to its version.

The model knows nothing of the codecs: it rounds as their rules say. What encoding has left over of a round is in the
next one, on whichever server that is merged; so a server that forgets it, or counts it twice, has other bits from then
on.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from kvd.compression import FP16, Compressor, TwoBit, name_of
from kvd.core.requests import Depart, Item, TakenForm, Transfer
from kvd.protocol.messages import Departure, MergedForm
from tests.simulator.process import Coroutine, Sleep
from tests.simulator.simulator import Me, World
from tests.simulator.workloads.coding import encoded
from tests.simulator.workloads.steps import SIZE, Floats, begin_push, begin_with, insist, item, pushpull

PLAIN_EACH = 4  # steps: then one worker pushes some keys as they are, and their values are not encoded


class CodedKey(NamedTuple):
    """A key whose pushes are compressed.

    Attributes:
        merge: of the key; "": the cluster's.
        merged: what becomes of the merged value.
        pushed, said: what the rule makes of a pushed value, and of a merged one.
        is_plain_at_times: some workers do not compress some pushes.
    """

    compressor: Compressor
    merge: str
    merged: MergedForm
    pushed: Callable[[Floats], Floats]
    said: Callable[[Floats], Floats]
    is_plain_at_times: bool = False


def _two_bit(threshold: float) -> Callable[[Floats], Floats]:
    """The rule of MXNet's 2bit."""

    def said(values: Floats) -> Floats:
        sent = np.zeros_like(values)
        sent[values >= threshold] = threshold
        sent[values <= -threshold] = -threshold
        return sent

    return said


def _half(values: Floats) -> Floats:
    return values.astype(np.float16).astype(np.float32)


def coded_keys(workers: int) -> dict[str, CodedKey]:
    """A sum of k values has k times their threshold, a mean the same."""
    small = _two_bit(0.25)
    fed_back, two_bit = MergedForm.FED_BACK, TwoBit(0.25)
    return {
        "a": CodedKey(two_bit, "sum", fed_back, small, _two_bit(0.25 * workers), is_plain_at_times=True),
        "b": CodedKey(two_bit, "mean", fed_back, small, small),
        "c": CodedKey(FP16(), "", MergedForm.ENCODED, _half, _half, is_plain_at_times=True),
        "d": CodedKey(FP16(), "", fed_back, _half, _half),
        "e": CodedKey(two_bit, "", MergedForm.PLAIN, small, lambda values: values),
    }


@dataclass
class CodedRounds:
    """Sync without an optimizer.

    Attributes:
        merge: the cluster's.
        pushpull: push and pull in one call.
    """

    workers: int
    steps: int
    merge: str = "sum"
    pushpull: bool = True
    pace_s: float = 0.25
    size: int = SIZE
    _versions: dict[str, list[tuple[Floats, Floats]]] = field(default_factory=dict)  # values, and what was left over
    keys: dict[str, CodedKey] = field(init=False)

    def __post_init__(self) -> None:
        self.keys = coded_keys(self.workers)

    # ── the model ──

    def contribution(self, key: str, rank: int, clock: int) -> Floats:
        return np.random.default_rng((ord(key), rank, clock)).normal(size=self.size).astype(np.float32)

    def is_plain(self, key: str, rank: int, clock: int) -> bool:
        return self.keys[key].is_plain_at_times and clock % PLAIN_EACH == 0 and rank == clock // PLAIN_EACH % 2

    def expected(self, key: str, clock: int) -> Floats:
        """The value after so many rounds."""
        zeros = np.zeros(self.size, np.float32)
        versions = self._versions.setdefault(key, [(zeros, zeros)])
        while len(versions) <= clock:
            versions.append(self.next_version(key, len(versions), versions[-1][1]))
        return versions[clock][0]

    def next_version(self, key: str, clock: int, left_over: Floats) -> tuple[Floats, Floats]:
        own = self.keys[key]
        ranks = range(self.workers)
        values = [self.contribution(key, rank, clock) for rank in ranks]
        given = [value if self.is_plain(key, rank, clock) else own.pushed(value) for rank, value in enumerate(values)]
        merged = given[0]
        for value in given[1:]:
            merged = merged + value
        if (own.merge or self.merge) == "mean":
            merged = merged / np.float32(self.workers)
        merged = merged + left_over
        nothing = np.zeros(self.size, np.float32)
        if own.merged is MergedForm.PLAIN or any(self.is_plain(key, rank, clock) for rank in ranks):
            return merged, nothing
        said = own.said(merged)
        return said, merged - said if own.merged is MergedForm.FED_BACK else nothing

    # ── a worker ──

    def program(self, me: Me) -> Coroutine:
        step = yield from begin_with(me, tuple(self.keys), self.make, None)
        for clock in range(step + 1, self.steps + 1):
            for key in self.keys:
                yield from self.transfer(me, key, clock)
            yield Sleep(self.pace_s)
        yield Depart(Departure.DONE)

    def make(self, key: str) -> Item:
        return self._merged(key, item(key, np.zeros(self.size, np.float32)))

    def _merged(self, key: str, made: Item) -> Item:
        assert made.spec is not None
        return made._replace(spec=replace(made.spec, merge=self.keys[key].merge))

    def transfer(self, me: Me, key: str, clock: int) -> Generator[Any, Any, None]:
        """The push and the pull of a key."""
        own, target = self.keys[key], np.full(self.size, np.nan, np.float32)
        both = self.pushpull and own.merged is not MergedForm.PLAIN
        value = self.contribution(key, me.rank, clock)
        is_plain = self.is_plain(key, me.rank, clock)
        into = target if both else None
        given = item(key, value, into) if is_plain else encoded(key, value, own.compressor, own.merged, into)
        push = Transfer((given,), push=True, pull=both, some_encoded=not is_plain)
        if both:
            versions = yield from pushpull(push, clock)
        else:
            yield from begin_push(push, clock)
            takes = TakenForm(name_of(own.compressor), lambda spec: True)
            pull = Transfer((item(key, None, target),), push=False, pull=True, takes=takes)
            versions = yield from insist(pull)
        if versions != [(clock, clock)]:
            me.world.fail(f"a pull of version {clock} of {key!r} brought {versions}")
        self.look_at(me.world, f"version {clock} of {key!r} at worker {me.rank}", key, clock, target)

    # ── what is there ──

    def look_at(self, world: World, name: str, key: str, clock: int, value: Floats) -> None:
        wrong = np.flatnonzero(value != self.expected(key, clock))
        if wrong.size:
            found, wanted = value[wrong[:4]].tolist(), self.expected(key, clock)[wrong[:4]].tolist()
            world.fail(f"{name} is {found} at {wrong[:4].tolist()}, and should be {wanted}: {wrong.size} are wrong")

    def check(self, world: World) -> None:
        for key in self.keys:
            self.look_at(world, f"key {key!r} in the end", key, self.steps, world.value(key))
