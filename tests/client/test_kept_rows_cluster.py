"""Which rows the servers of a cluster keep of a table, and what they export."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.testing.cluster import LocalCluster
from tests.client.harness import Pair
from tests.client.test_tables import rows
from tests.client.test_tables_cluster import ROWS, batch, both, clean, table, trained_here, wanted


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Two workers and two servers."""
    with LocalCluster(2, 2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def stores(cluster: LocalCluster) -> Pair:
    """The workers. A test deletes the keys that it makes."""
    one, other = cluster.open_stores()
    return one, other


def test_two_workers_keep_the_rows_that_one_store_keeps(stores: Pair) -> None:
    """A round counts once for a row, whoever names it."""
    description = table(admit_after=2, ttl_updates=2)

    def program(kv: kvd.KVStore) -> Any:
        kv.init("t", description)
        kv.set_optimizer(kvd.optimizer.Adagrad(0.1))
        for step in range(6):
            kv.push("t", batch(step, kv.rank))
        return kv.row_sparse_pull("t", wanted(ROWS))

    expected = trained_here(kvd.optimizer.Adagrad(0.1), 6, description=description)
    assert all(found.tobytes() == expected.tobytes() for found in both(stores, program))
    everything = trained_here(kvd.optimizer.Adagrad(0.1), 6)
    untouched = trained_here(kvd.optimizer.Adagrad(0.1), 0)
    back_at_the_beginning = (expected == untouched).all(axis=1) & (everything != untouched).any(axis=1)
    assert 0 < back_at_the_beginning.sum() < len(expected)
    clean(stores, "t")


def test_a_limit_is_shared_by_the_servers(cluster: LocalCluster, stores: Pair) -> None:
    def program(kv: kvd.KVStore) -> None:
        kv.init("t", kvd.RowSparse(row_shape=(2,), max_rows=10))
        kv.push("t", (np.arange(1000), rows(1000))).wait()

    both(stores, program)
    with cluster.observer() as reader:
        listed = reader.keys()
        assert [entry["updated_rows"] for entry in listed if entry["key"] == "t"] == [10]
    found = stores[0].row_sparse_pull("t", np.arange(1000))[:, 0]
    assert found.sum() == 2 * 10
    clean(stores, "t")
