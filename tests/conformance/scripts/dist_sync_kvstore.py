"""Synchronous training keys in a cluster: what MXNet's nightly program of this name checks, after its documentation."""

from __future__ import annotations

import sys

import numpy as np

import kvd as mx

KIND = sys.argv[1] if len(sys.argv) > 1 else "dist_sync"
RATE = 2
REPEATS, DEVICES = 3, 3
SMALL, BIG, IRREGULAR = (2, 3), (1200, 1200), (1211, 1211)  # values of one slice, of several, and of uneven ones
KEYS = {"float32": ["3", "5", "7"], "float16": ["4", "6", "8"]}
BIG_KEYS = {"float32": ["99"], "float16": ["100"]}
NUMBERS = [11, 12]  # whole numbers as keys

kv = mx.create(KIND)
rank, workers = kv.rank, kv.num_workers
half_sum = workers * (workers + 1) / 2  # of rank + 1 over the workers


def check(array: np.ndarray, number: float) -> None:
    """Every element is this number."""
    assert np.all(np.asarray(array) == number), (rank, array.ravel()[:4], number)


def init_keys() -> None:
    for dtype in KEYS:
        kv.init(KEYS[dtype], [np.ones(SMALL, dtype)] * len(KEYS[dtype]))
        kv.init(BIG_KEYS[dtype], [np.ones(BIG, dtype)] * len(BIG_KEYS[dtype]))
    kv.init(NUMBERS, [np.ones(IRREGULAR, np.float32)] * len(NUMBERS))


def test_the_value_of_rank_0_counts() -> None:
    names = [f"init {number}" for number in range(20)]
    kv.init(names, [np.full(SMALL if number % 2 else BIG, rank + 10.0, np.float32) for number in range(20)])
    for number, name in enumerate(names):
        value = np.zeros(SMALL if number % 2 else BIG, np.float32)
        kv.pull(name, out=value)
        check(value, 10)


def test_no_value_before_a_push() -> None:
    for dtype in KEYS:
        for key, shape in [(KEYS[dtype][0], SMALL), (BIG_KEYS[dtype][0], BIG)]:
            value = np.zeros(shape, dtype)
            kv.pull(key, out=value)
            check(value, 1)


def test_default_keys(dtype: str) -> None:
    """The optimizer adds RATE times the sum of what the workers push."""
    key, big = KEYS[dtype][0], BIG_KEYS[dtype][0]
    for step in range(1, REPEATS + 1):
        for name, shape in ((key, SMALL), (big, BIG)):
            kv.push(name, -np.ones(shape, dtype) * (rank + 1))
        expected = half_sum * RATE * step + 1
        for name, shape in ((key, SMALL), (big, BIG)):
            value = np.zeros(shape, dtype)
            kv.pull(name, out=value)
            check(value, expected)


def test_lists_of_keys_with_priorities() -> None:
    names = KEYS["float32"][1:]
    outs = [np.zeros(SMALL, np.float32) for _ in names]
    for step in range(1, REPEATS + 1):
        kv.push(names, [-np.ones(SMALL, np.float32) * (rank + 1)] * len(names), priority=-step)
        kv.pull(names, out=outs, priority=-step)
        for value in outs:
            check(value, half_sum * RATE * step + 1)


def test_several_devices_per_worker() -> None:
    key = NUMBERS[0]
    kv.push(key, [-np.ones(IRREGULAR, np.float32) * (device + 1) for device in range(DEVICES)])
    outs = [np.zeros(IRREGULAR, np.float32) for _ in range(DEVICES)]
    kv.pull(key, out=outs)
    for value in outs:
        check(value, workers * RATE * DEVICES * (DEVICES + 1) / 2 + 1)


def test_push_and_pull_in_one() -> None:
    key, value, out = NUMBERS[1], np.empty(IRREGULAR, np.float32), np.zeros(IRREGULAR, np.float32)
    for step in range(1, REPEATS + 1):
        value[...] = -(rank + 1)
        kv.pushpull(key, value, out=out)
        check(out, half_sum * RATE * step + 1)
        check(value, -(rank + 1))
    kv.pushpull(key, value)
    check(value, half_sum * RATE * (REPEATS + 1) + 1)


def test_a_gradient_that_was_pulled_does_not_change_with_the_store() -> None:
    pulled = kv.pull("float key")
    before = pulled.copy()
    kv.push("float key", np.ones(SMALL, np.float32)).wait()
    assert np.array_equal(pulled, before)


def test_wrong_calls() -> None:
    for call in (
        lambda: kv.pull("nobody made this key"),
        lambda: kv.push("3", np.ones((9, 9), np.float32)).wait(),
        lambda: kv.push("3", np.ones(SMALL, np.float64)).wait(),
        lambda: kv.pull(["3", "5"], out=[np.zeros(SMALL, np.float32)]),
    ):
        try:
            call()
        except mx.KvdError:
            continue
        raise AssertionError("a wrong call went through")


if __name__ == "__main__":
    test_the_value_of_rank_0_counts()
    init_keys()
    kv.init("float key", np.zeros(SMALL, np.float32))
    kv.set_optimizer(mx.optimizer.SGD(RATE))
    test_no_value_before_a_push()
    for dtype in KEYS:
        test_default_keys(dtype)
    test_lists_of_keys_with_priorities()
    test_several_devices_per_worker()
    test_push_and_pull_in_one()
    test_a_gradient_that_was_pulled_does_not_change_with_the_store()
    test_wrong_calls()
    kv.barrier()
    print(f"worker {rank} of {workers} is done", flush=True)
    kv.close()
