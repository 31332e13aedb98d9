"""AllReduceParameter: BigDL's members over every type of store."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import kvd
from kvd.optimizer import SGD
from kvd.parallel.allreduce import AllReduceParameter
from kvd.parallel.blocks import MissingBlock
from kvd.testing.cluster import LocalCluster

DISTRIBUTED = ["dist_sync", "dist_async"]


def truncated(values: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """What "fp16" leaves of values, by the definition: the upper 16 bits."""
    bits = np.asarray(values, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


@pytest.fixture
def local() -> Any:
    with kvd.create("local") as kv:
        yield kv


# ── partitions ──


def test_partitions(local: kvd.KVStore) -> None:
    parameter = AllReduceParameter(local, 0, 4, 10)
    assert [parameter.partition(number) for number in range(4)] == [(0, 3), (3, 3), (6, 2), (8, 2)]


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 17])
def test_partitions_cover_the_vector(local: kvd.KVStore, size: int) -> None:
    parameter = AllReduceParameter(local, 0, 4, size)
    end = 0
    for number in range(4):
        start, length = parameter.partition(number)
        assert start == end
        assert length in (size // 4, size // 4 + 1)
        end = start + length
    assert end == size


def test_local_partition_range_counts_from_the_offset(local: kvd.KVStore) -> None:
    assert AllReduceParameter(local, 0, 4, 10, partition_id=1).local_partition_range == (4, 3)
    assert AllReduceParameter(local, 0, 4, 10, param_offset=101, partition_id=2).local_partition_range == (107, 2)


# ── one process ──


def test_one_partition(local: kvd.KVStore) -> None:
    parameter = AllReduceParameter(local, "w", 1, 3)
    assert parameter.init(np.array([1.111111, 2.0, 3.0], np.float32)) == (0, 0, 3)
    assert parameter.weight_partition.tolist() == [np.float32(1.111111), 2.0, 3.0]  # the owner's lose nothing
    assert parameter.gradient_partition.tolist() == [0.0, 0.0, 0.0]
    weights = np.empty(3, np.float32)
    assert parameter.get_weights(weights).result() is None
    assert weights.tolist() == [1.109375, 2.0, 3.0]
    parameter.put_gradients([4.0, 8.0, 1.111111])
    parameter.aggregate_gradient_partition(2)
    assert parameter.gradient_partition.tolist() == [2.0, 4.0, 1.109375 / 2]
    parameter.aggregate_gradient_partition(2)  # in the original this would add the first block once more
    assert parameter.gradient_partition.tolist() == [2.0, 4.0, 1.109375 / 2]
    parameter.weight_partition -= parameter.gradient_partition
    parameter.send_weight_partition()
    parameter.get_weights(weights).result()
    np.testing.assert_array_equal(weights, truncated(parameter.weight_partition))


def test_none_loses_nothing(local: kvd.KVStore) -> None:
    parameter = AllReduceParameter(local, 0, 1, 2, compress="none")
    given = np.array([1.111111, np.pi], np.float32)
    parameter.init(given)
    weights = np.empty(2, np.float32)
    parameter.get_weights(weights).result()
    np.testing.assert_array_equal(weights, given)


def partitions_in(local: kvd.KVStore, number: int, size: int, **options: Any) -> list[AllReduceParameter]:
    parts = [AllReduceParameter(local, 0, number, size, partition_id=own, **options) for own in range(number)]
    for part in parts:
        part.init(np.zeros(size, np.float32))
    return parts


@pytest.mark.parametrize(("fold", "total"), [("float32", 285.0), ("truncating", 256.0)])
def test_the_sum_and_that_of_the_original(local: kvd.KVStore, fold: Any, total: float) -> None:
    parts = partitions_in(local, 30, 1, fold=fold)
    for part in parts:
        part.put_gradients([256.0 if part is parts[0] else 1.0])
    parts[0].aggregate_gradient_partition(1)
    assert parts[0].gradient_partition.tolist() == [total]


def test_several_partitions_in_one_process(local: kvd.KVStore) -> None:
    parts = partitions_in(local, 4, 10)
    for own, part in enumerate(parts):
        part.put_gradients(np.arange(10, dtype=np.float32) * (own + 1))
    for part in parts:
        part.aggregate_gradient_partition(10)
        start, length = part.partition(part.partition_id)
        np.testing.assert_array_equal(part.gradient_partition, np.arange(start, start + length, dtype=np.float32))


def test_a_block_that_is_missing_raises_and_nothing_is_summed(local: kvd.KVStore) -> None:
    parts = partitions_in(local, 3, 9, timeout=0.1)
    parts[0].put_gradients(np.ones(9, np.float32))
    parts[1].put_gradients(np.ones(9, np.float32))
    with pytest.raises(kvd.RequestTimeout, match="partition 2") as caught:
        parts[0].aggregate_gradient_partition(3)
    assert caught.value.waiting_for == ("partition 2",)
    assert parts[0].gradient_partition.tolist() == [0.0] * 3
    parts[2].put_gradients(np.ones(9, np.float32))
    parts[0].aggregate_gradient_partition(3)
    assert parts[0].gradient_partition.tolist() == [1.0] * 3


def test_weights_that_are_missing_leave_the_target_alone(local: kvd.KVStore) -> None:
    parts = [AllReduceParameter(local, 0, 2, 4, partition_id=own, timeout=0.1) for own in range(2)]
    parts[0].init(np.ones(4, np.float32))
    target = np.full(4, 7.0, np.float32)
    with pytest.raises(kvd.RequestTimeout, match="weights of iteration 0 by partition 1"):
        parts[0].get_weights(target).result()
    assert target.tolist() == [7.0] * 4


def test_a_block_that_was_overwritten_raises(local: kvd.KVStore) -> None:
    parts = partitions_in(local, 2, 4)
    parts[0].put_gradients(np.ones(4))
    for _ in range(2):
        parts[1].put_gradients(np.ones(4))
    with pytest.raises(MissingBlock, match="by partition 1 are missing") as caught:
        parts[0].aggregate_gradient_partition(2)
    assert (caught.value.partition, caught.value.node) == (1, "partition 1")


def test_a_second_init_starts_anew(local: kvd.KVStore) -> None:
    parameter = AllReduceParameter(local, 0, 1, 2)
    for value in (1.0, 2.0):
        parameter.init(np.full(2, value))
        weights = np.empty(2, np.float32)
        parameter.get_weights(weights).result()
        assert weights.tolist() == [value] * 2
        with pytest.raises(kvd.NotAllowed, match="put_gradients"):
            parameter.aggregate_gradient_partition(1)
        parameter.put_gradients(np.full(2, value))
        parameter.aggregate_gradient_partition(1)
        assert parameter.gradient_partition.tolist() == [value] * 2
    again = AllReduceParameter(local, 0, 1, 2)  # another object that goes on with the id
    again.init(np.full(2, 3.0))
    again.get_weights(weights).result()
    assert weights.tolist() == [3.0] * 2


def test_an_id_has_keys_of_its_own_beside_those_of_the_program(local: kvd.KVStore) -> None:
    local.init("w", np.ones(2, np.float32))
    one, two = AllReduceParameter(local, 1, 1, 2), AllReduceParameter(local, 2, 1, 5)
    one.init(np.full(2, 1.0))
    two.init(np.full(5, 2.0))
    weights = np.empty(2, np.float32)
    one.get_weights(weights).result()
    assert weights.tolist() == [1.0, 1.0]
    assert local.pull("w").tolist() == [1.0, 1.0]


def test_optimizer_and_updater_of_the_store_have_no_part_in_it(local: kvd.KVStore) -> None:
    local.set_optimizer(SGD(0.1))
    local.set_updater(lambda key, received, stored: stored.fill(0))
    parameter = AllReduceParameter(local, 0, 1, 2)
    parameter.init(np.ones(2))
    parameter.put_gradients(np.ones(2))
    parameter.aggregate_gradient_partition(1)
    assert parameter.gradient_partition.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_torch_tensors(local: kvd.KVStore, dtype: torch.dtype) -> None:
    parameter = AllReduceParameter(local, 0, 1, 3)
    parameter.init(torch.arange(3, dtype=dtype))
    target = torch.zeros(3, dtype=dtype)
    parameter.get_weights(target).result()
    assert target.tolist() == [0.0, 1.0, 2.0]
    parameter.put_gradients(torch.ones(3, dtype=dtype, requires_grad=True))
    parameter.aggregate_gradient_partition(1)
    assert parameter.gradient_partition.tolist() == [1.0] * 3


def test_a_nan_stays_a_nan(local: kvd.KVStore) -> None:
    parameter = AllReduceParameter(local, 0, 1, 1)
    parameter.init(np.zeros(1))
    parameter.put_gradients(np.array([0x7F800001], np.uint32).view(np.float32))
    parameter.aggregate_gradient_partition(1)
    assert np.isnan(parameter.gradient_partition[0])


# ── misuse ──


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        ({"partition_num": 0}, "partition_num"),
        ({"size": -1}, "size"),
        ({"size": 2.5}, "size"),
        ({"compress": "zip"}, "compress"),
        ({"partition_id": 1}, "partition_id"),
        ({"param_offset": -1}, "param_offset"),
        ({"fold": "double"}, "fold"),
    ],
)
def test_arguments_out_of_range(local: kvd.KVStore, arguments: dict[str, Any], setting: str) -> None:
    with pytest.raises(kvd.ConfigError) as caught:
        AllReduceParameter(local, 0, **({"partition_num": 1, "size": 2} | arguments))
    assert caught.value.setting == setting


async def make_async_store() -> Any:
    return await kvd.aio.create("local")


def test_an_asynchronous_store_is_refused() -> None:
    with pytest.raises(kvd.ConfigError, match=r"kvd\.create"):
        AllReduceParameter(asyncio.run(make_async_store()), 0, 1, 2)


def test_everything_needs_init_first(local: kvd.KVStore) -> None:
    parameter = AllReduceParameter(local, 0, 1, 2)
    for call in (
        lambda: parameter.weight_partition,
        lambda: parameter.gradient_partition,
        lambda: parameter.put_gradients(np.ones(2)),
        lambda: parameter.aggregate_gradient_partition(1),
        parameter.send_weight_partition,
        lambda: parameter.get_weights(np.ones(2)),
    ):
        with pytest.raises(kvd.NotAllowed, match="call init"):
            call()


def test_vectors_that_do_not_fit(local: kvd.KVStore) -> None:
    parameter = AllReduceParameter(local, 0, 1, 2)
    parameter.init(np.ones(2))
    for call in (parameter.init, parameter.put_gradients, parameter.get_weights):
        with pytest.raises(kvd.ShapeMismatch, match=r"expected the shape \(2,\)"):
            call(np.ones(3))
        with pytest.raises(kvd.ShapeMismatch):
            call(np.ones((2, 1)))
        with pytest.raises(kvd.DtypeMismatch, match="float32 or float64"):
            call(np.ones(2, np.int64))
        with pytest.raises(kvd.DtypeMismatch):
            call(np.ones(2, np.float16))
    read_only = np.ones(2, np.float32)
    read_only.flags.writeable = False
    with pytest.raises(kvd.NotAllowed):
        parameter.get_weights(read_only)
    with pytest.raises(kvd.ShapeMismatch):
        parameter.weight_partition = np.ones(1)
    wrong: list[Any] = [0, -1, True, float("nan")]
    for number in wrong:
        with pytest.raises(kvd.ConfigError):
            parameter.aggregate_gradient_partition(number)


def test_the_partitions_of_a_cluster_are_its_workers() -> None:
    def program(kv: kvd.KVStore) -> None:
        with pytest.raises(kvd.ConfigError, match="2 workers"):
            AllReduceParameter(kv, 0, 3, 10)
        with pytest.raises(kvd.ConfigError, match="leave it out"):
            AllReduceParameter(kv, 0, 2, 10, partition_id=1 - kv.rank)

    with LocalCluster(2) as cluster:
        cluster.run(program)


# ── clusters ──


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
        time.sleep(chance.random() * 0.01)
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
def test_the_merge_and_the_optimizer_of_the_cluster_have_no_part_in_it(settings: dict[str, Any]) -> None:
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
            time.sleep(0.05)
        parameter.aggregate_gradient_partition(1)
        seen = float(parameter.gradient_partition[0])
        parameter.put_gradients([kv.rank * 10.0 + 10.0] * 2)
        ahead.set()
        parameter.aggregate_gradient_partition(1)
        return [seen, float(parameter.gradient_partition[0])]

    with LocalCluster(2) as cluster:
        assert cluster.run(program) == [[3.0, 30.0]] * 2


def test_asynchronous_workers_that_do_not_ask_for_weights_can_overtake_and_are_told() -> None:
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
            time.sleep(0.2)
        parameter.aggregate_gradient_partition(3)
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


@pytest.mark.parametrize("kind", DISTRIBUTED)
def test_a_dead_worker_is_named(kind: str) -> None:
    code = """
import sys, time, numpy as np, kvd
from kvd.parallel.allreduce import AllReduceParameter
parameter = AllReduceParameter(kv := kvd.create(sys.argv[1]), 0, 2, 4)
parameter.init(np.zeros(4))
parameter.get_weights(np.empty(4, np.float32)).result()
print(kv.rank, flush=True)
time.sleep(60)
"""
    quick: dict[str, Any] = {
        "worker_timeout_s": 1.5,
        "server_timeout_s": 1.5,
        "request_timeout_s": 20.0,
        "on_worker_loss": "fail",
    }
    with LocalCluster(2, 1, **quick) as cluster:
        other = cluster.script(code, 1, kind)
        try:
            kv = cluster.store(kind, node_id="worker-0")
            parameter = AllReduceParameter(kv, 0, 2, 4)
            parameter.init(np.zeros(4))
            parameter.get_weights(np.empty(4, np.float32)).result()
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


def test_get_weights_runs_beside_the_program() -> None:
    """In threads of one process, a partition each: asked for before it is there."""
    with kvd.create("local") as kv, ThreadPoolExecutor(2) as pool:
        parts = [AllReduceParameter(kv, 0, 2, 4, partition_id=own) for own in range(2)]
        parts[0].init(np.ones(4))
        target = np.zeros(4, np.float32)
        future = parts[0].get_weights(target)
        assert not future.done()
        pool.submit(parts[1].init, np.full(4, 2.0)).result()
        assert future.result(10) is None
        assert target.tolist() == [1.0, 1.0, 2.0, 2.0]
