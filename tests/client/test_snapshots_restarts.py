"""Programs with snapshots that are started again: alone, as the successor of a dead worker, or as a new job."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.client.facades.blocking import backend_of
from kvd.errors import SnapshotError
from kvd.optimizer import SGD
from kvd.testing.cluster import LocalCluster, engine_of
from tests.client.harness import SLOW_TO_JUDGE, init_all, ones


class Killed(Exception):
    """The program dies here."""


def epochs(kv: kvd.KVStore, folder: Path, lives: int, source: str = "") -> tuple[list[tuple[int, int]], Any]:
    """Three epochs of two steps, with a snapshot and a push after each. It dies in the middle of epoch `lives`."""
    if source:
        assert kv.restore(folder / source) in (2, 4)
    else:
        kv.init(["w", "ends"], [np.zeros((3, 4), np.float32)] * 2)
        kv.set_optimizer(SGD(1.0, momentum=0.5))
    made = []
    for epoch in range(3):
        for step in kv.steps(2):
            made.append((epoch, step))
            kv.push("w", np.full((3, 4), 1 + 10 * epoch + step, np.float32))
            if epoch == lives:
                raise Killed
        kv.snapshot(folder / f"epoch-{epoch}")
        kv.push("ends", np.full((3, 4), 1 + epoch, np.float32))
    return made, [value.tobytes() for value in kv.pull(["w", "ends"])]


@pytest.mark.parametrize("kind", ["local", "device", "dist_sync", "dist_async"])
def test_a_program_with_loops_and_snapshots_goes_on_as_it_is_written(tmp_path: Path, kind: str) -> None:
    """Snapshots that lie before the one that is restored are not taken again, and neither is that one."""

    def run(lives: int, source: str = "") -> Any:
        with LocalCluster(1, 2) as cluster:
            kv = kvd.create(kind) if kind in ("local", "device") else cluster.store(kind)
            return epochs(kv, tmp_path, lives, source)

    with pytest.raises(Killed):
        run(1)
    with pytest.raises(Killed):
        run(2, "epoch-0")
    made, values = run(-1, "epoch-1")
    assert made == [(2, 0), (2, 1)]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["epoch-0", "epoch-1", "epoch-2"]
    for source in ("epoch-0", "epoch-1", "epoch-2"):
        (tmp_path / source).rename(tmp_path / f"earlier-{source}")
    assert run(-1)[1] == values


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("point", ["before", "taken", "restored", "first push"])
def test_a_worker_that_dies_around_a_snapshot_is_started_again(
    tmp_path: Path, kind: str, rank: int, point: str
) -> None:
    """Before the call, after it, after the restore, and within the first step of the restored job."""

    def program(kv: kvd.KVStore, crash: Any, source: Any = None) -> Any:
        if source:
            assert kv.restore(source) == 2
            crash("restored")
        else:
            kv.init(["a", "b"], [np.zeros(4, np.float32)] * 2)
            kv.set_optimizer(SGD(1.0))
        for step in kv.steps(4):
            kv.push("a", np.full(4, -(1 + kv.rank) * 10**step, np.float32))
            if step == 2:
                crash("first push")
            kv.push("b", np.full(4, -(10**step), np.float32))
            if step == 1 and not source:
                crash("before")
                kv.snapshot(tmp_path / "taken")
                crash("taken")
        kv.flush()
        kv.barrier("end")
        return [value.tolist() for value in kv.pull(["a", "b"])]

    with LocalCluster(2, 2, **SLOW_TO_JUDGE) as cluster:
        first = with_a_death(cluster, kind, program, rank, point)
    with LocalCluster(2, 1, **SLOW_TO_JUDGE) as cluster:
        second = with_a_death(cluster, kind, lambda kv, crash: program(kv, crash, tmp_path / "taken"), rank, point)
    assert first == second == [[[3333.0] * 4, [2222.0] * 4]] * 2
    assert [file.name for file in tmp_path.iterdir()] == ["taken"]


def with_a_death(cluster: LocalCluster, kind: str, program: Any, rank: int, point: str) -> list[Any]:
    """The results of two workers, one of which dies at a point of the program, if it comes there, and starts again."""

    def run(store: kvd.KVStore) -> Any:
        def crash(seen: str) -> None:
            if (store.rank, seen) == (rank, point) and not store.restarted:
                raise Killed

        try:
            return program(store, crash)
        except Killed:
            store.__exit__(Killed, None, None)
            return run(cluster.store(kind, node_id=f"worker-{rank}", preferred_rank=rank))

    stores = cluster.open_stores(kind, [{"node_id": f"worker-{number}"} for number in range(2)])
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(run, store) for store in stores]
    return [future.result() for future in running]


def test_worker_0_that_dies_before_the_others_know_has_written_nothing_in_vain(
    tmp_path: Path,
) -> None:
    """Its successor finds the snapshot of its predecessor, which is the one that is to be taken."""
    path = tmp_path / "taken"
    with LocalCluster(2, 2, **SLOW_TO_JUDGE) as cluster:
        one, other = cluster.open_stores("dist_sync", [{"node_id": f"worker-{number}"} for number in range(2)])
        init_all([one, other], "w")
        with ThreadPoolExecutor(2) as pool:
            for store in (one, other):
                store.push("w", ones())
            waits = pool.submit(other.snapshot, path)
            snapshots: Any = backend_of(one).snapshots
            engine_of(one).run(snapshots._write(path, 0, None)).result()
            assert not waits.done()
            one.__exit__(Killed, None, None)
            changed = path.stat().st_mtime_ns
            successor = cluster.store("dist_sync", node_id="worker-0", preferred_rank=0)
            assert successor.restarted
            successor.snapshot(path)
            waits.result()
        assert path.stat().st_mtime_ns == changed
        assert [file.name for file in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_a_program_begins_where_there_is_no_snapshot(tmp_path: Path, kind: str) -> None:
    """A restarted worker does as its predecessor did, though there is one by now."""
    path = tmp_path / "taken"

    def program(kv: kvd.KVStore, *, dies: bool = False) -> Any:
        begun = kv.restore(path, missing_ok=True)
        if begun is None:
            kv.init("w", ones())
            kv.set_optimizer(SGD(1.0))
        for step in kv.steps(3):
            if step == 2 and dies:
                raise Killed
            kv.push("w", -ones())
            if step == 1:
                kv.snapshot(path)
        return begun, kv.pull("w").tolist()

    if kind == "local":
        with kvd.create("local") as kv, pytest.raises(Killed):
            program(kv, dies=True)
    else:
        with LocalCluster(1, 1) as cluster:
            kv = cluster.store(node_id="worker-0")
            with pytest.raises(Killed):
                program(kv, dies=True)
            kv.__exit__(Killed, None, None)
            successor = cluster.store(node_id="worker-0")
            assert successor.restarted
            assert program(successor) == (None, [4.0] * 4)
    with kvd.create("local") as kv:
        assert program(kv) == (2, [4.0] * 4)
    path.rename(tmp_path / "moved")
    path.write_text("hello")
    with kvd.create("local") as kv, pytest.raises(SnapshotError, match="is no snapshot"):
        kv.restore(path, missing_ok=True)
