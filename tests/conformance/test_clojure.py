"""What org.apache.clojure-mxnet.kvstore documents and tests, in our store."""

from __future__ import annotations

from threading import Event
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.optimizer import SGD
from kvd.testing.cluster import LocalCluster

SHAPE = (4, 4)
TYPES = ["local", "dist_sync"]


@pytest.fixture(params=TYPES)
def kv(request: pytest.FixtureRequest) -> Any:
    if request.param == "local":
        with kvd.create() as store:
            yield store
    else:
        with LocalCluster(1, 2) as cluster:
            yield cluster.store(request.param)


def full(value: float) -> np.ndarray[Any, Any]:
    return np.full(SHAPE, value, np.float32)


def test_init_and_pull(kv: kvd.KVStore) -> None:
    kv.init("3", full(1))
    out = full(0)
    kv.pull("3", out=out)
    np.testing.assert_array_equal(out, full(1))


def test_push_and_pull(kv: kvd.KVStore) -> None:
    kv.init("3", full(1))
    kv.push("3", full(4))
    np.testing.assert_array_equal(kv.pull("3"), full(4))  # without an updater it replaces


@pytest.mark.parametrize("value", [1, 2])
def test_push_of_four_devices(kv: kvd.KVStore, value: int) -> None:
    kv.init("3", full(0))
    kv.push("3", [full(value) for _ in range(4)])
    outs = [full(0) for _ in range(4)]
    kv.pull("3", out=outs)
    for out in outs:
        np.testing.assert_array_equal(out, full(4 * value))


def test_a_vector_of_keys(kv: kvd.KVStore) -> None:
    keys = ["5", "7", "9"]
    kv.init(keys, [full(1)] * 3)
    kv.push(keys, [[full(index + 1)] * 4 for index in range(3)], priority=2)
    outs = [[full(0), full(0)] for _ in keys]
    kv.pull(keys, out=outs, priority=-2)
    for index, pair in enumerate(outs):
        for out in pair:
            np.testing.assert_array_equal(out, full(4 * (index + 1)))
    with pytest.raises(kvd.NotAllowed, match="3, got 2"):
        kv.push(keys, [full(1)] * 2)


def test_updater() -> None:
    """The second half of the original's aggregation test: `stored += received · 2`."""

    def update(key: str, received: Any, stored: Any) -> None:
        stored += 2 * received

    with kvd.create("local") as kv:
        kv.init("3", full(0))
        kv.set_updater(update)
        kv.push("3", [full(1)] * 4)
        np.testing.assert_array_equal(kv.pull("3"), full(8))


def test_type_workers_and_rank(kv: kvd.KVStore) -> None:
    assert kv.type in TYPES
    assert (kv.num_workers, kv.rank) == (1, 0)


def test_local_is_the_default() -> None:
    with kvd.create() as kv:
        assert (kv.type, kv.num_workers, kv.rank) == ("local", 1, 0)


@pytest.mark.parametrize("mask", range(1, 8))
def test_no_node_is_dead(kv: kvd.KVStore, mask: int) -> None:
    assert kv.num_dead_node(mask) == 0


def test_barrier(kv: kvd.KVStore) -> None:
    """There it passes the store as an argument too many, and fails."""
    kv.barrier()


def test_send_command_to_servers() -> None:
    """There it calls a private method, and fails."""
    with LocalCluster(1, 2) as cluster:
        assert cluster.run(lambda kv: kv.send_command_to_servers("ping", "body")) == [[b"body"] * 2]
    with kvd.create("local") as kv:
        assert kv.send_command_to_servers(0, "nobody is there") == []


def test_set_optimizer_and_its_states(kv: kvd.KVStore, tmp_path: Any) -> None:
    kv.init("3", full(0))
    kv.set_optimizer(SGD(1.0, momentum=0.5))
    kv.push("3", full(-1))
    kv.pull("3")
    kv.save_optimizer_states(str(tmp_path / "states"))
    kv.push("3", full(-1))
    np.testing.assert_array_equal(kv.pull("3"), full(2.5))
    kv.load_optimizer_states(str(tmp_path / "states"))
    kv.push("3", full(-1))
    np.testing.assert_array_equal(kv.pull("3"), full(4.0))


@pytest.mark.parametrize("flag", [True, False])
def test_set_barrier_before_exit(flag: bool) -> None:
    """Without the barrier a worker goes while the other still works."""
    gone = Event()

    def program(kv: kvd.KVStore) -> bool:
        kv.set_barrier_before_exit(flag)
        if kv.rank == 0:
            kv.close()
            gone.set()
            return True
        return gone.wait(0.3 if flag else 20)

    with LocalCluster(2) as cluster:
        assert cluster.run(program) == [True, not flag]


def test_a_disposed_store_is_not_used_again(kv: kvd.KVStore) -> None:
    kv.init("3", full(1))
    kv.close()
    for call in (lambda: kv.pull("3"), lambda: kv.push("3", full(1)), kv.barrier):
        with pytest.raises(kvd.KvdError, match="closed"):
            call()


def test_a_key_must_be_initialised_first(kv: kvd.KVStore) -> None:
    with pytest.raises(kvd.KeyNotFound, match="init"):
        kv.pull("3")
    with pytest.raises(kvd.KeyNotFound):
        kv.push("3", full(1)).wait()


def test_only_rank_0_inits() -> None:
    def program(kv: kvd.KVStore) -> Any:
        kv.init(["3", "4"], [full(kv.rank + 1), full(kv.rank + 2)])
        return [float(value[0, 0]) for value in kv.pull(["3", "4"])]

    with LocalCluster(3, 2) as cluster:
        assert cluster.run(program) == [[1.0, 2.0]] * 3
