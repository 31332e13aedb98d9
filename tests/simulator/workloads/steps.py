"""What the programs of simulated workers share: arrays as items, the start of a program, and requests made again.

Programs are written as restartable ones should be: a new incarnation asks for its clocks, rewinds to the smallest, and
goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, TypeAlias

import numpy as np

from kvd.core.requests import ClockOf, Control, InitKeys, Item, JoinCluster, Request, Rewind, Transfer
from kvd.errors import KeyExists, NodeLost
from kvd.optimizer import SGD, to_wire
from kvd.protocol.messages import SetOptimizer
from kvd.protocol.specs import KeySpec
from tests.simulator.process import PendingCall, Sleep, Start
from tests.simulator.simulator import Me

Floats = np.ndarray[Any, np.dtype[np.float32]]
Keys: TypeAlias = tuple[str, ...]
Grouping: TypeAlias = Callable[[Keys, int, int], list[Keys]]

SIZE = 1100  # floats of a key: two slices of the smallest size
RETRY_S = 1.0
MAX_ATTEMPTS = 60


@cache
def spec_of(size: int) -> KeySpec:
    """The spec of a key of so many floats: the same object each time, as programs have it."""
    return KeySpec("float32", (size,), 4096)


def item(key: str, source: Floats | None = None, target: Floats | None = None) -> Item:
    """A key with the bytes of arrays."""
    given = source if source is not None else target
    assert given is not None
    return Item(
        key,
        spec_of(given.size),
        None if source is None else source.view(np.uint8),
        None if target is None else target.view(np.uint8),
    )


def begin(me: Me, keys: Sequence[str], initial: Floats, optimizer: SGD | None) -> Generator[Any, Any, int]:
    """Joins, makes the keys with this value, and finds the step to go on from."""
    return (yield from begin_with(me, keys, lambda key: item(key, initial.copy()), optimizer))


def begin_with(
    me: Me, keys: Sequence[str], make: Callable[[str], Item], optimizer: SGD | None
) -> Generator[Any, Any, int]:
    """The same with keys that `make` describes."""
    yield from enter_with(me, keys, make, optimizer)
    step = 0
    if me.machine.session.predecessor:
        clocks: list[int] = []
        for key in keys:
            clocks.append((yield from insist(ClockOf(key))))  # noqa: PERF401  no comprehension can wait
        step = min(clocks)
        yield Rewind(step)
    return step


def enter(me: Me, keys: Sequence[str], initial: Floats, optimizer: SGD | None) -> Generator[Any, Any, None]:
    """Joins, and makes the keys with this value."""
    yield from enter_with(me, keys, lambda key: item(key, initial.copy()), optimizer)


def enter_with(
    me: Me, keys: Sequence[str], make: Callable[[str], Item], optimizer: SGD | None
) -> Generator[Any, Any, None]:
    """Joins, and makes the keys that `make` describes."""
    yield JoinCluster()
    if optimizer is not None and me.rank == 0:
        yield from insist(Control((SetOptimizer(0, to_wire(optimizer)),)))
    lists = [tuple(keys)] if len(keys) > 2 else [(key,) for key in keys]
    calls = []
    for names in lists:
        request = InitKeys(tuple(make(key) for key in names))
        calls.append((yield Start(request)))
    for names, call in zip(lists, calls, strict=True):
        try:
            yield call
        except NodeLost:
            for key in names:
                with suppress(KeyExists):  # the first went through after all
                    yield from insist(InitKeys((make(key),)))


def weights_before(me: Me, keys: Sequence[str], size: int, clock: int) -> Generator[Any, Any, dict[str, Floats]]:
    """What the keys hold before step `clock`, and nothing later."""
    weights = {key: np.full(size, np.nan, np.float32) for key in keys}
    pulls = tuple(item(key, None, target) for key, target in weights.items())
    versions = yield from insist(Transfer(pulls, push=False, pull=True))
    if versions != [(clock - 1, clock - 1)] * len(keys):
        me.world.fail(f"worker {me.rank} asked for version {clock - 1} of {keys}, got {versions}")
    return weights


def insist(request: Request) -> Generator[Any, Any, Any]:
    """A request that is made again while a node is lost, as in a program whose supervisor restarts nodes."""
    for _ in range(MAX_ATTEMPTS):
        try:
            return (yield request)
        except NodeLost:
            yield Sleep(RETRY_S)
    raise AssertionError(f"{MAX_ATTEMPTS} attempts at {type(request).__name__} failed")


def begin_push(push: Transfer, clock: int, timeout_s: float | None = None) -> Generator[Any, Any, PendingCall]:
    """Starts a push, again if it is refused before it has begun: later pushes must not take its clock."""
    for _ in range(MAX_ATTEMPTS):
        call = yield Start(push, timeout_s)
        assert isinstance(call, PendingCall)
        if (yield from insist(ClockOf(push.items[0].key))) >= clock:
            return call
        yield Sleep(RETRY_S)
    raise AssertionError(f"a push of {push.items[0].key!r} does not begin: {call.error}")


def pushpull(transfer: Transfer, clock: int) -> Generator[Any, Any, Any]:
    """A pushpull. If a node is lost before it begins, it is made again; later its push counts, and is pulled."""
    reached = clock - 1
    while reached == clock - 1:
        try:
            return (yield transfer)
        except NodeLost:
            yield Sleep(RETRY_S)
            reached = yield from insist(ClockOf(transfer.items[0].key))
    pulls = tuple(entry._replace(source=None) for entry in transfer.items)
    return (yield from insist(Transfer(pulls, push=False, pull=True)))


# ── the keys of a step, as they go into one call each, by rank and clock ──────────────────────────────────────────────


def one_by_one(keys: Keys, rank: int, clock: int) -> list[Keys]:
    """A call for each key."""
    return [(key,) for key in keys]


def all_together(keys: Keys, rank: int, clock: int) -> list[Keys]:
    """One call for all keys."""
    return [keys]


def mostly_together(seed: int) -> Grouping:
    """Mostly one call for all keys; at times in reverse order, in two calls, or one by one.

    Not all workers do so in the same step.
    """

    def group(keys: Keys, rank: int, clock: int) -> list[Keys]:
        whim = (7 * clock + 3 * rank + seed) % 11
        if whim == 0:
            return one_by_one(keys, rank, clock)
        if whim == 1:
            return [tuple(reversed(keys))]
        if whim == 2:
            return [keys[:2], keys[2:]]
        return [keys]

    return group


MANY_KEYS: Keys = tuple("abcdefghijkl")
