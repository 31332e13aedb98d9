"""How many functions of Python one operation calls: what small values cost, whatever the machine is doing besides.

The limits are what was found, and a tenth more: a change that exceeds them has made every small push slower.
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
OPERATIONS = 200
WORKERS = 2
IN_FLIGHT = 16


class Calls:
    """Counts the calls of each thread while `is_on`."""

    def __init__(self) -> None:
        self.is_on = False
        self._counts: Counter[str] = Counter()

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.is_on and event == "call":
            self._counts[threading.current_thread().name] += 1

    def per_operation(self, thread: str) -> float:
        """Of the threads whose names begin so, per operation of one of them."""
        counts = [count for name, count in self._counts.items() if name.startswith(thread)]
        return sum(counts) / len(counts) / OPERATIONS


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
        pytest.param(pushpull, 58, 138, id="1 KiB"),
        pytest.param(listed(10), 195, 250, id="a list of ten"),
        pytest.param(listed(500), 240, 440, id="a list of five hundred"),
        pytest.param(in_flight, 100, 110, id="many in flight"),
    ],
)
def test_calls_of_functions(calls: Calls, prepare: Any, by_worker: int, by_server: int) -> None:
    count_calls(calls, prepare, lanes="auto")
    assert calls.per_operation("ThreadPool") <= by_worker
    assert calls.per_operation("test-server") <= by_server


def test_the_setting_turns_lanes_off(calls: Calls) -> None:
    count_calls(calls, pushpull, lanes="off")
    assert calls.per_operation("ThreadPool") > 200


def count_calls(calls: Calls, prepare: Any, *, lanes: str) -> None:
    """Counts the calls of `OPERATIONS` operations in each of the workers."""
    together = threading.Barrier(WORKERS, timeout=60)

    def program(store: kvd.KVStore) -> None:
        operation = prepare(store)
        for _ in range(WARM_UP):
            operation()
        together.wait()
        calls.is_on = True
        for _ in range(OPERATIONS):
            operation()
        together.wait()
        calls.is_on = False

    with LocalCluster(WORKERS, 1, lanes=lanes) as cluster:
        cluster.run(program)
