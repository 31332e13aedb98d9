"""What MXNet's KVStore does with keys of type ``row_sparse``, in our tables: values worked out by hand.

Where MXNet has an array of the type, we have a table; where it gives back an array with rows of zeros between those
that were asked for, we give back these, in the order asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.testing.cluster import LocalCluster

SHAPE = (6, 4)
KEYS = ["5", "7", "11"]
ALL = np.arange(SHAPE[0])


@pytest.fixture(params=["local", "device", "dist_sync"])
def kv(request: pytest.FixtureRequest) -> Iterator[kvd.KVStore]:
    if request.param != "dist_sync":
        with kvd.create(request.param) as store:
            yield store
        return
    with LocalCluster(1, 2) as cluster:
        yield cluster.open_stores()[0]


def ones() -> kvd.RowSparse:
    """A table that begins as an array of ones does."""
    return kvd.RowSparse(SHAPE, initializer=kvd.initializer.Constant(1))


def rows(ids: Any, value: float) -> kvd.RowSparseArray:
    return kvd.RowSparseArray(ids, np.full((len(ids), SHAPE[1]), value, np.float32))


def check(found: Any, expected: list[float]) -> None:
    """Each row has one number in all its places."""
    np.testing.assert_array_equal(found, np.repeat(np.array(expected, np.float32)[:, None], SHAPE[1], axis=1))


@pytest.mark.parametrize("key", ["w", 3])
def test_a_single_key(kv: kvd.KVStore, key: str | int) -> None:
    kv.init(key, ones())
    check(kv.row_sparse_pull(key, ALL), [1] * 6)
    kv.push(key, rows(ALL, 4))
    check(kv.row_sparse_pull(key, row_ids=ALL), [4] * 6)


def test_a_list_of_keys(kv: kvd.KVStore) -> None:
    kv.init(KEYS, [ones() for _ in KEYS])
    kv.push(KEYS, [rows(ALL, 4) for _ in KEYS])
    for found in kv.row_sparse_pull(KEYS, [ALL] * 3):
        check(found, [4] * 6)


def test_rows_of_several_devices_in_any_order_and_more_than_once(kv: kvd.KVStore) -> None:
    """Each device wants other rows, drawn with replacement; they come back in the order asked."""
    kv.init("w", ones())
    kv.push("w", kvd.RowSparseArray(ALL, np.repeat(np.arange(6, dtype=np.float32)[:, None], 4, axis=1)))
    drawn = np.random.default_rng(1)
    for count in (1, 4, 20):
        ids = drawn.integers(0, 6, count)
        out = np.empty((count, 4), np.float32)
        kv.row_sparse_pull("w", ids, out=out)
        check(out, ids.tolist())


@pytest.mark.parametrize("devices", [1, 4])
def test_what_devices_push_is_added_up(kv: kvd.KVStore, devices: int) -> None:
    kv.init(["w", *KEYS], [ones() for _ in range(4)])
    drawn = np.random.default_rng(2)
    arrays = [drawn.standard_normal(SHAPE).astype(np.float32) for _ in range(devices)]
    total = arrays[0]
    for array in arrays[1:]:
        total = total + array
    kv.push("w", [kvd.RowSparseArray(ALL, array) for array in arrays])
    np.testing.assert_array_equal(kv.row_sparse_pull("w", ALL), total)
    kv.push(KEYS, [[kvd.RowSparseArray(ALL, 2 * array) for array in arrays] for _ in KEYS])
    for found in kv.row_sparse_pull(KEYS, [ALL] * 3):
        np.testing.assert_array_equal(found, 2 * total)


def test_devices_that_push_different_rows(kv: kvd.KVStore) -> None:
    """Rows of one device, of the other, of both, and of none: SGD with a rate of 1 subtracts them."""
    kv.init("w", ones())
    kv.set_optimizer(kvd.optimizer.SGD(1.0))
    kv.push("w", [rows([4, 1], 2), rows([1, 0], 3)])
    check(kv.row_sparse_pull("w", ALL), [-2, -4, 1, 1, -1, 1])


def test_an_optimizer_leaves_other_rows_alone(kv: kvd.KVStore) -> None:
    """MXNet's `lazy_update`: momentum and weight decay of rows that are not pushed rest."""
    kv.init("w", ones())
    kv.set_optimizer(kvd.optimizer.SGD(0.5, momentum=0.5, wd=0.5))
    kv.push("w", rows([2], 1))  # v = 1 + 0.5·1 = 1.5; w = 1 - 0.5·1.5 = 0.25
    check(kv.row_sparse_pull("w", ALL), [1, 1, 0.25, 1, 1, 1])
    kv.push("w", rows([3], 0))  # v = 0.5; w = 0.75
    check(kv.row_sparse_pull("w", ALL), [1, 1, 0.25, 0.75, 1, 1])


def test_an_empty_push_counts_in_the_round() -> None:
    """Both workers push in each round, one of them nothing: the round closes, and has the rows of the other."""

    def program(kv: kvd.KVStore) -> list[Any]:
        kv.init("w", ones())
        kv.set_optimizer(kvd.optimizer.SGD(1.0))
        seen = []
        for step in range(3):
            kv.push("w", rows([step] if kv.rank == step % 2 else [], 1))
            seen.append(kv.row_sparse_pull("w", ALL)[:, 0].tolist())
        return seen

    with LocalCluster(2, 2) as cluster:
        for seen in cluster.run(program):
            assert seen == [[0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]]


def test_a_worker_that_did_not_make_the_table_pulls_its_rows() -> None:
    """Every worker pulls other rows of what all have pushed, as in MXNet's nightly test of many workers."""
    workers = 3

    def program(kv: kvd.KVStore) -> Any:
        kv.init("w", kvd.RowSparse(SHAPE))
        for step in range(1, 4):
            kv.push("w", rows(ALL, (kv.rank + 1) * step))
        return kv.row_sparse_pull("w", [5, kv.rank, 5])[:, 0].tolist()

    with LocalCluster(workers, 2) as cluster:
        assert cluster.run(program) == [[18.0] * 3] * workers  # (1 + 2 + 3) · 3: the last round replaces the others


def test_row_ids_take_64_bits(kv: kvd.KVStore) -> None:
    kv.init("w", kvd.RowSparse(row_shape=(4,)))
    ids = [(1 << 63) - 1, 1 << 40, 0]
    kv.push("w", rows(ids, 7))
    check(kv.row_sparse_pull("w", [1 << 40, 1, (1 << 63) - 1]), [7, 0, 7])
