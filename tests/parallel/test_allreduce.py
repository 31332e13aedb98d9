"""AllReduceParameter: BigDL's members, with all partitions in one process."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import kvd
from kvd.optimizer import SGD
from kvd.parallel.allreduce.blocks import MissingBlock
from kvd.parallel.allreduce.parameter import AllReduceParameter


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


@pytest.mark.parametrize(("fold", "total"), [("float32", 258.0), ("truncating", 256.0)])
def test_the_sum_and_the_sum_of_the_original(local: kvd.KVStore, fold: Any, total: float) -> None:
    parts = partitions_in(local, 3, 1, fold=fold)
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


def test_a_second_init_starts_over(local: kvd.KVStore) -> None:
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


def test_an_id_has_its_own_keys_beside_those_of_the_program(local: kvd.KVStore) -> None:
    local.init("w", np.ones(2, np.float32))
    one, two = AllReduceParameter(local, 1, 1, 2), AllReduceParameter(local, 2, 1, 5)
    one.init(np.full(2, 1.0))
    two.init(np.full(5, 2.0))
    weights = np.empty(2, np.float32)
    one.get_weights(weights).result()
    assert weights.tolist() == [1.0, 1.0]
    assert local.pull("w").tolist() == [1.0, 1.0]


def test_the_stores_optimizer_and_updater_are_not_used(local: kvd.KVStore) -> None:
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
