"""Calls leave no reference cycles: arrays are freed at once, and not when the garbage collector finds them."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import kvd
from kvd.testing.cluster import PATHS, LocalCluster, PathName

CALLS = 50


@contextmanager
def garbage(found: Counter[str]) -> Iterator[None]:
    """Counts by type what only the garbage collector frees."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield
        gc.collect()
        found.update(type(each).__name__ for each in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def pushpull(kv: kvd.KVStore) -> None:
    kv.pushpull("w", np.ones(300_000, np.float32))


def pushpull_async(kv: kvd.KVStore) -> None:
    kv.pushpull_async("w", np.ones(300_000, np.float32)).wait()


def push_and_pull(kv: kvd.KVStore) -> None:
    kv.push("w", np.ones(300_000, np.float32)).wait()
    kv.pull("w")


@pytest.mark.parametrize("path", PATHS)
def test_calls_leave_nothing_to_the_garbage_collector(path: PathName) -> None:
    with LocalCluster(processes=True, path=path) as cluster, cluster.store() as kv:
        kv.init("w", np.zeros(300_000, np.float32))
        for call in (pushpull, pushpull_async, push_and_pull):
            found: Counter[str] = Counter()
            call(kv)
            with garbage(found):
                for _ in range(CALLS):
                    call(kv)
            assert max(found.values(), default=0) < CALLS // 10, (call.__name__, found)
