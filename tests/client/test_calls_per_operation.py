"""Python function calls per operation: the cost of small values, independent of the machine's load.

Each limit is the number that was measured plus a twentieth: a change that exceeds it makes every small push slower.
Calls are counted in blocks of operations, and the cheapest block counts, because heartbeats, retries and answers that a
busy machine delivers one by one add calls of their own. Blocks are counted until one is within the limit.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch  # noqa: F401  before calls are counted: kinds of calls import it themselves

import kvd
from benchmarks.kinds_of_calls import IN_FLIGHT, KINDS, ONE_KEY, TWO_KEYS, Call, Prepare
from kvd.testing.cluster import LocalCluster

WARM_UP = 80  # several calls on each key
OPERATIONS = 16  # in a block
MOST_BLOCKS = 100  # until one is undisturbed
PATIENCE_S = 60.0
MANY = f"{IN_FLIGHT} in flight"


class Cost(NamedTuple):
    """Function calls of one operation.

    Attributes:
        worker: on average over the workers, by the threads of their programs.
        servers: for the operations of all workers.
    """

    worker: float
    servers: float


class Counts:
    """Counts of the calls that threads make while counting is on.

    A program counts its own thread, a server while the programs make operations.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.is_on = False
        self._counted = threading.local()

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        name = threading.current_thread().name
        if name.startswith("test-server"):
            if self.is_on:
                self.calls["servers"] += 1
        elif getattr(self._counted, "is_on", False):
            self.calls["workers"] += 1

    def run(self, call: Call) -> None:
        """Count one block of operations of this thread."""
        self._counted.is_on = True
        for _ in range(OPERATIONS):
            call.run()
        self._counted.is_on = False


@pytest.fixture
def counts() -> Iterator[Counts]:
    counts = Counts()
    threading.setprofile(counts.note)
    yield counts
    threading.setprofile(None)
    assert sys.getprofile() is None


def listed(keys: int) -> Prepare:
    """A list of keys in one call."""

    def prepare(store: kvd.KVStore, key: str) -> Call:
        names = [f"{keys}/{number}" for number in range(keys)]  # longer ones would need more messages
        values, outs = np.ones((keys, 256), np.float32), np.empty((keys, 256), np.float32)
        store.init(names, list(values))
        return Call(lambda: store.pushpull(names, list(values), list(outs)))

    return prepare


LISTS: dict[str, Prepare] = {"a list of ten": listed(10), "a list of five hundred": listed(500)}

ONE_WORKER = {  # nothing waits for another worker
    "NumPy": Cost(61, 126),
    "a list of ten": Cost(207, 126),
    "a list of five hundred": Cost(234, 200),
    MANY: Cost(86, 96),
}
TWO_WORKERS = {
    "NumPy": Cost(60, 156),
    "list of one": Cost(60, 156),
    "copy=False": Cost(62, 156),
    "bind": Cost(250, 156),
    "torch": Cost(292, 156),
    "handle and wait": Cost(120, 156),
    MANY: Cost(104, 130),
    "push, then pull": Cost(387, 246),
    ONE_KEY: Cost(116, 136),
    TWO_KEYS: Cost(104, 130),
}
TWO_COPIES = {"NumPy": Cost(65, 588)}  # on two servers


@pytest.mark.parametrize(
    ("workers", "copies", "limits"),
    [
        pytest.param(1, 1, ONE_WORKER, id="one worker"),
        pytest.param(2, 1, TWO_WORKERS, id="two workers"),
        pytest.param(2, 2, TWO_COPIES, id="two copies"),
    ],
)
def test_calls_of_functions(counts: Counts, workers: int, copies: int, limits: dict[str, Cost]) -> None:
    found = measure(counts, workers, copies, limits)
    assert {kind: cost for kind, cost in found.items() if not is_within(cost, limits[kind])} == {}


def is_within(cost: Cost, limit: Cost) -> bool:
    return cost.worker <= limit.worker and cost.servers <= limit.servers


def measure(counts: Counts, workers: int, copies: int, limits: dict[str, Cost], **settings: Any) -> dict[str, Cost]:
    """Return the cost of each kind of call in its cheapest blocks."""
    kinds = KINDS | LISTS
    barrier = threading.Barrier(workers, timeout=PATIENCE_S)
    found: dict[str, Cost] = {}

    def as_one(action: Callable[[], object]) -> None:
        """Let one of the programs do something while all wait."""
        if barrier.wait() == 0:
            action()
        barrier.wait()

    def begin() -> None:
        counts.calls.clear()
        counts.is_on = True

    def end(kind: str) -> None:
        counts.is_on = False
        cost = Cost(counts.calls["workers"] / OPERATIONS / workers, counts.calls["servers"] / OPERATIONS)
        found[kind] = Cost(*map(min, cost, found.get(kind, cost)))

    def program(store: kvd.KVStore) -> None:
        try:
            for kind, limit in limits.items():
                call = kinds[kind](store, kind)
                for _ in range(WARM_UP):
                    call.run()
                for _ in range(MOST_BLOCKS):
                    as_one(begin)
                    counts.run(call)
                    as_one(lambda kind=kind: end(kind))  # type: ignore[misc]
                    if is_within(found[kind], limit):
                        break
                call.finish()
        except BaseException:
            barrier.abort()
            raise

    with LocalCluster(workers, copies, replicas=copies, **settings) as cluster:
        cluster.run(program)
    return found
