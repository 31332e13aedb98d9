"""A store in one process: what MXNet's unit tests of the KVStore check, after its documentation."""

from __future__ import annotations

import sys

import numpy as np

import kvd as mx

SHAPE = (4, 4)
KEYS = {"numbers": (3, [5, 7, 11]), "texts": ("a", ["b", "c", "d"])}
DEVICES = 4
KIND = sys.argv[1]


def store(one, many):
    kv = mx.create(KIND)
    kv.init(one, np.zeros(SHAPE, np.float32))
    kv.init(many, [np.zeros(SHAPE, np.float32)] * len(many))
    return kv


def check(array, number) -> None:
    assert np.all(np.asarray(array) == number), (array, number)


def test_one_key(one, many) -> None:
    kv, value = store(one, many), np.empty(SHAPE, np.float32)
    kv.push(one, np.ones(SHAPE, np.float32))
    kv.pull(one, out=value)
    check(value, 1)


def test_init(one, many) -> None:
    kv, value = mx.create(KIND), np.zeros(SHAPE, np.float32)
    kv.init(one, np.ones(SHAPE, np.float32) * 4)
    kv.pull(one, out=value)
    check(value, 4)


def test_pull_gives_the_value_to_every_out(one, many) -> None:
    kv = store(one, many)
    kv.push(one, np.ones(SHAPE, np.float32) * 3)
    outs = [np.empty(SHAPE, np.float32) for _ in range(DEVICES)]
    kv.pull(one, out=outs)
    kv.pull([one] * DEVICES, out=outs)
    for value in outs:
        check(value, 3)


def test_lists(one, many) -> None:
    kv = store(one, many)
    kv.push(many, [np.ones(SHAPE, np.float32) * 4] * len(many))
    outs = [np.empty(SHAPE, np.float32) for _ in many]
    kv.pull(many, out=outs)
    for value in outs:
        check(value, 4)


def test_values_of_devices_are_added(one, many) -> None:
    kv = store(one, many)
    values = [np.ones(SHAPE, np.float32) for _ in range(DEVICES)]
    kv.push(one, values)
    kv.pull(one, out=values)
    for value in values:
        check(value, DEVICES)
    values = [[np.ones(SHAPE, np.float32) * 2.0 for _ in range(DEVICES)] for _ in many]
    kv.push(many, values)
    kv.pull(many, out=values)
    for devices in values:
        for value in devices:
            check(value, DEVICES * 2.0)


def test_a_key_in_several_places_of_a_list(one, many) -> None:
    kv = store(one, many)
    kv.push([one] * DEVICES, [np.ones(SHAPE, np.float32)] * DEVICES)
    check(kv.pull(one), DEVICES)
    kv.push([many[0], one, many[0]], [np.ones(SHAPE, np.float32) * number for number in (2, 7, 3)])
    check(kv.pull(many[0]), 5)
    check(kv.pull(one), 7)


def test_updater(one, many) -> None:
    kv, seen = store(one, many), []

    def update(key, received, stored) -> None:
        seen.append(key)
        stored += received * 2

    kv.set_updater(update)
    values = [np.ones(SHAPE, np.float32) for _ in range(DEVICES)]
    for step in (1, 2, 3):
        kv.push(one, [np.ones(SHAPE, np.float32)] * DEVICES)
        kv.pull(one, out=values)
        for value in values:
            check(value, DEVICES * 2 * step)
    kv.push(many, [[np.ones(SHAPE, np.float32)] * DEVICES] * len(many))
    for value in kv.pull(many):
        check(value, DEVICES * 2)
    assert seen == [one] * 3 + many
    assert {type(key) for key in seen} == {type(one)}


def test_pushpull(one, many) -> None:
    kv = store(one, many)
    values, outs = [np.ones(SHAPE, np.float32)] * DEVICES, [np.empty(SHAPE, np.float32) for _ in range(DEVICES)]
    kv.pushpull(one, values, out=outs)
    for value in outs:
        check(value, DEVICES)
    both = [np.ones(SHAPE, np.float32) * 2 for _ in many]
    kv.pushpull(many, both)
    for value in both:
        check(value, 2)


def test_broadcast(one, many) -> None:
    kv, outs = mx.create(KIND), [np.empty(SHAPE, np.float32) for _ in range(DEVICES)]
    kv.broadcast(one, np.ones(SHAPE, np.float32) * 5, out=outs)
    for value in outs:
        check(value, 5)
    lists = [[np.empty(SHAPE, np.float32) for _ in range(DEVICES)] for _ in many]
    kv.broadcast(many, [np.ones(SHAPE, np.float32) * 6] * len(many), out=lists)
    for value in [value for devices in lists for value in devices]:
        check(value, 6)


def test_type_rank_and_capabilities() -> None:
    for name in ("local", "device", "local_update_cpu", "local_allreduce_cpu", "local_allreduce_device", "nccl"):
        assert mx.create(name).type == name
    kv = mx.create(KIND)
    assert (kv.rank, kv.num_workers) == (0, 1)
    assert kv.is_capable("optimizer")
    try:
        kv.is_capable("nothing")
    except ValueError:
        return
    raise AssertionError("an unknown capability was accepted")


def test_wrong_calls(one, many) -> None:
    kv = store(one, many)
    for call in (
        lambda: kv.init(one, np.zeros(SHAPE, np.float32)),
        lambda: kv.pull("nobody made this key", out=np.zeros(SHAPE, np.float32)),
        lambda: kv.push(one, np.zeros((1, 1), np.float32)).wait(),
        lambda: kv.push({"a": 1}, np.zeros(SHAPE, np.float32)),
        lambda: kv.push([one, many[0]], [np.zeros(SHAPE, np.float32)]),
        lambda: mx.create("no such type"),
    ):
        try:
            call()
        except mx.KvdError:
            continue
        raise AssertionError("a wrong call went through")


if __name__ == "__main__":
    for one, many in KEYS.values():
        for name, test in sorted(globals().items()):
            if name.startswith("test_") and name != "test_type_rank_and_capabilities":
                test(one, many)
    test_type_rank_and_capabilities()
    print("worker 0 of 1 is done", flush=True)
