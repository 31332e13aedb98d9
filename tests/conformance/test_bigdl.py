"""What BigDL's AllReduceParameter documents, in ours: values from its tests and from its arithmetic by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvd
from kvd.parallel import AllReduceParameter
from kvd.testing.cluster import LocalCluster

TYPES = ["dist_sync", "dist_async"]


def as_bytes(values: Any) -> bytes:
    """BigDL's "fp16": bits 31 to 24, then 23 to 16 of each float32."""
    return b"".join(
        bytes([bits >> 24, bits >> 16 & 255]) for bits in np.asarray(values, np.float32).view(np.uint32).tolist()
    )


@pytest.mark.parametrize("kind", TYPES)
def test_init_gives_id_start_and_length_and_stores_the_slices(kind: str) -> None:
    given = np.array([1.111111, 2.111111, 3.111111, 4.111111, 5.111111, 6, 7, 8, 9, 10], np.float32)

    def program(kv: kvd.KVStore) -> Any:
        parameter = AllReduceParameter(kv, 7, 4, 10)
        result = parameter.init(given)
        _, start, length = result
        np.testing.assert_array_equal(parameter.weight_partition, given[start : start + length])
        assert parameter.gradient_partition.tolist() == [0.0] * length
        assert parameter.local_partition_range == (start + 1, length)
        weights = np.empty(10, np.float32)
        parameter.get_weights(weights).result()
        return result, weights.tolist()

    with LocalCluster(4, 2) as cluster:
        results = cluster.run(program, kind)
    assert [result for result, _ in results] == [(0, 0, 3), (1, 3, 3), (2, 6, 2), (3, 8, 2)]
    for _, weights in results:
        assert weights == [1.109375, 2.109375, 3.109375, 4.09375, 5.09375, 6, 7, 8, 9, 10]


def test_blocks_travel_with_the_most_significant_byte_first() -> None:
    with kvd.create("local") as kv:
        parameter = AllReduceParameter(kv, 7, 1, 3)
        parameter.init(np.array([1.111111, -2.5, 1e30]))
        parameter.put_gradients(np.array([3.0, 4.0, 5.111111]))
        assert kv.pull("allreduce/7/weights/0").tobytes()[-6:] == as_bytes([1.111111, -2.5, 1e30])
        assert kv.pull("allreduce/7/gradients/0/0").tobytes()[-6:] == as_bytes([3.0, 4.0, 5.111111])


def original_fold(gradients: Any, avg_numbers: int) -> Any:
    """Truncate each, add from left to right, truncate after every addition, divide."""

    def cut(value: Any) -> Any:
        return (np.asarray(value, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)

    total = cut(gradients[0])
    for gradient in gradients[1:]:
        total = cut(total + cut(gradient))
    return total / np.float32(avg_numbers)


@pytest.mark.parametrize("kind", TYPES)
def test_gradients_are_averaged_with_its_arithmetic(kind: str) -> None:
    size, workers = 11, 3
    gradients = np.random.default_rng(1).standard_normal((workers, size)).astype(np.float32)

    def program(kv: kvd.KVStore, fold: Any) -> Any:
        parameter = AllReduceParameter(kv, 0, workers, size, fold=fold)
        parameter.init(np.zeros(size))
        parameter.put_gradients(gradients[kv.rank])
        parameter.aggregate_gradient_partition(6)  # not of the workers, but of the models that they ran
        return parameter.gradient_partition.copy()

    with LocalCluster(workers, 2) as cluster:
        found = np.concatenate(cluster.run(lambda kv: program(kv, "truncating"), kind))
    np.testing.assert_array_equal(found, original_fold(gradients, 6))
    with LocalCluster(workers, 2) as cluster:
        better = np.concatenate(cluster.run(lambda kv: program(kv, "float32"), kind))
    np.testing.assert_allclose(better, gradients.sum(0) / 6, atol=3 * 2.0**-7)
    assert np.abs(better - gradients.sum(0) / 6).mean() < np.abs(found - gradients.sum(0) / 6).mean()


@pytest.mark.parametrize("kind", TYPES)
def test_send_weight_partition_makes_them_visible_to_all(kind: str) -> None:
    def program(kv: kvd.KVStore) -> Any:
        parameter = AllReduceParameter(kv, 0, 2, 4, compress="none")
        parameter.init(np.zeros(4))
        seen = []
        for step in range(3):
            parameter.weight_partition[...] = 10 * step + kv.rank + 0.1
            parameter.send_weight_partition()
            weights = np.empty(4, np.float32)
            parameter.get_weights(weights).result()
            seen.append(weights.tolist())
            parameter.put_gradients(np.zeros(4))  # nobody goes on before all have read, as in an iteration
            parameter.aggregate_gradient_partition(2)
        return seen

    expected = [np.array([10 * step + 0.1] * 2 + [10 * step + 1.1] * 2, np.float32).tolist() for step in range(3)]
    with LocalCluster(2, 2) as cluster:
        assert cluster.run(program, kind) == [expected] * 2
