"""Tables that begin with rows that a program gives them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvd
from kvd.errors import DtypeMismatch, NotAllowed, ShapeMismatch
from kvd.initializer import Constant
from kvd.tables import first_rows
from kvd.testing.cluster import LocalCluster

FLOAT = np.float32
WHOLE = np.arange(60, dtype=FLOAT).reshape(20, 3)


def of(values: Any, **more: Any) -> kvd.RowSparse:
    return kvd.RowSparse(shape=(20, 3), initializer=Constant(-1.0), values=values, **more)


def use(kv: Any, values: Any) -> Any:
    """Some steps on a table that begins with these values; the rows before and after them."""
    kv.init("t", of(values if kv.rank == 0 else None))
    before = kv.row_sparse_pull("t", np.arange(20))
    kv.barrier()
    kv.set_optimizer(kvd.optimizer.SGD(0.5))
    kv.push("t", ([4, 19], np.ones((2, 3), FLOAT)))
    return before, kv.row_sparse_pull("t", np.arange(20)), kv.version("t")


@pytest.mark.parametrize(
    ("kind", "some"),
    [("local", False), ("local", True), ("dist_sync", False), ("dist_sync", True), ("dist_async", False)],
)
def test_a_table_begins_with_the_given_rows(monkeypatch: Any, kind: str, some: bool) -> None:
    monkeypatch.setattr(first_rows, "PAGE_NBYTES", 64)  # three rows: several pages for each part
    ids = np.array([7, 19, 7, 0])
    values = kvd.RowSparseArray(ids, np.array([WHOLE[7] - 2, WHOLE[19], np.full(3, 2), WHOLE[0]], FLOAT))
    wanted = np.full((20, 3), -1, FLOAT)
    wanted[[0, 7, 19]] = WHOLE[[0, 7, 19]]
    wanted = wanted if some else WHOLE
    if kind == "local":
        with kvd.create("local") as kv:
            results = [use(kv, values if some else WHOLE)]
    else:
        with LocalCluster(2, 2) as cluster:
            results = cluster.run(lambda kv: use(kv, values if some else WHOLE), type=kind)
    pushes = len(results)
    after = wanted.copy()
    after[[4, 19]] -= 0.5 * pushes
    for before, rows, version in results:
        np.testing.assert_array_equal(before, wanted)
        if kind != "dist_async":
            np.testing.assert_array_equal(rows, after)
            assert version == 1


@pytest.mark.soak
def test_a_backup_has_the_first_rows_too() -> None:
    with LocalCluster(1, 2, replicas=2, processes=True) as cluster:
        (kv,) = cluster.open_stores()
        kv.init("t", of(WHOLE))
        cluster.kill_server(0)
        np.testing.assert_array_equal(kv.row_sparse_pull("t", np.arange(20)), WHOLE)


def test_the_given_array_is_the_programs_again() -> None:
    values = WHOLE.copy()
    with kvd.create("local") as kv:
        kv.init("t", of(values))
        values[:] = 0
        np.testing.assert_array_equal(kv.row_sparse_pull("t", [5]), WHOLE[5:6])


@pytest.mark.parametrize(
    ("values", "error", "text"),
    [
        (WHOLE[:, :2], ShapeMismatch, r"has the shape \(20, 3\), and the values that it is to begin with \(20, 2\)"),
        (WHOLE[:5], ShapeMismatch, r"or some of them as kvd.RowSparseArray\(ids, rows\)"),
        ([[0.5, 1.0, 2.0]], ShapeMismatch, r"the values that it is to begin with \(1, 3\)"),
        (([3], WHOLE[:1, :2]), ShapeMismatch, "1 row ids need rows of shape"),
        (WHOLE.astype(np.float64), DtypeMismatch, r"cast them, with astype\('float32'\)$"),
        (np.zeros((21, 3), FLOAT), ShapeMismatch, "has the shape"),
        (kvd.RowSparseArray([20], WHOLE[:1]), NotAllowed, "has the rows 0 to 19"),
        (np.float32(1), ShapeMismatch, "has the shape"),
    ],
)
def test_values_that_are_no_rows_of_the_table_make_none(values: Any, error: type[Exception], text: str) -> None:
    with kvd.create("local") as kv:
        with pytest.raises(error, match=text):
            kv.init("t", of(values))
        kv.init("t", of(WHOLE))
    with LocalCluster(1, 2) as cluster:
        (kv,) = cluster.open_stores()
        with pytest.raises(error, match=text):
            kv.init("t", of(values))
        kv.init("t", of(WHOLE))
        np.testing.assert_array_equal(kv.row_sparse_pull("t", [3]), WHOLE[3:4])
