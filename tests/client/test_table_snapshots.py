"""Snapshots of tables: a training goes on elsewhere with the bits of one that was never disturbed."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.errors import NotAllowed, SnapshotError
from kvd.optimizer import SGD, Adam, RowWiseAdagrad
from kvd.snapshots import manifest
from kvd.testing.cluster import LocalCluster

ROWS = 200
OPTIMIZERS = [None, SGD(0.1), SGD(0.1, momentum=0.9), Adam(0.01), RowWiseAdagrad(0.1)]


def begin(kv: kvd.KVStore, optimizer: Any) -> None:
    normal = kvd.initializer.Normal(0.5, seed=3)
    kv.init("bounded", kvd.RowSparse((ROWS, 2, 3), initializer=normal))
    kv.init("any", kvd.RowSparse(row_shape=(1,), dtype="float64"), merge="mean")
    kv.init("w", np.full(5, 0.5, np.float32))
    if optimizer is not None:
        kv.set_optimizer(optimizer)


def pushed(rank: int, step: int) -> tuple[Any, Any]:
    """Row ids of both tables, fewer of the second one in later steps."""
    drawn = np.random.default_rng([step, rank])
    return drawn.choice(ROWS, 30, replace=False), drawn.integers(0, 1 << 50, max(0, 8 - 2 * step)) // (1 << 44)


def push(kv: kvd.KVStore, step: int) -> None:
    bounded, other = pushed(kv.rank, step)
    drawn = np.random.default_rng([step, kv.rank, 1])
    kv.push("bounded", kvd.RowSparseArray(bounded, drawn.standard_normal((30, 2, 3)).astype(np.float32)))
    kv.push("any", kvd.RowSparseArray(other, drawn.standard_normal((len(other), 1))))
    kv.push("w", drawn.standard_normal(5).astype(np.float32))


def values(kv: kvd.KVStore) -> list[bytes]:
    rows = kv.row_sparse_pull("bounded", np.arange(ROWS)), kv.row_sparse_pull("any", np.arange(100))
    return [*[array.tobytes() for array in rows], kv.pull("w").tobytes()]


def train(kv: kvd.KVStore, stop: int = -1, path: Path | None = None) -> list[bytes]:
    """The values after 8 steps, or after the step `stop` with a snapshot."""
    for step in kv.steps(8):
        push(kv, step)
        if step == stop:
            kv.snapshot(path)
            break
    return values(kv)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
@pytest.mark.parametrize("kind", ["local", "device"])
def test_a_store_of_one_process_goes_on_with_the_same_bits(tmp_path: Path, optimizer: Any, kind: str) -> None:
    with kvd.create(kind) as kv:
        begin(kv, optimizer)
        expected = train(kv)
    with kvd.create(kind) as kv:
        begin(kv, optimizer)
        taken = train(kv, 4, tmp_path / "taken")
    with kvd.create(kind) as kv:
        assert kv.restore(tmp_path / "taken") == 5
        assert values(kv) == taken
        kv.init("bounded", kvd.RowSparse((ROWS, 2, 3), initializer=kvd.initializer.Normal(0.5, seed=3)))
        assert train(kv) == expected


@pytest.mark.parametrize("optimizer", [OPTIMIZERS[2], OPTIMIZERS[4]], ids=repr)
def test_a_cluster_goes_on_with_the_same_bits_in_other_parts(tmp_path: Path, optimizer: Any) -> None:
    path = tmp_path / "taken"

    def undisturbed(kv: kvd.KVStore) -> list[bytes]:
        begin(kv, optimizer)
        return train(kv)

    def before(kv: kvd.KVStore) -> list[bytes]:
        begin(kv, optimizer)
        return train(kv, 4, path)

    def after(kv: kvd.KVStore) -> tuple[list[bytes], list[bytes]]:
        assert kv.restore(path) == 5
        kv.init("any", kvd.RowSparse(row_shape=(1,), dtype="float64"), merge="mean")
        return values(kv), train(kv)

    with LocalCluster(2, 2) as cluster:
        expected = cluster.run(undisturbed)[0]
    with LocalCluster(2, 3) as cluster:
        taken = cluster.run(before)[0]
    with LocalCluster(2, 2, replicas=2) as cluster:
        assert cluster.run(after) == [(taken, expected)] * 2
    with LocalCluster(2, 1) as cluster:
        assert cluster.run(after) == [(taken, expected)] * 2


def test_a_restored_table_outlives_its_servers(tmp_path: Path) -> None:
    """The rows that were restored are held by the backup as well."""
    path = tmp_path / "taken"
    with kvd.create("local") as kv:
        begin(kv, OPTIMIZERS[3])
        expected = train(kv, 3, path)
    with LocalCluster(1, 2, replicas=2, processes=True, server_timeout_s=2.0) as cluster:
        kv = cluster.open_stores()[0]
        kv.restore(path)
        cluster.kill_server(0)
        assert values(kv) == expected
        kv.close()


def test_rows_come_in_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many messages each way, and arrays that lie in many parts."""
    monkeypatch.setattr("kvd.core.server.slice_states.PAGE_NBYTES", 100)
    monkeypatch.setattr("kvd.client.cluster.stored_tables.PAGE_NBYTES", 100)
    monkeypatch.setattr("kvd.snapshots.series.PART_BYTES", 256)
    monkeypatch.setattr("kvd.snapshots.writer.PART_BYTES", 256)
    path = tmp_path / "taken"

    def before(kv: kvd.KVStore) -> list[bytes]:
        begin(kv, OPTIMIZERS[3])
        return train(kv, 4, path)

    with LocalCluster(1, 2) as cluster:
        expected = cluster.run(before)[0]
    with LocalCluster(1, 3) as cluster:
        (store,) = cluster.open_stores()
        store.restore(path)
        assert values(store) == expected


def test_tables_that_keep_some_rows_only_are_restored_with_what_they_say(tmp_path: Path) -> None:
    """The rows of a snapshot are admitted, and as old as the newest update."""
    with kvd.create("local") as kv:
        kv.init("t", kvd.RowSparse(row_shape=(1,), admit_after=2, ttl_updates=3))
        for ids in ([1, 2], [1, 3], [1]):
            kv.push("t", kvd.RowSparseArray(ids, np.full((len(ids), 1), 5, np.float32)))
        assert kv.row_sparse_pull("t", [1, 2, 3]).tolist() == [[5], [0], [0]]
        kv.snapshot(tmp_path / "taken")
    with kvd.create("local") as kv:
        kv.restore(tmp_path / "taken")
        for _ in range(2):
            kv.push("t", kvd.RowSparseArray([9], np.ones((1, 1), np.float32)))
            assert kv.row_sparse_pull("t", [1]).tolist() == [[5]]
        kv.push("t", kvd.RowSparseArray([9], np.ones((1, 1), np.float32)))
        assert kv.row_sparse_pull("t", [1, 9]).tolist() == [[0], [1]]


def test_a_table_without_rows(tmp_path: Path) -> None:
    with LocalCluster(1, 2) as cluster:
        (store,) = cluster.open_stores()
        begin(store, OPTIMIZERS[3])
        store.snapshot(tmp_path / "taken")
    with kvd.create("local") as kv, kvd.create("local") as other:
        kv.restore(tmp_path / "taken")
        begin(other, OPTIMIZERS[3])
        assert values(kv) == values(other)
        assert train(kv) == train(other)


# ── what is wrong ──


def test_a_restored_table_is_made_again_only_as_it_was(tmp_path: Path) -> None:
    with kvd.create("local") as kv:
        begin(kv, None)
        kv.snapshot(tmp_path / "taken")
    with kvd.create("local") as kv:
        kv.restore(tmp_path / "taken")
        with pytest.raises(kvd.ShapeMismatch, match="table 'bounded' has 200 rows"):
            kv.init("bounded", kvd.RowSparse((ROWS + 1, 2, 3)))
        with pytest.raises(NotAllowed, match="begin as Normal"):
            kv.init("bounded", kvd.RowSparse((ROWS, 2, 3)))
        with pytest.raises(NotAllowed, match="is a table"):
            kv.init("bounded", np.zeros(3, np.float32))


def changed(path: Path, change: Any) -> None:
    """Writes the manifest with something else in it, and with the right checksum."""
    file = path / manifest.FILE
    content = json.loads(file.read_bytes())
    del content["sha256"]
    change(next(key for key in content["keys"] if key["key"] == "bounded"), content)
    digest = sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    file.write_text(json.dumps({**content, "sha256": digest}))


WRONG = {
    "no such initializer": lambda key, _: key["table"].update(initializer=["Nothing", [], 0]),
    "an initializer that is none": lambda key, _: key["table"].update(initializer=7),
    "too many rows": lambda key, _: key["table"].update(num_rows=10**6),
    "rows that are no number": lambda key, _: key["table"].update(rows="many"),
    "a negative number of rows": lambda key, _: key["table"].update(rows=-7),
    "nothing that it keeps": lambda key, _: key["table"].update(keeping={"rows": 3}),
    "ids in no part": lambda key, _: key["table"]["ids"][0].__setitem__(0, 99),
    "ids of a tensor that is not there": lambda key, _: key["table"]["ids"][0].__setitem__(1, "nothing"),
    "a table of half floats": lambda key, _: key.update(dtype="float16"),
    "fewer rows than the ids name": lambda key, _: key["table"].update(rows=5),
}


@pytest.mark.parametrize("what", WRONG)
def test_manifests_that_say_what_cannot_be(tmp_path: Path, what: str) -> None:
    path = tmp_path / "taken"
    with kvd.create("local") as kv:
        begin(kv, None)
        train(kv, 2, path)
    changed(path, WRONG[what])
    with kvd.create("local") as kv, pytest.raises(SnapshotError):
        kv.restore(path)


def test_only_snapshots_with_tables_need_the_newer_format(tmp_path: Path) -> None:
    with kvd.create("local") as kv:
        kv.init("w", np.zeros(3, np.float32))
        kv.snapshot(tmp_path / "without")
        kv.init("t", kvd.RowSparse((5, 1)))
        kv.snapshot(tmp_path / "with")
    versions = [json.loads((tmp_path / name / manifest.FILE).read_bytes())["version"] for name in ("without", "with")]
    assert versions == [1, 2]
