"""Broadcast and pushpull, all that a custom store needs.

What MXNet's programs for custom stores and for its BytePS store check, after their documentation. The argument is the
name of the store; ``teststore`` is registered here.
"""

from __future__ import annotations

import sys

import numpy as np

import kvd as mx

SMALL, BIG = (2, 3), (1200, 1200)
KIND = sys.argv[1]


@mx.KVStoreBase.register
class TestStore(mx.KVStoreBase):
    """A store of one worker, which adds what its devices have."""

    def broadcast(self, key, value, out, priority=0):
        for target in out if isinstance(out, list) else [out]:
            target[...] = value

    def pushpull(self, key, value, out=None, priority=0):
        values = value if isinstance(value, list) else [value]
        total = sum(values[1:], values[0].copy())
        targets = values if out is None else out if isinstance(out, list) else [out]
        for target in targets:
            target[...] = total

    @staticmethod
    def is_capable(capability):
        return False

    type, rank, num_workers = "teststore", 0, 1


kv = mx.create(KIND)
rank, workers = kv.rank, kv.num_workers


def check(array, number) -> None:
    assert np.all(array == number), (rank, array.ravel()[:4], number)


def test_broadcast_of_one_key() -> None:
    for key, shape in [(f"small {number}", SMALL) for number in range(8)] + [("big", BIG), (7, SMALL)]:
        out = np.zeros(shape, np.float32)
        kv.broadcast(key, np.full(shape, rank + 3.0, np.float32), out=out)
        check(out, 3)


def test_broadcast_to_several_devices() -> None:
    outs = [np.zeros(SMALL, np.float32) for _ in range(3)]
    kv.broadcast("devices", np.full(SMALL, rank + 4.0, np.float32), out=outs)
    for out in outs:
        check(out, 4)


def test_pushpull_into_out() -> None:
    for step in range(3):
        for key, shape in [("small 0", SMALL), ("big", BIG), (7, SMALL)]:
            value, out = np.full(shape, rank + 1.0 + step, np.float32), np.zeros(shape, np.float32)
            kv.pushpull(key, value, out=out, priority=-step)
            check(out, workers * (workers + 1) / 2 + workers * step)
            check(value, rank + 1.0 + step)


def test_pushpull_in_place() -> None:
    value = np.full(BIG, rank + 1.0, np.float32)
    kv.pushpull("big", value)
    check(value, workers * (workers + 1) / 2)


def test_pushpull_of_several_devices() -> None:
    values, outs = [np.ones(SMALL, np.float32) for _ in range(4)], [np.zeros(SMALL, np.float32) for _ in range(2)]
    kv.pushpull("devices", values, out=outs)
    for out in outs:
        check(out, 4 * workers)


if __name__ == "__main__":
    assert kv.type == KIND
    for name, test in sorted(globals().items()):
        if name.startswith("test_"):
            test()
    print(f"worker {rank} of {workers} is done", flush=True)
    if hasattr(kv, "close"):
        kv.close()
