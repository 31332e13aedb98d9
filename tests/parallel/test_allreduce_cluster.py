"""AllReduceParameter between the workers of a cluster: order, lateness, death."""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.errors import NotResumed
from kvd.optimizer import SGD
from kvd.parallel.allreduce.blocks import MissingBlock
from kvd.parallel.allreduce.parameter import AllReduceParameter
from kvd.testing.cluster import LocalCluster

DISTRIBUTED = ["dist_sync", "dist_async"]


def test_the_partitions_of_a_cluster_are_its_workers() -> None:
    def program(kv: kvd.KVStore) -> None:
        with pytest.raises(kvd.ConfigError, match="2 workers"):
            AllReduceParameter(kv, 0, 3, 10)
        with pytest.raises(kvd.ConfigError, match="leave it out"):
            AllReduceParameter(kv, 0, 2, 10, partition_id=1 - kv.rank)

    with LocalCluster(2) as cluster:
        cluster.run(program)


def train(kv: kvd.KVStore, size: int, steps: int, **options: Any) -> np.ndarray[Any, Any]:
    """`steps` iterations at uneven speed; what the weights of this worker's slice were after each."""
    chance = random.Random(kv.rank)
    parameter = AllReduceParameter(kv, "job", kv.num_workers, size, **options)
    start, length = parameter.init(np.arange(size, dtype=np.float32))[1:]
    assert (start, length) == parameter.partition(kv.rank)
    weights = np.empty(size, np.float32)
    for step in range(steps):
        parameter.get_weights(weights).result()
        np.testing.assert_array_equal(weights, np.arange(size) - step * (np.arange(size) % 4), err_msg=f"step {step}")
        time.sleep(chance.random() * 0.01)  # time itself: uneven speed
        # (0 + 1 + … + P-1) · 2 / (P · (P-1)) = 1
        parameter.put_gradients((np.arange(size) % 4) * 2.0 * kv.rank)
        parameter.aggregate_gradient_partition(kv.num_workers * (kv.num_workers - 1))
        parameter.weight_partition -= parameter.gradient_partition
        parameter.send_weight_partition()
    return parameter.weight_partition.copy()


@pytest.mark.parametrize("compress", ["fp16", "none"])
@pytest.mark.parametrize("kind", DISTRIBUTED)
@pytest.mark.parametrize("size", [0, 2, 11])  # fewer elements than partitions too
def test_every_worker_updates_its_slice(kind: str, compress: str, size: int) -> None:
    workers, steps = 3, 12
    with LocalCluster(workers, 2) as cluster:
        slices = cluster.run(lambda kv: train(kv, size, steps, compress=compress), kind)
    expected = np.arange(size) - steps * (np.arange(size) % 4)
    np.testing.assert_array_equal(np.concatenate(slices), expected)


@pytest.mark.parametrize("kind", DISTRIBUTED)
def test_blocks_of_several_slices(kind: str) -> None:
    """So that a pull of an asynchronous store can find slices of different iterations."""
    size, steps = 12_000, 15

    def program(kv: kvd.KVStore) -> None:
        parameter = AllReduceParameter(kv, 0, 2, size, compress="none")
        parameter.init(np.zeros(size))
        weights = np.empty(size, np.float32)
        for step in range(steps):
            parameter.get_weights(weights).result()
            np.testing.assert_array_equal(weights, np.full(size, step * 3.0))
            parameter.put_gradients(np.full(size, kv.rank + 1.0))
            parameter.aggregate_gradient_partition(1)
            np.testing.assert_array_equal(parameter.gradient_partition, np.full(size // 2, 3.0))
            parameter.weight_partition += parameter.gradient_partition
            parameter.send_weight_partition()

    with LocalCluster(2, 2, slice_bytes=4096) as cluster:
        cluster.run(program, kind)


@pytest.mark.parametrize("settings", [{"merge": "mean"}, {"merge": "weighted"}])
def test_the_clusters_merge_and_optimizer_are_not_used(settings: dict[str, Any]) -> None:
    def program(kv: kvd.KVStore) -> Any:
        kv.set_optimizer(SGD(0.1))
        return train(kv, 7, 3)

    with LocalCluster(2, 1, **settings) as cluster:
        np.testing.assert_array_equal(np.concatenate(cluster.run(program)), np.arange(7) - 3 * (np.arange(7) % 4))


def test_bounded_staleness() -> None:
    with LocalCluster(2, 1, staleness=1) as cluster:
        slices = cluster.run(lambda kv: train(kv, 7, 6), "dist_async")
    np.testing.assert_array_equal(np.concatenate(slices), np.arange(7) - 6 * (np.arange(7) % 4))


def test_beside_keys_of_the_program() -> None:
    def program(kv: kvd.KVStore) -> Any:
        kv.init("allreduce", np.zeros(3, np.float32))
        mixed = []
        for _ in range(3):
            kv.push("allreduce", np.full(3, kv.rank + 1.0, np.float32))
            mixed.append(train(kv, 5, 2))  # another object with the same id each time
        return kv.pull("allreduce").tolist(), np.concatenate(mixed).tolist()

    with LocalCluster(2, 2) as cluster:
        (seen, first), (_, second) = cluster.run(program)
    assert seen == [3.0] * 3
    expected = (np.arange(5) - 2 * (np.arange(5) % 4)).tolist()
    assert (first, second) == (expected[:3] * 3, expected[3:] * 3)


def test_a_worker_one_iteration_ahead_changes_nothing_for_the_others() -> None:
    """Worker 0 has put its next gradients before worker 1 reads the last ones."""
    ahead = threading.Event()

    def program(kv: kvd.KVStore) -> list[float]:
        parameter = AllReduceParameter(kv, 0, 2, 2)
        parameter.init(np.zeros(2))
        parameter.put_gradients([kv.rank + 1.0] * 2)
        if kv.rank == 1:
            ahead.wait(10)
            time.sleep(0.05)  # time itself: the gradients of the other arrive, and nobody says so
        parameter.aggregate_gradient_partition(1)
        seen = float(parameter.gradient_partition[0])
        parameter.put_gradients([kv.rank * 10.0 + 10.0] * 2)
        ahead.set()
        parameter.aggregate_gradient_partition(1)
        return [seen, float(parameter.gradient_partition[0])]

    with LocalCluster(2) as cluster:
        assert cluster.run(program) == [[3.0, 30.0]] * 2


def test_asynchronous_workers_that_overtake_get_an_error() -> None:
    ahead = threading.Event()

    def program(kv: kvd.KVStore) -> None:
        parameter = AllReduceParameter(kv, 0, 2, 2)
        parameter.init(np.zeros(2))
        parameter.put_gradients([1.0, 1.0])
        if kv.rank == 0:
            parameter.aggregate_gradient_partition(1)
            parameter.put_gradients([1.0, 1.0])
            kv.flush()
            ahead.set()
        else:
            ahead.wait(10)
            with pytest.raises(MissingBlock, match=r"gradients of iteration 1 by worker 0 .* get_weights between"):
                parameter.aggregate_gradient_partition(1)

    with LocalCluster(2) as cluster:
        cluster.run(program, "dist_async")


@pytest.mark.parametrize("kind", DISTRIBUTED)
def test_a_late_worker_is_named(kind: str) -> None:
    done = threading.Event()
    gate = threading.Barrier(2)

    def program(kv: kvd.KVStore) -> None:
        parameter = AllReduceParameter(kv, 0, 3, 6, timeout=0.5)
        parameter.init(np.zeros(6))
        parameter.get_weights(np.empty(6, np.float32)).result(10)
        if kv.rank == 1:
            done.wait(20)
            parameter.put_gradients(np.ones(6))
        else:
            parameter.put_gradients(np.ones(6))
            with pytest.raises(kvd.RequestTimeout, match="by worker 1 did not come") as caught:
                parameter.aggregate_gradient_partition(3)
            assert caught.value.waiting_for == ("worker 1",)
            assert parameter.gradient_partition.tolist() == [0.0, 0.0]
            gate.wait(10)  # the other has seen it too
            done.set()
        sums = False
        while not sums:  # the other's gradients arrive when they do
            with suppress(kvd.RequestTimeout):
                parameter.aggregate_gradient_partition(3)
                sums = True
        assert parameter.gradient_partition.tolist() == [1.0, 1.0]

    with LocalCluster(3, 2) as cluster:
        cluster.run(program, kind)


@pytest.mark.parametrize("kind", DISTRIBUTED)
def test_a_worker_that_left_the_rounds_is_named(kind: str) -> None:
    def program(kv: kvd.KVStore) -> None:
        parameter = AllReduceParameter(kv, 0, 2, 4)
        parameter.init(np.zeros(4))
        if kv.rank == 1:
            kv.join()
            return
        parameter.put_gradients(np.ones(4))
        with pytest.raises(MissingBlock, match="worker 1 are missing: it has left the rounds"):
            parameter.aggregate_gradient_partition(2)

    with LocalCluster(2) as cluster:
        cluster.run(program, kind)


WORKER = """
import sys, time, numpy as np, kvd
from kvd.parallel.allreduce.parameter import AllReduceParameter
parameter = AllReduceParameter(kv := kvd.create(sys.argv[1]), 0, 2, 4)
parameter.init(np.zeros(4))
parameter.get_weights(np.empty(4, np.float32)).result()
print(kv.rank, flush=True)
time.sleep(60)  # until it is killed
"""


def begun_by(kv: kvd.KVStore) -> AllReduceParameter:
    """A vector of 4 elements of 2 workers, after its first iteration."""
    parameter = AllReduceParameter(kv, 0, 2, 4)
    parameter.init(np.zeros(4))
    parameter.get_weights(np.empty(4, np.float32)).result()
    return parameter


@pytest.mark.parametrize("kind", DISTRIBUTED)
def test_a_dead_worker_is_named(kind: str) -> None:
    quick: dict[str, Any] = {
        "worker_timeout_s": 1.5,
        "server_timeout_s": 1.5,
        "request_timeout_s": 20.0,
        "on_worker_loss": "fail",
    }
    with LocalCluster(2, 1, **quick) as cluster:
        other = cluster.script(WORKER, 1, kind)
        try:
            parameter = begun_by(cluster.store(kind, node_id="worker-0"))
            assert other.stdout is not None
            dead = f"worker {other.stdout.readline().decode().strip()}"
            other.kill()
            parameter.put_gradients(np.ones(4))
            with pytest.raises(kvd.NodeLost) as caught:
                parameter.aggregate_gradient_partition(2)
            assert caught.value.node == dead
        finally:
            other.kill()
            other.wait()


@pytest.mark.parametrize("kind", DISTRIBUTED)
def test_a_restarted_worker_does_not_pass_for_its_predecessor(kind: str) -> None:
    """Its slice in full precision died with that one, so the weights that it would send are those of the start."""
    with LocalCluster(2, 1, on_worker_loss="wait") as cluster:
        other = cluster.script(WORKER, 1, kind)
        try:
            parameter_store = cluster.store(kind, node_id="worker-0")
            parameter = begun_by(parameter_store)
            assert other.stdout is not None
            other.stdout.readline()
        finally:
            other.kill()
            other.wait()
        successor = cluster.store(kind, node_id="worker-1")
        with pytest.raises(NotResumed, match="under another id"):
            AllReduceParameter(successor, 0, 2, 4).init(np.zeros(4))
        assert parameter.get_weights(np.empty(4, np.float32)).result() is None  # those of before the death
        both = [
            AllReduceParameter(kv, "second", 2, 4)
            for kv in sorted((parameter_store, successor), key=lambda kv: kv.rank)
        ]
        for _ in range(2):  # a second init of its own is no matter of predecessors
            for one in both:
                one.init(np.arange(4.0))
            for one in both:
                weights = np.empty(4, np.float32)
                one.get_weights(weights).result()
                np.testing.assert_array_equal(weights, [0, 1, 2, 3])
