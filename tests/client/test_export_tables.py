"""Files with the rows of a table, all of them and those that have changed; read with the library of safetensors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

import kvd
from kvd.client.calls import tables as tables_module
from kvd.errors import KeyNotFound, KvdError, NotAllowed
from kvd.protocol.messages import BIGGEST
from kvd.tables.parts import parts_of
from kvd.testing.cluster import LocalCluster
from tests.client.test_tables import FLOAT

WIDTH = 3


def table(**more: Any) -> kvd.RowSparse:
    initializer = kvd.initializer.Constant(1.0)
    return kvd.RowSparse(row_shape=(WIDTH,), initializer=initializer, track_updates=True, **more)


@pytest.fixture(scope="module")
def one_worker() -> Iterator[kvd.KVStore]:
    """In a cluster with three servers."""
    with LocalCluster(1, 3) as cluster:
        yield cluster.open_stores()[0]


@pytest.fixture(params=["local", "cluster"])
def kv(request: pytest.FixtureRequest) -> Iterator[kvd.KVStore]:
    if request.param == "cluster":
        store = request.getfixturevalue("one_worker")
        yield store
        store.delete([key for key in "tuw" if _is_live(store, key)])
    else:
        with kvd.create("local") as store:
            yield store


def _is_live(store: kvd.KVStore, key: str) -> bool:
    try:
        store.version(key)
    except KeyNotFound:
        return False
    return True


def pushed(kv: kvd.KVStore, ids: Any, value: float) -> None:
    kv.push("t", (ids, np.full((len(ids), WIDTH), value, FLOAT))).wait()


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "numpy") as file:
        found: dict[str, str] = file.metadata()
        return found


def test_all_rows_that_take_memory_are_written(
    kv: kvd.KVStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        tables_module, "_EXPORTED_AT_ONCE_NBYTES", 5 * WIDTH * 4
    )  # several pieces, the last one smaller
    kv.init("t", kvd.RowSparse((100, WIDTH, 1), initializer=kvd.initializer.Constant(1.0)))
    ids = np.random.default_rng(3).permutation(100)[:47]
    rows = np.random.default_rng(4).standard_normal((47, WIDTH, 1)).astype(FLOAT)
    kv.push("t", (ids, rows)).wait()
    path = tmp_path / "t.safetensors"
    path.write_bytes(b"an older file")
    assert kv.export_table("t", path) == 1
    found = load_file(path)
    assert found.keys() == {"ids", "rows"}
    order = np.argsort(ids)
    assert found["ids"].tolist() == ids[order].tolist()
    assert found["rows"].tobytes() == rows[order].tobytes()
    assert found["rows"].shape == (47, WIDTH, 1)
    assert metadata(path) == {
        "format": "kvd-table",
        "key": "t",
        "shape": "100, 3, 1",
        "initializer": "Constant(value=1.0)",
        "version": "1",
    }
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.safetensors"]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_table_without_rows(kv: kvd.KVStore, tmp_path: Path, dtype: str) -> None:
    kv.init("t", table(dtype=dtype))
    assert kv.export_table("t", str(tmp_path / "t")) == 0
    assert kv.export_table("t", tmp_path / "u", since=0) == 0
    assert {name: (array.dtype.name, array.shape) for name, array in load_file(tmp_path / "u").items()} == {
        "ids": ("int64", (0,)),
        "rows": (dtype, (0, WIDTH)),
        "evicted": ("int64", (0,)),
    }
    assert metadata(tmp_path / "u")["shape"] == "any, 3"


def test_what_has_changed_makes_of_an_earlier_file_the_newer_one(kv: kvd.KVStore, tmp_path: Path) -> None:
    """As docs/tables.md says: without those that were evicted, and with the rows that are in the file."""
    kv.init("t", table(ttl_updates=3, admit_after=2))
    chance = np.random.default_rng(5)
    rows: dict[int, list[float]] = {}
    since, sizes = None, []
    for number in range(12):
        for _ in range(number % 3):
            pushed(kv, np.unique(chance.integers(0, 12, 4)), float(number + 1))
        now = kv.export_table("t", tmp_path / "changes", since=since)
        changes = load_file(tmp_path / "changes")
        if since is not None:
            assert metadata(tmp_path / "changes")["since"] == str(since)
        rows = {row: value for row, value in rows.items() if row not in changes.get("evicted", ())}
        rows |= dict(zip(changes["ids"].tolist(), changes["rows"].tolist(), strict=True))
        since = now
        assert kv.export_table("t", tmp_path / "all") == now
        everything = load_file(tmp_path / "all")
        assert rows == dict(zip(everything["ids"].tolist(), everything["rows"].tolist(), strict=True))
        assert kv.row_sparse_pull("t", everything["ids"]).tolist() == everything["rows"].tolist()
        sizes.append((len(changes["ids"]), len(everything["ids"])))
    assert any(0 < few < many for few, many in sizes)


def test_a_list_of_keys_and_other_mistakes_are_refused(kv: kvd.KVStore, tmp_path: Path) -> None:
    kv.init(["t", "u", "w"], [table(), kvd.RowSparse((3, 2)), np.zeros(3, FLOAT)])
    pushed(kv, [1], 2.0)
    path = tmp_path / "file"
    wrong: list[tuple[Callable[[], Any], type[KvdError], str]] = [
        (lambda: kv.export_table(["t"], path), NotAllowed, "takes one key"),
        (lambda: kv.export_table("nobody", path), KeyNotFound, "nobody"),
        (lambda: kv.export_table("w", path), NotAllowed, "'w' is no table"),
        (lambda: kv.export_table("u", path, since=0), NotAllowed, "'u' does not track updates: make it with track_u"),
        (
            lambda: kv.export_table("t", path, since=2),
            NotAllowed,
            "'t' is at version 1, before since=2: export all of it",
        ),
        (lambda: kv.export_table("t", path, since=BIGGEST), NotAllowed, "'t' is at version 1, before since=46116"),
        (lambda: kv.export_table("t", path, since=-1), NotAllowed, "since is a whole number from 0"),
        (lambda: kv.export_table("t", ""), NotAllowed, "the path of a file"),
    ]
    for call, kind, text in wrong:
        with pytest.raises(kind, match=text):
            call()
    assert not path.exists()


def test_a_file_that_cannot_be_written_leaves_the_older_one(kv: kvd.KVStore, tmp_path: Path) -> None:
    kv.init("t", table())
    with pytest.raises(FileNotFoundError):
        kv.export_table("t", tmp_path / "no folder" / "file")
    assert list(tmp_path.iterdir()) == []


def test_many_rows_come_in_pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of each part; the last page is full."""
    monkeypatch.setattr("kvd.core.server.row_lists.IDS_AT_ONCE", 10)
    description = kvd.RowSparse(row_shape=(1,))
    with LocalCluster(1, 2) as cluster:
        kv = cluster.open_stores("dist_async")[0]
        kv.init("t", description)
        ids = np.arange(0, 400, 3)
        counts = np.bincount(parts_of(ids, 2)) // 10 * 10
        ids = np.sort(np.concatenate([ids[parts_of(ids, 2) == part][: counts[part]] for part in (0, 1)]))
        kv.push("t", (ids, ids[:, None].astype(FLOAT)))
        assert kv.export_table("t", tmp_path / "file") == 1
    found = load_file(tmp_path / "file")
    assert found["ids"].tolist() == ids.tolist()
    assert found["rows"][:, 0].tolist() == ids.tolist()


def test_each_of_two_workers_exports_the_same(tmp_path: Path) -> None:
    """Also a worker that did not make the table, and whose pushes are under way when it asks."""
    with LocalCluster(2, 2) as cluster:
        stores = cluster.open_stores()
        stores[0].init(7, table())
        for _ in range(3):
            for kv in stores:
                kv.push(7, (np.arange(20), np.full((20, WIDTH), kv.rank + 1, FLOAT)))
        for kv in stores:
            assert kv.export_table(7, tmp_path / str(kv.rank)) == 3
            with pytest.raises(NotAllowed, match="table 7 is at version 3, before since=4"):
                kv.export_table(7, tmp_path / "none", since=4)
        found = [load_file(tmp_path / rank) for rank in "01"]
    assert [file["rows"].tolist() for file in found] == [np.full((20, WIDTH), 3).tolist()] * 2
    assert metadata(tmp_path / "0")["key"] == "7"


def test_changes_are_complete_while_another_worker_pushes(tmp_path: Path) -> None:
    """A row that changes while it is exported is in the next file, or is evicted by it."""
    description = table(admit_after=2, ttl_updates=12, max_rows=60)
    with LocalCluster(2, 2) as cluster:
        one, other = cluster.open_stores("dist_async")
        one.init("t", description)
        ended = threading.Event()

        def push() -> None:
            chance = np.random.default_rng(1)
            while not ended.is_set():
                ids = np.unique(chance.zipf(1.3, 40) % 300)
                other.push("t", (ids, chance.standard_normal((len(ids), WIDTH)).astype(FLOAT))).wait()

        rows: dict[int, list[float]] = {}
        since = None
        with ThreadPoolExecutor(1) as pool:
            pushing = pool.submit(push)
            try:
                for number in range(12):
                    if number == 11:
                        ended.set()
                        pushing.result()
                    since = one.export_table("t", tmp_path / "changes", since=since)
                    changes = load_file(tmp_path / "changes")
                    rows = {row: value for row, value in rows.items() if row not in changes.get("evicted", ())}
                    rows |= dict(zip(changes["ids"].tolist(), changes["rows"].tolist(), strict=True))
            finally:
                ended.set()
        assert one.export_table("t", tmp_path / "all") == since == other.version("t")
    everything = load_file(tmp_path / "all")
    assert rows == dict(zip(everything["ids"].tolist(), everything["rows"].tolist(), strict=True))
    assert 0 < len(rows) <= 60


@pytest.mark.parametrize("kind", ["local", "dist_async"])
def test_an_asynchronous_program_exports_as_well(kind: str, tmp_path: Path) -> None:
    async def program(**settings: Any) -> int:
        async with await kvd.aio.create(kind, **settings) as kv:
            await kv.init("t", table())
            await kv.push("t", ([3, 4], np.ones((2, WIDTH), FLOAT)))
            return int(await kv.export_table("t", tmp_path / "file"))

    if kind == "local":
        assert asyncio.run(program()) == 1
    else:
        with LocalCluster(1, 2) as cluster:
            assert asyncio.run(program(**cluster.settings, scheduler=cluster.address)) == 1
    assert load_file(tmp_path / "file")["ids"].tolist() == [3, 4]
