"""kv.snapshot_async: the state is read between two steps, and written while the program goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.errors import NodeLost, RequestTimeout, SnapshotError
from kvd.optimizer import SGD
from kvd.protocol.messages import Departure
from kvd.snapshots.folder import NewFolder
from kvd.snapshots.reader import StoredSnapshot
from kvd.testing.cluster import LocalCluster, engine_of, wait_until
from tests.client.harness import SLOW_TO_JUDGE, ones

KINDS = ["local", "dist_sync", "dist_async"]
WRITE = NewFolder.write


class Disk:
    """Writes wait while it is closed, and fail once it is full."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.is_full = False
        self.asked = threading.Semaphore(0)

    def write(self, folder: NewFolder, name: str, *content: Any) -> None:
        self.asked.release()
        assert self.is_open.wait(30)
        if self.is_full:
            raise OSError(28, "No space left on device")
        WRITE(folder, name, *content)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk()
    monkeypatch.setattr(NewFolder, "write", lambda folder, *what: disk.write(folder, *what))
    yield disk
    disk.is_open.set()


def run(kind: str, program: Any) -> list[Any]:
    if kind == "local":
        with kvd.create("local") as kv:
            return [program(kv)]
    with LocalCluster(2, 2) as cluster:
        return cluster.run(program, kind)


def value_in(path: Path, key: str) -> Any:
    snapshot = StoredSnapshot.open(path)
    (found,) = [each for each in snapshot.manifest.keys if each.key == key]
    return snapshot.value(found).tolist(), {name: array.tolist() for name, array in snapshot.state(found).items()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_program_goes_on_while_it_is_written(tmp_path: Path, disk: Disk, kind: str) -> None:
    path = tmp_path / "taken"

    def program(kv: kvd.KVStore) -> Any:
        kv.init("w", ones() * 0)
        kv.set_optimizer(SGD(1.0, momentum=1.0))
        for step in kv.steps(5):
            kv.push("w", -ones() / kv.num_workers)
            if step == 1:
                written = kv.snapshot_async(path)
        kv.flush()
        kv.barrier("all steps are made")
        assert not written.done()
        assert not path.exists()
        kv.barrier("seen")
        disk.is_open.set()
        assert written.wait() is None
        assert path.exists()
        return kv.pull("w").tolist()

    values = run(kind, program)
    assert len({str(value) for value in values}) == 1
    value, state = value_in(path, "w")
    if kind != "dist_async":
        assert values[0] == [15.0] * 4  # 1 + 2 + 3 + 4 + 5
        assert (value, state) == ([3.0] * 4, {"slot/momentum": [-2.0] * 4})
    assert StoredSnapshot.open(path).manifest.origin.steps == 2
    assert [file.name for file in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize("kind", KINDS)
def test_one_is_written_at_a_time_and_close_waits_for_it(tmp_path: Path, disk: Disk, kind: str) -> None:
    opener = threading.Timer(0.2, disk.is_open.set)

    def program(kv: kvd.KVStore) -> None:
        kv.init("w", ones())
        first = kv.snapshot_async(tmp_path / "first")
        if kv.rank == 0:
            opener.start()
        second = kv.snapshot_async(tmp_path / "second")
        assert first.done()
        kv.snapshot(tmp_path / "third")
        assert second.done()
        kv.snapshot_async(tmp_path / "third").wait()  # the same one
        kv.snapshot_async(tmp_path / "last")

    run(kind, program)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["first", "last", "second", "third"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_is_said_by_the_handle(tmp_path: Path, disk: Disk, kind: str) -> None:
    path = tmp_path / "taken"
    disk.is_full = True

    def program(kv: kvd.KVStore) -> Any:
        kv.init("w", ones())
        written = kv.snapshot_async(path)
        kv.barrier("read")
        disk.is_open.set()
        with pytest.raises(SnapshotError, match="No space left on device: the snapshot cannot be written") as caught:
            written.wait()
        assert caught.value.path == str(path)
        kv.flush()  # it was said
        kv.snapshot_async(path)
        wait_until(lambda: not list(tmp_path.iterdir()), "what was written is gone")
        return kv.rank

    if kind == "local":
        with pytest.raises(SnapshotError, match="No space left"):
            run(kind, program)
    else:
        with pytest.raises(SnapshotError, match="No space left"):  # by `close`, in worker 0
            run(kind, program)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_a_program_that_fails_meanwhile_leaves_nothing(tmp_path: Path, disk: Disk, kind: str) -> None:
    def program(kv: kvd.KVStore) -> None:
        kv.init("w", ones())
        kv.snapshot_async(tmp_path / "taken")
        kv.barrier("read")
        threading.Timer(0.1, disk.is_open.set).start()
        raise KeyError("the program")

    with pytest.raises(KeyError, match="the program"):
        run(kind, program)
    wait_until(lambda: not list(tmp_path.iterdir()), "what was written is gone")


@pytest.mark.asyncio
async def test_awaited_in_an_event_loop(tmp_path: Path, disk: Disk) -> None:
    with LocalCluster(1, 2) as cluster:
        given = {**cluster.settings, "scheduler": cluster.address}
        async with await kvd.aio.create("dist_sync", **given) as kv:
            await kv.init("w", ones())
            written = await kv.snapshot_async(tmp_path / "taken")
            await (await kv.push("w", ones() * 5))
            assert not written.done()
            disk.is_open.set()
            await written
    assert value_in(tmp_path / "taken", "w")[0] == [1.0] * 4


class Killed(Exception):
    """The program dies here."""


def two_workers(cluster: LocalCluster, kind: str) -> list[kvd.KVStore]:
    return cluster.open_stores(kind, [{"node_id": f"worker-{number}"} for number in range(2)])


def begin(kv: kvd.KVStore) -> None:
    kv.init("w", ones() * 0)
    kv.set_optimizer(SGD(1.0))


def both(calls: list[Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_a_worker_that_dies_while_worker_0_writes_is_no_obstacle(tmp_path: Path, disk: Disk, kind: str) -> None:
    path = tmp_path / "taken"
    with LocalCluster(2, 2, **SLOW_TO_JUDGE) as cluster:
        one, other = two_workers(cluster, kind)
        both([lambda: begin(one), lambda: begin(other)])
        written, _ = both([lambda: one.snapshot_async(path), lambda: other.snapshot_async(path)])
        other.__exit__(Killed, None, None)
        disk.is_open.set()
        written.wait()
        successor = cluster.store(kind, node_id="worker-1", preferred_rank=1)
        begin(successor)
        successor.snapshot_async(path).wait()  # as its predecessor did
    assert [file.name for file in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_worker_0_dies_while_it_writes(tmp_path: Path, disk: Disk, kind: str) -> None:
    """In synchronous stores its successor takes the same snapshot; in others the values have changed."""
    path = tmp_path / "taken"
    with LocalCluster(2, 2, **{**SLOW_TO_JUDGE, "worker_timeout_s": 12.0}) as cluster:  # it waits for that
        one, other = two_workers(cluster, kind)
        both([lambda: begin(one), lambda: begin(other)])
        _, seen = both([lambda: one.snapshot_async(path), lambda: other.snapshot_async(path)])
        other.push("w", -ones())
        with pytest.raises(RequestTimeout):
            seen.wait(0.05)
        engine_of(one).stop(1.0, Departure.FAILED)  # as SIGKILL does: nobody is told
        with pytest.raises(SnapshotError, match="worker 0 died while it wrote the snapshot"):
            seen.wait()
        disk.is_full = True
        disk.is_open.set()
        wait_until(lambda: not list(tmp_path.iterdir()), "the thread has ended, as its process would")
        disk.is_full = False
        successor = cluster.store(kind, node_id="worker-0", preferred_rank=0)
        begin(successor)
        again = successor.snapshot_async(path)
        if kind == "dist_sync":
            again.wait()
            assert value_in(path, "w")[0] == [0.0] * 4
        else:
            with pytest.raises(SnapshotError, match="the values have changed since: take another one"):
                again.wait()
            assert not path.exists()
        successor.flush()
    assert [file.name for file in tmp_path.iterdir()] == (["taken"] if kind == "dist_sync" else [])


def test_a_successor_of_worker_0_finds_what_its_predecessor_has_written(tmp_path: Path, disk: Disk) -> None:
    path = tmp_path / "taken"
    disk.is_open.set()
    with LocalCluster(2, 2, **SLOW_TO_JUDGE) as cluster:
        one, other = two_workers(cluster, "dist_sync")
        both([lambda: begin(one), lambda: begin(other)])
        for handle in both([lambda: one.snapshot_async(path), lambda: other.snapshot_async(path)]):
            handle.wait()
        changed = path.stat().st_mtime_ns
        one.__exit__(Killed, None, None)
        successor = cluster.store(node_id="worker-0", preferred_rank=0)
        begin(successor)
        successor.snapshot_async(path).wait()
    assert path.stat().st_mtime_ns == changed


def test_arrays_of_the_program_may_change_meanwhile(tmp_path: Path, disk: Disk) -> None:
    with kvd.create("local") as kv:
        value = np.zeros(4, np.float32)
        kv.init("w", value)

        def add(key: Any, received: Any, stored: Any) -> None:
            stored += received

        kv.set_updater(add)
        written = kv.snapshot_async(tmp_path / "taken")
        value[:] = 7
        kv.push("w", ones())
        disk.is_open.set()
        written.wait()
    assert value_in(tmp_path / "taken", "w")[0] == [0.0] * 4


@pytest.mark.parametrize("replicas", [1, 2])
def test_nothing_is_taken_of_a_job_that_has_lost_values(tmp_path: Path, replicas: int) -> None:
    """What is left would look like a whole snapshot."""
    with LocalCluster(1, 2, processes=True, replicas=replicas) as cluster:
        kv = cluster.store()
        kv.init([f"key {number}" for number in range(9)], [ones()] * 9)
        for rank in range(replicas):
            cluster.kill_server(rank)
        for rank in range(replicas):
            cluster.restart_server(rank)
        view = engine_of(kv).machine.view
        lineages = {partition: view.lineage_of(partition) for partition in range(2)}
        wait_until(
            lambda: len(view.servers()) == 2 or lineages != {part: view.lineage_of(part) for part in range(2)},
            "the new servers are there",
        )
        for take in (kv.snapshot, kv.snapshot_async):
            with pytest.raises(NodeLost):
                take(tmp_path / "taken")
        assert list(tmp_path.iterdir()) == []
