"""Observers read rows of tables."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.errors import DtypeMismatch, KeyNotFound, NotAllowed, ShapeMismatch
from kvd.testing.cluster import LocalCluster

FLOAT = np.float32


def make(kv: Any) -> None:
    kv.init("t", kvd.RowSparse(shape=(60, 2), initializer=kvd.initializer.Constant(5.0)))
    kv.init(7, kvd.RowSparse(row_shape=(3,), dtype="float64"))
    kv.init("w", np.zeros(3, FLOAT))


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_rows_come_in_the_order_asked_and_the_newest(kind: str) -> None:
    with LocalCluster(1, 2) as cluster, cluster.observer() as reader:
        (kv,) = cluster.open_stores(kind)
        make(kv)
        ids = np.array([9, 4, 59, 9])
        assert reader.row_sparse_pull("t", ids).tolist() == [[5, 5]] * 4
        kv.push("t", (np.arange(60), np.repeat(np.arange(60, dtype=FLOAT)[:, None], 2, 1))).wait()
        assert reader.row_sparse_pull("t", ids)[:, 0].tolist() == [9, 4, 59, 9]
        kv.push(7, ([1 << 60], np.full((1, 3), 2.5))).wait()
        out = np.zeros((2, 2), FLOAT)
        one, other = reader.row_sparse_pull(["t", 7], [[1, 0], [3, 1 << 60]], out=[out, np.zeros((2, 3))])
        assert one is out
        assert (out[:, 0].tolist(), other[:, 0].tolist()) == ([1, 0], [0, 2.5])
        assert reader.row_sparse_pull("t", []).shape == (0, 2)
        assert kv.clock("t") == 1  # a read is no step


@pytest.mark.parametrize(
    ("key", "ids", "error", "text"),
    [
        ("w", [0], NotAllowed, "key 'w' is no table"),
        ("x", [0], KeyNotFound, "'x'"),
        ("t", [60], NotAllowed, "has the rows 0 to 59"),
        (7, [-1], NotAllowed, "table 7 has the rows"),
        ("t", [0.5], DtypeMismatch, "are whole numbers"),
        ("t", [[1]], ShapeMismatch, "pass ids.reshape"),
    ],
)
def test_bad_calls(key: Any, ids: Any, error: type[Exception], text: str) -> None:
    with LocalCluster(1, 2) as cluster, cluster.observer() as reader:
        make(cluster.open_stores()[0])
        with pytest.raises(error, match=text):
            reader.row_sparse_pull(key, ids)


def test_all_rows_are_of_one_version_while_the_training_goes_on() -> None:
    """Each step adds one to every row: rows of two versions would differ."""
    with LocalCluster(1, 3) as cluster, cluster.observer() as reader:
        (kv,) = cluster.open_stores()
        kv.init("t", kvd.RowSparse(shape=(60, 2)))
        kv.set_optimizer(kvd.optimizer.SGD(1.0))
        done = threading.Event()
        ones = (np.arange(60), -np.ones((60, 2), FLOAT))

        def train() -> None:
            while not done.is_set():
                kv.push("t", ones).wait()

        trainer = threading.Thread(target=train)
        trainer.start()
        try:
            seen = [np.unique(reader.row_sparse_pull("t", np.arange(60))).tolist() for _ in range(40)]
        finally:
            done.set()
            trainer.join()
        assert {len(each) for each in seen} == {1}
        assert seen == sorted(seen)
        assert seen[-1] > seen[0]


def test_a_table_that_was_made_again_is_read_as_it_is_now() -> None:
    with LocalCluster(1, 2) as cluster, cluster.observer() as reader:
        (kv,) = cluster.open_stores()
        make(kv)
        reader.row_sparse_pull("t", [1])
        kv.delete("t")
        kv.init("t", kvd.RowSparse(shape=(4, 1), initializer=kvd.initializer.Constant(2.0)))
        try:
            rows = reader.row_sparse_pull("t", [1])
        except KeyNotFound:  # it meets the deletion, and looks the key up again
            rows = reader.row_sparse_pull("t", [1])
        assert rows.tolist() == [[2.0]]
