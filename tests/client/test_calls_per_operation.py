"""Python function calls per operation: the cost of small values, independent of the machine's load.

Each limit is the measured number plus a twentieth: a change that exceeds it makes every small push slower. Calls are
counted in blocks of operations, and the cheapest block counts, because heartbeats, retries and answers that a busy
machine delivers one by one add calls of their own. With a single worker no push waits for another one to arrive.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import count
from types import FrameType
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.testing.cluster import LocalCluster

WARM_UP = 80  # several calls on each key
OPERATIONS = 32  # in a block
MOST_BLOCKS = 100  # until one is undisturbed
IN_FLIGHT = 16


class Calls:
    """Counts the calls of each thread in one block after another."""

    def __init__(self) -> None:
        self._blocks: list[Counter[str]] = []
        self._is_on = False

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._is_on and event == "call":
            self._blocks[-1][threading.current_thread().name] += 1

    def count(self, operation: Callable[[], object]) -> None:
        """Count one block of operations."""
        self._blocks.append(Counter())
        self._is_on = True
        for _ in range(OPERATIONS):
            operation()
        self._is_on = False

    def per_operation(self, thread: str) -> float:
        """Return the calls per operation in the cheapest block, of the threads with this prefix."""
        return min(
            sum(calls for name, calls in block.items() if name.startswith(thread)) / OPERATIONS
            for block in self._blocks
        )


@pytest.fixture
def calls() -> Iterator[Calls]:
    calls = Calls()
    threading.setprofile(calls.note)
    yield calls
    threading.setprofile(None)
    assert sys.getprofile() is None


def pushpull(store: kvd.KVStore) -> Callable[[], object]:
    value, out = np.ones(256, np.float32), np.empty(256, np.float32)
    store.init("w", value)
    return lambda: store.pushpull("w", value, out)


def in_flight(store: kvd.KVStore) -> Callable[[], object]:
    """One call of as many as are always in flight: the oldest ends, and another begins."""
    names = [str(number) for number in range(IN_FLIGHT)]
    values, outs = np.ones((IN_FLIGHT, 256), np.float32), list(np.empty((IN_FLIGHT, 256), np.float32))
    store.init(names, list(values))
    flying: deque[kvd.Handle] = deque()
    begun = count(0)

    def operation() -> None:
        if len(flying) == IN_FLIGHT:
            flying.popleft().wait()
        place = next(begun) % IN_FLIGHT
        flying.append(store.pushpull_async(names[place], values[place], outs[place]))

    return operation


def listed(keys: int) -> Callable[[kvd.KVStore], Callable[[], object]]:
    def prepare(store: kvd.KVStore) -> Callable[[], object]:
        names = [str(number) for number in range(keys)]
        values, outs = np.ones((keys, 256), np.float32), np.empty((keys, 256), np.float32)
        store.init(names, list(values))
        return lambda: store.pushpull(names, list(values), list(outs))

    return prepare


@pytest.mark.parametrize(
    ("prepare", "by_worker", "by_server"),
    [
        pytest.param(pushpull, 59, 102, id="1 KiB"),
        pytest.param(listed(10), 202, 103, id="a list of ten"),
        pytest.param(listed(500), 230, 214, id="a list of five hundred"),
        pytest.param(in_flight, 83, 76, id="many in flight"),
    ],
)
def test_calls_of_functions(calls: Calls, prepare: Any, by_worker: int, by_server: int) -> None:
    count_calls(calls, prepare, lanes="auto", by_worker=by_worker, by_server=by_server)
    assert calls.per_operation("ThreadPool") <= by_worker
    assert calls.per_operation("test-server") <= by_server


def test_the_setting_turns_lanes_off(calls: Calls) -> None:
    count_calls(calls, pushpull, lanes="off", by_worker=300, by_server=300)
    assert calls.per_operation("ThreadPool") > 200


def count_calls(calls: Calls, prepare: Any, *, lanes: str, by_worker: int, by_server: int) -> None:
    """Count blocks until the cheapest ones are within the limits, at most `MOST_BLOCKS`."""

    def program(store: kvd.KVStore) -> None:
        operation = prepare(store)
        for _ in range(WARM_UP):
            operation()
        for _ in range(MOST_BLOCKS):
            calls.count(operation)
            if calls.per_operation("ThreadPool") <= by_worker and calls.per_operation("test-server") <= by_server:
                break

    with LocalCluster(1, 1, lanes=lanes) as cluster:
        cluster.run(program)
